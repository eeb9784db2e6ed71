//! Counts the instructions per work request with valgrind, in a second run of this program.
//!
//! The caller drives the engine in that run, because valgrind would count polling threads too.

use std::process::Command;

use super::ladder_run::{LadderDevices, LadderRun};
use super::rung::Rung;
use crate::failure::{CommandFailure, CommandResult};

/// The operations of the two counted runs. Their difference does not include the start of the program.
const FEW: u64 = 4;
const MANY: u64 = 24;

/// The instructions per work request of rung `number` on null devices.
pub fn instructions(number: usize, options: &[String]) -> CommandResult<f64> {
    let (few, many) = (run(number, FEW, options)?, run(number, MANY, options)?);
    let requests = many.0.saturating_sub(few.0).max(1);
    Ok(many.1.saturating_sub(few.1) as f64 / requests as f64)
}

/// The work requests and instructions of a run.
fn run(number: usize, operations: u64, options: &[String]) -> CommandResult<(u64, u64)> {
    let program =
        std::env::current_exe().map_err(|e| CommandFailure::new(format!("cannot find this program: {e}")))?;
    let run = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(program)
        .args(["bench", "ladder", "--counted", &format!("{number}:{operations}")])
        .args(options)
        .output()
        .map_err(|e| {
            CommandFailure::new(format!("cannot run valgrind ({e}); install it, or remove --instructions"))
        })?;
    let stderr = String::from_utf8_lossy(&run.stderr);
    let collected = stderr.lines().find_map(|line| line.split("Collected :").nth(1));
    let instructions = collected.and_then(|number| number.trim().parse().ok());
    let requests = String::from_utf8_lossy(&run.stdout).trim().parse().ok();
    match (requests, instructions) {
        (Some(requests), Some(instructions)) if run.status.success() => Ok((requests, instructions)),
        _ => Err(CommandFailure::new(format!(
            "valgrind printed no count: {}",
            stderr.lines().last().unwrap_or("")
        ))),
    }
}

/// Runs the counted operations and prints the number of work requests.
pub fn counted(
    devices: &LadderDevices,
    rung: &Rung,
    batch: usize,
    page: usize,
    operations: u64,
) -> CommandResult {
    let workers = rung.workers(batch, &[]);
    let ladder_run =
        LadderRun::open(devices, rung, page, |builder| builder.workers(workers.clone()).caller_driven())?;
    let requests = ladder_run.run(operations)?;
    crate::output::line(&requests.to_string())
}

/// Parses `NUMBER:OPERATIONS` of a counted run.
pub fn parse(text: &str) -> Result<(usize, u64), String> {
    let parsed = text
        .split_once(':')
        .and_then(|(rung, operations)| Some((rung.parse().ok()?, operations.parse().ok()?)));
    parsed.ok_or_else(|| "give the number of a rung and of operations, such as 0:24".to_owned())
}
