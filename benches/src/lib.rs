//! The common code of the benches: two connected fabrics in one process over loopback, and two processes of which one
//! writes. Programs in C do the same, for comparison.

pub mod compare;
pub mod driven_fabric;
pub mod inside;
pub mod list_load;
pub mod load;
pub mod over;
pub mod ping_pong;
pub mod processes;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use backend_loopback::{Loopback, Null};
use transport_core::spi::Backend;
use transport_core::{
    Access, Fabric, FabricBuilder, Pages, Peer, Region, RemoteRegion, Result, TransportConfig,
};

/// The result of a step of a bench. The error is a sentence.
pub type BenchResult<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// The limit of every wait of a bench.
pub const LIMIT: Duration = Duration::from_secs(30);

/// Who drives the engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Driven {
    /// The measuring thread.
    ByCaller,
    /// A worker thread per fabric.
    ByWorkers,
}

/// A writing fabric, a target fabric, and a region in each.
pub struct FabricPair {
    /// The writing side.
    pub writer: Fabric,
    /// The target side. It only has to exist.
    pub target: Fabric,
    /// The target as the writer sees it.
    pub peer: Peer,
    /// Source bytes.
    pub src: Region,
    /// The target's region, behind `dst`.
    pub landing: Region,
    /// The target's region as the writer addresses it.
    pub dst: RemoteRegion,
}

impl FabricPair {
    /// Opens both fabrics, with `bytes` of touched memory on either side.
    pub fn open(driven: Driven, bytes: usize) -> Result<Self> {
        Self::over(Arc::new(Loopback::new()), driven, bytes)
    }

    /// As [`FabricPair::open`], over `rails` null devices: the bench measures the software alone.
    pub fn null(driven: Driven, rails: u32, bytes: usize) -> Result<Self> {
        Self::over(Arc::new(Null::new(rails)), driven, bytes)
    }

    /// As [`FabricPair::open`], over any backend.
    pub fn over(backend: Arc<dyn Backend>, driven: Driven, bytes: usize) -> Result<Self> {
        Self::between(open(&backend, driven, None)?, open(&backend, driven, None)?, bytes)
    }

    /// As [`FabricPair::over`], caller-driven, with memory for notifications.
    pub fn notifying(backend: Arc<dyn Backend>, bytes: usize) -> Result<Self> {
        let open = || open(&backend, Driven::ByCaller, Some(8 << 20));
        Self::between(open()?, open()?, bytes)
    }

    fn between(writer: Fabric, target: Fabric, bytes: usize) -> Result<Self> {
        let (peer, _) = writer.connect_local(&target)?;
        let src = writer.alloc(bytes, Access::LOCAL)?;
        let landing = target.alloc(bytes, Access::REMOTE_WRITE | Access::REMOTE_READ)?;
        let content: Vec<u8> = (0..bytes).map(|at| (at.wrapping_mul(31) >> 3) as u8).collect();
        src.copy_in(0, &content)?;
        landing.copy_in(0, &content)?;
        let dst = peer.import(&landing.descriptor())?;
        Ok(Self { writer, target, peer, src, landing, dst })
    }

    /// Runs one write to its end.
    pub fn write(&self, at: usize, len: usize) -> Result<()> {
        self.peer.write(&self.src, at..at + len, &self.dst, at)?.wait(LIMIT).map(drop)
    }

    /// Runs one paged write to its end.
    pub fn write_pages(&self, from: &Pages, to: &Pages, page: usize) -> Result<()> {
        self.peer.write_pages(&self.src, from, &self.dst, to, page)?.wait(LIMIT).map(drop)
    }
}

/// Prints the error of a bench, if it failed, and returns the exit code.
pub fn exit_code(program: &str, done: BenchResult<ExitCode>) -> ExitCode {
    done.unwrap_or_else(|why| {
        eprintln!("{program}: {why}");
        ExitCode::FAILURE
    })
}

/// `count` page indices in a shuffled order, which is the same in every run of one seed.
pub fn shuffled(count: u32, seed: u64) -> Vec<u32> {
    let mut indices: Vec<u32> = (0..count).collect();
    fastrand::Rng::with_seed(seed).shuffle(&mut indices);
    indices
}

fn open(backend: &Arc<dyn Backend>, driven: Driven, notifications: Option<usize>) -> Result<Fabric> {
    let transport = TransportConfig::new(backend.name(), Arc::clone(backend));
    let mut builder = FabricBuilder::new().transport(transport).seed(1);
    if let Some(memory) = notifications {
        builder = builder.notifications(memory);
    }
    match driven {
        Driven::ByCaller => builder.caller_driven().open(),
        Driven::ByWorkers => builder.open(),
    }
}
