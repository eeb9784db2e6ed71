//! What a blocking send costs from its call until a thread of another process, which sleeps in `wait`, has the message.
//! Beside it, the same through a pipe: one system call that wakes one thread.
//!
//! `cargo run --profile dist -p benches --bin wakeups` runs both in turns. Each message carries the time at which it
//! was sent: Linux has one monotonic clock for all processes.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::time::Duration;

use benches::over::Over;
use benches::{BenchResult, LIMIT, exit_code};
use clap::{Parser, ValueEnum};
use rustix::time::{ClockId, clock_gettime};
use transport_core::{Access, Fabric, FabricBuilder, wait};

/// Bytes of a message: a time.
const LEN: usize = 8;
/// Receives that are posted.
const RECEIVES: usize = 64;
/// Readings of each way per round.
const READINGS: usize = 200;

#[derive(Parser)]
struct Arguments {
    /// What carries the messages.
    #[arg(long, default_value = "loopback")]
    over: Over,
    /// The time between two messages, in microseconds. Workers sleep after 100.
    #[arg(long, default_value_t = 2000)]
    gap_us: u64,
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// The receiving process, of messages that come through its input, or from the peer that connects.
    #[arg(long, hide = true)]
    receiver: Option<Receiver>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Receiver {
    Pipe,
    Fabric,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let done = match arguments.receiver {
        Some(Receiver::Pipe) => receive_from_pipe(),
        Some(Receiver::Fabric) => arguments.receive(),
        None => arguments.measure(),
    };
    exit_code("wakeups", done.map(|()| ExitCode::SUCCESS))
}

/// Nanoseconds of the clock that all processes share.
fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn age(sent: [u8; LEN]) -> u64 {
    now() - u64::from_le_bytes(sent)
}

/// Prints the median of the ages of each [`READINGS`] messages, in microseconds.
fn report(mut next: impl FnMut() -> BenchResult<Option<u64>>) -> BenchResult<()> {
    let mut ages = Vec::with_capacity(READINGS);
    while let Some(age) = next()? {
        ages.push(age);
        if ages.len() == READINGS {
            ages.sort_unstable();
            println!("{}", ages[READINGS / 2] as f64 / 1e3);
            ages.clear();
        }
    }
    Ok(())
}

fn receive_from_pipe() -> BenchResult<()> {
    let mut input = std::io::stdin().lock();
    println!();
    report(|| {
        let mut sent = [0; LEN];
        Ok(input.read_exact(&mut sent).is_ok().then(|| age(sent)))
    })
}

/// The other process, and the lines that it prints.
struct Other {
    process: Child,
    input: Option<ChildStdin>,
    said: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Other {
    fn start(receiver: Receiver, over: Over) -> BenchResult<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        for (flag, value) in
            [("--receiver", receiver.to_possible_value()), ("--over", over.to_possible_value())]
        {
            command.arg(flag).arg(value.ok_or("a hidden value")?.get_name());
        }
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let said = BufReader::new(process.stdout.take().ok_or("no output")?).lines();
        Ok(Self { input: process.stdin.take(), process, said })
    }

    fn line(&mut self) -> BenchResult<String> {
        Ok(self.said.next().ok_or("the other process has ended")??)
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.input = None;
        let _ = self.process.wait();
    }
}

impl Arguments {
    fn open(&self) -> BenchResult<Fabric> {
        Ok(FabricBuilder::new().transport(self.over.transport()?).handshake_limit(LIMIT).open()?)
    }

    /// The receiving process. Ends when the peer does.
    fn receive(&self) -> BenchResult<()> {
        let fabric = self.open()?;
        let listener = wait(fabric.listen("127.0.0.1:0"), LIMIT)??;
        println!("{}", listener.local_addr());
        let _peer = wait(listener.accept(), LIMIT)??;
        let pool = fabric.recv_pool(RECEIVES, LEN)?;
        report(|| {
            let message = match wait(pool.next(), LIMIT)? {
                Ok(message) => message,
                Err(_) => return Ok(None),
            };
            let mut sent = [0; LEN];
            message.copy_out(&mut sent);
            Ok((sent != [0; LEN]).then(|| age(sent)))
        })
    }

    fn measure(&self) -> BenchResult<()> {
        let gap = || std::thread::sleep(Duration::from_micros(self.gap_us));
        let mut by_pipe = Other::start(Receiver::Pipe, self.over)?;
        by_pipe.line()?;
        let mut by_fabric = Other::start(Receiver::Fabric, self.over)?;
        let address = by_fabric.line()?;
        let fabric = self.open()?;
        let peer = wait(fabric.connect(&address), LIMIT)??;
        let src = fabric.alloc(LEN, Access::LOCAL)?;
        let (mut pipe, mut ours) = (Vec::new(), Vec::new());
        for _ in 0..self.rounds {
            for _ in 0..READINGS {
                gap();
                by_pipe.input.as_mut().ok_or("no input")?.write_all(&now().to_le_bytes())?;
            }
            pipe.push(by_pipe.line()?.parse::<f64>()?);
            for _ in 0..READINGS {
                gap();
                src.copy_in(0, &now().to_le_bytes())?;
                peer.send(&src, 0..LEN)?.wait(LIMIT)?;
            }
            ours.push(by_fabric.line()?.parse::<f64>()?);
        }
        src.copy_in(0, &[0; LEN])?;
        peer.send(&src, 0..LEN)?.wait(LIMIT)?;
        let [pipe, ours] = [pipe, ours].map(|mut all| {
            all.sort_unstable_by(f64::total_cmp);
            all[all.len() / 2]
        });
        println!("a pipe: {pipe:.1} us; a message: {ours:.1} us, {:.2} times a pipe", ours / pipe);
        Ok(())
    }
}
