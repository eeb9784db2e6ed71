//! The parent's handle on a helper process.

use std::fmt;
use std::io::Write;
use std::process::{ChildStdin, Command, Stdio};
use std::str::FromStr;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use limit::{Limit, lines};
use rustix::process::{Pid, Signal, kill_process};
use transport_core::{Fabric, Peer};

use super::LIMIT;
use super::helper_commands::{BACKEND, SEED, VARIANT};
use crate::check::{TestResult, TrialFailure, within};
use crate::trial::TrialContext;

/// A helper process. Dropping it kills the process.
pub(crate) struct HelperProcess {
    process: std::process::Child,
    commands: ChildStdin,
    responses: Receiver<String>,
}

impl HelperProcess {
    /// Starts a helper with an open fabric of the same backend and variant.
    #[track_caller]
    pub(crate) fn spawn(context: &TrialContext) -> TestResult<Self> {
        let mut helper = Self::spawn_idle(context)?;
        helper.command("open")?;
        Ok(helper)
    }

    /// Starts a helper that has no fabric yet.
    #[track_caller]
    pub(crate) fn spawn_idle(context: &TrialContext) -> TestResult<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .env(BACKEND, context.backend.name())
            .env(VARIANT, context.variant.name())
            .env(SEED, (context.seed + 500).to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let missing = || TrialFailure::new("the helper process has no pipes");
        let commands = process.stdin.take().ok_or_else(missing)?;
        let output = process.stdout.take().ok_or_else(missing)?;
        Ok(Self { process, commands, responses: lines(output) })
    }

    /// Sends a command and waits for its response. Fails if the response is an error.
    #[track_caller]
    pub(crate) fn command(&mut self, command: &str) -> TestResult<String> {
        self.start(command)?;
        self.finish(command)
    }

    /// Sends a command and fails unless the response is an error of one of these kinds.
    #[track_caller]
    pub(crate) fn expect_error(&mut self, command: &str, kinds: &[&str]) -> TestResult {
        self.start(command)?;
        let response = self.response(command)?;
        let kind = response.strip_prefix("err ").and_then(|rest| rest.split(' ').next());
        match kind {
            Some(kind) if kinds.contains(&kind) => Ok(()),
            _ => Err(TrialFailure::new(format!("helper, {command}: {response:?}, want one of {kinds:?}"))),
        }
    }

    /// Sends a command and does not wait for its response.
    #[track_caller]
    pub(crate) fn start(&mut self, command: &str) -> TestResult {
        Ok(writeln!(self.commands, "{command}")?)
    }

    /// Waits for the response to a command that was sent before.
    #[track_caller]
    pub(crate) fn finish(&mut self, command: &str) -> TestResult<String> {
        let line = self.response(command)?;
        match line.strip_prefix("ok") {
            Some(text) => Ok(text.trim().into()),
            None => Err(TrialFailure::new(format!("helper, {command}: {line}"))),
        }
    }

    #[track_caller]
    fn response(&mut self, command: &str) -> TestResult<String> {
        let waited = Limit::of(LIMIT).receive(&self.responses);
        waited.map_err(|_| TrialFailure::new(format!("helper, {command}: no response within {LIMIT:?}")))
    }

    /// Starts a helper with a fabric that listens, and connects `fabric` to it.
    #[track_caller]
    pub(crate) fn spawn_connected(context: &TrialContext, fabric: &Fabric) -> TestResult<(Self, Peer)> {
        let mut helper = Self::spawn(context)?;
        let address = helper.command("listen")?;
        let peer = helper.connect(fabric, &address)?;
        Ok((helper, peer))
    }

    /// The bytes of the descriptor of the helper's region `name`.
    #[track_caller]
    pub(crate) fn descriptor(&mut self, name: &str) -> TestResult<Vec<u8>> {
        let hex = self.command(&format!("descriptor {name}"))?;
        let bytes = (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16));
        bytes
            .collect::<Result<_, _>>()
            .map_err(|why| TrialFailure::new(format!("the helper sent no descriptor: {why}")))
    }

    /// Connects `fabric` to the helper's listener at `address`.
    #[track_caller]
    pub(crate) fn connect(&mut self, fabric: &Fabric, address: &str) -> TestResult<Peer> {
        self.start("accept")?;
        let peer = within(LIMIT, "a connection", fabric.connect(address))??;
        self.finish("accept")?;
        Ok(peer)
    }

    /// The resources that the helper holds now.
    #[track_caller]
    pub(crate) fn resource_usage(&mut self) -> TestResult<ResourceUsage> {
        self.command("resource-usage")?.parse().map_err(TrialFailure::new)
    }

    /// Sends the helper a signal.
    #[track_caller]
    pub(crate) fn signal(&self, signal: Signal) -> TestResult {
        let id = i32::try_from(self.process.id()).ok().and_then(Pid::from_raw);
        let id = id.ok_or_else(|| TrialFailure::new("the helper process has no id"))?;
        kill_process(id, signal).map_err(|error| std::io::Error::from(error).into())
    }
}

impl Drop for HelperProcess {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Threads, file descriptors, CPU time so far, and memory of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ResourceUsage {
    pub threads: usize,
    pub files: usize,
    pub cpu_time: Duration,
    /// Resident memory in bytes.
    pub resident: u64,
}

impl ResourceUsage {
    /// Reads the usage of this process.
    pub(crate) fn of_this_process() -> std::io::Result<Self> {
        let threads = std::fs::read_dir("/proc/self/task")?.count();
        // Reading the directory uses one descriptor.
        let files = std::fs::read_dir("/proc/self/fd")?.count() - 1;
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        let cpu_time = Duration::new(time.tv_sec as u64, time.tv_nsec as u32);
        Ok(Self { threads, files, cpu_time, resident: resident()? })
    }
}

/// Resident memory in bytes, from `VmRSS` of `/proc/self/status`, which is in kB.
fn resident() -> std::io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    Ok(kilobytes.unwrap_or(0) * 1024)
}

impl fmt::Display for ResourceUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {} {}", self.threads, self.files, self.cpu_time.as_nanos(), self.resident)
    }
}

impl FromStr for ResourceUsage {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers: Result<Vec<u64>, _> = text.split(' ').map(str::parse).collect();
        match numbers.as_deref() {
            Ok(&[threads, files, nanos, resident]) => Ok(Self {
                threads: threads as usize,
                files: files as usize,
                cpu_time: Duration::from_nanos(nanos),
                resident,
            }),
            _ => Err(format!("{text:?} is no resource usage")),
        }
    }
}
