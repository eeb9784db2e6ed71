//! Runs the suite: chooses the trials and seeds, and prints what is skipped and why.

use std::cell::LazyCell;
use std::process::{Command, ExitCode, Output};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use libtest_mimic::{Arguments, Completion, Trial as Test};
use transport_core::FabricBuilder;
use transport_core::spi::Operations;

use crate::backend_under_test::{BackendUnderTest, TransportShape, TrialTag, Variant};
use crate::run::TrialRun;
use crate::trial::{Trial, TrialContext};
use crate::trials::trials;
use crate::{process, statistics};

/// The default seed. It is fixed, so that a failure in CI also happens in every checkout.
const SEED: u64 = 1;
/// The environment variable with another seed.
pub(crate) const SEED_VARIABLE: &str = "MULTIRAIL_SEED";
/// The environment variable with the number of seeds, from that one on, of each virtual trial.
pub(crate) const SEEDS_VARIABLE: &str = "MULTIRAIL_SEEDS";

/// Runs all trials against all backends. This is the `main` of a test without harness.
pub fn main(backends: Vec<Arc<dyn BackendUnderTest>>) -> ExitCode {
    if let Some(code) = process::run_if_helper(&backends) {
        return code;
    }
    let arguments = Arguments::from_args();
    if backends.len() > 1 && arguments.filter.is_none() && !arguments.list {
        return run_in_parallel(&backends);
    }
    let (seed, seeds) = match (number(SEED_VARIABLE), number(SEEDS_VARIABLE)) {
        (Ok(seed), Ok(seeds)) => (seed.unwrap_or(SEED), seeds),
        (Err(error), _) | (_, Err(error)) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let runs: Vec<_> = backends.iter().flat_map(|backend| runs(backend, seed, seeds, &arguments)).collect();
    if let Some(error) = backends.iter().find_map(|backend| stale_entry(&**backend)) {
        eprintln!("{error}");
        return ExitCode::FAILURE;
    }
    if !arguments.list {
        print_plan(&backends, &runs, seed);
    }
    let begun = Instant::now();
    let conclusion = libtest_mimic::run(&arguments, runs.into_iter().map(TrialRun::into_test).collect());
    process::drop_kept_pair();
    if !arguments.list {
        statistics::print(begun.elapsed());
    }
    conclusion.exit_code()
}

fn number(variable: &str) -> Result<Option<u64>, String> {
    let Ok(text) = std::env::var(variable) else { return Ok(None) };
    text.parse().map(Some).map_err(|_| format!("{variable} must be a whole number"))
}

/// The runs of one backend that the command line asks for. A backend without such runs is not opened, because it
/// may have 32 devices.
fn runs(
    backend: &Arc<dyn BackendUnderTest>,
    seed: u64,
    seeds: Option<u64>,
    arguments: &Arguments,
) -> Vec<TrialRun> {
    let supported = LazyCell::new(|| operations(&**backend));
    let mut runs = Vec::new();
    for trial in trials().filter(|trial| backend.runs_tag(trial.tag) && backend.runs_trial(trial.name)) {
        let count = match trial.tag {
            TrialTag::Virtual => seeds.unwrap_or(backend.seeds()).max(1),
            TrialTag::Process => 1,
        };
        let variants = backend.variants(trial.variants);
        for &variant in &variants {
            let short = short_name(trial, variant, variants.len());
            let name = format!("{}::{short}", backend.name());
            if arguments.is_filtered_out(&TrialRun::named(&name, trial.tag, || Ok(Completion::Completed))) {
                continue;
            }
            let known =
                backend.known_failures().iter().find(|known| known.trial == short).map(|known| known.why);
            let skipped = why_skipped(trial, &**backend, variant, &supported);
            let context = TrialContext {
                seed_sweep: seeds.is_some() || backend.seeds() > 1,
                ..TrialContext::new(backend.clone(), variant, seed)
            };
            let seeds = seed..seed.saturating_add(count);
            runs.push(TrialRun { trial: *trial, context, seeds, name, skipped, known });
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

/// The operations that the backend supports, or the reason why it cannot be opened. One device is enough: the
/// others support the same operations.
fn operations(backend: &dyn BackendUnderTest) -> Result<Operations, String> {
    let shape = TransportShape { rails: 1, variant: Variant::Plain, seed: SEED };
    let transport = backend.transport("probe", shape)?;
    let fabric = FabricBuilder::new().transport(transport).open().map_err(|error| error.to_string())?;
    Ok(fabric.transports().iter().fold(Operations::all(), |all, info| all & info.capabilities.operations))
}

/// The reason why a trial cannot run, if there is one.
fn why_skipped(
    trial: &Trial,
    backend: &dyn BackendUnderTest,
    variant: Variant,
    supported: &Result<Operations, String>,
) -> Option<String> {
    if trial.tag == TrialTag::Process && !cfg!(target_os = "linux") {
        return Some("process trials run on Linux only: they read /proc".into());
    }
    if let Some(why) = backend.skip_reason(trial.name) {
        return Some(why.to_owned());
    }
    let rails = trial.rails.max(backend.rails());
    if let Err(why) = backend.transport("probe", TransportShape { rails, variant, seed: SEED }) {
        return Some(why);
    }
    match supported {
        Err(why) => Some(why.clone()),
        Ok(supported) if !supported.contains(trial.needs) => {
            Some(format!("the backend does not support {:?}", trial.needs - *supported))
        }
        Ok(_) => None,
    }
}

/// An error if a known failure names no trial.
fn stale_entry(backend: &dyn BackendUnderTest) -> Option<String> {
    let exists = |name: &str| {
        trials().any(|trial| {
            let variants = backend.variants(trial.variants);
            variants.iter().any(|variant| short_name(trial, *variant, variants.len()) == name)
        })
    };
    let stale = backend.known_failures().iter().find(|known| !exists(known.trial))?;
    Some(format!("{}: the known failure {:?} names no trial; remove it", backend.name(), stale.trial))
}

fn print_plan(backends: &[Arc<dyn BackendUnderTest>], runs: &[TrialRun], seed: u64) {
    let distinct = trials().count();
    println!("conformance: {distinct} trials, {SEED_VARIABLE}={seed}");
    for backend in backends {
        let of_subject = || runs.iter().filter(|run| Arc::ptr_eq(&run.context.backend, backend));
        let tagged = |tag| of_subject().filter(|run| run.trial.tag == tag).count();
        let skipped = of_subject().filter(|run| run.skipped.is_some()).count();
        let (all, known) = (of_subject().count(), of_subject().filter(|run| run.known.is_some()).count());
        if all == 0 {
            continue;
        }
        let (virtual_, process) = (tagged(TrialTag::Virtual), tagged(TrialTag::Process));
        println!(
            "  {}: {all} runs ({virtual_} virtual, {process} process), {skipped} skipped, {known} known failures",
            backend.name()
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

/// The tests of [`run_or_skip`], each with its name: `tests![one, another]`.
#[macro_export]
macro_rules! tests {
    ($($test:ident),+ $(,)?) => { &[$((stringify!($test), $test as fn())),+] };
}

/// Runs `tests`, each of which fails if it panics. This is the `main` of a test without harness.
///
/// If `missing` names something that the tests need and the machine lacks, no test runs: each prints
/// `skipped: reason` and counts as ignored.
pub fn run_or_skip(missing: Option<String>, tests: &[(&'static str, fn())]) -> ExitCode {
    let test = |(name, run): &(&'static str, fn())| {
        let (run, missing) = (*run, missing.clone());
        Test::ignorable_test(*name, move || match missing {
            Some(reason) => Ok(Completion::ignored_with(format!("skipped: {reason}"))),
            None => {
                run();
                Ok(Completion::Completed)
            }
        })
    };
    libtest_mimic::run(&Arguments::from_args(), tests.iter().map(test).collect()).exit_code()
}

/// Runs this program once for each backend and prints each output. Returns success if all passed.
///
/// Process trials run alone in their process and mostly wait. So each backend gets its own process, and a few of these
/// processes run at the same time.
fn run_in_parallel(backends: &[Arc<dyn BackendUnderTest>]) -> ExitCode {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (next, failed, printing) = (AtomicUsize::new(0), AtomicUsize::new(0), Mutex::new(()));
    std::thread::scope(|scope| {
        for _ in 0..=cores.min(backends.len()) {
            scope.spawn(|| {
                while let Some(backend) = backends.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let output = run_one(backend.name());
                    let _whole_output = printing.lock().unwrap_or_else(PoisonError::into_inner);
                    println!("-- {}", backend.name());
                    match output {
                        Ok(Output { status, stdout, stderr }) => {
                            eprint!("{}", String::from_utf8_lossy(&stderr));
                            print!("{}", String::from_utf8_lossy(&stdout));
                            failed.fetch_add(usize::from(!status.success()), Ordering::Relaxed);
                        }
                        Err(error) => {
                            eprintln!("the test process did not start: {error}");
                            failed.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    match failed.into_inner() {
        0 => ExitCode::SUCCESS,
        failed => {
            println!("{failed} of {} backends failed", backends.len());
            ExitCode::FAILURE
        }
    }
}

/// Runs the trials of one backend in a new process.
fn run_one(backend: &str) -> std::io::Result<Output> {
    let arguments = std::env::args_os().skip(1);
    Command::new(std::env::current_exe()?).args(arguments).arg(format!("{backend}::")).output()
}
