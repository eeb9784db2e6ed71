//! The two processes of a measurement: a target that is written to, and our side of it.

use std::io::{BufRead, BufReader, Read};
use std::pin::pin;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::thread::spawn;

use backend_efa::{Efa, EfaConfig};
use benches::{Driven, LIMIT};
use transport_core::spi::Backend;
use transport_core::{Access, Fabric, FabricBuilder, Peer, Region, RemoteRegion, TransportConfig};

use crate::Done;
use crate::side::{Side, pin};

/// The name of the target's region.
const REGION: &str = "target";

/// libfabric's provider.
#[derive(clap::Args, Clone)]
pub struct Provider {
    /// tcp, shm, ...
    #[arg(long, default_value = "tcp")]
    pub provider: String,
}

impl Provider {
    /// The local address: sockets stay on this host; shm and cards have none.
    pub fn node(&self) -> Option<&'static str> {
        let has_none = matches!(self.provider.as_str(), "shm" | "efa" | "efa-direct");
        (!has_none).then_some("127.0.0.1")
    }

    /// A fabric on one device of it.
    pub fn open(&self, driven: Driven) -> Done<Fabric> {
        let config = EfaConfig::default().provider(&self.provider);
        let efa = Efa::with(self.node().into_iter().fold(config, EfaConfig::node));
        let devices = efa.probe().map_err(|why| format!("{}; {}", why.reason, why.remedy))?;
        let transport = TransportConfig::new("efa", Arc::new(efa)).devices(devices);
        let builder = FabricBuilder::new().transport(transport);
        Ok(match driven {
            Driven::ByCaller => builder.caller_driven(),
            Driven::ByWorkers => builder,
        }
        .open()?)
    }
}

/// A region with `content` in every byte's place, in huge pages where the kernel has them, as
/// `writes.c` has it.
fn region(fabric: &Fabric, bytes: usize, content: impl Fn(usize) -> u8) -> Done<Region> {
    let region = fabric.alloc(bytes, Access::all())?;
    region.copy_in(0, &(0..bytes).map(content).collect::<Vec<_>>())?;
    Ok(region)
}

/// The process that is written to.
#[derive(clap::Args, Clone)]
pub struct Target {
    #[command(flatten)]
    provider: Provider,
    /// Bytes of its region.
    #[arg(long)]
    region: usize,
    /// A worker drives it, which sleeps when it is idle; else this thread does, and never sleeps.
    #[arg(long)]
    worker: bool,
}

impl Target {
    /// Tells its address and serves until its input ends.
    pub fn run(self) -> Done<ExitCode> {
        let driven = if self.worker { Driven::ByWorkers } else { Driven::ByCaller };
        let fabric = self.provider.open(driven)?;
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
        if !self.worker {
            pin(Side::Target)?;
            while !over.load(Ordering::Acquire) {
                fabric.step();
            }
        }
        let _ = input.join();
        Ok(ExitCode::SUCCESS)
    }
}

/// Our side, connected to a target.
pub struct Ends {
    pub fabric: Fabric,
    pub peer: Peer,
    pub src: Region,
    pub dst: RemoteRegion,
    target: Child,
    /// Its end ends the target.
    _input: Option<ChildStdin>,
}

impl Ends {
    /// Starts a target of `bytes` and connects to it.
    pub fn meet(provider: &Provider, driven: Driven, bytes: usize) -> Done<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["target", "--provider", &provider.provider, "--region", &bytes.to_string()]);
        if driven == Driven::ByWorkers {
            command.arg("--worker");
        }
        let mut target = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = target.stdin.take();
        let mut address = String::new();
        BufReader::new(target.stdout.take().ok_or("no output")?).read_line(&mut address)?;
        let fabric = provider.open(driven)?;
        let peer = drive(&fabric, fabric.connect(address.trim()))?;
        let dst = drive(&fabric, peer.region(REGION))?;
        let src = region(&fabric, bytes, |at| (at.wrapping_mul(31) >> 3) as u8)?;
        Ok(Self { fabric, peer, src, dst, target, _input: input })
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
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        fabric.step();
        if let Poll::Ready(result) = future.as_mut().poll(&mut context) {
            return Ok(result?);
        }
    }
}
