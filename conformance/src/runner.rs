//! Runs the suite: what runs, over which seeds, and what is skipped and why.

use std::cell::LazyCell;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use libtest_mimic::{Arguments, Completion};
use transport_core::FabricBuilder;
use transport_core::spi::Operations;

use crate::apart;
use crate::process;
use crate::run::Run;
use crate::subject::{Shape, Subject, Tag, Variant};
use crate::tally;
use crate::trial::{Context, Trial};
use crate::trials::trials;

/// The seed of a run that was given none: fixed, so that a failure in CI is the
/// failure of every checkout.
const SEED: u64 = 1;
/// The environment variable that replays or explores another one.
pub(crate) const SEED_VARIABLE: &str = "MULTIRAIL_SEED";
/// The environment variable that says over how many seeds, from that one on, virtual trials run.
pub(crate) const SEEDS_VARIABLE: &str = "MULTIRAIL_SEEDS";

/// Runs all trials against all subjects; the `main` of a test without harness.
pub fn main(subjects: Vec<Arc<dyn Subject>>) -> ExitCode {
    if let Some(code) = process::role(&subjects) {
        return code;
    }
    let arguments = Arguments::from_args();
    if subjects.len() > 1 && arguments.filter.is_none() && !arguments.list {
        return apart::run(&subjects);
    }
    let (seed, seeds) = match (number(SEED_VARIABLE), number(SEEDS_VARIABLE)) {
        (Ok(seed), Ok(seeds)) => (seed.unwrap_or(SEED), seeds),
        (Err(complaint), _) | (_, Err(complaint)) => {
            eprintln!("{complaint}");
            return ExitCode::FAILURE;
        }
    };
    let runs: Vec<_> = subjects.iter().flat_map(|subject| runs(subject, seed, seeds, &arguments)).collect();
    if let Some(complaint) = subjects.iter().find_map(|subject| stale_entry(&**subject)) {
        eprintln!("{complaint}");
        return ExitCode::FAILURE;
    }
    if !arguments.list {
        print_plan(&subjects, &runs, seed);
    }
    let begun = Instant::now();
    let conclusion = libtest_mimic::run(&arguments, runs.into_iter().map(Run::into_test).collect());
    process::part();
    if !arguments.list {
        tally::print(begun.elapsed());
    }
    conclusion.exit_code()
}

fn number(variable: &str) -> Result<Option<u64>, String> {
    let Ok(text) = std::env::var(variable) else { return Ok(None) };
    text.parse().map(Some).map_err(|_| format!("{variable} must be a whole number"))
}

/// Those that were asked for. A subject of which none was is not opened: it may have 32 devices.
fn runs(subject: &Arc<dyn Subject>, seed: u64, seeds: Option<u64>, arguments: &Arguments) -> Vec<Run> {
    let offered = LazyCell::new(|| operations(&**subject));
    let mut runs = Vec::new();
    for trial in trials().filter(|trial| subject.takes(trial.tag) && subject.wants(trial.name)) {
        let count = match trial.tag {
            Tag::Virtual => seeds.unwrap_or(subject.seeds()).max(1),
            Tag::Process => 1,
        };
        let variants = subject.variants(trial.variants);
        for &variant in &variants {
            let short = short_name(trial, variant, variants.len());
            let name = format!("{}::{short}", subject.name());
            if arguments.is_filtered_out(&Run::named(&name, trial.tag, || Ok(Completion::Completed))) {
                continue;
            }
            let known =
                subject.known_failures().iter().find(|known| known.trial == short).map(|known| known.why);
            let skipped = obstacle(trial, &**subject, variant, &offered);
            let context = Context {
                swept: seeds.is_some() || subject.seeds() > 1,
                ..Context::new(subject.clone(), variant, seed)
            };
            let seeds = seed..seed.saturating_add(count);
            runs.push(Run { trial: *trial, context, seeds, name, skipped, known });
        }
    }
    runs
}

fn short_name(trial: &Trial, variant: Variant, of: usize) -> String {
    match of {
        1 => trial.name.into(),
        _ => format!("{}[{}]", trial.name, variant.name()),
    }
}

/// What the subject can do, or why it cannot be opened at all. One device tells: its likes do the same.
fn operations(subject: &dyn Subject) -> Result<Operations, String> {
    let shape = Shape { rails: 1, variant: Variant::Plain, seed: SEED };
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
    if let Some(why) = subject.beside_the_point(trial.name) {
        return Some(why.to_owned());
    }
    let rails = trial.rails.max(subject.rails());
    if let Err(why) = subject.transport("probe", Shape { rails, variant, seed: SEED }) {
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
        trials().any(|trial| {
            let variants = subject.variants(trial.variants);
            variants.iter().any(|variant| short_name(trial, *variant, variants.len()) == name)
        })
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
        if all == 0 {
            continue;
        }
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
