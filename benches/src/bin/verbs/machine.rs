//! The virtual machine with soft-RoCE devices.

use std::env::{args_os, current_exe, var_os};
use std::path::Path;
use std::process::{Command, ExitCode};

use benches::BenchResult;

/// Whether this is it: `ci/rdma-vm` says so.
pub fn is_inside() -> bool {
    var_os("RDMA_VM").is_some()
}

/// Runs this program again, inside; its code. None in there, and where it shall run here.
pub fn enter(here: bool) -> BenchResult<Option<ExitCode>> {
    if here || is_inside() {
        return Ok(None);
    }
    let run = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ci/rdma-vm/run");
    let mut command = Command::new(&run);
    command.arg(current_exe()?).args(args_os().skip(1)).env("RDMA_VM_SECONDS", "1800");
    let status = command.status().map_err(|why| format!("{} does not start: {why}", run.display()))?;
    Ok(Some(status.code().map_or(ExitCode::FAILURE, |code| ExitCode::from(code as u8))))
}
