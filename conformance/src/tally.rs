//! What a run of the suite amounted to: runs, and how many of them did different things.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

static TRIALS: Mutex<BTreeMap<String, Seen>> = Mutex::new(BTreeMap::new());

#[derive(Default)]
struct Seen {
    runs: usize,
    took: Duration,
    /// What the fabrics of a run did, as [`crate::trial::Witness`] has it.
    behaviours: BTreeSet<u64>,
}

/// One trial's part.
pub(crate) struct Tally {
    name: String,
}

impl Tally {
    pub(crate) fn of(name: &str) -> Self {
        Self { name: name.into() }
    }

    /// A seed is over.
    pub(crate) fn ran(&self, behaviour: u64, took: Duration) {
        let mut trials = TRIALS.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = trials.entry(self.name.clone()).or_default();
        seen.runs += 1;
        seen.took += took;
        seen.behaviours.insert(behaviour);
    }
}

/// Processor time of this thread.
pub(crate) fn busy() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Prints the sums of a run that took so long; nothing if every trial ran once.
pub(crate) fn print(elapsed: Duration) {
    let trials = TRIALS.lock().unwrap_or_else(PoisonError::into_inner);
    let runs: usize = trials.values().map(|seen| seen.runs).sum();
    if runs == trials.len() {
        return;
    }
    let most = trials.values().map(|seen| seen.runs).max().unwrap_or(0);
    let behaviours: usize = trials.values().map(|seen| seen.behaviours.len()).sum();
    let alike = trials.values().filter(|seen| seen.runs > 1 && seen.behaviours.len() == 1).count();
    println!(
        "{} trials, {most} seeds each at most: {runs} runs in {:.1} s, {behaviours} different behaviours \
         (by event hash); {alike} trials do the same at every seed",
        trials.len(),
        elapsed.as_secs_f64(),
    );
    if std::env::var_os("MULTIRAIL_TIMES").is_some() {
        let mut slowest: Vec<_> = trials.iter().collect();
        slowest.sort_by_key(|(_, seen)| std::cmp::Reverse(seen.took));
        for (name, seen) in slowest {
            let each = seen.took.as_secs_f64() * 1e3 / seen.runs as f64;
            println!(
                "  {each:8.2} ms of a processor a run, {} behaviours of {}: {name}",
                seen.behaviours.len(),
                seen.runs
            );
        }
    }
}
