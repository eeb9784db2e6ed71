//! Fault injection: rounds that send KILL, TERM, STOP or STOP-CONT at a random moment to one side of `multirail bench`,
//! or of `multirail send` and `multirail serve`.
//!
//! ```console
//! $ ci/storm --rounds 200          # or: --seconds 60
//! $ ci/storm --seed 7 --round 31   # repeats one round
//! ```
//!
//! In every round both sides must end, without a panic and by no signal except the round's own. Each printed row of
//! bench must be verified. Each file with its final name must have the sender's bytes, and `send --resume` must store
//! the rest. After the last round no process, no temporary file and no file in `/dev/shm` may be left.

mod files;
mod round;
mod side;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use limit::Limit;
use round::{Round, StormTransport};

/// The options of the command line.
struct StormOptions {
    seed: u64,
    rounds: u64,
    seconds: Option<u64>,
    only: Option<u64>,
    jobs: usize,
    over: Vec<String>,
}

const USAGE: &str = "usage: storm [--rounds N | --seconds S] [--seed N] [--round N] [--jobs N] \
                     [--over loopback,tcp,shm,auto-tcp,cards]";

fn arguments() -> Result<StormOptions, String> {
    let now = std::time::UNIX_EPOCH.elapsed().map_or(1, |since| since.as_secs());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let over = StormTransport::ALL.map(String::from).to_vec();
    let mut arguments =
        StormOptions { seed: now, rounds: 200, seconds: None, only: None, jobs: 2 * cores, over };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words.next().ok_or(USAGE)?;
        let number = || value.parse::<u64>().map_err(|_| format!("{word} needs a number, not {value:?}"));
        match word.as_str() {
            "--seed" => arguments.seed = number()?,
            "--rounds" => arguments.rounds = number()?,
            "--seconds" => (arguments.seconds, arguments.rounds) = (Some(number()?), u64::MAX),
            "--round" => arguments.only = Some(number()?),
            "--jobs" => arguments.jobs = number()?.max(1) as usize,
            "--over" => arguments.over = value.split(',').map(String::from).collect(),
            _ => return Err(USAGE.into()),
        }
    }
    Ok(arguments)
}

fn main() -> ExitCode {
    match arguments().and_then(|arguments| storm(&arguments)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("storm: {why}");
            ExitCode::from(2)
        }
    }
}

/// Runs the rounds. Returns true if none failed and nothing is left.
fn storm(arguments: &StormOptions) -> Result<bool, String> {
    let multirail = std::env::var_os("MULTIRAIL").unwrap_or_else(|| "target/release/multirail".into());
    let multirail =
        std::fs::canonicalize(&multirail).map_err(|why| format!("{}: {why}", multirail.display()))?;
    let mut settings = Vec::new();
    for name in &arguments.over {
        match StormTransport::of(name)? {
            Ok(setting) => settings.push(setting),
            Err(why) => println!("skipped: {name}: {why}"),
        }
    }
    if settings.is_empty() {
        return Err("all settings were skipped: nothing can run".into());
    }
    let work = std::env::temp_dir().join(format!("multirail-storm-{}", std::process::id()));
    std::fs::create_dir(&work).map_err(|why| format!("{}: {why}", work.display()))?;
    let source = files::make(&work.join("source"), arguments.seed)
        .map_err(|why| format!("cannot make the files to send: {why}"))?;
    let shared = shared_memory();
    println!("storm: seed {}, over {}", arguments.seed, arguments.over.join(", "));

    let (begun, next, failed, done) =
        (Instant::now(), AtomicU64::new(0), Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    let jobs = if arguments.only.is_some() { 1 } else { arguments.jobs };
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let taken = next.fetch_add(1, Ordering::Relaxed);
                    let number = arguments.only.unwrap_or(taken);
                    let has_time =
                        arguments.seconds.is_none_or(|most| begun.elapsed() < Duration::from_secs(most));
                    if taken >= arguments.rounds || !has_time || (arguments.only.is_some() && taken > 0) {
                        return;
                    }
                    let place = work.join(format!("round-{number}"));
                    let round = Round::new(arguments.seed, number, &settings);
                    let result = round.run(&multirail, &source, &place);
                    push(&done, round.kind());
                    if let Err(why) = result {
                        let command = format!("ci/storm --seed {} --round {number}", arguments.seed);
                        println!(
                            "round {number} FAILED: {}: {why}\n  repeat it: {command}",
                            round.describe()
                        );
                        push(&failed, number);
                    }
                }
            });
        }
    });
    if arguments.over.iter().any(|name| name == "shm") {
        sweep(&multirail)?;
    }
    // The folder belongs to the simulator, not to a transport: the simulator's next process would remove it.
    let _ = std::fs::remove_dir_all(round::simulation());
    let mut left = leftovers(&work, &shared);
    if failed.lock().is_ok_and(|failed| failed.is_empty()) {
        std::fs::remove_dir_all(&work).map_err(|why| format!("{}: {why}", work.display()))?;
    } else {
        println!("the files of the failed rounds are in {}", work.display());
    }
    left.iter_mut().for_each(|what| println!("left behind: {what}"));
    let (done, failed) = (done.into_inner().unwrap_or_default(), failed.into_inner().unwrap_or_default());
    let kinds: BTreeSet<_> = done.iter().collect();
    println!(
        "storm: {} rounds ({} kinds) in {} s, {} failed, {} left behind",
        done.len(),
        kinds.len(),
        begun.elapsed().as_secs(),
        failed.len(),
        left.len()
    );
    Ok(failed.is_empty() && left.is_empty())
}

fn push<T>(list: &Mutex<Vec<T>>, value: T) {
    list.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(value);
}

/// Names in `/dev/shm`.
fn shared_memory() -> BTreeSet<PathBuf> {
    let entries = std::fs::read_dir("/dev/shm").into_iter().flatten().filter_map(Result::ok);
    entries.map(|entry| entry.path()).collect()
}

/// Opens shm once more, which removes the shared memory of killed processes. No other process would remove it.
fn sweep(multirail: &Path) -> Result<(), String> {
    let output = Command::new(multirail).args(["info", "--backend", "efa", "--provider", "shm"]).output();
    let output = output.map_err(|why| format!("{}: {why}", multirail.display()))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("shm cannot be opened any more: {}", String::from_utf8_lossy(&output.stderr))),
    }
}

/// Returns what the rounds have left behind. Waits for a while, because the kernel removes dead processes and their
/// shared memory with a delay.
fn leftovers(work: &Path, before: &BTreeSet<PathBuf>) -> Vec<String> {
    let mut left = Vec::new();
    Limit::of(Duration::from_secs(10)).ask(|| {
        left = side::processes_of(work).into_iter().map(|process| format!("process {process}")).collect();
        let memory = shared_memory();
        left.extend(memory.difference(before).map(|path| format!("shared memory {}", path.display())));
        left.extend(
            files::left_in(&work.join("tmp")).into_iter().map(|path| format!("file {}", path.display())),
        );
        left.is_empty().then_some(())
    });
    left
}
