//! One trial against one backend: runs each seed within a time limit.

use std::ops::Range;
use std::path::Path;
use std::sync::RwLock;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use libtest_mimic::{Completion, Failed};
use limit::Limit;

use crate::backend_under_test::TrialTag;
use crate::check::TestResult;
use crate::process::LIMIT;
use crate::runner::{SEED_VARIABLE, SEEDS_VARIABLE};
use crate::statistics::{RunRecorder, thread_cpu_time};
use crate::trial::{Trial, TrialContext};

/// Process trials measure time and CPU time, so they run alone: they hold this lock for writing.
static MACHINE: RwLock<()> = RwLock::new(());

/// The number of failed seeds after which a trial's other seeds do not run.
const MAX_FAILED_SEEDS: usize = 10;

/// One trial against one backend and variant, over its seeds.
pub(crate) struct TrialRun {
    pub trial: Trial,
    pub context: TrialContext,
    pub seeds: Range<u64>,
    /// The name with the backend's and the variant's names.
    pub name: String,
    pub skipped: Option<String>,
    pub known: Option<&'static str>,
}

impl TrialRun {
    /// The run as a test of libtest-mimic.
    pub(crate) fn into_test(self) -> libtest_mimic::Trial {
        Self::named(&self.name.clone(), self.trial.tag, move || self.execute())
    }

    /// A test of libtest-mimic with this name.
    pub(crate) fn named(
        name: &str,
        tag: TrialTag,
        execute: impl FnOnce() -> Result<Completion, Failed> + Send + 'static,
    ) -> libtest_mimic::Trial {
        let kind = match tag {
            TrialTag::Virtual => "virtual",
            TrialTag::Process => "process",
        };
        libtest_mimic::Trial::ignorable_test(name, execute).with_kind(kind)
    }

    /// Runs all seeds. A trial that is listed as a known failure must fail.
    fn execute(self) -> Result<Completion, Failed> {
        if let Some(why) = self.skipped {
            return Ok(Completion::ignored_with(why));
        }
        let failed = self.run_all()?;
        match (failed.first(), self.known) {
            (None, None) => Ok(Completion::Completed),
            (None, Some(why)) => Err(format!(
                "the trial passed, but it is listed as a known failure ({why}): remove it from the list"
            )
            .into()),
            (Some(first), Some(why)) => {
                Ok(Completion::ignored_with(format!("known failure: {why}: {}", first.what)))
            }
            (Some(_), None) => Err(self.report(&failed).into()),
        }
    }

    /// Runs every seed in a separate thread. If a trial hangs, it fails, its thread stays behind, and the other
    /// trials go on.
    fn run_all(&self) -> Result<Vec<FailedSeed>, Failed> {
        let limit = match self.trial.tag {
            TrialTag::Virtual => Duration::from_secs(60),
            // Longer than any wait within the trial: such a wait fails first and says where it waits.
            TrialTag::Process => 3 * LIMIT,
        };
        let shared = (self.trial.tag == TrialTag::Virtual).then(|| MACHINE.read());
        let alone = (self.trial.tag == TrialTag::Process).then(|| MACHINE.write());
        let mut failed = Vec::new();
        let mut remaining = self.seeds.clone();
        let mut thread = self.start(remaining.clone())?;
        while let Some(seed) = remaining.next() {
            let what = match Limit::of(limit).receive(&thread.results) {
                Ok(Ok(())) => continue,
                Ok(Err(failure)) => failure.to_string(),
                Err(RecvTimeoutError::Disconnected) => {
                    let next = self.start(remaining.clone())?;
                    std::mem::replace(&mut thread, next).exit_message()
                }
                Err(RecvTimeoutError::Timeout) => {
                    failed.push(FailedSeed {
                        seed,
                        what: format!(
                            "the trial hangs: it did not end within {limit:?}, counted as on an idle machine"
                        ),
                    });
                    break;
                }
            };
            failed.push(FailedSeed { seed, what });
            if failed.len() == MAX_FAILED_SEEDS {
                break;
            }
        }
        drop((shared, alone));
        Ok(failed)
    }

    /// Starts a thread that runs `seeds` in order. The thread ends after the current seed once the receiver of
    /// its results is dropped.
    fn start(&self, seeds: Range<u64>) -> Result<TrialThread, Failed> {
        let (sender, results) = mpsc::channel();
        let (run, context) = (self.trial.run, self.context.clone());
        let recorder = RunRecorder::of(&self.name);
        let body = move || {
            for seed in seeds {
                let begun = thread_cpu_time();
                let result = run(&context.with_seed(seed));
                recorder.record(context.event_digest.take(), thread_cpu_time() - begun);
                if sender.send(result).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name(self.name.clone()).spawn(body)?;
        Ok(TrialThread { results, thread })
    }

    /// The failed seeds, each with the command that runs it again.
    fn report(&self, failed: &[FailedSeed]) -> String {
        let line = |one: &FailedSeed| {
            let seeds = self.context.seed_sweep.then_some(1);
            format!("{}\nreplay: {}", one.what, replay(&self.name, one.seed, seeds))
        };
        let mut lines: Vec<_> = failed.iter().map(line).collect();
        if failed.len() == MAX_FAILED_SEEDS {
            lines.push(format!("{MAX_FAILED_SEEDS} seeds failed: the seeds after them were left out"));
        }
        lines.join("\n")
    }
}

/// A seed that failed, and the failure's text.
struct FailedSeed {
    seed: u64,
    what: String,
}

/// The thread that runs a trial, and its result for each seed.
struct TrialThread {
    results: Receiver<TestResult>,
    thread: JoinHandle<()>,
}

impl TrialThread {
    /// Waits for the thread and returns why it ended without a result.
    fn exit_message(self) -> String {
        match self.thread.join() {
            Ok(()) => "the trial ended without a result".into(),
            Err(panic) => {
                let text = panic.downcast_ref::<&str>().copied();
                let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
                format!("panicked: {}", text.unwrap_or("without a message"))
            }
        }
    }
}

/// The shell command that runs one trial again in the workspace. `seeds` is given if the run is one of many seeds.
fn replay(name: &str, seed: u64, seeds: Option<u64>) -> String {
    let program = std::env::current_exe().unwrap_or_default();
    let seeds = seeds.map_or_else(String::new, |seeds| format!(" {SEEDS_VARIABLE}={seeds}"));
    let (profile, target) = (profile(&program), target(&program));
    format!(
        "{SEED_VARIABLE}={seed}{seeds} cargo test{profile} --workspace --test {target} -- --exact '{name}'"
    )
}

/// The test target of a program: Cargo names the program `target-hash`.
fn target(program: &Path) -> &str {
    let name = program.file_name().and_then(|name| name.to_str());
    name.and_then(|name| name.rsplit_once('-')).map_or("NAME", |(target, _)| target)
}

/// The `--profile` option of a program: Cargo puts the program into `PROFILE/deps`.
fn profile(program: &Path) -> String {
    match program.ancestors().nth(2).and_then(Path::file_name).and_then(|name| name.to_str()) {
        None | Some("debug") => String::new(),
        Some(profile) => format!(" --profile {profile}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn target_and_profile_come_from_the_path() {
        let path = Path::new("/a/target/checked/deps/some_test-0123456789abcdef");
        assert_eq!((target(path), &*profile(path)), ("some_test", " --profile checked"));
        assert_eq!(profile(Path::new("/a/target/debug/deps/test-0123456789abcdef")), "");
        assert_eq!(target(Path::new("odd")), "NAME");
    }
}
