//! One round: two sides, a signal at a random moment, and the checks afterwards.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use limit::Limit;
use rustix::process::{Pid, Signal};

use crate::files;
use crate::side::{LIMIT, StormProcess, children, processes_of, runs, signal};

/// The transport of a round.
#[derive(Debug, Clone)]
pub struct StormTransport {
    name: &'static str,
    arguments: &'static [&'static str],
    /// The program that starts `multirail`, if there is one.
    runner: Option<PathBuf>,
}

impl StormTransport {
    /// The names of all settings.
    pub const ALL: [&'static str; 5] = ["loopback", "tcp", "shm", "auto-tcp", "cards"];

    /// The setting with this name, or the reason why it cannot run on this machine.
    pub fn of(name: &str) -> Result<Result<Self, String>, String> {
        let plain = |name, arguments| Ok(Ok(Self { name, arguments, runner: None }));
        match name {
            "loopback" => plain("loopback", &["--backend", "loopback"]),
            "tcp" => plain("tcp", &["--backend", "efa", "--provider", "tcp", "--node", "127.0.0.1"]),
            "shm" => plain("shm", &["--backend", "efa", "--provider", "shm"]),
            "auto-tcp" => plain("auto-tcp", &["--provider", "tcp", "--node", "127.0.0.1"]),
            "cards" => Ok(Self::cards()),
            _ => Err(format!("unknown setting {name:?}; use one of {}", Self::ALL.join(", "))),
        }
    }

    /// Simulated EFA devices, whose library must be built before. They run with libfabric 2.1, because 1.17 emulates
    /// writes in many steps, each of which may wait until the other side's thread wakes up.
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
enum Workload {
    /// `bench client` and `bench server`.
    Bench(&'static str),
    /// `bench`, which starts its server itself.
    SelfServedBench(&'static str),
    /// `send` and `serve`.
    Files,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    Kill,
    Term,
    /// Stop the target until the other side has ended.
    Stop,
    /// Stop the target for this time.
    Pause(Duration),
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum FaultTarget {
    /// The side that connects: `bench client`, `bench`, `send`.
    Client,
    /// The side that listens: `bench server`, `serve`.
    Server,
}

/// A round, chosen by its seed and number.
#[derive(Debug)]
pub struct Round {
    setting: StormTransport,
    workload: Workload,
    fault: Fault,
    target: FaultTarget,
    after: Duration,
}

impl Round {
    /// The round with this number. It is the same in every run of one seed with the same settings.
    pub fn new(seed: u64, number: u64, settings: &[StormTransport]) -> Self {
        const OPS: [&str; 5] = ["write", "write-pages", "write-imm", "read", "send"];
        let mut random = fastrand::Rng::with_seed(seed.wrapping_mul(1_000_003).wrapping_add(number));
        // All settings come in turn, so that a short run has some rounds of each.
        let setting = settings[(number % settings.len() as u64) as usize].clone();
        let op = OPS[random.usize(..OPS.len())];
        let workload = [
            Workload::Files,
            Workload::Files,
            Workload::Bench(op),
            Workload::Bench(op),
            Workload::SelfServedBench(op),
        ][random.usize(..5)];
        let pause = Duration::from_millis(random.u64(1..5000));
        let fault = [Fault::Kill, Fault::Term, Fault::Stop, Fault::Pause(pause)][random.usize(..4)];
        let target = if random.bool() { FaultTarget::Client } else { FaultTarget::Server };
        // A round spends most of its short time on start and connection, and the rest on the transfer. The moment may
        // be in any of these.
        let after = Duration::from_micros((10_f64.powf(random.f64() * 3.2 + 3.0)) as u64);
        Self { setting, workload, fault, target, after }
    }

    /// The kind of the round, without its moment.
    pub fn kind(&self) -> String {
        let fault = match self.fault {
            Fault::Pause(_) => "STOP-CONT",
            Fault::Kill => "KILL",
            Fault::Term => "TERM",
            Fault::Stop => "STOP",
        };
        format!("{}, {:?}, {fault} to the {:?}", self.setting.name, self.workload, self.target)
    }

    /// A description for a reader.
    pub fn describe(&self) -> String {
        let pause =
            if let Fault::Pause(pause) = self.fault { format!(" for {pause:?}") } else { String::new() };
        format!("{}{pause} after {:?}", self.kind(), self.after)
    }

    /// Runs the round in `place`, a folder of its own.
    ///
    /// # Errors
    /// The check that failed.
    pub fn run(&self, multirail: &Path, source: &Path, place: &Path) -> Result<(), String> {
        let folders = [place.join("into"), place.join("tmp")];
        folders
            .iter()
            .try_for_each(std::fs::create_dir_all)
            .map_err(|why| format!("{}: {why}", place.display()))?;
        match self.workload {
            Workload::Files => self.files(multirail, source, place)?,
            Workload::Bench(op) => self.bench(multirail, op, place)?,
            Workload::SelfServedBench(op) => self.self_served_bench(multirail, op, place)?,
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
    ) -> Result<StormProcess, String> {
        StormProcess::start(name, self.setting.command(multirail, words), place)
    }

    fn bench(&self, multirail: &Path, op: &str, place: &Path) -> Result<(), String> {
        let words = ["bench", "server", "--listen", "127.0.0.1:0", "--json"];
        let mut server = self.start("bench server", multirail, &words, place)?;
        let address = server.address()?;
        let words = ["bench", "client", &address, "--op", op, "--duration", "700ms", "--json"];
        let mut client = self.start("bench client", multirail, &words, place)?;
        std::thread::sleep(self.after);
        self.inject_fault(&mut client, &mut server)?;
        // If the client never connected, the server waits for another client.
        let status = client.wait_end(self.allowed_signal(FaultTarget::Client))?;
        if !status.success() {
            self.end_waiting_server(&mut server)?;
        }
        server.wait_end(
            self.allowed_signal(FaultTarget::Server).or((!status.success()).then_some(Signal::TERM)),
        )?;
        verified(&mut client, status.success())
    }

    /// A `bench` that starts its server itself: its child is the server.
    fn self_served_bench(&self, multirail: &Path, op: &str, place: &Path) -> Result<(), String> {
        let words = ["bench", "--op", op, "--duration", "700ms", "--json"];
        let mut bench = self.start("bench", multirail, &words, place)?;
        std::thread::sleep(self.after);
        let parent = bench.pid();
        // Over cards a script starts the bench, and has children of its own before it.
        let has_started = runs(parent, multirail) && self.target == FaultTarget::Server;
        let child = children(parent).first().copied().filter(|_| has_started);
        let target = child.unwrap_or(parent);
        let by = if child.is_some() { None } else { self.allowed_signal(self.target) };
        match self.fault {
            Fault::Kill => signal(target, Signal::KILL),
            Fault::Term => signal(target, Signal::TERM),
            // If the child is stopped, bench ends the connection to it. If bench itself is stopped, no other process
            // ends before it does.
            Fault::Stop if child.is_some() => signal(target, Signal::STOP),
            Fault::Stop => pause(target, Duration::from_secs(5)),
            Fault::Pause(span) => pause(target, span),
        }
        let status = bench.wait_end(by)?;
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
        self.inject_fault(&mut sender, &mut server)?;
        let sent = sender.wait_end(self.allowed_signal(FaultTarget::Client))?.success();
        let stored = into.join(source.file_name().unwrap_or_default());
        if let Some(what) = files::difference(&stored, source, sent) {
            return Err(format!(
                "after {}: {what}; {}",
                if sent { "a success" } else { "a failure" },
                sender.output_text()
            ));
        }
        if sent {
            signal(server.pid(), Signal::TERM);
            server.wait_end(self.allowed_signal(FaultTarget::Server).or(Some(Signal::TERM)))?;
            return unfinished(&into);
        }
        // The rest of the files goes to the same server if it still runs, or to a new one.
        let server_ended =
            self.target == FaultTarget::Server && matches!(self.fault, Fault::Kill | Fault::Term);
        if server_ended || server.is_over() {
            server.wait_end(self.allowed_signal(FaultTarget::Server))?;
            server = self.start("serve", multirail, &serve, place)?;
        }
        let address = if server_ended { server.address()? } else { address };
        let words = ["send", &source_words, "--to", &address, "--resume"];
        let mut resumed_sender = self.start("send --resume", multirail, &words, place)?;
        let resumed = resumed_sender.wait_end(None)?;
        if !resumed.success() {
            return Err(format!(
                "send --resume fails ({resumed}): {}; serve: {}",
                resumed_sender.output_text(),
                server.output_text()
            ));
        }
        if let Some(what) = files::difference(&stored, source, true) {
            return Err(format!("after send --resume: {what}"));
        }
        signal(server.pid(), Signal::TERM);
        server.wait_end(Some(Signal::TERM))?;
        unfinished(&into)
    }

    /// Sends the round's signal to its target. A stopped target continues once the other side has ended.
    fn inject_fault(&self, client: &mut StormProcess, server: &mut StormProcess) -> Result<(), String> {
        let (target, other) = match self.target {
            FaultTarget::Client => (client, server),
            FaultTarget::Server => (server, client),
        };
        match self.fault {
            Fault::Kill => signal(target.pid(), Signal::KILL),
            Fault::Term => signal(target.pid(), Signal::TERM),
            Fault::Pause(span) => pause(target.pid(), span),
            Fault::Stop => {
                signal(target.pid(), Signal::STOP);
                // `serve` runs on without its sender, so the round does not wait for it.
                if !(self.workload == Workload::Files && self.target == FaultTarget::Client) {
                    // A bench server without a client waits for one; `end_waiting_server` ends it later.
                    Limit::of(Duration::from_secs(6)).ask(|| other.is_over().then_some(()));
                } else {
                    std::thread::sleep(Duration::from_secs(4));
                }
                signal(target.pid(), Signal::CONT);
            }
        }
        Ok(())
    }

    /// The signal by which a side may end.
    fn allowed_signal(&self, side: FaultTarget) -> Option<Signal> {
        match self.fault {
            Fault::Kill if self.target == side => Some(Signal::KILL),
            Fault::Term if self.target == side => Some(Signal::TERM),
            _ => None,
        }
    }

    /// Ends a bench server whose client may never have connected, unless the server ends by itself.
    fn end_waiting_server(&self, server: &mut StormProcess) -> Result<(), String> {
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

/// Checks that every printed row of a bench has verified bytes, except rows of measurements that were cut short. A
/// bench that succeeded must have printed a row.
fn verified(bench: &mut StormProcess, succeeded: bool) -> Result<(), String> {
    let rows = bench.output();
    let is_bad = |row: &&String| row.contains("\"verified\":false") && !row.contains("\"cut_short\":true");
    let bad = rows.iter().find(is_bad);
    match bad {
        Some(row) => Err(format!("wrong bytes: {row}")),
        None if succeeded && !rows.iter().any(|row| row.contains("\"verified\":true")) => {
            Err(format!("the bench succeeded without a verified row: {}", bench.output_text()))
        }
        None => Ok(()),
    }
}

/// Checks that `into` has no unfinished file once all files have arrived.
fn unfinished(into: &Path) -> Result<(), String> {
    let left = files::below(&into.join(".multirail"));
    match left.first() {
        Some(path) => Err(format!("{} files are left in .multirail, {} first", left.len(), path.display())),
        None => Ok(()),
    }
}
