//! What the benches share: two connected fabrics over loopback, in one process; and two processes,
//! one of which writes, beside programs in C that do the same.

pub mod compare;
pub mod ends;
pub mod inside;
pub mod load;
pub mod turns;
pub mod volley;

use std::sync::Arc;
use std::time::Duration;

use backend_loopback::{Loopback, Null};
use transport_core::spi::Backend;
use transport_core::{
    Access, Fabric, FabricBuilder, Pages, Peer, Region, RemoteRegion, Result, TransportConfig,
};

/// Anything that can go wrong, in words.
pub type BenchResult<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Every wait of a bench ends by then.
pub const LIMIT: Duration = Duration::from_secs(30);

/// Who drives the engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Driven {
    /// The measuring thread itself.
    ByCaller,
    /// A worker thread per fabric.
    ByWorkers,
}

/// A fabric that writes, one that is written to, and a region in each.
pub struct FabricPair {
    /// The writing side.
    pub writer: Fabric,
    /// The written side; it only has to live.
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

    /// Over `rails` null devices: what is measured is the software alone.
    pub fn null(driven: Driven, rails: u32, bytes: usize) -> Result<Self> {
        Self::over(Arc::new(Null::new(rails)), driven, bytes)
    }

    /// As [`FabricPair::open`], over any backend.
    pub fn over(backend: Arc<dyn Backend>, driven: Driven, bytes: usize) -> Result<Self> {
        let (writer, target) = (open(&backend, driven)?, open(&backend, driven)?);
        let (peer, _) = writer.connect_local(&target)?;
        let src = writer.alloc(bytes, Access::LOCAL)?;
        let landing = target.alloc(bytes, Access::REMOTE_WRITE | Access::REMOTE_READ)?;
        let content: Vec<u8> = (0..bytes).map(|at| (at.wrapping_mul(31) >> 3) as u8).collect();
        src.copy_in(0, &content)?;
        landing.copy_in(0, &content)?;
        let dst = peer.import(&landing.descriptor())?;
        Ok(Self { writer, target, peer, src, landing, dst })
    }

    /// One write, waited for.
    pub fn write(&self, at: usize, len: usize) -> Result<()> {
        self.peer.write(&self.src, at..at + len, &self.dst, at)?.wait(LIMIT).map(drop)
    }

    /// One paged write, waited for.
    pub fn write_pages(&self, from: &Pages, to: &Pages, page: usize) -> Result<()> {
        self.peer.write_pages(&self.src, from, &self.dst, to, page)?.wait(LIMIT).map(drop)
    }
}

/// The same shuffle every time: `count` page indices.
pub fn shuffled(count: u32, seed: u64) -> Vec<u32> {
    let mut indices: Vec<u32> = (0..count).collect();
    fastrand::Rng::with_seed(seed).shuffle(&mut indices);
    indices
}

fn open(backend: &Arc<dyn Backend>, driven: Driven) -> Result<Fabric> {
    let transport = TransportConfig::new(backend.name(), Arc::clone(backend));
    let builder = FabricBuilder::new().transport(transport).seed(1);
    match driven {
        Driven::ByCaller => builder.caller_driven().open(),
        Driven::ByWorkers => builder.open(),
    }
}
