//! A child: started as an ordinary user, spoken to over pipes, killed in the end.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use limit::Limit;
use rustix::process::{Pid, Signal, kill_process};

/// What any answer may take on a busy machine.
const LIMIT: Duration = limit::HANG;

/// How a child starts.
pub struct Start {
    /// Its user and group, if we are root.
    pub user: u32,
    /// `MULTIRAIL_LOOPBACK_STAGING`'s words.
    pub staging: &'static str,
    /// What a seccomp filter answers process_vm_writev and -readv with; 0 for no filter.
    pub refuse: i32,
    /// Not dumpable.
    pub hidden: bool,
}

impl Default for Start {
    fn default() -> Self {
        Self { user: 65534, staging: "0", refuse: 0, hidden: false }
    }
}

pub struct Child {
    process: std::process::Child,
    orders: ChildStdin,
    answers: Receiver<String>,
}

impl Child {
    pub fn start(how: Start) -> Self {
        // By this name, since an ordinary user may not be let into the folder of the executable.
        let mut command = Command::new("/proc/self/exe");
        command
            .args(["--ignored", "--exact", "sibling", "--nocapture"])
            .env(super::sibling::STAGING, how.staging);
        if rustix::process::geteuid().is_root() {
            // The standard library drops the supplementary groups with them.
            command.uid(how.user).gid(how.user);
        }
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (orders, output) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        let (tell, answers) = channel();
        std::thread::spawn(move || {
            let lines = BufReader::new(output).lines().map_while(Result::ok);
            lines
                .filter_map(|line| Some(line.strip_prefix('@')?.to_owned()))
                .try_for_each(|line| tell.send(line))
        });
        let mut child = Self { process, orders, answers };
        if how.hidden {
            child.ask("hide");
        }
        if how.refuse != 0 {
            child.ask(&format!("filter {}", how.refuse));
        }
        child.ask("open");
        child
    }

    /// Gives an order that must succeed; its answer.
    #[track_caller]
    pub fn ask(&mut self, order: &str) -> String {
        self.tell(order);
        self.hear(order)
    }

    /// Gives an order that must be refused: the kind of error and its words.
    #[track_caller]
    pub fn refused(&mut self, order: &str) -> String {
        self.tell(order);
        self.hear_refusal(order)
    }

    #[track_caller]
    pub fn tell(&mut self, order: &str) {
        writeln!(self.orders, "{order}").unwrap();
    }

    #[track_caller]
    pub fn hear(&mut self, order: &str) -> String {
        let line = self.line(order);
        line.strip_prefix("ok ").unwrap_or_else(|| panic!("{order}: {line}")).to_owned()
    }

    #[track_caller]
    pub fn hear_refusal(&mut self, order: &str) -> String {
        let line = self.line(order);
        line.strip_prefix("err ").unwrap_or_else(|| panic!("{order} was not refused: {line}")).to_owned()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    #[track_caller]
    fn line(&mut self, order: &str) -> String {
        let said = Limit::of(LIMIT).receive(&self.answers);
        said.unwrap_or_else(|error| panic!("{order}: {error}; see the child's panic above"))
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
