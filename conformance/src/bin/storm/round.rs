//! One round: two sides, a signal at a moment, and what must hold afterwards.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use limit::Limit;
use rustix::process::{Pid, Signal};

use crate::files;
use crate::side::{LIMIT, Side, children, processes_of, signal};

/// What the bytes travel over.
#[derive(Debug, Clone)]
pub struct Setting {
    name: &'static str,
    arguments: &'static [&'static str],
    /// The program that starts `multirail`, and the first of its arguments.
    runner: Option<PathBuf>,
}

impl Setting {
    /// Names of all of them.
    pub const ALL: [&'static str; 5] = ["loopback", "tcp", "shm", "auto-tcp", "cards"];

    /// The setting of that name, or why it cannot be had here.
    pub fn of(name: &str) -> Result<Result<Self, String>, String> {
        let plain = |name, arguments| Ok(Ok(Self { name, arguments, runner: None }));
        match name {
            "loopback" => plain("loopback", &["--backend", "loopback"]),
            "tcp" => plain("tcp", &["--backend", "efa", "--provider", "tcp", "--node", "127.0.0.1"]),
            "shm" => plain("shm", &["--backend", "efa", "--provider", "shm"]),
            "auto-tcp" => plain("auto-tcp", &["--provider", "tcp", "--node", "127.0.0.1"]),
            "cards" => Ok(Self::cards()),
            _ => Err(format!("{name:?} is none of {}", Self::ALL.join(", "))),
        }
    }

    /// Simulated cards: the library that plays them must have been built. With libfabric 2.1: 1.17 emulates writes, in
    /// many steps of which each may wait for a nap of the other side's.
    fn cards() -> Result<Self, String> {
        let runner =
            std::fs::canonicalize("ci/efa-sim/run").map_err(|why| format!("ci/efa-sim/run: {why}"))?;
        let library =
            std::env::var_os("EFA_SIM_LIBRARY").unwrap_or_else(|| "target/release/libefa_sim.so".into());
        match std::fs::canonicalize(&library) {
            Ok(_) => Ok(Self { name: "cards", arguments: &["--backend", "efa"], runner: Some(runner) }),
            Err(why) => {
                Err(format!("{}: {why}; build it: cargo build --release -p efa-sim", library.display()))
            }
        }
    }

    fn command(&self, multirail: &Path, words: &[&str]) -> Command {
        let mut command = match &self.runner {
            None => Command::new(multirail),
            Some(runner) => {
                let mut command = Command::new(runner);
                command
                    .args(["--root", "trixie"])
                    .arg(multirail)
                    .env("EFA_SIM_DEVICES", "4")
                    .env("EFA_SIM_DIR", simulation());
                let library = std::env::var_os("EFA_SIM_LIBRARY")
                    .unwrap_or_else(|| "target/release/libefa_sim.so".into());
                command.env("EFA_SIM_LIBRARY", std::fs::canonicalize(library).unwrap_or_default());
                command
            }
        };
        command.args(words).args(self.arguments);
        command.env_remove("MULTIRAIL_BACKEND").env_remove("MULTIRAIL_TOKEN_FILE");
        command
    }
}

/// The folder in which the processes of simulated cards find each other.
pub fn simulation() -> PathBuf {
    PathBuf::from(format!("/dev/shm/multirail-storm-cards-{}", std::process::id()))
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Work {
    /// `bench client` and `bench server`.
    Bench(&'static str),
    /// `bench`, which starts its server itself.
    Own(&'static str),
    /// `send` and `serve`.
    Files,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Act {
    Kill,
    Term,
    /// Stopped until the other side has ended.
    Stop,
    /// Stopped for so long.
    Pause(Duration),
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Victim {
    /// What begins: `bench client`, `bench`, `send`.
    Client,
    /// What waits: the others.
    Server,
}

/// A round, by its seed and number.
#[derive(Debug)]
pub struct Round {
    setting: Setting,
    work: Work,
    act: Act,
    victim: Victim,
    after: Duration,
}

impl Round {
    /// The round of that number: the same for every run of one seed over the same settings.
    pub fn new(seed: u64, number: u64, settings: &[Setting]) -> Self {
        const OPS: [&str; 5] = ["write", "write-pages", "write-imm", "read", "send"];
        let mut random = fastrand::Rng::with_seed(seed.wrapping_mul(1_000_003).wrapping_add(number));
        // All settings come in turn: a short storm has some of each.
        let setting = settings[(number % settings.len() as u64) as usize].clone();
        let op = OPS[random.usize(..OPS.len())];
        let work =
            [Work::Files, Work::Files, Work::Bench(op), Work::Bench(op), Work::Own(op)][random.usize(..5)];
        let pause = Duration::from_millis(random.u64(1..5000));
        let act = [Act::Kill, Act::Term, Act::Stop, Act::Pause(pause)][random.usize(..4)];
        let victim = if random.bool() { Victim::Client } else { Victim::Server };
        // Start and connection take most of a short life, the transfer the rest: a moment of any of them.
        let after = Duration::from_micros((10_f64.powf(random.f64() * 3.2 + 3.0)) as u64);
        Self { setting, work, act, victim, after }
    }

    /// What kind of round it is, without its moment.
    pub fn kind(&self) -> String {
        let act = match self.act {
            Act::Pause(_) => "STOP-CONT",
            Act::Kill => "KILL",
            Act::Term => "TERM",
            Act::Stop => "STOP",
        };
        format!("{}, {:?}, {act} to the {:?}", self.setting.name, self.work, self.victim)
    }

    /// All of it, for a reader.
    pub fn describe(&self) -> String {
        let pause = if let Act::Pause(pause) = self.act { format!(" for {pause:?}") } else { String::new() };
        format!("{}{pause} after {:?}", self.kind(), self.after)
    }

    /// Runs it in `place`, a folder of its own.
    ///
    /// # Errors
    /// What did not hold.
    pub fn run(&self, multirail: &Path, source: &Path, place: &Path) -> Result<(), String> {
        let folders = [place.join("into"), place.join("tmp")];
        folders
            .iter()
            .try_for_each(std::fs::create_dir_all)
            .map_err(|why| format!("{}: {why}", place.display()))?;
        match self.work {
            Work::Files => self.files(multirail, source, place)?,
            Work::Bench(op) => self.bench(multirail, op, place)?,
            Work::Own(op) => self.own(multirail, op, place)?,
        }
        let mut left = Vec::new();
        Limit::of(LIMIT).ask(|| {
            left = processes_of(place);
            left.is_empty().then_some(())
        });
        left.extend(files::left_in(&place.join("tmp")).into_iter().map(|path| path.display().to_string()));
        if !left.is_empty() {
            return Err(format!("left behind: {}", left.join(", ")));
        }
        std::fs::remove_dir_all(place).map_err(|why| format!("{}: {why}", place.display()))
    }

    fn start(
        &self,
        name: &'static str,
        multirail: &Path,
        words: &[&str],
        place: &Path,
    ) -> Result<Side, String> {
        Side::start(name, self.setting.command(multirail, words), place)
    }

    fn bench(&self, multirail: &Path, op: &str, place: &Path) -> Result<(), String> {
        let words = ["bench", "server", "--listen", "127.0.0.1:0", "--json"];
        let mut server = self.start("bench server", multirail, &words, place)?;
        let address = server.address()?;
        let words = ["bench", "client", &address, "--op", op, "--duration", "700ms", "--json"];
        let mut client = self.start("bench client", multirail, &words, place)?;
        std::thread::sleep(self.after);
        self.strike(&mut client, &mut server)?;
        // A client that never came leaves the server waiting for another one.
        let status = client.ends(self.death(Victim::Client))?;
        if !status.success() {
            self.lets_go(&mut server)?;
        }
        server.ends(self.death(Victim::Server).or((!status.success()).then_some(Signal::TERM)))?;
        verified(&mut client, status.success())
    }

    /// A `bench` that starts its server itself: its child is the server.
    fn own(&self, multirail: &Path, op: &str, place: &Path) -> Result<(), String> {
        let words = ["bench", "--op", op, "--duration", "700ms", "--json"];
        let mut bench = self.start("bench", multirail, &words, place)?;
        std::thread::sleep(self.after);
        let parent = bench.pid();
        let child = children(parent).first().copied().filter(|_| self.victim == Victim::Server);
        let victim = child.unwrap_or(parent);
        let by = if child.is_some() { None } else { self.death(self.victim) };
        match self.act {
            Act::Kill => signal(victim, Signal::KILL),
            Act::Term => signal(victim, Signal::TERM),
            // A bench whose child is stopped gives it up; one that is stopped itself has nobody to end before it.
            Act::Stop if child.is_some() => signal(victim, Signal::STOP),
            Act::Stop => pause(victim, Duration::from_secs(5)),
            Act::Pause(span) => pause(victim, span),
        }
        let status = bench.ends(by)?;
        verified(&mut bench, status.success())
    }

    fn files(&self, multirail: &Path, source: &Path, place: &Path) -> Result<(), String> {
        let (into, source_words) = (place.join("into"), source.display().to_string());
        let into_words = into.display().to_string();
        let serve = ["serve", "--into", &into_words, "--listen", "127.0.0.1:0", "--json"];
        let mut server = self.start("serve", multirail, &serve, place)?;
        let address = server.address()?;
        let mut sender = self.start("send", multirail, &["send", &source_words, "--to", &address], place)?;
        std::thread::sleep(self.after);
        self.strike(&mut sender, &mut server)?;
        let sent = sender.ends(self.death(Victim::Client))?.success();
        let stored = into.join(source.file_name().unwrap_or_default());
        if let Some(what) = files::difference(&stored, source, sent) {
            return Err(format!(
                "after {}: {what}; {}",
                if sent { "a success" } else { "a failure" },
                sender.words()
            ));
        }
        if sent {
            signal(server.pid(), Signal::TERM);
            server.ends(self.death(Victim::Server).or(Some(Signal::TERM)))?;
            return unfinished(&into);
        }
        // The rest goes to the same server, if that is still there, or to a new one.
        let was_hit = self.victim == Victim::Server && matches!(self.act, Act::Kill | Act::Term);
        if was_hit || server.is_over() {
            server.ends(self.death(Victim::Server))?;
            server = self.start("serve", multirail, &serve, place)?;
        }
        let address = if was_hit { server.address()? } else { address };
        let words = ["send", &source_words, "--to", &address, "--resume"];
        let mut again = self.start("send --resume", multirail, &words, place)?;
        let resumed = again.ends(None)?;
        if !resumed.success() {
            return Err(format!(
                "send --resume fails ({resumed}): {}; serve: {}",
                again.words(),
                server.words()
            ));
        }
        if let Some(what) = files::difference(&stored, source, true) {
            return Err(format!("after send --resume: {what}"));
        }
        signal(server.pid(), Signal::TERM);
        server.ends(Some(Signal::TERM))?;
        unfinished(&into)
    }

    /// Does to one side what the round is about. A stopped side goes on once the other has ended.
    fn strike(&self, client: &mut Side, server: &mut Side) -> Result<(), String> {
        let (victim, other) = match self.victim {
            Victim::Client => (client, server),
            Victim::Server => (server, client),
        };
        match self.act {
            Act::Kill => signal(victim.pid(), Signal::KILL),
            Act::Term => signal(victim.pid(), Signal::TERM),
            Act::Pause(span) => pause(victim.pid(), span),
            Act::Stop => {
                signal(victim.pid(), Signal::STOP);
                // `serve` goes on without its sender, so it is not waited for.
                if !(self.work == Work::Files && self.victim == Victim::Client) {
                    // A bench server that nobody has met yet waits for a client: it is let go below.
                    Limit::of(Duration::from_secs(6)).ask(|| other.is_over().then_some(()));
                } else {
                    std::thread::sleep(Duration::from_secs(4));
                }
                signal(victim.pid(), Signal::CONT);
            }
        }
        Ok(())
    }

    /// The signal that a side may have died of.
    fn death(&self, side: Victim) -> Option<Signal> {
        match self.act {
            Act::Kill if self.victim == side => Some(Signal::KILL),
            Act::Term if self.victim == side => Some(Signal::TERM),
            _ => None,
        }
    }

    /// Ends a bench server that its client may never have reached, if it does not end by itself.
    fn lets_go(&self, server: &mut Side) -> Result<(), String> {
        if Limit::of(Duration::from_secs(10)).ask(|| server.is_over().then_some(())).is_none() {
            signal(server.pid(), Signal::TERM);
        }
        Ok(())
    }
}

fn pause(process: Pid, span: Duration) {
    signal(process, Signal::STOP);
    std::thread::sleep(span);
    signal(process, Signal::CONT);
}

/// Every row that a bench has told is of verified bytes, but that of a measurement that was cut short; a bench that
/// succeeded has told one.
fn verified(bench: &mut Side, succeeded: bool) -> Result<(), String> {
    let rows = bench.output();
    let is_bad = |row: &&String| row.contains("\"verified\":false") && !row.contains("\"cut_short\":true");
    let bad = rows.iter().find(is_bad);
    match bad {
        Some(row) => Err(format!("wrong bytes: {row}")),
        None if succeeded && !rows.iter().any(|row| row.contains("\"verified\":true")) => {
            Err(format!("a bench succeeded without a row: {}", bench.words()))
        }
        None => Ok(()),
    }
}

/// No unfinished file waits in `into` once all has arrived.
fn unfinished(into: &Path) -> Result<(), String> {
    let left = files::below(&into.join(".multirail"));
    match left.first() {
        Some(path) => Err(format!("{} files are left in .multirail, {} first", left.len(), path.display())),
        None => Ok(()),
    }
}
