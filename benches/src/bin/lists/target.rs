//! The target process, and the initiator's handle on it.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::sleep;
use std::time::{Duration, Instant};

use benches::list_load::scattered;
use benches::{BenchResult, LIMIT};
use transport_core::wait;

use crate::ListsConfig;
use crate::memory::ListMemory;

/// The limit of a command. On a busy machine, a target takes seconds to fill or to compare its memory.
const COMMAND_LIMIT: Duration = Duration::from_secs(120);

/// The name under which the target publishes its region number `number`.
pub fn region_name(number: u32) -> String {
    format!("region {number}")
}

/// Prints the address of the listener, publishes the regions, and serves `fill`, `clear` and `check` until the input
/// ends.
pub fn run(config: &ListsConfig) -> BenchResult<()> {
    let fabric = config.open()?;
    let memory = ListMemory::register(&fabric, config)?;
    for (number, region) in (0..).zip(&memory.regions) {
        fabric.publish(&region_name(number), region)?;
    }
    let (from, to) = scattered(config.regions, config.entries);
    let sources = inverse(&to, &from);
    let listener = wait(fabric.listen("127.0.0.1:0"), LIMIT)??;
    println!("{}", listener.local_addr());
    for command in std::io::stdin().lines() {
        let command = command?;
        match command.as_str() {
            "fill" => memory.fill()?,
            "clear" => memory.clear()?,
            "check" => memory.check(&sources)?,
            _ => return Err(format!("no such command: {command}").into()),
        }
        println!("{command}");
    }
    Ok(())
}

/// The list in which entry `of[i]` is `is[i]`.
pub fn inverse(of: &[u32], is: &[u32]) -> Vec<u32> {
    let mut list = vec![0; of.len()];
    of.iter().zip(is).for_each(|(of, is)| list[*of as usize] = *is);
    list
}

/// A target in a process of its own. It ends when this is dropped.
pub struct TargetProcess {
    process: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl TargetProcess {
    /// Starts a target. Returns it, and the address of its listener.
    pub fn start(config: &ListsConfig) -> BenchResult<(Self, String)> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("target").args(config.arguments()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn()?;
        let (input, output) = (process.stdin.take(), process.stdout.take().ok_or("no output")?);
        let (sender, lines) = channel();
        // A thread of its own, because a read has no limit.
        std::thread::spawn(move || {
            BufReader::new(output).lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        let this = Self { process, input, lines };
        let address = this.line()?;
        Ok((this, address))
    }

    /// Has the target execute a command.
    pub fn ask(&mut self, command: &str) -> BenchResult<()> {
        writeln!(self.input.as_ref().ok_or("no input")?, "{command}")?;
        self.line().map(drop)
    }

    fn line(&self) -> BenchResult<String> {
        let failed = |why| match why {
            RecvTimeoutError::Timeout => format!("the target does not answer within {COMMAND_LIMIT:?}"),
            RecvTimeoutError::Disconnected => "the target has ended; its error is above".to_owned(),
        };
        Ok(self.lines.recv_timeout(COMMAND_LIMIT).map_err(failed)?)
    }
}

impl Drop for TargetProcess {
    fn drop(&mut self) {
        self.input = None;
        let until = Instant::now() + LIMIT;
        while matches!(self.process.try_wait(), Ok(None)) && Instant::now() < until {
            sleep(Duration::from_millis(1));
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
