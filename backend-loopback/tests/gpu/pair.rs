//! Two fabrics, and their regions in every kind of memory.

use std::sync::Arc;

use cuda::{CudaMemory, Device};
use multirail_loopback::{Loopback, LoopbackConfig};
use multirail_spi::{Access, ErrorKind, HostBuffer, Memory};
use transport_core::{Fabric, FabricBuilder, Peer, Region, RemoteRegion, TransportConfig};

pub const BOTH: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// The memory of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Host,
    Gpu(usize),
}

/// The reason why there is no GPU. `None` if there is one.
pub fn missing() -> Option<String> {
    let why = Device::all().err()?;
    assert!(matches!(why.kind(), ErrorKind::Unsupported | ErrorKind::NotFound), "{why}");
    Some(why.to_string())
}

/// Every pair of places with a GPU in it.
pub fn pairs() -> Vec<(Place, Place)> {
    let gpus = Device::all().unwrap().len().min(2);
    let places: Vec<_> = std::iter::once(Place::Host).chain((0..gpus).map(Place::Gpu)).collect();
    let all = places.iter().flat_map(|from| places.iter().map(|to| (*from, *to)));
    all.filter(|pair| *pair != (Place::Host, Place::Host)).collect()
}

/// Two connected fabrics.
pub struct Pair {
    pub here: Fabric,
    pub there: Fabric,
    pub to: Peer,
    pub from: Peer,
}

pub fn builder(config: &LoopbackConfig) -> FabricBuilder {
    let backend = Arc::new(Loopback::with(config.clone()));
    FabricBuilder::new().transport(TransportConfig::new("loopback", backend))
}

pub fn connected(here: Fabric, there: Fabric) -> Pair {
    let (to, from) = here.connect_local(&there).unwrap();
    Pair { here, there, to, from }
}

pub fn fabrics(config: &LoopbackConfig) -> Pair {
    connected(builder(config).open().unwrap(), builder(config).open().unwrap())
}

pub fn region(fabric: &Fabric, place: Place, len: usize, access: Access) -> Region {
    let memory: Arc<dyn Memory> = match place {
        Place::Host => Arc::new(HostBuffer::new(len).unwrap()),
        Place::Gpu(number) => Arc::new(CudaMemory::new(&Device::all().unwrap()[number], len).unwrap()),
    };
    // SAFETY: nobody refers to the bytes.
    unsafe { fabric.register(memory, access) }.unwrap()
}

impl Pair {
    /// A source with its content, a target, and the target as imported by this side.
    pub fn regions(&self, places: (Place, Place), len: usize) -> (Region, Vec<u8>, Region, RemoteRegion) {
        let source = region(&self.here, places.0, len, Access::LOCAL);
        let target = region(&self.there, places.1, len, BOTH);
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
