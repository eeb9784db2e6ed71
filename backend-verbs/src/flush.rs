//! Flushes: reads of a few bytes of the peer's memory. Such a read makes the peer's card finish its earlier writes
//! first. docs/verbs.md, "Several cards", gives the reason.

use std::sync::Arc;

use multirail_spi::{Access, HostBuffer, Memory, MemoryRegion, Piece, Result, WorkRequest};

use crate::device::Device;
use crate::region::Registered;

/// The bytes of a flush. A read of no bytes reads no memory, so it flushes nothing.
const LEN: u64 = 8;
/// The offset where the bytes of a peer land. It is behind the bytes that peers read, in another cache line.
const LANDING: usize = 128;
const WHOLE: usize = 4096;

/// The memory that a peer reads to flush this side's card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct FlushTarget {
    address: u64,
    rkey: u32,
}

/// A page of zeros that is registered with a card. Peers read it to flush the card, and the bytes that this side's
/// flushes read land in it.
pub(crate) struct FlushPage {
    region: Registered,
    memory: Arc<HostBuffer>,
}

impl FlushPage {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self> {
        let memory = Arc::new(HostBuffer::sparse(WHOLE)?);
        // SAFETY: no code holds references into the memory.
        let region = unsafe { Registered::new(device, memory.clone(), Access::REMOTE_READ, false) }?;
        Ok(Self { region, memory })
    }

    /// The target for the offer to a peer.
    pub(crate) fn target(&self) -> FlushTarget {
        let key = self.region.key();
        FlushTarget { address: key.base, rkey: key.key as u32 }
    }

    /// The read of `target` that flushes. All requests of a run of flushes are this read.
    pub(crate) fn read(&self, run: &WorkRequest, target: FlushTarget) -> (WorkRequest, Piece) {
        let local = self.memory.as_ptr().wrapping_add(LANDING);
        let (lkey, rkey) = (self.region.lkey(), target.rkey.into());
        let piece = Piece { local, remote: target.address, len: LEN };
        (WorkRequest { local, lkey, len: LEN, remote: target.address, rkey, ..*run }, piece)
    }
}
