//! A network namespace in which sockets have buffers of one size.
//!
//! Linux grows a socket's receive buffer by what its reader takes at a time. Over the loopback
//! interface that ends anywhere between 128 KiB and 32 MiB, and with it the speed anywhere between 1
//! and 3 GB/s, for any program: in a namespace of its own the size can be told, and is the same for
//! both sides of a comparison.

use std::env::{args_os, current_exe, var_os};
use std::process::{Command, ExitCode};

use benches::BenchResult;

/// Set for the process inside.
const INSIDE: &str = "MULTIRAIL_BENCH_NETWORK";
/// The buffer that a socket has before the kernel tunes it (`tcp_rmem`, tcp(7)).
const BYTES: u32 = 131_072;

/// Runs this program again, inside; its code. None in there, where all that is left is to measure.
pub fn enter() -> BenchResult<Option<ExitCode>> {
    if var_os(INSIDE).is_some() {
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
    let mut inside = unshare(&format!(r#"{prepare} && exec "$0" "$@""#));
    let status = inside.arg(current_exe()?).args(args_os().skip(1)).env(INSIDE, "1").status()?;
    Ok(Some(status.code().map_or(ExitCode::FAILURE, |code| ExitCode::from(code as u8))))
}

/// A shell in a new namespace.
fn unshare(script: &str) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--net", "sh", "-c", script]);
    command
}
