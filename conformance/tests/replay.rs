//! Whether a failing seed is reported as promised: this program runs the suite as a program
//! of its own, on devices that fail with some seeds, and then the commands that it prints.

use std::process::{Command, ExitCode, Output};
use std::sync::Arc;

use backend_loopback::{Loopback, LoopbackConfig};
use multirail_conformance::{BackendUnderTest, Shape, Tag, Variant};
use transport_core::TransportConfig;

/// Set in the suite's process: the seeds that fail.
const BROKEN: &str = "MULTIRAIL_TEST_BROKEN_SEEDS";
const TRIAL: &str = "broken::write::imm_without_bytes";

struct Broken(Vec<u64>);

impl BackendUnderTest for Broken {
    fn name(&self) -> &str {
        "broken"
    }

    fn runs_tag(&self, tag: Tag) -> bool {
        tag == Tag::Virtual
    }

    fn seeds(&self) -> u64 {
        3
    }

    fn variants(&self, _: &[Variant]) -> Vec<Variant> {
        vec![Variant::Plain]
    }

    fn transport(&self, label: &str, shape: Shape) -> Result<TransportConfig, String> {
        // Seed 1 is what the suite finds out with what the devices can do.
        if shape.seed != 1 && self.0.contains(&shape.seed) {
            return Err(format!("seed {} was to fail", shape.seed));
        }
        if shape.seed == 5 && self.0.contains(&6) {
            panic!("seed 5 was to panic");
        }
        Ok(TransportConfig::new(label, Arc::new(Loopback::with(LoopbackConfig::default()))))
    }
}

/// The output of a command, which must fail or not.
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

    // Two seeds fail and one panics between them: all are named, and the others run.
    let text = run(&mut suite("9", "4,6")?, false)?;
    ensure(text.contains("9 runs") || text.contains("8 runs"), "not all seeds ran", &text)?;
    let commands: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("replay: ")).collect();
    let seeds: Vec<_> = commands.iter().filter_map(|command| command.split(' ').next()).collect();
    ensure(
        seeds == ["MULTIRAIL_SEED=4", "MULTIRAIL_SEED=5", "MULTIRAIL_SEED=6"],
        "other seeds were named than those that failed",
        &text,
    )?;
    ensure(text.contains("panicked: seed 5 was to panic"), "a panic lost its words", &text)?;

    // The printed line, as it is, in a shell: that seed alone, and the same failure.
    let mut shell = Command::new("sh");
    shell.args(["-c", commands[0]]).env(BROKEN, "4").current_dir(env!("CARGO_MANIFEST_DIR"));
    let again = run(&mut shell, false)?;
    ensure(again.contains("seed 4 was to fail"), "the replay fails otherwise", &again)?;
    ensure(again.contains("0 passed; 1 failed"), "the replay is not of one trial", &again)?;
    ensure(again.matches("replay: ").count() == 1, "the replay is not of one seed", &again)?;
    // Mended, the same command passes.
    run(shell.env(BROKEN, ""), true)?;

    // Seeds after enough failures are left out.
    let text =
        run(&mut suite("40", &(2..40).map(|seed| seed.to_string()).collect::<Vec<_>>().join(","))?, false)?;
    ensure(text.matches("replay: ").count() == 10, "not ten failures", &text)?;
    ensure(text.contains("left out"), "it does not say that seeds were left out", &text)
}

fn main() -> ExitCode {
    if let Ok(broken) = std::env::var(BROKEN) {
        let broken = broken.split(',').filter_map(|seed| seed.parse().ok()).collect();
        return multirail_conformance::main(vec![Arc::new(Broken(broken))]);
    }
    // As a test of a harness, for those who list and filter.
    let arguments = libtest_mimic::Arguments::from_args();
    let test = libtest_mimic::Trial::test("a_failing_seed_prints_what_replays_it", || Ok(check()?));
    libtest_mimic::run(&arguments, vec![test]).exit_code()
}
