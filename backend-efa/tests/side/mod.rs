//! One side of a connection over libfabric: a domain with its endpoint and a region.
#![allow(dead_code, reason = "each test uses what it needs")]

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use multirail_efa::{Efa, EfaConfig};
use multirail_spi::{
    Access, Backend, Domain, DomainSetup, Endpoint, EndpointConfig, HostBuffer, Memory, MemoryRegion,
    PeerSlot, RemoteMemory, SystemClock, WorkKind, WorkRequest, copy::CopyStrategy,
};

/// The limit of every wait.
pub const LIMIT: Duration = limit::HANG;
pub const LEN: usize = 8 << 20;
pub const PIECE: usize = 1 << 20;

/// A domain with its endpoint and a region.
pub struct Side {
    // The fields are dropped in this order.
    pub endpoint: Box<dyn Endpoint>,
    pub region: Arc<dyn MemoryRegion>,
    pub memory: Arc<HostBuffer>,
    pub domain: Arc<dyn Domain>,
}

impl Side {
    /// Opens a side over tcp. Returns `None`, and prints why, if there is no libfabric.
    pub fn open() -> Option<Self> {
        Self::of(EfaConfig::default().provider("tcp").node("127.0.0.1"), 0)
    }

    /// Opens a side on device `index` of a provider. Returns `None`, and prints why, if there is none.
    pub fn of(config: EfaConfig, index: usize) -> Option<Self> {
        let efa = Efa::with(config);
        let devices = match efa.probe() {
            Ok(devices) => devices,
            Err(why) => {
                eprintln!("skipped: {}; {}", why.reason, why.remedy);
                return None;
            }
        };
        let setup = DomainSetup {
            clock: Arc::new(SystemClock::default()),
            seed: 1,
            incarnation: 1,
            worker_sleeps: true,
        };
        let Some(device) = devices.get(index) else {
            eprintln!("skipped: there are {} devices, and device {index} is needed", devices.len());
            return None;
        };
        let domain = efa.open(device, &setup).unwrap();
        let memory = Arc::new(HostBuffer::new(LEN).unwrap());
        // SAFETY: nobody holds references into the buffer.
        let region = unsafe { domain.register(memory.clone(), Access::all()) }.unwrap();
        let endpoint = domain.endpoint(EndpointConfig::default()).unwrap();
        Some(Self { endpoint, region, memory, domain })
    }

    /// Connects two sides. Returns each side's slot for the other.
    pub fn connect(&self, other: &Self) -> (PeerSlot, PeerSlot) {
        let (ours, our_offer) = self.domain.connector().prepare().unwrap();
        let (theirs, their_offer) = other.domain.connector().prepare().unwrap();
        self.domain.connector().complete(ours, &their_offer).unwrap();
        other.domain.connector().complete(theirs, &our_offer).unwrap();
        (ours, theirs)
    }

    /// The request to write piece `number`. Its id is `number`, too.
    pub fn request(&self, peer: PeerSlot, to: &dyn RemoteMemory, number: usize) -> WorkRequest {
        WorkRequest {
            id: number as u64,
            peer,
            kind: WorkKind::Write,
            local: self.memory.as_ptr().wrapping_add(number * PIECE),
            lkey: self.region.lkey(),
            len: PIECE as u64,
            remote: to.base() + (number * PIECE) as u64,
            rkey: to.rkey(),
            imm: None,
            strategy: CopyStrategy::Plain,
        }
    }

    /// Imports this side's region at `other`, whose slot for this side is `slot`.
    pub fn import_for(&self, other: &Self, slot: PeerSlot) -> Arc<dyn RemoteMemory> {
        other.domain.import(slot, &self.region.key(), LIMIT).unwrap()
    }

    /// The bytes of this side's memory.
    pub fn bytes(&self, range: Range<usize>) -> Vec<u8> {
        assert!(range.end <= LEN);
        // SAFETY: allocated, with the length that was checked; nobody writes to it meanwhile.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().add(range.start), range.len()).to_vec() }
    }
}
