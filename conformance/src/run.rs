//! One trial on one subject's device: over its seeds, each within a limit.

use std::ops::Range;
use std::sync::RwLock;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use libtest_mimic::{Completion, Failed};
use limit::Limit;

use crate::check::Verdict;
use crate::process::LIMIT;
use crate::replay::replay;
use crate::subject::Tag;
use crate::tally::{self, Tally};
use crate::trial::{Context, Trial};

/// Process trials measure time and processor use: they run alone.
static MACHINE: RwLock<()> = RwLock::new(());

/// Failing seeds after which the rest of a trial's seeds is left out.
const ENOUGH: usize = 10;

/// One trial against one subject's device, over its seeds.
pub(crate) struct Run {
    pub trial: Trial,
    pub context: Context,
    pub seeds: Range<u64>,
    /// With the subject's and the variant's.
    pub name: String,
    pub skipped: Option<String>,
    pub known: Option<&'static str>,
}

impl Run {
    /// As the harness takes it.
    pub(crate) fn into_test(self) -> libtest_mimic::Trial {
        Self::named(&self.name.clone(), self.trial.tag, move || self.judge())
    }

    /// As the harness takes one of that name.
    pub(crate) fn named(
        name: &str,
        tag: Tag,
        judge: impl FnOnce() -> Result<Completion, Failed> + Send + 'static,
    ) -> libtest_mimic::Trial {
        let kind = match tag {
            Tag::Virtual => "virtual",
            Tag::Process => "process",
        };
        libtest_mimic::Trial::ignorable_test(name, judge).with_kind(kind)
    }

    fn judge(self) -> Result<Completion, Failed> {
        if let Some(why) = self.skipped {
            return Ok(Completion::ignored_with(why));
        }
        let failing = self.run_all()?;
        match (failing.first(), self.known) {
            (None, None) => Ok(Completion::Completed),
            (None, Some(why)) => {
                Err(format!("passes, but is listed as a known failure ({why}): take it off the list").into())
            }
            (Some(first), Some(why)) => {
                Ok(Completion::ignored_with(format!("known failure: {why}: {}", first.what)))
            }
            (Some(_), None) => Err(self.report(&failing).into()),
        }
    }

    /// Runs every seed, in a thread apart: a trial that hangs is named and left behind
    /// while the others go on.
    fn run_all(&self) -> Result<Vec<Failing>, Failed> {
        let limit = match self.trial.tag {
            Tag::Virtual => Duration::from_secs(60),
            // More than a wait in it, which says where it waits.
            Tag::Process => 3 * LIMIT,
        };
        let shared = (self.trial.tag == Tag::Virtual).then(|| MACHINE.read());
        let alone = (self.trial.tag == Tag::Process).then(|| MACHINE.write());
        let mut failing = Vec::new();
        let mut left = self.seeds.clone();
        let mut running = self.start(left.clone())?;
        while let Some(seed) = left.next() {
            let what = match Limit::of(limit).receive(&running.told) {
                Ok(Ok(())) => continue,
                Ok(Err(failure)) => failure.to_string(),
                Err(RecvTimeoutError::Disconnected) => {
                    let next = self.start(left.clone())?;
                    std::mem::replace(&mut running, next).last_words()
                }
                Err(RecvTimeoutError::Timeout) => {
                    failing.push(Failing {
                        seed,
                        what: format!("hangs: not over after {limit:?} of an idle machine"),
                    });
                    break;
                }
            };
            failing.push(Failing { seed, what });
            if failing.len() == ENOUGH {
                break;
            }
        }
        drop((shared, alone));
        Ok(failing)
    }

    /// Begins with the first of `seeds`; who stops listening stops it after the next.
    fn start(&self, seeds: Range<u64>) -> Result<Running, Failed> {
        let (tell, told) = mpsc::channel();
        let (run, context) = (self.trial.run, self.context.clone());
        let tally = Tally::of(&self.name);
        let body = move || {
            for seed in seeds {
                let begun = tally::busy();
                let verdict = run(&context.with_seed(seed));
                tally.ran(context.witness.take(), tally::busy() - begun);
                if tell.send(verdict).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name(self.name.clone()).spawn(body)?;
        Ok(Running { told, thread })
    }

    fn report(&self, failing: &[Failing]) -> String {
        let line = |one: &Failing| {
            let seeds = self.context.swept.then_some(1);
            format!("{}\nreplay: {}", one.what, replay(&self.name, one.seed, seeds))
        };
        let mut lines: Vec<_> = failing.iter().map(line).collect();
        if failing.len() == ENOUGH {
            lines.push(format!("{ENOUGH} seeds failed: those after them were left out"));
        }
        lines.join("\n")
    }
}

/// A seed that failed, and how.
struct Failing {
    seed: u64,
    what: String,
}

/// The thread that runs a trial, and what it says of each seed.
struct Running {
    told: Receiver<Verdict>,
    thread: JoinHandle<()>,
}

impl Running {
    /// Why it ended without a verdict.
    fn last_words(self) -> String {
        match self.thread.join() {
            Ok(()) => "ended without a verdict".into(),
            Err(panic) => {
                let text = panic.downcast_ref::<&str>().copied();
                let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
                format!("panicked: {}", text.unwrap_or("without words"))
            }
        }
    }
}
