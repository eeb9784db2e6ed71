//! Flushes: reads of a few bytes of the peer's, which push what its card has written before them.
//!
//! docs/verbs.md, "Several cards", says why.

use std::sync::Arc;

use multirail_spi::{Access, HostBuffer, Memory, MemoryRegion, Piece, Result, WorkRequest};

use crate::device::Device;
use crate::region::Registered;

/// Bytes of a flush: a read of none reads no memory, and pushes nothing.
const LEN: u64 = 8;
/// Where a peer's bytes land, behind those that peers read, in a cache line of its own.
const LANDING: usize = 128;
const WHOLE: usize = 4096;

/// What a peer reads to flush this side's card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct FlushTarget {
    address: u64,
    rkey: u32,
}

/// A page of a card's that peers may read, and that its own flushes land in: zeroes.
pub(crate) struct FlushPage {
    region: Registered,
    memory: Arc<HostBuffer>,
}

impl FlushPage {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self> {
        let memory = Arc::new(HostBuffer::sparse(WHOLE)?);
        // SAFETY: nobody holds references into the memory.
        let region = unsafe { Registered::new(device, memory.clone(), Access::REMOTE_READ, false) }?;
        Ok(Self { region, memory })
    }

    /// What peers are told.
    pub(crate) fn target(&self) -> FlushTarget {
        let key = self.region.key();
        FlushTarget { address: key.base, rkey: key.key as u32 }
    }

    /// The read of `target` that stands for a run of flushes; each of its requests is the same.
    pub(crate) fn read(&self, run: &WorkRequest, target: FlushTarget) -> (WorkRequest, Piece) {
        let local = self.memory.as_ptr().wrapping_add(LANDING);
        let (lkey, rkey) = (self.region.lkey(), target.rkey.into());
        let piece = Piece { local, remote: target.address, len: LEN };
        (WorkRequest { local, lkey, len: LEN, remote: target.address, rkey, ..*run }, piece)
    }
}
