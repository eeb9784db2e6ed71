//! The two processes of a measurement: the writer, which measures, and the target, which the writer writes to.

use std::cell::Cell;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use rustix::event::{PollFd, PollFlags, Timespec};
use transport_core::spi::Backend;
use transport_core::{Access, Fabric, FabricBuilder, Peer, Region, RemoteRegion, TransportConfig};

use crate::driven_fabric::DrivenFabric;
use crate::ping_pong::{AnnouncedBy, PingPong};
use crate::{BenchResult, Driven, LIMIT};

/// The name of the target's region.
const REGION: &str = "target";
/// The name of the writer's region.
const SOURCE: &str = "source";
/// Turns of the engine between two checks whether the input has ended.
const TURNS_PER_CHECK: u32 = 1024;

/// The devices that the two processes of a measurement open.
pub trait BenchDevices: clap::Args + Clone {
    /// Whether each process is bound to one core. False where the kernel does the card's work in threads of its own,
    /// which would have to share these cores.
    const PINS: bool;

    /// A transport over one device, for one of the processes.
    fn transport(&self, side: ProcessRole) -> BenchResult<TransportConfig>;

    /// The arguments that give another process the same devices.
    fn arguments(&self) -> Vec<String>;
}

/// A transport over all devices of `backend`, or over the device `only`.
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

/// Memory for notifications, where they are measured.
const NOTIFICATION_MEMORY: usize = 4 << 20;

fn open(
    devices: &impl BenchDevices,
    side: ProcessRole,
    driven: Driven,
    notifications: bool,
) -> BenchResult<DrivenFabric> {
    // Under callgrind, on a busy machine, a handshake takes seconds.
    let builder = FabricBuilder::new().transport(devices.transport(side)?).handshake_limit(LIMIT);
    // A process that waits or sleeps does not serve its connections meanwhile.
    let builder = builder.peer_timeout(LIMIT);
    let builder = if notifications { builder.notifications(NOTIFICATION_MEMORY) } else { builder };
    DrivenFabric::open(builder, driven)
}

/// A region in huge pages, where the kernel has them. Each byte is `content` of its offset.
fn region(fabric: &Fabric, bytes: usize, content: impl Fn(usize) -> u8) -> BenchResult<Region> {
    let region = fabric.alloc(bytes, Access::all())?;
    region.copy_in(0, &(0..bytes).map(content).collect::<Vec<_>>())?;
    Ok(region)
}

/// The target process.
#[derive(clap::Args, Clone)]
pub struct Target<P: BenchDevices> {
    #[command(flatten)]
    devices: P,
    /// Bytes of its region.
    #[arg(long)]
    region: usize,
    /// A worker drives the engine and sleeps when it is idle. Otherwise this thread drives it and never sleeps.
    #[arg(long)]
    worker: bool,
    /// This thread responds to each write with a write of this number of bytes.
    #[arg(long)]
    echo: Option<usize>,
    /// What tells of these writes.
    #[arg(long, default_value = "imm")]
    announced: AnnouncedBy,
    /// The thread that drives the engine sleeps this number of milliseconds after each turn.
    #[arg(long, default_value_t = 0, hide = true)]
    pause: u64,
}

impl<P: BenchDevices> Target<P> {
    /// Prints the address of the listener and serves until the input ends.
    pub fn run(self) -> BenchResult<ExitCode> {
        let driven = if self.worker { Driven::ByWorkers } else { Driven::ByCaller };
        let notifies = self.announced.needs_notifications();
        let fabric = open(&self.devices, ProcessRole::Target, driven, notifies)?;
        let region = region(&fabric, self.region, |_| 0)?;
        fabric.publish(REGION, &region)?;
        let listener = fabric.drive(fabric.listen("127.0.0.1:0"))?;
        println!("{}", listener.local_addr());
        if !self.worker && (P::PINS || self.echo.is_some()) {
            pin(ProcessRole::Target)?;
        }
        let input = Input::default();
        match self.echo {
            Some(len) => {
                let peer = fabric.drive(listener.accept())?;
                let dst = fabric.drive(peer.region(SOURCE))?;
                let mut ping_pong = PingPong::new(&fabric, &peer, (&region, &dst), len, self.announced)?;
                while ping_pong.await_write(|| input.is_over())? {
                    ping_pong.write()?;
                }
            }
            None if self.worker => input.await_end()?,
            None if self.pause > 0 => {
                while !input.has_ended() {
                    turn(&fabric);
                    fabric.serve();
                    std::thread::sleep(Duration::from_millis(self.pause));
                }
            }
            None => {
                while !input.is_over() {
                    fabric.step();
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// A turn of a target that sleeps between its turns. Callgrind can count the instructions of this function alone.
#[inline(never)]
fn turn(fabric: &DrivenFabric) {
    fabric.step();
}

/// The input of this process. The writer sends nothing through it and closes it at the end.
#[derive(Default)]
struct Input {
    calls: Cell<u32>,
}

impl Input {
    /// Returns true if the input has ended. Checks at every [`TURNS_PER_CHECK`]th call.
    fn is_over(&self) -> bool {
        self.calls.set(self.calls.get().wrapping_add(1));
        self.calls.get().is_multiple_of(TURNS_PER_CHECK) && self.has_ended()
    }

    /// Returns true if the input has ended.
    fn has_ended(&self) -> bool {
        self.poll(Some(&Timespec::default())) != Ok(0)
    }

    fn await_end(&self) -> BenchResult<()> {
        self.poll(None)?;
        Ok(())
    }

    fn poll(&self, limit: Option<&Timespec>) -> rustix::io::Result<usize> {
        rustix::event::poll(&mut [PollFd::new(&std::io::stdin(), PollFlags::IN)], limit)
    }
}

/// The writer, connected to a target.
pub struct ConnectedWriter {
    /// The writer's fabric.
    pub fabric: DrivenFabric,
    /// The target.
    pub peer: Peer,
    /// The source of the writes.
    pub src: Region,
    /// The destination of the writes.
    pub dst: RemoteRegion,
    target: Child,
    /// The input of the target. The target ends when it is closed.
    _input: Option<ChildStdin>,
}

impl ConnectedWriter {
    /// Starts a target with a region of `bytes`, and connects to it. `driven` and `target` say who drives the engines
    /// of the writer and of the target.
    pub fn connect(
        devices: &impl BenchDevices,
        driven: Driven,
        target: Driven,
        bytes: usize,
    ) -> BenchResult<Self> {
        let more = (target == Driven::ByWorkers).then(|| "--worker".to_owned());
        Self::start(devices, driven, bytes, false, more)
    }

    /// Starts a target that sleeps `pause` after each turn, and connects to it.
    pub fn with_pauses(devices: &impl BenchDevices, bytes: usize, pause: Duration) -> BenchResult<Self> {
        let more = ["--pause".to_owned(), pause.as_millis().to_string()];
        Self::start(devices, Driven::ByCaller, bytes, false, more)
    }

    /// Starts a target that responds to each write with a write of `len` bytes.
    pub fn echo(devices: &impl BenchDevices, len: usize, announced: AnnouncedBy) -> BenchResult<Self> {
        let (notifies, len_word) = (announced.needs_notifications(), len.to_string());
        let by = announced.to_possible_value().ok_or("a hidden value")?;
        let more = ["--echo", &len_word, "--announced", by.get_name()].map(str::to_owned);
        Self::start(devices, Driven::ByCaller, len, notifies, more)
    }

    fn start(
        devices: &impl BenchDevices,
        driven: Driven,
        bytes: usize,
        notifications: bool,
        more: impl IntoIterator<Item = String>,
    ) -> BenchResult<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("target").args(devices.arguments()).args(["--region", &bytes.to_string()]).args(more);
        let mut target = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = target.stdin.take();
        let mut address = String::new();
        BufReader::new(target.stdout.take().ok_or("no output")?).read_line(&mut address)?;
        let fabric = open(devices, ProcessRole::Writer, driven, notifications)?;
        let src = region(&fabric, bytes, |at| (at.wrapping_mul(31) >> 3) as u8)?;
        fabric.publish(SOURCE, &src)?;
        let peer = fabric.drive(fabric.connect(address.trim()))?;
        let dst = fabric.drive(peer.region(REGION))?;
        Ok(Self { fabric, peer, src, dst, target, _input: input })
    }

    /// A ping-pong with the target, of `len` bytes at a time.
    pub fn ping_pong(&self, len: usize, announced: AnnouncedBy) -> BenchResult<PingPong<'_>> {
        PingPong::new(&self.fabric, &self.peer, (&self.src, &self.dst), len, announced)
    }

    /// Compares the written pages of `size` bytes with their source.
    pub fn verify(&self, pages: &[u32], size: usize) -> BenchResult<()> {
        let landing = self.fabric.alloc(self.src.len(), Access::LOCAL)?;
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

/// One of the two processes of a measurement.
#[derive(Clone, Copy)]
pub enum ProcessRole {
    /// Writes and measures.
    Writer,
    /// Has the region that the writer writes to.
    Target,
}

/// Binds this thread, which drives the engine, to a core, as `writes.c` does: the writer to the first core that it may
/// use, the target to the second. Otherwise the scheduler's choice of cores would change the results more than the
/// measured code does.
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

/// Binds nothing: the measurements run on Linux only.
#[cfg(not(target_os = "linux"))]
pub fn pin(_: ProcessRole) -> BenchResult<()> {
    Ok(())
}
