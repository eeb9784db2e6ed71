//! multirail between two processes, for `benches/peers/run.py`: an initiator that measures, and a target.
//!
//! The initiator starts the target and serves commands, one a line of its input. It answers each with a line of JSON,
//! the median in microseconds: `{"us": 1.5}`. It ends with its input. The programs of the other libraries serve the
//! same commands:
//!
//! | command | what is measured |
//! |---|---|
//! | `write BYTES` | a write, until it is delivered |
//! | `pages COUNT BYTES GAP` | one page of an operation of COUNT shuffled pages, GAP bytes apart |
//! | `message BYTES` | half a round trip of a message |
//! | `messages BYTES` | one of many messages in one direction |
//! | `peers COUNT` | a write of 8 bytes to each of COUNT peers in turn; `connect_us`: connecting one, to the first write's end |

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use benches::driven_fabric::DrivenFabric;
use benches::over::Over;
use benches::{BenchResult, Driven, LIMIT, exit_code, shuffled};
use clap::{Parser, ValueEnum};
use transport_core::{
    Access, Fabric, FabricBuilder, LocalList, Op, Pages, Peer, RecvPool, Region, RemoteList, RemoteRegion,
    WriteOptions, wait,
};

/// How long a process may be silent: `run.py` stops the processes while another library's run.
const PAUSE: Duration = Duration::from_secs(600);
/// As in `ucx.c` and `side.py`.
const MEMORY: usize = 128 << 20;
const SAMPLES_TAKE: Duration = Duration::from_millis(100);
const LEAST_SAMPLES: usize = 3;
const BATCH: usize = 64;
const BURST: usize = 1024;
const LARGEST_MESSAGE: usize = 4096;
/// The messages that are sent and not delivered, at most; and the receiver's buffers.
const UNDER_WAY: usize = 256;

/// The first byte of a message.
const ECHO: u8 = 0;
const COUNTED: u8 = 1;
const LAST: u8 = 2;

#[derive(Parser)]
struct Arguments {
    /// What carries the bytes.
    #[arg(long, default_value = "loopback")]
    over: Over,
    /// The measuring thread and the target's main thread drive their engines: for messages. Otherwise workers do.
    #[arg(long)]
    driven: bool,
    /// The other side.
    #[arg(long, hide = true)]
    target: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let done = if arguments.target { arguments.serve() } else { arguments.measure() };
    exit_code("peers", done.map(|()| ExitCode::SUCCESS))
}

impl Arguments {
    fn open(&self) -> BenchResult<DrivenFabric> {
        let driven = if self.driven { Driven::ByCaller } else { Driven::ByWorkers };
        let builder = FabricBuilder::new().transport(self.over.transport()?);
        DrivenFabric::open(builder.handshake_limit(LIMIT).peer_timeout(PAUSE), driven)
    }

    /// The target: answers messages, and opens fabrics when it is asked for them.
    fn serve(&self) -> BenchResult<()> {
        let fabric = self.open()?;
        let region = touched(&fabric, MEMORY)?;
        fabric.publish("region", &region)?;
        let pool = fabric.recv_pool(UNDER_WAY, LARGEST_MESSAGE)?;
        let listener = fabric.drive(fabric.listen("127.0.0.1:0"))?;
        println!("{}", listener.local_addr());
        let initiator = fabric.drive(listener.accept())?;
        let answer = fabric.alloc(LARGEST_MESSAGE, Access::LOCAL)?;
        let commands = lines_of_input();
        let (mut others, mut answers) = (Vec::new(), VecDeque::new());
        loop {
            if self.driven {
                fabric.step();
            } else {
                std::thread::sleep(Duration::from_millis(1));
            }
            while let Some(message) = pool.try_next() {
                let message = message?;
                let mut kind = [0];
                message.copy_out(&mut kind);
                if kind[0] != COUNTED {
                    answers.push_back(initiator.send(&answer, 0..message.len())?);
                }
            }
            reap(&mut answers)?;
            match commands.try_recv() {
                Ok(count) => others = self.others(count.parse()?)?,
                Err(TryRecvError::Disconnected) => return Ok(()),
                Err(TryRecvError::Empty) => {}
            }
            let _ = &others;
        }
    }

    /// Opens fabrics that may be connected to, and prints their addresses.
    fn others(&self, count: usize) -> BenchResult<Vec<Other>> {
        let mut others = Vec::new();
        for _ in 0..count {
            let builder = FabricBuilder::new().transport(self.over.transport()?);
            let fabric = builder.handshake_limit(LIMIT).peer_timeout(PAUSE).open()?;
            let region = fabric.alloc(64, Access::all())?;
            fabric.publish("region", &region)?;
            let listener = wait(fabric.listen("127.0.0.1:0"), LIMIT)??;
            println!("{}", listener.local_addr());
            others.push(Other { _fabric: fabric, _region: region, _listener: listener });
        }
        std::io::stdout().flush()?;
        Ok(others)
    }

    fn measure(&self) -> BenchResult<()> {
        let mut command = Command::new(std::env::current_exe()?);
        let over = self.over.to_possible_value().ok_or("a hidden value")?;
        command.args(["--target", "--over", over.get_name()]);
        if self.driven {
            command.arg("--driven");
        }
        let mut target = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut addresses = BufReader::new(target.stdout.take().ok_or("no output")?);
        let fabric = self.open()?;
        let region = touched(&fabric, MEMORY)?;
        let pool = fabric.recv_pool(4, LARGEST_MESSAGE)?;
        let peer = fabric.drive(fabric.connect(next_line(&mut addresses)?.as_str()))?;
        let remote = fabric.drive(peer.region("region"))?;
        let mut initiator =
            Initiator { is_driven: self.driven, fabric, region, pool, peer, remote, target, addresses };
        println!(r#"{{"ready":true}}"#);
        for command in std::io::stdin().lines() {
            println!("{}", initiator.run(&command?)?);
        }
        let mut target = initiator.target;
        drop(target.stdin.take());
        target.wait()?;
        Ok(())
    }
}

/// A fabric of the target that only has to exist.
struct Other {
    _fabric: Fabric,
    _region: Region,
    _listener: transport_core::Listener,
}

struct Initiator {
    is_driven: bool,
    fabric: DrivenFabric,
    region: Region,
    pool: RecvPool,
    peer: Peer,
    remote: RemoteRegion,
    target: Child,
    addresses: BufReader<ChildStdout>,
}

impl Initiator {
    /// Runs one command, and returns its line of JSON.
    fn run(&mut self, command: &str) -> BenchResult<String> {
        let mut words = command.split_whitespace();
        let kind = words.next().unwrap_or_default();
        let numbers = words.map(str::parse).collect::<Result<Vec<usize>, _>>()?;
        match (kind, &numbers[..]) {
            ("write", &[len]) => self.write(len),
            ("pages", &[count, len, gap]) => self.pages(count, len, gap),
            ("message", &[len]) => self.message(len),
            ("messages", &[len]) => self.messages(len),
            ("peers", &[count]) => self.peers(count),
            _ => Err(format!("no such command: {command}").into()),
        }
    }

    fn write(&self, len: usize) -> BenchResult<String> {
        let batch = if len < 64 << 10 { BATCH } else { 1 };
        median_us(batch, || {
            for _ in 0..batch {
                self.peer.write(&self.region, 0..len, &self.remote, 0)?.wait(LIMIT)?;
            }
            Ok(())
        })
    }

    fn pages(&self, count: usize, len: usize, gap: usize) -> BenchResult<String> {
        let (from, to) = (shuffled(count as u32, 1), shuffled(count as u32, 2));
        if gap > 0 {
            // Entries of a list may be apart, pages may not.
            let (mut local, mut remote) = (LocalList::new(), RemoteList::new());
            local.push_strided(&self.region, 0, len, count as u32, len + gap)?;
            remote.push_strided(&self.remote, 0, len, count as u32, len + gap)?;
            let options = WriteOptions::new();
            return median_us(count, || {
                self.peer.write_list(&local, &from, &remote, &to, &options)?.wait(LIMIT)?;
                Ok(())
            });
        }
        let (from, to) = (Pages::new(&from[..]), Pages::new(&to[..]));
        median_us(count, || {
            self.peer.write_pages(&self.region, &from, &self.remote, &to, len)?.wait(LIMIT)?;
            Ok(())
        })
    }

    fn message(&self, len: usize) -> BenchResult<String> {
        let mut under_way = VecDeque::new();
        self.region.copy_in(0, &[ECHO])?;
        median_us(2, || {
            under_way.push_back(self.peer.send(&self.region, 0..len)?);
            self.await_answer(&mut under_way)
        })
    }

    fn messages(&self, len: usize) -> BenchResult<String> {
        let mut under_way = VecDeque::new();
        median_us(BURST, || {
            self.region.copy_in(0, &[COUNTED])?;
            for _ in 1..BURST {
                while under_way.len() >= UNDER_WAY {
                    self.fabric.step();
                    reap(&mut under_way)?;
                }
                under_way.push_back(self.peer.send(&self.region, 0..len)?);
            }
            // The bytes of those before must have left.
            let end = Instant::now() + LIMIT;
            while !under_way.is_empty() {
                self.fabric.step();
                reap(&mut under_way)?;
                in_time(end)?;
            }
            self.region.copy_in(0, &[LAST])?;
            under_way.push_back(self.peer.send(&self.region, 0..len)?);
            self.await_answer(&mut under_way)
        })
    }

    fn await_answer(&self, under_way: &mut VecDeque<Op>) -> BenchResult<()> {
        let end = Instant::now() + LIMIT;
        loop {
            self.fabric.step();
            if let Some(answer) = self.pool.try_next() {
                answer?;
                return reap(under_way);
            }
            in_time(end)?;
        }
    }

    /// Awaits `future`, and drives the engine if no worker does.
    fn done<T>(&self, future: impl Future<Output = transport_core::Result<T>>) -> BenchResult<T> {
        if self.is_driven { self.fabric.drive(future) } else { Ok(wait(future, LIMIT)??) }
    }

    fn peers(&mut self, count: usize) -> BenchResult<String> {
        let input = self.target.stdin.as_mut().ok_or("the target has no input")?;
        writeln!(input, "{count}")?;
        let (mut peers, mut connects) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let address = next_line(&mut self.addresses)?;
            let begun = Instant::now();
            let peer = self.done(self.fabric.connect(address.as_str()))?;
            let remote = self.done(peer.region("region"))?;
            peer.write(&self.region, 0..8, &remote, 0)?.wait(LIMIT)?;
            connects.push(begun.elapsed().as_secs_f64());
            peers.push((peer, remote));
        }
        let writes = median_of_samples(count, || {
            for (peer, remote) in &peers {
                peer.write(&self.region, 0..8, remote, 0)?.wait(LIMIT)?;
            }
            Ok(())
        })?;
        Ok(format!(r#"{{"us":{writes:.4},"connect_us":{:.1}}}"#, 1e6 * median(connects)))
    }
}

/// Removes the operations that have ended.
fn reap(under_way: &mut VecDeque<Op>) -> BenchResult<()> {
    while let Some(result) = under_way.front_mut().and_then(Op::try_result) {
        result?;
        under_way.pop_front();
    }
    Ok(())
}

fn in_time(end: Instant) -> BenchResult<()> {
    if Instant::now() < end { Ok(()) } else { Err("the target does not answer".into()) }
}

fn touched(fabric: &Fabric, len: usize) -> BenchResult<Region> {
    let region = fabric.alloc(len, Access::all())?;
    region.copy_in(0, &vec![1; len])?;
    Ok(region)
}

fn next_line(lines: &mut impl BufRead) -> BenchResult<String> {
    let mut line = String::new();
    lines.read_line(&mut line)?;
    if line.is_empty() { Err("the target has ended".into()) } else { Ok(line.trim().to_owned()) }
}

/// The lines of this process's input, read by a thread of its own.
fn lines_of_input() -> Receiver<String> {
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        std::io::stdin().lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
    });
    lines
}

/// The line of JSON of a command: the median time of one of the operations of a sample.
fn median_us(operations: usize, sample: impl FnMut() -> BenchResult<()>) -> BenchResult<String> {
    Ok(format!(r#"{{"us":{:.4}}}"#, median_of_samples(operations, sample)?))
}

fn median_of_samples(operations: usize, mut sample: impl FnMut() -> BenchResult<()>) -> BenchResult<f64> {
    let (end, mut samples) = (Instant::now() + SAMPLES_TAKE, Vec::new());
    while samples.len() < LEAST_SAMPLES || Instant::now() < end {
        let begun = Instant::now();
        sample()?;
        samples.push(begun.elapsed().as_secs_f64());
    }
    Ok(1e6 * median(samples) / operations as f64)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
