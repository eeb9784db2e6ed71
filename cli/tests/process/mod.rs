//! Processes of the command under test. Every wait has a limit, and no process is left behind.
#![allow(dead_code)]

use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use limit::{Limit, lines};
use rustix::process::{Pid, Signal, kill_process};

/// The limit of waits, on an idle machine.
pub const LIMIT: Duration = limit::HANG;

/// A running `multirail`. Dropping it kills it.
pub struct RunningCommand {
    child: Child,
    stdout: Receiver<String>,
    stderr: Receiver<String>,
    pace: Arc<Pace>,
}

/// How many lines of stdout may be read. A process that is ahead of its reader waits in its next line.
#[derive(Default)]
struct Pace {
    /// `None` if all may be read.
    lines: Mutex<Option<u32>>,
    changed: Condvar,
}

impl Pace {
    /// Waits until the next line may be read.
    fn pass(&self) {
        let lines = self.lines.lock().expect("no holder panics");
        let mut lines = self.changed.wait_while(lines, |lines| *lines == Some(0)).expect("no holder panics");
        if let Some(lines) = &mut *lines {
            *lines -= 1;
        }
    }

    /// Lets at least so many lines be read.
    fn allow(&self, least: u32) {
        if let Some(lines) = &mut *self.lines.lock().expect("no holder panics") {
            *lines = least.max(*lines);
        }
        self.changed.notify_all();
    }

    fn end(&self) {
        *self.lines.lock().expect("no holder panics") = None;
        self.changed.notify_all();
    }
}

/// The lines that a sender may print while a test waits for its words on stderr: more than it has windows, so that it
/// comes to the wait in which it notices the end of its server.
const LINES_OF_A_WAIT: u32 = 16;

/// A command line of `multirail` without environment variables that change it.
pub fn multirail(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_multirail"));
    command.args(arguments).stdin(Stdio::null());
    command.env_remove("MULTIRAIL_BACKEND").env_remove("MULTIRAIL_TOKEN_FILE");
    command
}

/// Runs a command to its end. Returns whether it succeeded, its stdout and its stderr.
pub fn run(arguments: &[&str]) -> (bool, String, String) {
    let output = multirail(arguments).output().expect("start multirail");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8 output");
    (output.status.success(), text(output.stdout), text(output.stderr))
}

/// Asserts that a row of `send` and a row of `serve` have the same counts.
pub fn assert_agree(sent: &serde_json::Value, stored: &serde_json::Value) {
    let counts = [
        "files",
        "directories",
        "links",
        "bytes",
        "same_files",
        "same_links",
        "skipped_files",
        "skipped_directories",
        "skipped_links",
    ];
    for count in counts {
        assert!(sent[count].is_u64() && sent[count] == stored[count], "{count}: {sent} {stored}");
    }
    assert_eq!(sent["sent"], stored["stored"]);
    assert_eq!(sent["sent_bytes"], stored["received_bytes"], "{sent} {stored}");
}

/// The output of `multirail` in a terminal with this many columns. Without the program `script`, prints that the test
/// is skipped and returns `None`.
pub fn in_terminal(columns: usize, arguments: &[&str]) -> Option<String> {
    // `script` is in bsdutils, which every Debian has.
    let inside = format!("stty cols {columns} rows 50 && exec \"$MULTIRAIL\" {}", arguments.join(" "));
    let mut command = Command::new("script");
    command.args(["--quiet", "--return", "--command", &inside, "/dev/null"]).stdin(Stdio::null());
    command.env("MULTIRAIL", env!("CARGO_BIN_EXE_multirail")).env("SHELL", "/bin/sh");
    command.env_remove("MULTIRAIL_BACKEND").env_remove("MULTIRAIL_TOKEN_FILE");
    match command.output() {
        Ok(output) => Some(String::from_utf8(output.stdout).expect("UTF-8 output").replace('\r', "")),
        Err(error) => {
            println!("skipped: no terminal can be had from `script`: {error}");
            None
        }
    }
}

impl RunningCommand {
    /// Starts `multirail`.
    pub fn start(arguments: &[&str]) -> Self {
        Self::spawn(multirail(arguments))
    }

    /// Starts a command.
    pub fn spawn(mut command: Command) -> Self {
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("start multirail");
        let stdout = lines(child.stdout.take().expect("piped"));
        let stderr = lines(child.stderr.take().expect("piped"));
        Self { child, stdout, stderr, pace: Arc::default() }
    }

    /// Starts `multirail`, which prints no more than some ten lines to stdout that the test has not asked for. Then it
    /// waits, so that a test that is held up still finds it at work. It goes on while the test waits for its end.
    pub fn start_paced(arguments: &[&str]) -> Self {
        let (ours, theirs) = UnixStream::pair().expect("two sockets");
        // Room for a few lines: the kernel makes it as much as it needs at least.
        rustix::net::sockopt::set_socket_send_buffer_size(&theirs, 1).expect("a small buffer");
        let mut command = multirail(arguments);
        let mut child = command
            .stdout(Stdio::from(OwnedFd::from(theirs)))
            .stderr(Stdio::piped())
            .spawn()
            .expect("start multirail");
        // The command holds the other end of the socket, too.
        drop(command);
        let stderr = lines(child.stderr.take().expect("piped"));
        let pace = Arc::new(Pace { lines: Mutex::new(Some(0)), changed: Condvar::new() });
        let (sender, stdout) = channel();
        let reader = Arc::clone(&pace);
        std::thread::spawn(move || {
            // A small buffer: what is in it, the process has printed.
            let mut lines = BufReader::with_capacity(64, ours).lines();
            loop {
                reader.pass();
                let Some(Ok(line)) = lines.next() else { return };
                let _ = sender.send(line);
            }
        });
        Self { child, stdout, stderr, pace }
    }

    /// Starts a server and reads the address it listens on.
    pub fn server(arguments: &[&str]) -> (Self, String) {
        let server = Self::start(&[arguments, &["--listen", "127.0.0.1:0", "--json"]].concat());
        let address = server.json()["listening"].as_str().expect("an address").to_owned();
        (server, address)
    }

    /// The next line of stdout.
    pub fn line(&self) -> String {
        self.pace.allow(1);
        Limit::of(LIMIT)
            .receive(&self.stdout)
            .unwrap_or_else(|_| panic!("no line; stderr: {:?}", self.errors()))
    }

    /// The next line of stdout of a process that has ended, or `None`.
    pub fn next_line(&self) -> Option<String> {
        self.stdout.recv_timeout(LIMIT).ok()
    }

    /// The next line of stdout as JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.line()).expect("a JSON line")
    }

    /// The next line of stdout of a process that has ended as JSON, or `None`.
    pub fn rest(&self) -> Option<serde_json::Value> {
        let line = Limit::of(LIMIT).receive(&self.stdout).ok()?;
        Some(serde_json::from_str(&line).expect("a JSON line"))
    }

    /// Lines on stderr so far.
    pub fn errors(&self) -> Vec<String> {
        self.stderr.try_iter().collect()
    }

    /// Waits for a line on stderr that contains `text`.
    pub fn await_error(&self, text: &str) -> String {
        self.pace.allow(LINES_OF_A_WAIT);
        let mut limit = Limit::of(LIMIT);
        loop {
            let line = limit.receive(&self.stderr);
            let line = line.unwrap_or_else(|_| panic!("stderr never said {text:?}"));
            if line.contains(text) {
                return line;
            }
        }
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("signal");
    }

    /// Waits for the end for at most `limit`. Returns the exit status and the rest of stderr.
    pub fn end_within(&mut self, limit: Duration) -> (ExitStatus, Vec<String>) {
        self.pace.end();
        let status = eventually(limit, "the process ends", || self.child.try_wait().expect("wait"));
        // Reads until the end of the pipe. A child process may keep the pipe open, but the process's own lines come
        // soon.
        let mut said = Vec::new();
        while let Ok(line) = Limit::of(Duration::from_millis(300)).receive(&self.stderr) {
            said.push(line);
        }
        (status, said)
    }

    /// Waits for a failure with one sentence, for at most `limit`.
    pub fn fails_within(&mut self, limit: Duration) -> String {
        let (status, said) = self.end_within(limit);
        assert!(status.code().is_some_and(|code| code != 0), "{status}: {said:?}");
        assert_eq!(said.len(), 1, "one sentence: {said:?}");
        assert!(said[0].starts_with("multirail: "), "{said:?}");
        said[0].clone()
    }

    /// Waits for any failure, for at most `limit`.
    pub fn ends_within(&mut self, limit: Duration) {
        let (status, said) = self.end_within(limit);
        assert!(status.code().is_some_and(|code| code != 0), "{status}: {said:?}");
    }

    /// Waits for the end, by a signal or not.
    pub fn ends_within_any(&mut self, limit: Duration) {
        let (status, said) = self.end_within(limit);
        assert!(!status.success(), "{said:?}");
    }

    /// Waits for success.
    pub fn succeeds(&mut self) {
        let (status, said) = self.end_within(LIMIT);
        assert!(status.success(), "{status}: {said:?}");
    }

    /// Waits for success without output.
    pub fn succeeds_silently(&mut self) {
        let (status, said) = self.end_within(LIMIT);
        assert!(status.success() && said.is_empty(), "{status}: {said:?}");
    }
}

impl Drop for RunningCommand {
    fn drop(&mut self) {
        self.pace.end();
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Polls `ask` until it returns a value, for at most `limit`.
pub fn eventually<T>(limit: Duration, what: &str, ask: impl FnMut() -> Option<T>) -> T {
    Limit::of(limit).ask(ask).unwrap_or_else(|| panic!("within {limit:?} of an idle machine: {what}"))
}
