//! The programs of Debian's package perftest. Each runs as two processes, of which the second measures.

use std::fs;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use benches::BenchResult;
use benches::processes::ProcessRole;

use crate::Ports;

/// The TCP port through which both processes connect: perftest's default.
const PORT: u16 = 18_515;
/// The limit of the time until the first process listens.
const LIMIT: Duration = Duration::from_secs(20);

/// The first process. Dropping it kills it.
struct PerftestServer(Child);

impl Drop for PerftestServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs `program` with `more` arguments between both ports. Returns the figures of its row for `size`, which begins
/// with the size and the count.
pub fn row(program: &str, ports: &Ports, size: usize, more: &[&str]) -> BenchResult<Vec<f64>> {
    let command = |side| -> BenchResult<Command> {
        let mut command = Command::new(program);
        let (gid, size) = (ports.gid.to_string(), size.to_string());
        command
            .args(["-F", "-d", ports.of(side)?, "-x", &gid, "-s", &size, "-p", &PORT.to_string()])
            .args(more);
        Ok(command)
    };
    let advice = |why| format!("{program} does not start ({why}): install Debian's package perftest");
    let spawned = command(ProcessRole::Target)?.stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    let mut server = PerftestServer(spawned.map_err(advice)?);
    let end = Instant::now() + LIMIT;
    while !is_listening()? {
        if server.0.try_wait()?.is_some() || Instant::now() > end {
            server.0.kill()?;
            let mut words = String::new();
            server.0.stderr.take().ok_or("no output")?.read_to_string(&mut words)?;
            return Err(format!("{program} does not listen: {words}").into());
        }
        // No event tells when another process listens.
        sleep(Duration::from_millis(5));
    }
    let output = command(ProcessRole::Writer)?.arg("127.0.0.1").output().map_err(advice)?;
    let text = String::from_utf8_lossy(&output.stdout);
    let numbers =
        |line: &str| line.split_whitespace().map(|word| word.parse().ok()).collect::<Option<Vec<f64>>>();
    let mut rows = text.lines().filter_map(numbers).filter(|row| row.first() == Some(&(size as f64)));
    let words = || String::from_utf8_lossy(&output.stderr).into_owned();
    let row = rows.next().ok_or_else(|| format!("{program} measured nothing: {text}{}", words()))?;
    server.0.wait()?;
    Ok(row)
}

/// Whether a process listens at [`PORT`] (proc(5): the local address in hexadecimal, state 0A).
fn is_listening() -> BenchResult<bool> {
    let wanted = format!(":{PORT:04X}");
    let has_it = |path: &str| -> BenchResult<bool> {
        Ok(fs::read_to_string(path)?.lines().any(|line| {
            let mut words = line.split_whitespace();
            words.nth(1).is_some_and(|local| local.ends_with(&wanted)) && words.nth(1) == Some("0A")
        }))
    };
    Ok(has_it("/proc/net/tcp")? || has_it("/proc/net/tcp6")?)
}
