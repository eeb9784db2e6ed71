//! Statistics of a run of the suite: the number of runs, and how many had different events.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

static TRIALS: Mutex<BTreeMap<String, TrialStats>> = Mutex::new(BTreeMap::new());

#[derive(Default)]
struct TrialStats {
    runs: usize,
    cpu_time: Duration,
    /// The [`crate::trial::EventDigest`] of each run.
    digests: BTreeSet<u64>,
}

/// Records the runs of one trial.
pub(crate) struct RunRecorder {
    name: String,
}

impl RunRecorder {
    pub(crate) fn of(name: &str) -> Self {
        Self { name: name.into() }
    }

    /// Records the run of one seed.
    pub(crate) fn record(&self, digest: u64, cpu_time: Duration) {
        let mut trials = TRIALS.lock().unwrap_or_else(PoisonError::into_inner);
        let stats = trials.entry(self.name.clone()).or_default();
        stats.runs += 1;
        stats.cpu_time += cpu_time;
        stats.digests.insert(digest);
    }
}

/// The CPU time of this thread.
pub(crate) fn thread_cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Prints the sums of a run that took `elapsed`. Prints nothing if every trial ran once.
pub(crate) fn print(elapsed: Duration) {
    let trials = TRIALS.lock().unwrap_or_else(PoisonError::into_inner);
    let runs: usize = trials.values().map(|stats| stats.runs).sum();
    if runs == trials.len() {
        return;
    }
    let most = trials.values().map(|stats| stats.runs).max().unwrap_or(0);
    let digests: usize = trials.values().map(|stats| stats.digests.len()).sum();
    let alike = trials.values().filter(|stats| stats.runs > 1 && stats.digests.len() == 1).count();
    println!(
        "{} trials, {most} seeds each at most: {runs} runs in {:.1} s, {digests} different event hashes; \
         {alike} trials have one event hash for every seed",
        trials.len(),
        elapsed.as_secs_f64(),
    );
    if std::env::var_os("MULTIRAIL_TIMES").is_some() {
        let mut slowest: Vec<_> = trials.iter().collect();
        slowest.sort_by_key(|(_, stats)| std::cmp::Reverse(stats.cpu_time));
        for (name, stats) in slowest {
            let each = stats.cpu_time.as_secs_f64() * 1e3 / stats.runs as f64;
            println!(
                "  {each:8.2} ms CPU time per run, {} event hashes in {} runs: {name}",
                stats.digests.len(),
                stats.runs
            );
        }
    }
}
