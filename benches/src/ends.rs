//! The two processes of a measurement: a target that is written to, and our side of it.

use std::cell::Cell;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use transport_core::spi::Backend;
use transport_core::{Access, Fabric, FabricBuilder, Peer, Region, RemoteRegion, TransportConfig};

use crate::turns::Turns;
use crate::volley::Volley;
use crate::{BenchResult, Driven, LIMIT};

/// The name of the target's region.
const REGION: &str = "target";
/// And of the other side's.
const SOURCE: &str = "source";
/// Turns between two looks at whether the input has ended.
const PER_LOOK: u32 = 1024;

/// Where a measurement happens: the devices that its two processes open.
pub trait BenchDevices: clap::Args + Clone {
    /// Whether processes that move much keep to a core each: not where the kernel does the card's work
    /// in threads of its own, which would have to share them.
    const PINS: bool;

    /// A transport over one device, for a side.
    fn transport(&self, side: ProcessRole) -> BenchResult<TransportConfig>;

    /// The same for another process.
    fn arguments(&self) -> Vec<String>;
}

/// The devices of `backend`, or one of them; or why there is none.
pub fn transport(backend: impl Backend + 'static, only: Option<&str>) -> BenchResult<TransportConfig> {
    let mut devices = backend.probe().map_err(|why| format!("{}; {}", why.reason, why.remedy))?;
    if let Some(name) = only {
        devices.retain(|device| device.name == name);
        if devices.is_empty() {
            return Err(format!("{} has no device {name}", backend.name()).into());
        }
    }
    Ok(TransportConfig::new(backend.name(), Arc::new(backend)).devices(devices))
}

fn open(place: &impl BenchDevices, side: ProcessRole, driven: Driven) -> BenchResult<Turns> {
    // By callgrind, on a machine that others use too, a handshake takes seconds.
    let builder = FabricBuilder::new().transport(place.transport(side)?).handshake_limit(LIMIT);
    // And whoever waits or sleeps serves nobody meanwhile.
    let builder = builder.peer_timeout(LIMIT);
    Turns::open(builder, driven)
}

/// A region with `content` in every byte's place, in huge pages where the kernel has them.
fn region(fabric: &Fabric, bytes: usize, content: impl Fn(usize) -> u8) -> BenchResult<Region> {
    let region = fabric.alloc(bytes, Access::all())?;
    region.copy_in(0, &(0..bytes).map(content).collect::<Vec<_>>())?;
    Ok(region)
}

/// The process that is written to.
#[derive(clap::Args, Clone)]
pub struct Target<P: BenchDevices> {
    #[command(flatten)]
    place: P,
    /// Bytes of its region.
    #[arg(long)]
    region: usize,
    /// A worker drives it, which sleeps when it is idle; else this thread does, and never sleeps.
    #[arg(long)]
    worker: bool,
    /// Answers each imm with a write of so many bytes and that imm; by this thread.
    #[arg(long)]
    echo: Option<usize>,
}

impl<P: BenchDevices> Target<P> {
    /// Tells its address and serves until its input ends.
    pub fn run(self) -> BenchResult<ExitCode> {
        let driven = if self.worker { Driven::ByWorkers } else { Driven::ByCaller };
        let turns = open(&self.place, ProcessRole::Target, driven)?;
        let region = region(&turns, self.region, |_| 0)?;
        turns.publish(REGION, &region)?;
        let listener = turns.drive(turns.listen("127.0.0.1:0"))?;
        println!("{}", listener.local_addr());
        if !self.worker && (P::PINS || self.echo.is_some()) {
            pin(ProcessRole::Target)?;
        }
        let input = Input::default();
        match self.echo {
            Some(len) => {
                let peer = turns.drive(listener.accept())?;
                let dst = turns.drive(peer.region(SOURCE))?;
                let mut volley = Volley::new(&turns, &peer, &region, &dst, len);
                while volley.takes(|| input.is_over())? {
                    volley.plays()?;
                }
            }
            None if self.worker => input.await_end()?,
            None => {
                while !input.is_over() {
                    turns.step();
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// This process's input. Nothing comes through it but its end.
#[derive(Default)]
struct Input {
    asked: Cell<u32>,
}

impl Input {
    /// Looks each time it was asked often enough.
    fn is_over(&self) -> bool {
        self.asked.set(self.asked.get().wrapping_add(1));
        self.asked.get().is_multiple_of(PER_LOOK) && self.ends(Some(&Timespec::default())) != Ok(0)
    }

    fn await_end(&self) -> BenchResult<()> {
        self.ends(None)?;
        Ok(())
    }

    fn ends(&self, limit: Option<&Timespec>) -> rustix::io::Result<usize> {
        poll(&mut [PollFd::new(&std::io::stdin(), PollFlags::IN)], limit)
    }
}

/// Our side, connected to a target.
pub struct ConnectedWriter {
    /// This side's.
    pub turns: Turns,
    /// The target.
    pub peer: Peer,
    /// What is written from.
    pub src: Region,
    /// What is written to.
    pub dst: RemoteRegion,
    target: Child,
    /// Its end ends the target.
    _input: Option<ChildStdin>,
}

impl ConnectedWriter {
    /// Starts a target of `bytes`, driven as `target` says, and connects to it.
    pub fn meet(
        place: &impl BenchDevices,
        driven: Driven,
        target: Driven,
        bytes: usize,
    ) -> BenchResult<Self> {
        let more = (target == Driven::ByWorkers).then(|| "--worker".to_owned());
        Self::start(place, driven, bytes, more)
    }

    /// Starts a target that answers each imm with a write of `len` bytes.
    pub fn echo(place: &impl BenchDevices, len: usize) -> BenchResult<Self> {
        Self::start(place, Driven::ByCaller, len, ["--echo".to_owned(), len.to_string()])
    }

    fn start(
        place: &impl BenchDevices,
        driven: Driven,
        bytes: usize,
        more: impl IntoIterator<Item = String>,
    ) -> BenchResult<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("target").args(place.arguments()).args(["--region", &bytes.to_string()]).args(more);
        let mut target = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = target.stdin.take();
        let mut address = String::new();
        BufReader::new(target.stdout.take().ok_or("no output")?).read_line(&mut address)?;
        let turns = open(place, ProcessRole::Writer, driven)?;
        let src = region(&turns, bytes, |at| (at.wrapping_mul(31) >> 3) as u8)?;
        turns.publish(SOURCE, &src)?;
        let peer = turns.drive(turns.connect(address.trim()))?;
        let dst = turns.drive(peer.region(REGION))?;
        Ok(Self { turns, peer, src, dst, target, _input: input })
    }

    /// A ping-pong with the target, of `len` bytes at a time.
    pub fn volley(&self, len: usize) -> Volley<'_> {
        Volley::new(&self.turns, &self.peer, &self.src, &self.dst, len)
    }

    /// Compares the pages of `size` that were written with what they were written from.
    pub fn verify(&self, pages: &[u32], size: usize) -> BenchResult<()> {
        let landing = self.turns.alloc(self.src.len(), Access::LOCAL)?;
        self.peer.read(&landing, 0..self.src.len(), &self.dst, 0)?.wait(LIMIT)?;
        let (mut want, mut got) = (vec![0; size], vec![0; size]);
        for page in pages {
            let at = *page as usize * size;
            self.src.copy_out(at, &mut want)?;
            landing.copy_out(at, &mut got)?;
            if want != got {
                return Err(format!("page {page} did not arrive as it was written").into());
            }
        }
        Ok(())
    }
}

impl Drop for ConnectedWriter {
    fn drop(&mut self) {
        self._input = None;
        let _ = self.target.wait();
    }
}

/// Which of the two processes this is.
#[derive(Clone, Copy)]
pub enum ProcessRole {
    /// Measures.
    Writer,
    /// Is written to.
    Target,
}

/// Binds this thread, which drives all, to its side's core as `writes.c` does: the first or the
/// second of those it may use. Where the scheduler puts them else decides more than what is measured.
#[cfg(target_os = "linux")]
pub fn pin(side: ProcessRole) -> BenchResult<()> {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let may = sched_getaffinity(None)?;
    let mut cores = (0..CpuSet::MAX_CPU).filter(|core| may.is_set(*core));
    if let Some(core) = cores.nth(side as usize) {
        let mut only = CpuSet::new();
        only.set(core);
        sched_setaffinity(None, &only)?;
    }
    Ok(())
}

/// There is nothing to measure.
#[cfg(not(target_os = "linux"))]
pub fn pin(_: ProcessRole) -> BenchResult<()> {
    Ok(())
}
