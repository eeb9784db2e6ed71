//! One process of a round.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::Receiver;
use std::time::Duration;

use limit::{Limit, lines};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

/// The time on an idle machine within which a process must end once its peer has: the peer timeout of 5 s, a cancel, a
/// close, and a margin.
pub const LIMIT: Duration = Duration::from_secs(30);

/// The environment variable that marks all processes of a run.
const MARK: &str = "MULTIRAIL_STORM";

/// A running `multirail` and its output. Dropping it kills the process.
pub struct StormProcess {
    name: &'static str,
    child: Child,
    lines: Receiver<String>,
    errors: Receiver<String>,
    stdout: Vec<String>,
    stderr: Vec<String>,
}

impl StormProcess {
    /// Starts `command` with its temporary files in `work`.
    pub fn start(name: &'static str, mut command: Command, work: &Path) -> Result<Self, String> {
        command.env(MARK, work).env("TMPDIR", work.join("tmp"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn().map_err(|why| format!("{name} did not start: {why}"))?;
        let missing = || format!("{name} has no pipes");
        let stdout = child.stdout.take().ok_or_else(missing)?;
        let stderr = child.stderr.take().ok_or_else(missing)?;
        let (lines, errors) = (lines(stdout), lines(stderr));
        Ok(Self { name, child, lines, errors, stdout: Vec::new(), stderr: Vec::new() })
    }

    /// The address that a server listens on.
    pub fn address(&mut self) -> Result<String, String> {
        let Ok(line) = Limit::of(LIMIT).receive(&self.lines) else {
            let output = self.output_text();
            return Err(format!("{} printed no address: {output}", self.name));
        };
        let after = line.split("\"listening\":\"").nth(1).and_then(|rest| rest.split('"').next());
        after.map(String::from).ok_or_else(|| format!("{} printed {line:?}, want its address", self.name))
    }

    /// The id of the process.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Returns true if the process has ended.
    pub fn is_over(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|status| status.is_some())
    }

    /// Waits for the end of the process. `by` is the signal by which it may end.
    ///
    /// # Errors
    /// The process does not end, panicked, or ended by another signal.
    pub fn wait_end(&mut self, by: Option<Signal>) -> Result<ExitStatus, String> {
        let ended = Limit::of(LIMIT).ask(|| self.child.try_wait().ok().flatten());
        let Some(status) = ended else {
            let (stacks, output) = (stacks(self.pid()), self.output_text());
            return Err(format!(
                "{} hangs: it did not end within {LIMIT:?}, counted as on an idle machine; {stacks}; {output}",
                self.name
            ));
        };
        let signal = status.signal();
        let output = self.output_text();
        if signal.is_some() && signal != by.map(Signal::as_raw) {
            return Err(format!("{} ended by a signal: {status}; {output}", self.name));
        }
        match output.contains("panicked") {
            true => Err(format!("{} panicked: {output}", self.name)),
            false => Ok(status),
        }
    }

    /// All lines of standard output, once the process has ended.
    pub fn output(&mut self) -> &[String] {
        self.output_text();
        &self.stdout
    }

    /// The output of the process so far, as text.
    pub fn output_text(&mut self) -> String {
        let ended = self.is_over();
        let wait = || if ended { Duration::from_millis(300) } else { Duration::ZERO };
        while let Ok(line) = Limit::of(wait()).receive(&self.lines) {
            self.stdout.push(line);
        }
        while let Ok(line) = Limit::of(wait()).receive(&self.errors) {
            self.stderr.push(line);
        }
        format!("stdout: {:?}, stderr: {:?}", self.stdout, self.stderr)
    }
}

impl Drop for StormProcess {
    fn drop(&mut self) {
        // Kills the process group: this ends the child of a killed bench too, after the search for leftovers.
        let _ = rustix::process::kill_process_group(self.pid(), Signal::KILL);
        let _ = self.child.wait();
    }
}

/// Sends `signal` to a process, which may have ended.
pub fn signal(process: Pid, signal: Signal) {
    let _ = kill_process(process, signal);
}

/// Whether a process runs `program`, or a copy of it with the same file name: no script that is yet to start it.
pub fn runs(process: Pid, program: &Path) -> bool {
    let path = std::fs::read_link(format!("/proc/{}/exe", process.as_raw_nonzero()));
    path.is_ok_and(|path| path.file_name() == program.file_name())
}

/// The children of a process.
pub fn children(process: Pid) -> Vec<Pid> {
    let path = format!("/proc/{0}/task/{0}/children", process.as_raw_nonzero());
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().filter_map(|word| word.parse().ok().and_then(Pid::from_raw)).collect()
}

/// The processes of the run in `work` that still run.
pub fn processes_of(work: &Path) -> Vec<String> {
    let mark = [MARK.as_bytes(), b"=", work.as_os_str().as_encoded_bytes()].concat();
    let mut all = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok) {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw)
        else {
            continue;
        };
        let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        let is_ours = environment.split(|byte| *byte == 0).any(|variable| {
            variable == mark || variable.strip_prefix(&mark[..]).is_some_and(|rest| rest.starts_with(b"/"))
        });
        if is_ours && test_kill_process(pid).is_ok() {
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            all.push(format!(
                "{}: {}",
                pid.as_raw_nonzero(),
                String::from_utf8_lossy(&line).replace('\0', " ")
            ));
        }
    }
    all
}

/// The kernel functions in which the threads of a process wait.
fn stacks(process: Pid) -> String {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", process.as_raw_nonzero())).into_iter().flatten();
    let thread = |task: std::fs::DirEntry| {
        let read = |name: &str| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        format!("{} in {}", read("comm").trim(), read("wchan"))
    };
    format!("threads: {}", tasks.filter_map(Result::ok).map(thread).collect::<Vec<_>>().join(", "))
}
