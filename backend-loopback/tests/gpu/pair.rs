//! Two fabrics, and their regions in every kind of memory.

use std::sync::Arc;

use cuda::{CudaMemory, Device};
use multirail_loopback::{Loopback, LoopbackConfig};
use multirail_spi::{Access, ErrorKind, HostBuffer, Memory};
use transport_core::{Fabric, FabricBuilder, Peer, Region, RemoteRegion, TransportConfig};

pub const BOTH: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// The memory of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TestMemory {
    Host,
    Gpu(usize),
}

/// The reason why there is no GPU. `None` if there is one.
pub fn missing() -> Option<String> {
    let why = Device::all().err()?;
    assert!(matches!(why.kind(), ErrorKind::Unsupported | ErrorKind::NotFound), "{why}");
    Some(why.to_string())
}

/// Every pair of memories of which one is a GPU's.
pub fn pairs() -> Vec<(TestMemory, TestMemory)> {
    let gpus = Device::all().unwrap().len().min(2);
    let memories: Vec<_> = std::iter::once(TestMemory::Host).chain((0..gpus).map(TestMemory::Gpu)).collect();
    let all = memories.iter().flat_map(|from| memories.iter().map(|to| (*from, *to)));
    all.filter(|pair| *pair != (TestMemory::Host, TestMemory::Host)).collect()
}

/// Two connected fabrics.
pub struct FabricPair {
    pub here: Fabric,
    pub there: Fabric,
    pub to: Peer,
    pub from: Peer,
}

pub fn builder(config: &LoopbackConfig) -> FabricBuilder {
    let backend = Arc::new(Loopback::with(config.clone()));
    FabricBuilder::new().transport(TransportConfig::new("loopback", backend))
}

pub fn connected(here: Fabric, there: Fabric) -> FabricPair {
    let (to, from) = here.connect_local(&there).unwrap();
    FabricPair { here, there, to, from }
}

pub fn fabrics(config: &LoopbackConfig) -> FabricPair {
    connected(builder(config).open().unwrap(), builder(config).open().unwrap())
}

pub fn region(fabric: &Fabric, place: TestMemory, len: usize, access: Access) -> Region {
    let memory: Arc<dyn Memory> = match place {
        TestMemory::Host => Arc::new(HostBuffer::new(len).unwrap()),
        TestMemory::Gpu(number) => Arc::new(CudaMemory::new(&Device::all().unwrap()[number], len).unwrap()),
    };
    // SAFETY: nobody refers to the bytes.
    unsafe { fabric.register(memory, access) }.unwrap()
}

impl FabricPair {
    /// A source with its content, a target, and the target as imported by this side.
    pub fn regions(
        &self,
        memories: (TestMemory, TestMemory),
        len: usize,
    ) -> (Region, Vec<u8>, Region, RemoteRegion) {
        let source = region(&self.here, memories.0, len, Access::LOCAL);
        let target = region(&self.there, memories.1, len, BOTH);
        let mut random = fastrand::Rng::with_seed(len as u64);
        let content: Vec<u8> = (0..len).map(|_| random.u8(..)).collect();
        source.copy_in(0, &content).unwrap();
        let remote = self.to.import(&target.descriptor()).unwrap();
        (source, content, target, remote)
    }
}

pub fn content(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.copy_out(0, &mut bytes).unwrap();
    bytes
}
