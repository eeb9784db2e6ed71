//! Tests the report of a failed seed: this program runs the suite in another process, on devices that fail with some
//! seeds, and then runs the printed replay commands.

use std::process::{Command, ExitCode, Output};
use std::sync::Arc;

use backend_loopback::{Loopback, LoopbackConfig};
use multirail_conformance::{BackendUnderTest, TransportShape, TrialTag, Variant};
use transport_core::TransportConfig;

/// The environment variable of the suite's process with the failing seeds.
const BROKEN: &str = "MULTIRAIL_TEST_BROKEN_SEEDS";
const TRIAL: &str = "broken::write::imm_without_bytes";

struct Broken(Vec<u64>);

impl BackendUnderTest for Broken {
    fn name(&self) -> &str {
        "broken"
    }

    fn runs_tag(&self, tag: TrialTag) -> bool {
        tag == TrialTag::Virtual
    }

    fn seeds(&self) -> u64 {
        3
    }

    fn variants(&self, _: &[Variant]) -> Vec<Variant> {
        vec![Variant::Plain]
    }

    fn transport(&self, label: &str, shape: TransportShape) -> Result<TransportConfig, String> {
        // The suite probes the devices with seed 1.
        if shape.seed != 1 && self.0.contains(&shape.seed) {
            return Err(format!("seed {} fails by design", shape.seed));
        }
        if shape.seed == 5 && self.0.contains(&6) {
            panic!("seed 5 panics by design");
        }
        Ok(TransportConfig::new(label, Arc::new(Loopback::with(LoopbackConfig::default()))))
    }
}

/// Runs a command and returns its output. Fails unless the command succeeds or fails as expected.
fn run(command: &mut Command, succeeds: bool) -> Result<String, String> {
    let Output { status, stdout, stderr } =
        command.output().map_err(|error| format!("{command:?} does not start: {error}"))?;
    let text = String::from_utf8_lossy(&stdout).into_owned() + &String::from_utf8_lossy(&stderr);
    if status.success() == succeeds { Ok(text) } else { Err(format!("{command:?}: {status}\n{text}")) }
}

fn suite(seeds: &str, broken: &str) -> Result<Command, String> {
    let mut command = Command::new(std::env::current_exe().map_err(|error| error.to_string())?);
    command.args(["--exact", TRIAL]).env("MULTIRAIL_SEEDS", seeds).env(BROKEN, broken);
    command.env_remove("MULTIRAIL_SEED");
    Ok(command)
}

fn ensure(holds: bool, what: &str, text: &str) -> Result<(), String> {
    if holds { Ok(()) } else { Err(format!("{what}:\n{text}")) }
}

fn check() -> Result<(), String> {
    let text = run(&mut suite("9", "")?, true)?;
    ensure(text.contains("9 runs"), "nine seeds did not run", &text)?;

    // Two seeds fail, and one between them panics. The report names all three, and the other seeds run.
    let text = run(&mut suite("9", "4,6")?, false)?;
    ensure(text.contains("9 runs") || text.contains("8 runs"), "not all seeds ran", &text)?;
    let commands: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("replay: ")).collect();
    let seeds: Vec<_> = commands.iter().filter_map(|command| command.split(' ').next()).collect();
    ensure(
        seeds == ["MULTIRAIL_SEED=4", "MULTIRAIL_SEED=5", "MULTIRAIL_SEED=6"],
        "the report names other seeds than the failed ones",
        &text,
    )?;
    ensure(
        text.contains("panicked: seed 5 panics by design"),
        "the report lacks the message of a panic",
        &text,
    )?;

    // The printed command, run in a shell, runs that seed alone and fails in the same way.
    let mut shell = Command::new("sh");
    shell.args(["-c", commands[0]]).env(BROKEN, "4").current_dir(env!("CARGO_MANIFEST_DIR"));
    let again = run(&mut shell, false)?;
    ensure(again.contains("seed 4 fails by design"), "the replay fails in another way", &again)?;
    ensure(again.contains("0 passed; 1 failed"), "the replay does not run exactly one trial", &again)?;
    ensure(again.matches("replay: ").count() == 1, "the replay does not run exactly one seed", &again)?;
    // Without the failing seeds the same command passes.
    run(shell.env(BROKEN, ""), true)?;

    // The suite leaves out the seeds after ten failures.
    let text =
        run(&mut suite("40", &(2..40).map(|seed| seed.to_string()).collect::<Vec<_>>().join(","))?, false)?;
    ensure(text.matches("replay: ").count() == 10, "the report does not have ten failures", &text)?;
    ensure(text.contains("left out"), "the report does not say that seeds were left out", &text)
}

fn main() -> ExitCode {
    if let Ok(broken) = std::env::var(BROKEN) {
        let broken = broken.split(',').filter_map(|seed| seed.parse().ok()).collect();
        return multirail_conformance::main(vec![Arc::new(Broken(broken))]);
    }
    // A test of a harness, so that it can be listed and filtered.
    let arguments = libtest_mimic::Arguments::from_args();
    let test = libtest_mimic::Trial::test("a_failing_seed_prints_what_replays_it", || Ok(check()?));
    libtest_mimic::run(&arguments, vec![test]).exit_code()
}
