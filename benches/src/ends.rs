//! The two processes of a measurement: a target that is written to, and our side of it.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::thread::spawn;

use transport_core::spi::Backend;
use transport_core::{Access, Fabric, FabricBuilder, Peer, Region, RemoteRegion, TransportConfig};

use crate::side::{Side, pin};
use crate::volley::Volley;
use crate::{Done, Driven, LIMIT};

/// The name of the target's region.
const REGION: &str = "target";
/// And of the other side's.
const SOURCE: &str = "source";

/// Where a measurement happens: the devices that its two processes open.
pub trait Place: clap::Args + Clone {
    /// Whether processes that move much keep to a core each: not where the kernel does the card's work
    /// in threads of its own, which would have to share them.
    const PINS: bool;

    /// A transport over one device, for a side.
    fn transport(&self, side: Side) -> Done<TransportConfig>;

    /// The same for another process.
    fn arguments(&self) -> Vec<String>;
}

/// The devices of `backend`, or one of them; or why there is none.
pub fn transport(backend: impl Backend + 'static, only: Option<&str>) -> Done<TransportConfig> {
    let mut devices = backend.probe().map_err(|why| format!("{}; {}", why.reason, why.remedy))?;
    if let Some(name) = only {
        devices.retain(|device| device.name == name);
        if devices.is_empty() {
            return Err(format!("{} has no device {name}", backend.name()).into());
        }
    }
    Ok(TransportConfig::new(backend.name(), Arc::new(backend)).devices(devices))
}

fn open(place: &impl Place, side: Side, driven: Driven) -> Done<Fabric> {
    // By callgrind, on a machine that others use too, a handshake takes seconds.
    let builder = FabricBuilder::new().transport(place.transport(side)?).handshake_limit(LIMIT);
    Ok(match driven {
        Driven::ByCaller => builder.caller_driven(),
        Driven::ByWorkers => builder,
    }
    .open()?)
}

/// A region with `content` in every byte's place, in huge pages where the kernel has them.
fn region(fabric: &Fabric, bytes: usize, content: impl Fn(usize) -> u8) -> Done<Region> {
    let region = fabric.alloc(bytes, Access::all())?;
    region.copy_in(0, &(0..bytes).map(content).collect::<Vec<_>>())?;
    Ok(region)
}

/// The process that is written to.
#[derive(clap::Args, Clone)]
pub struct Target<P: Place> {
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

impl<P: Place> Target<P> {
    /// Tells its address and serves until its input ends.
    pub fn run(self) -> Done<ExitCode> {
        let driven = if self.worker { Driven::ByWorkers } else { Driven::ByCaller };
        let fabric = open(&self.place, Side::Target, driven)?;
        let region = region(&fabric, self.region, |_| 0)?;
        fabric.publish(REGION, &region)?;
        let listener = drive(&fabric, fabric.listen("127.0.0.1:0"))?;
        println!("{}", listener.local_addr());
        let over = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&over);
        let input = spawn(move || {
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            ended.store(true, Ordering::Release);
        });
        let is_over = || over.load(Ordering::Acquire);
        if !self.worker && (P::PINS || self.echo.is_some()) {
            pin(Side::Target)?;
        }
        match self.echo {
            Some(len) => {
                let peer = drive(&fabric, listener.accept())?;
                let dst = drive(&fabric, peer.region(SOURCE))?;
                let mut volley = Volley::new(&fabric, &peer, &region, &dst, len);
                while volley.takes(is_over)? {
                    volley.plays()?;
                }
            }
            None if self.worker => {}
            None => {
                while !is_over() {
                    fabric.step();
                }
            }
        }
        let _ = input.join();
        Ok(ExitCode::SUCCESS)
    }
}

/// Our side, connected to a target.
pub struct Ends {
    /// This side's.
    pub fabric: Fabric,
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

impl Ends {
    /// Starts a target of `bytes`, driven as `target` says, and connects to it.
    pub fn meet(place: &impl Place, driven: Driven, target: Driven, bytes: usize) -> Done<Self> {
        let more = (target == Driven::ByWorkers).then(|| "--worker".to_owned());
        Self::start(place, driven, bytes, more)
    }

    /// Starts a target that answers each imm with a write of `len` bytes.
    pub fn echo(place: &impl Place, len: usize) -> Done<Self> {
        Self::start(place, Driven::ByCaller, len, ["--echo".to_owned(), len.to_string()])
    }

    fn start(
        place: &impl Place,
        driven: Driven,
        bytes: usize,
        more: impl IntoIterator<Item = String>,
    ) -> Done<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("target").args(place.arguments()).args(["--region", &bytes.to_string()]).args(more);
        let mut target = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = target.stdin.take();
        let mut address = String::new();
        BufReader::new(target.stdout.take().ok_or("no output")?).read_line(&mut address)?;
        let fabric = open(place, Side::Writer, driven)?;
        let src = region(&fabric, bytes, |at| (at.wrapping_mul(31) >> 3) as u8)?;
        fabric.publish(SOURCE, &src)?;
        let peer = drive(&fabric, fabric.connect(address.trim()))?;
        let dst = drive(&fabric, peer.region(REGION))?;
        Ok(Self { fabric, peer, src, dst, target, _input: input })
    }

    /// A ping-pong with the target, of `len` bytes at a time.
    pub fn volley(&self, len: usize) -> Volley<'_> {
        Volley::new(&self.fabric, &self.peer, &self.src, &self.dst, len)
    }

    /// Compares the pages of `size` that were written with what they were written from.
    pub fn verify(&self, pages: &[u32], size: usize) -> Done<()> {
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

impl Drop for Ends {
    fn drop(&mut self) {
        self._input = None;
        let _ = self.target.wait();
    }
}

/// Awaits `future`, driving the fabric meanwhile.
fn drive<T>(fabric: &Fabric, future: impl Future<Output = transport_core::Result<T>>) -> Done<T> {
    let mut future = std::pin::pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        fabric.step();
        if let Poll::Ready(result) = future.as_mut().poll(&mut context) {
            return Ok(result?);
        }
    }
}
