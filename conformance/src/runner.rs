//! Runs the suite: what is skipped and why, limits, known failures, replays.

use std::process::ExitCode;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, RwLock};
use std::time::Duration;

use libtest_mimic::{Arguments, Completion, Failed};
use transport_core::FabricBuilder;
use transport_core::spi::Operations;

use crate::check::Verdict;
use crate::process;
use crate::subject::{Shape, Subject, Tag, Variant};
use crate::trial::{Context, Trial};
use crate::trials::trials;

/// The seed of a run that was given none: fixed, so that a failure in CI is the
/// failure of every checkout.
const SEED: u64 = 1;
/// The environment variable that replays or explores another one.
const SEED_VARIABLE: &str = "MULTIRAIL_SEED";

/// Process trials measure time and processor use: they run alone.
static MACHINE: RwLock<()> = RwLock::new(());

/// Runs all trials against all subjects; the `main` of a test without harness.
pub fn main(subjects: Vec<Arc<dyn Subject>>) -> ExitCode {
    if let Some(code) = process::role(&subjects) {
        return code;
    }
    let arguments = Arguments::from_args();
    let seed = match std::env::var(SEED_VARIABLE).map(|text| text.parse()) {
        Err(_) => SEED,
        Ok(Ok(seed)) => seed,
        Ok(Err(_)) => {
            eprintln!("{SEED_VARIABLE} must be a whole number");
            return ExitCode::FAILURE;
        }
    };
    let runs: Vec<_> = subjects.iter().flat_map(|subject| runs(subject, seed)).collect();
    if let Some(complaint) = subjects.iter().find_map(|subject| stale_entry(&**subject)) {
        eprintln!("{complaint}");
        return ExitCode::FAILURE;
    }
    if !arguments.list {
        print_plan(&subjects, &runs, seed);
    }
    libtest_mimic::run(&arguments, runs.into_iter().map(Run::into_test).collect()).exit_code()
}

/// One trial against one subject's device.
struct Run {
    trial: Trial,
    context: Context,
    name: String,
    skipped: Option<String>,
    known: Option<&'static str>,
}

fn runs(subject: &Arc<dyn Subject>, seed: u64) -> Vec<Run> {
    let offered = operations(&**subject);
    let mut runs = Vec::new();
    for trial in trials().filter(|trial| subject.takes(trial.tag)) {
        for &variant in trial.variants {
            let short = short_name(trial, variant);
            let known =
                subject.known_failures().iter().find(|known| known.trial == short).map(|known| known.why);
            let skipped = obstacle(trial, &**subject, variant, &offered);
            let context = Context { subject: subject.clone(), variant, seed };
            let name = format!("{}::{short}", subject.name());
            runs.push(Run { trial: *trial, context, name, skipped, known });
        }
    }
    runs
}

fn short_name(trial: &Trial, variant: Variant) -> String {
    match trial.variants.len() {
        1 => trial.name.into(),
        _ => format!("{}[{}]", trial.name, variant.name()),
    }
}

/// What the subject can do, or why it cannot be opened at all.
fn operations(subject: &dyn Subject) -> Result<Operations, String> {
    let shape = Shape { rails: subject.rails(), variant: Variant::Plain };
    let transport = subject.transport("probe", shape)?;
    let fabric = FabricBuilder::new().transport(transport).open().map_err(|error| error.to_string())?;
    Ok(fabric.transports().iter().fold(Operations::all(), |all, info| all & info.capabilities.operations))
}

/// Why a trial cannot run.
fn obstacle(
    trial: &Trial,
    subject: &dyn Subject,
    variant: Variant,
    offered: &Result<Operations, String>,
) -> Option<String> {
    if trial.tag == Tag::Process && !cfg!(target_os = "linux") {
        return Some("process trials read /proc: they run on Linux".into());
    }
    let rails = trial.rails.max(subject.rails());
    if let Err(why) = subject.transport("probe", Shape { rails, variant }) {
        return Some(why);
    }
    match offered {
        Err(why) => Some(why.clone()),
        Ok(offered) if !offered.contains(trial.needs) => {
            Some(format!("it does not offer {:?}", trial.needs - *offered))
        }
        Ok(_) => None,
    }
}

fn stale_entry(subject: &dyn Subject) -> Option<String> {
    let exists = |name: &str| {
        trials().any(|trial| trial.variants.iter().any(|variant| short_name(trial, *variant) == name))
    };
    let stale = subject.known_failures().iter().find(|known| !exists(known.trial))?;
    Some(format!("{}: the known failure {:?} names no trial; remove it", subject.name(), stale.trial))
}

fn print_plan(subjects: &[Arc<dyn Subject>], runs: &[Run], seed: u64) {
    let distinct = trials().count();
    println!("conformance: {distinct} trials, {SEED_VARIABLE}={seed}");
    for subject in subjects {
        let of_subject = || runs.iter().filter(|run| Arc::ptr_eq(&run.context.subject, subject));
        let tagged = |tag| of_subject().filter(|run| run.trial.tag == tag).count();
        let skipped = of_subject().filter(|run| run.skipped.is_some()).count();
        let (all, known) = (of_subject().count(), of_subject().filter(|run| run.known.is_some()).count());
        let (virtual_, process) = (tagged(Tag::Virtual), tagged(Tag::Process));
        println!(
            "  {}: {all} runs ({virtual_} virtual, {process} process), {skipped} skipped, {known} known failures",
            subject.name()
        );
    }
    for run in runs {
        if let Some(why) = &run.skipped {
            println!("  skipped: {}: {why}", run.name);
        } else if let Some(why) = run.known {
            println!("  known to fail: {}: {why}", run.name);
        }
    }
}

impl Run {
    fn into_test(self) -> libtest_mimic::Trial {
        let kind = match self.trial.tag {
            Tag::Virtual => "virtual",
            Tag::Process => "process",
        };
        libtest_mimic::Trial::ignorable_test(self.name.clone(), move || self.judge()).with_kind(kind)
    }

    fn judge(self) -> Result<Completion, Failed> {
        if let Some(why) = self.skipped {
            return Ok(Completion::ignored_with(why));
        }
        let (name, known, seed) = (self.name.clone(), self.known, self.context.seed);
        match (self.run_alone(), known) {
            (Ok(()), None) => Ok(Completion::Completed),
            (Ok(()), Some(why)) => {
                Err(format!("passes, but is listed as a known failure ({why}): take it off the list").into())
            }
            (Err(what), Some(why)) => Ok(Completion::ignored_with(format!("known failure: {why}: {what}"))),
            (Err(what), None) => Err(format!("{what}\nreplay: {}", replay(&name, seed)).into()),
        }
    }

    /// Runs the trial in a thread of its own, so that one that hangs is named and
    /// left behind while the others go on.
    fn run_alone(self) -> Result<(), String> {
        let limit = match self.trial.tag {
            Tag::Virtual => Duration::from_secs(60),
            Tag::Process => Duration::from_secs(90),
        };
        let shared = (self.trial.tag == Tag::Virtual).then(|| MACHINE.read());
        let alone = (self.trial.tag == Tag::Process).then(|| MACHINE.write());
        let (tell, told) = mpsc::channel::<Verdict>();
        let body = move || {
            let verdict = (self.trial.run)(&self.context);
            let _ = tell.send(verdict);
        };
        let thread = std::thread::Builder::new().name(self.name).spawn(body).map_err(|e| e.to_string())?;
        let verdict = told.recv_timeout(limit);
        drop((shared, alone));
        match verdict {
            Ok(verdict) => verdict.map_err(|failure| failure.to_string()),
            Err(RecvTimeoutError::Timeout) => Err(format!("hangs: not over after {limit:?}")),
            Err(RecvTimeoutError::Disconnected) => Err(match thread.join() {
                Ok(()) => "ended without a verdict".into(),
                Err(panic) => format!("panicked: {}", words(&*panic)),
            }),
        }
    }
}

fn words(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without words")
}

/// The command that runs one trial again.
fn replay(name: &str, seed: u64) -> String {
    let program = std::env::current_exe().ok();
    let target =
        program.as_deref().and_then(|path| path.file_name()).map(|name| name.to_string_lossy().into_owned());
    // Cargo names a test's program `target-hash`.
    let target =
        target.and_then(|name| Some(name.rsplit_once('-')?.0.to_owned())).unwrap_or_else(|| "NAME".into());
    format!("{SEED_VARIABLE}={seed} cargo test -p conformance --test {target} -- --exact '{name}'")
}
