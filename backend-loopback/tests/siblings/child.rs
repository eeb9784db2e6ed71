//! A child process: runs as an ordinary user, gets commands over a pipe, and is killed in the end.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use limit::Limit;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

/// The longest time that an answer may take on a busy machine.
const LIMIT: Duration = limit::HANG;

/// The settings of a child.
pub struct Start {
    /// Its user and group, if this test runs as root.
    pub user: u32,
    /// The value of `MULTIRAIL_LOOPBACK_STAGING`.
    pub staging: &'static str,
    /// The errno with which a seccomp filter refuses process_vm_writev and process_vm_readv. 0 for no filter.
    pub refuse: i32,
    /// True for a child that is not dumpable.
    pub hidden: bool,
    /// True for a child that uses the portable path.
    pub portable: bool,
}

impl Default for Start {
    fn default() -> Self {
        Self { user: 65534, staging: "0", refuse: 0, hidden: false, portable: super::is_portable() }
    }
}

pub struct Child {
    process: std::process::Child,
    commands: ChildStdin,
    answers: Receiver<String>,
}

impl Child {
    pub fn start(settings: Start) -> Self {
        // An ordinary user may have no access to the executable's folder, but has it to this name.
        let mut command = Command::new("/proc/self/exe");
        command
            .args(["--ignored", "--exact", "sibling", "--nocapture"])
            .env(super::sibling::STAGING, settings.staging)
            .env("MULTIRAIL_LOOPBACK_PORTABLE", if settings.portable { "1" } else { "0" });
        if rustix::process::geteuid().is_root() {
            // With these, the standard library also drops the supplementary groups.
            command.uid(settings.user).gid(settings.user);
        }
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (commands, output) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            let lines = BufReader::new(output).lines().map_while(Result::ok);
            lines
                .filter_map(|line| Some(line.strip_prefix('@')?.to_owned()))
                .try_for_each(|line| sender.send(line))
        });
        let mut child = Self { process, commands, answers };
        if settings.hidden {
            child.ask("hide");
        }
        if settings.refuse != 0 {
            child.ask(&format!("filter {}", settings.refuse));
        }
        child.ask("open");
        child
    }

    /// Sends a command that must succeed. Returns the answer.
    #[track_caller]
    pub fn ask(&mut self, command: &str) -> String {
        self.send(command);
        self.receive(command)
    }

    /// Sends a command that must be refused. Returns the kind and the text of the error.
    #[track_caller]
    pub fn refused(&mut self, command: &str) -> String {
        self.send(command);
        self.receive_refusal(command)
    }

    #[track_caller]
    pub fn send(&mut self, command: &str) {
        writeln!(self.commands, "{command}").unwrap();
    }

    #[track_caller]
    pub fn receive(&mut self, command: &str) -> String {
        let line = self.line(command);
        line.strip_prefix("ok ").unwrap_or_else(|| panic!("{command}: {line}")).to_owned()
    }

    #[track_caller]
    pub fn receive_refusal(&mut self, command: &str) -> String {
        let line = self.line(command);
        line.strip_prefix("err ").unwrap_or_else(|| panic!("{command} was not refused: {line}")).to_owned()
    }

    /// Stops the process. No thread of it runs any more once this has returned.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        let process = Pid::from_child(&self.process);
        let (_, status) = waitpid(Some(process), WaitOptions::UNTRACED).unwrap().unwrap();
        assert!(status.stopped());
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    #[track_caller]
    fn line(&mut self, command: &str) -> String {
        let said = Limit::of(LIMIT).receive(&self.answers);
        said.unwrap_or_else(|error| panic!("{command}: {error}; see the child's panic above"))
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
