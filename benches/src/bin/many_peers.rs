//! What a process pays for its peers: the engine's idle turn, connecting, importing, descriptors, memory, and the
//! processor time of an idle process.
//!
//! `run` is the process with many peers, the hub. Its peers are fabrics of other processes.

use std::io::{BufRead, BufReader, Write};
use std::pin::pin;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use backend_loopback::Loopback;
use benches::{BenchResult, LIMIT, exit_code};
use clap::{Parser, Subcommand};
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use transport_core::{Access, Fabric, FabricBuilder, Listener, Peer, TransportConfig};

/// The name of the region that each side publishes.
const REGION: &str = "region";
/// Bytes of that region.
const REGION_LEN: usize = 4096;
/// The imm of all writes.
const IMM: u32 = 1;
/// Idle turns of one reading, and readings.
const TURNS: u32 = 20_000;
const READINGS: usize = 9;
/// How long an idle process is watched.
const IDLE: Duration = Duration::from_secs(4);

#[derive(Parser)]
struct ManyPeersArguments {
    #[command(subcommand)]
    what: ManyPeersCommand,
}

#[derive(Subcommand)]
enum ManyPeersCommand {
    /// Measures with each number of peers.
    Run(Run),
    /// Registers many small regions.
    Regions {
        #[arg(long, default_value_t = 65_536)]
        count: usize,
        /// Bytes of each.
        #[arg(long, default_value_t = REGION_LEN)]
        len: usize,
    },
    /// The process of the peers.
    #[command(hide = true)]
    Peers {
        #[arg(long)]
        address: String,
    },
}

fn main() -> ExitCode {
    let done = match ManyPeersArguments::parse().what {
        ManyPeersCommand::Run(run) => run.run(),
        ManyPeersCommand::Regions { count, len } => many_regions(count, len),
        ManyPeersCommand::Peers { address } => be_peers(&address),
    };
    exit_code("many_peers", done.map(|()| ExitCode::SUCCESS))
}

/// Opens a fabric over loopback, which the caller drives unless `by_worker`.
fn open(connections: &Connections, by_worker: bool) -> BenchResult<Fabric> {
    let transport = TransportConfig::new("loopback", Arc::new(Loopback::new()));
    let builder = FabricBuilder::new().transport(transport).control_on(connections.handle.clone());
    let builder = builder.handshake_limit(LIMIT).max_operations(64);
    Ok(if by_worker { builder } else { builder.caller_driven() }.open()?)
}

/// Drives `fabric` until `future` is done.
fn drive<T>(fabric: &Fabric, future: impl Future<Output = transport_core::Result<T>>) -> BenchResult<T> {
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    let end = Instant::now() + LIMIT;
    loop {
        fabric.step();
        if let Poll::Ready(result) = future.as_mut().poll(&mut context) {
            return Ok(result?);
        }
        if Instant::now() > end {
            return Err("the other process does not answer".into());
        }
        std::thread::yield_now();
    }
}

/// A runtime for the connections of many fabrics, with a thread of its own.
struct Connections {
    handle: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Connections {
    fn start() -> BenchResult<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (stop, stopped) = oneshot::channel();
        let handle = runtime.handle().clone();
        let thread = std::thread::spawn(move || _ = runtime.block_on(stopped));
        Ok(Self { handle, stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            eprintln!("many_peers: the thread of the connections has panicked");
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Prints what `count` regions of `len` bytes cost.
fn many_regions(count: usize, len: usize) -> BenchResult<()> {
    let connections = Connections::start()?;
    let fabric = open(&connections, false)?;
    let before = Resources::now()?;
    let begun = Instant::now();
    let regions: Vec<_> = (0..count).map(|_| fabric.alloc(len, Access::all())).collect::<Result<_, _>>()?;
    let each = begun.elapsed().as_secs_f64() * 1e6 / count as f64;
    let after = Resources::now()?;
    println!(
        "{} regions of {len} bytes: {each:.1} us each, {} descriptors more",
        regions.len(),
        after.descriptors - before.descriptors
    );
    Ok(())
}

// ---- the process of the peers ----

/// Opens a fabric and connects it for each line `connect`. Writes to the hub from every fabric for each line `write`.
fn be_peers(address: &str) -> BenchResult<()> {
    let connections = Connections::start()?;
    let mut peers: Vec<(Fabric, Peer)> = Vec::new();
    for line in std::io::stdin().lines() {
        match line?.as_str() {
            "connect" => {
                let fabric = open(&connections, false)?;
                let region = fabric.alloc(REGION_LEN, Access::all())?;
                fabric.publish(REGION, &region)?;
                let begun = Instant::now();
                let peer = drive(&fabric, fabric.connect(address))?;
                println!("{}", begun.elapsed().as_secs_f64() * 1e6);
                // The region stays published.
                std::mem::forget(region);
                peers.push((fabric, peer));
            }
            "write" => {
                for (fabric, peer) in &peers {
                    let src = fabric.alloc(REGION_LEN, Access::LOCAL)?;
                    let dst = drive(fabric, peer.region(REGION))?;
                    let options = transport_core::WriteOptions::new().imm(IMM);
                    peer.write_with(&src, 0..8, &dst, 0, &options)?.wait(LIMIT)?;
                }
                println!("done");
            }
            other => return Err(format!("unknown line {other}").into()),
        }
    }
    Ok(())
}

// ---- the hub ----

/// The process of the peers, as the hub sees it.
struct PeerProcess {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl PeerProcess {
    fn start(address: &str) -> BenchResult<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["peers", "--address", address]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().ok_or("no output")?);
        Ok(Self { child, input, output })
    }

    fn say(&mut self, line: &str) -> BenchResult<()> {
        Ok(writeln!(self.input.as_mut().ok_or("no input")?, "{line}")?)
    }

    fn answer(&mut self) -> BenchResult<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        if line.is_empty() { Err("the process of the peers has ended".into()) } else { Ok(line) }
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        self.input = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[derive(clap::Args)]
struct Run {
    /// Numbers of peers.
    #[arg(long, value_delimiter = ',', default_value = "1,100,1000")]
    peers: Vec<usize>,
    /// Whether each peer also writes to the hub.
    #[arg(long)]
    write: bool,
    /// Processes that the peers are spread over. A process may have 65,530 mappings (`vm.max_map_count`).
    #[arg(long, default_value_t = 1)]
    processes: usize,
}

impl Run {
    fn run(&self) -> BenchResult<()> {
        println!(
            "peers, idle turn ns, connect ms, import ms, descriptors and KiB resident and KiB shared a peer, idle % of a core"
        );
        for count in &self.peers {
            let driven = Hub::open(false, self.processes)?.measure(*count, self.write)?;
            let idle = Hub::open(true, self.processes)?.idle(*count)?;
            println!("{count}, {driven}, {idle:.2}");
        }
        Ok(())
    }
}

/// A fabric with many peers.
struct Hub {
    fabric: Fabric,
    listener: Listener,
    processes: Vec<PeerProcess>,
    peers: Vec<Peer>,
    /// Microseconds that each connect took.
    connects: Vec<f64>,
    /// Dropped last.
    _connections: Connections,
}

impl Hub {
    fn open(by_worker: bool, processes: usize) -> BenchResult<Self> {
        let connections = Connections::start()?;
        let fabric = open(&connections, by_worker)?;
        let region = fabric.alloc(1 << 16, Access::all())?;
        fabric.publish(REGION, &region)?;
        std::mem::forget(region);
        let listener = drive(&fabric, fabric.listen("127.0.0.1:0"))?;
        let address = listener.local_addr().to_string();
        let processes: BenchResult<Vec<_>> =
            (0..processes.max(1)).map(|_| PeerProcess::start(&address)).collect();
        let processes = processes?;
        Ok(Self {
            fabric,
            listener,
            processes,
            peers: Vec::new(),
            connects: Vec::new(),
            _connections: connections,
        })
    }

    fn connect(&mut self, count: usize) -> BenchResult<()> {
        while self.peers.len() < count {
            let at = self.peers.len() % self.processes.len();
            self.processes[at].say("connect")?;
            let peer = drive(&self.fabric, self.listener.accept())?;
            self.peers.push(peer);
            self.connects.push(self.processes[at].answer()?.trim().parse()?);
        }
        Ok(())
    }

    /// The turn, the connects, the import, the descriptors and the memory, as text.
    fn measure(mut self, count: usize, write: bool) -> BenchResult<String> {
        // What the first peer makes for all.
        self.connect(1)?;
        let before = Resources::now()?;
        self.connect(count)?;
        let after = Resources::now()?;
        let others = (count - 1).max(1) as f64;
        let last = self.connects.split_off(self.connects.len().saturating_sub(31));
        let mut imports = Vec::new();
        for peer in self.peers.iter().rev().take(31) {
            let begun = Instant::now();
            drive(&self.fabric, peer.region(REGION))?;
            imports.push(begun.elapsed().as_secs_f64() * 1e3);
        }
        if write {
            for process in &mut self.processes {
                process.say("write")?;
            }
            let counters: Vec<_> = self.peers.iter().map(|peer| peer.imm(IMM)).collect();
            let mut left: Vec<usize> = (0..counters.len()).collect();
            let end = Instant::now() + LIMIT * 4;
            while !left.is_empty() {
                self.fabric.step();
                left.retain(|at| !counters[*at].try_take(1));
                if Instant::now() > end {
                    return Err(format!("the imms of {} peers do not arrive", left.len()).into());
                }
            }
            for process in &mut self.processes {
                process.answer()?;
            }
        }
        for _ in 0..TURNS {
            self.fabric.step();
        }
        let mut turns = Vec::new();
        for _ in 0..READINGS {
            let begun = Instant::now();
            for _ in 0..TURNS / READINGS as u32 {
                self.fabric.step();
            }
            turns.push(begun.elapsed().as_secs_f64() * 1e9 / f64::from(TURNS / READINGS as u32));
        }
        Ok(format!(
            "{:.0}, {:.2}, {:.2}, {:.1}, {:.1}, {:.1}",
            median(turns),
            median(last) / 1e3,
            median(imports),
            (after.descriptors - before.descriptors) / others,
            (after.resident - before.resident) / others,
            (after.shared - before.shared) / others,
        ))
    }

    /// The processor time of this process while nothing happens, in percent of a core.
    fn idle(mut self, count: usize) -> BenchResult<f64> {
        self.connect(count)?;
        std::thread::sleep(Duration::from_millis(500));
        let (begun, before) = (Instant::now(), processor_time());
        std::thread::sleep(IDLE);
        Ok((processor_time() - before).as_secs_f64() / begun.elapsed().as_secs_f64() * 100.0)
    }
}

fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// What this process uses. Memory is in KiB.
struct Resources {
    descriptors: f64,
    resident: f64,
    /// Of the whole machine.
    shared: f64,
}

impl Resources {
    fn now() -> BenchResult<Self> {
        let value = |file: &str, name: &str| -> BenchResult<f64> {
            let text = std::fs::read_to_string(file)?;
            let line = text.lines().find(|line| line.starts_with(name)).ok_or("no such line")?;
            Ok(line.split_whitespace().nth(1).ok_or("no value")?.parse()?)
        };
        Ok(Self {
            descriptors: std::fs::read_dir("/proc/self/fd")?.count() as f64,
            resident: value("/proc/self/status", "VmRSS:")?,
            shared: value("/proc/meminfo", "Shmem:")?,
        })
    }
}
