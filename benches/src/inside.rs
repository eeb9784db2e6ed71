//! Runs a bench again in a place of its own: in a network namespace, or in the virtual machine with soft-RoCE devices.

use std::env::{args_os, current_exe, var_os};
use std::path::Path;
use std::process::{Command, ExitCode};

use crate::BenchResult;

/// The variable that is set for the process in the network namespace.
const IN_NAMESPACE: &str = "MULTIRAIL_BENCH_NETWORK";
/// The buffer that a socket has before the kernel tunes it (`tcp_rmem`, tcp(7)).
const BYTES: u32 = 131_072;

/// Runs this program again in a network namespace where all socket buffers have one size, and returns its exit code.
/// Returns `None` in the namespace, where the caller measures, and where no namespace can be made.
///
/// Linux grows a socket's receive buffer by the bytes that its reader takes at a time. Over the loopback interface the
/// buffer ends anywhere between 128 KiB and 32 MiB, and the speed anywhere between 1 and 3 GB/s, for any program. In a
/// namespace of its own the size can be set, and both sides of a comparison have the same.
pub fn network_namespace() -> BenchResult<Option<ExitCode>> {
    if var_os(IN_NAMESPACE).is_some() {
        return Ok(None);
    }
    let prepare = format!("ip link set lo up && echo 4096 {BYTES} {BYTES} >/proc/sys/net/ipv4/tcp_rmem");
    let is_possible = unshare(&prepare).status().is_ok_and(|status| status.success());
    if !is_possible {
        println!("NO NETWORK NAMESPACE (it takes util-linux, iproute2, and root or user namespaces):");
        println!("the kernel tunes the sockets' buffers as it likes, and figures of tcp say little");
        return Ok(None);
    }
    println!("in a network namespace whose sockets receive into {} KiB", BYTES >> 10);
    let mut command = unshare(&format!(r#"{prepare} && exec "$0" "$@""#));
    command.env(IN_NAMESPACE, "1");
    run_again(command).map(Some)
}

/// A shell in a new namespace.
fn unshare(script: &str) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--net", "sh", "-c", script]);
    command
}

/// Returns true in the virtual machine: `ci/rdma-vm` sets the variable.
pub fn is_in_machine() -> bool {
    var_os("RDMA_VM").is_some()
}

/// Runs this program again in the virtual machine with soft-RoCE devices, and returns its exit code. Returns `None` in
/// the machine, and with `here`, which asks for this machine's own devices.
pub fn virtual_machine(here: bool) -> BenchResult<Option<ExitCode>> {
    if here || is_in_machine() {
        return Ok(None);
    }
    let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../ci/rdma-vm/run"));
    command.env("RDMA_VM_SECONDS", "1800");
    run_again(command).map(Some)
}

/// Runs `command` with this program and its arguments, and returns the exit code.
fn run_again(mut command: Command) -> BenchResult<ExitCode> {
    command.arg(current_exe()?).args(args_os().skip(1));
    let status = command
        .status()
        .map_err(|why| format!("{} does not start: {why}", command.get_program().to_string_lossy()))?;
    Ok(status.code().map_or(ExitCode::FAILURE, |code| ExitCode::from(code as u8)))
}
