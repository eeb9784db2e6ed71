//! The staging buffer: bytes for regions that the initiator cannot reach itself.
//!
//! The target makes one per peer, at the first import that needs it. The initiator fills a slot. The target's worker
//! takes the slot, moves the bytes between slot and region, and writes a response. Both sides use the slots in order,
//! so that each side keeps one number. Each side checks everything that the other side wrote: the target bounds every
//! field, and the initiator reads nothing but the response.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use crossbeam_utils::CachePadded;
use multirail_spi::{ErrorKind, WorkKind};

use super::SegmentContent;
use super::lease_table::RegionKey;

/// Slots of a staging buffer. Each peer's buffer takes `SLOTS * SLOT_BYTES`, 1 MiB.
pub(crate) const SLOTS: usize = 64;
/// Bytes of one slot: four pages, so that a revoke never waits for more.
pub(crate) const SLOT_BYTES: usize = 16 << 10;
/// Slots that a target serves of one peer before it serves the next peer.
const SLOTS_PER_POLL: usize = 16;

const FREE: u32 = 0;
const POSTED: u32 = 1;
const TAKEN: u32 = 2;
const RESPONDED: u32 = 3;

/// The content of the shared memory. Zeroed memory is the initial state.
#[repr(C)]
pub(crate) struct StagingBuffer {
    /// The initiator sleeps and wants to be woken by the next response.
    armed: CachePadded<AtomicU32>,
    slots: [Slot; SLOTS],
    data: [UnsafeCell<[u8; SLOT_BYTES]>; SLOTS],
}

#[repr(C, align(64))]
struct Slot {
    state: AtomicU32,
    response: AtomicU32,
    kind: AtomicU32,
    len: AtomicU32,
    key: AtomicU64,
    remote: AtomicU64,
}

// SAFETY: the data are only reached through raw pointers, by `copy`.
unsafe impl Sync for StagingBuffer {}
// SAFETY: plain memory.
unsafe impl Send for StagingBuffer {}
// SAFETY: atomics and raw bytes.
unsafe impl SegmentContent for StagingBuffer {
    const HEAD: usize = size_of::<Self>();
}

/// What the initiator finds in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotStatus {
    /// The target has not responded.
    Pending,
    /// The target has responded.
    Done(Result<(), ErrorKind>),
    /// The target wrote a value that is not possible.
    Invalid,
}

/// The numbers that the target writes as responses.
const RESPONSES: [(u32, Result<(), ErrorKind>); 3] =
    [(0, Ok(())), (1, Err(ErrorKind::RemoteAccess)), (2, Err(ErrorKind::Revoked))];

/// The request of the initiator in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlotRequest {
    pub(crate) kind: WorkKind,
    pub(crate) key: RegionKey,
    pub(crate) remote: u64,
    pub(crate) len: usize,
}

impl StagingBuffer {
    /// The bytes of slot `at`.
    pub(crate) fn bytes(&self, at: u64) -> *mut u8 {
        self.data[at as usize % SLOTS].get().cast()
    }

    /// Initiator: returns true if slot `at` may be filled.
    pub(crate) fn is_free(&self, at: u64) -> bool {
        self.slot(at).state.load(Ordering::Acquire) == FREE
    }

    /// Initiator: hands slot `at` over to the target. The slot's bytes are in place.
    pub(crate) fn post(&self, at: u64, request: &SlotRequest) {
        let slot = self.slot(at);
        slot.kind.store(u32::from(request.kind == WorkKind::Read), Ordering::Relaxed);
        slot.len.store(request.len as u32, Ordering::Relaxed);
        slot.key.store(request.key.to_wire(), Ordering::Relaxed);
        slot.remote.store(request.remote, Ordering::Relaxed);
        slot.state.store(POSTED, Ordering::Release);
    }

    /// Initiator: takes slot `at` back. Returns false if the target has taken it.
    pub(crate) fn take_back(&self, at: u64) -> bool {
        let state = &self.slot(at).state;
        state.compare_exchange(POSTED, FREE, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Initiator: the status of slot `at`. If the target has responded, the bytes are visible.
    pub(crate) fn status(&self, at: u64) -> SlotStatus {
        let slot = self.slot(at);
        match slot.state.load(Ordering::Acquire) {
            POSTED | TAKEN => SlotStatus::Pending,
            RESPONDED => {
                let response = slot.response.load(Ordering::Relaxed);
                let known = RESPONSES.iter().find(|(number, _)| *number == response);
                known.map_or(SlotStatus::Invalid, |(_, outcome)| SlotStatus::Done(*outcome))
            }
            _ => SlotStatus::Invalid,
        }
    }

    /// Initiator: frees slot `at`, whose response was read.
    pub(crate) fn release(&self, at: u64) {
        self.slot(at).state.store(FREE, Ordering::Release);
    }

    /// Initiator: asks the target for a wakeup at its next response. Returns false if slot `at` has one already. The
    /// fence pairs with the one in [`StagingBuffer::serve`].
    pub(crate) fn arm(&self, at: u64) -> bool {
        self.armed.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.status(at) == SlotStatus::Pending
    }

    /// Target: returns true if slot `at` waits to be served.
    pub(crate) fn is_posted(&self, at: u64) -> bool {
        self.slot(at).state.load(Ordering::Acquire) == POSTED
    }

    /// Target: serves the posted slots from slot `at` on, up to [`SLOTS_PER_POLL`]. `run` moves the bytes of one
    /// slot, which it gets by number. Returns how many slots were served, and whether the initiator sleeps and must
    /// be woken.
    pub(crate) fn serve(&self, at: u64, mut run: impl FnMut(u64) -> Result<(), ErrorKind>) -> (u64, bool) {
        let mut served = 0;
        while served < SLOTS_PER_POLL as u64 && self.serve_one(at + served, &mut run) {
            served += 1;
        }
        fence(Ordering::SeqCst);
        let sleeps = served > 0
            && self.armed.load(Ordering::Relaxed) != 0
            && self.armed.swap(0, Ordering::AcqRel) != 0;
        (served, sleeps)
    }

    fn serve_one(&self, at: u64, run: &mut impl FnMut(u64) -> Result<(), ErrorKind>) -> bool {
        let slot = self.slot(at);
        // Once the slot is taken, the initiator cannot take it back.
        if slot.state.compare_exchange(POSTED, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return false;
        }
        let outcome = run(at);
        let known = RESPONSES.iter().find(|(_, known)| *known == outcome);
        slot.response.store(known.map_or(1, |(number, _)| *number), Ordering::Relaxed);
        slot.state.store(RESPONDED, Ordering::Release);
        true
    }

    /// Target: the request in slot `at`. Reads each field once, since the initiator may change it meanwhile.
    ///
    /// # Errors
    /// `RemoteAccess` if no region can have the key, or if the length exceeds a slot.
    pub(crate) fn request(&self, at: u64) -> Result<SlotRequest, ErrorKind> {
        let slot = self.slot(at);
        let kind = if slot.kind.load(Ordering::Relaxed) != 0 { WorkKind::Read } else { WorkKind::Write };
        let (len, remote) = (slot.len.load(Ordering::Relaxed), slot.remote.load(Ordering::Relaxed));
        let key = RegionKey::from_wire(slot.key.load(Ordering::Relaxed)).ok_or(ErrorKind::RemoteAccess)?;
        let len = len as usize;
        if len > SLOT_BYTES {
            return Err(ErrorKind::RemoteAccess);
        }
        Ok(SlotRequest { kind, key, remote, len })
    }

    fn slot(&self, at: u64) -> &Slot {
        &self.slots[at as usize % SLOTS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::Segment;

    #[test]
    fn an_invalid_slot_is_found() {
        let buffer = Segment::<StagingBuffer>::create().unwrap();
        let buffer = buffer.content();
        assert_eq!(buffer.status(0), SlotStatus::Invalid, "nothing was posted");
        for (state, response) in [(9, 0), (RESPONDED, 77), (FREE, 0)] {
            buffer.slots[0].state.store(state, Ordering::Relaxed);
            buffer.slots[0].response.store(response, Ordering::Relaxed);
            assert_eq!(buffer.status(0), SlotStatus::Invalid);
            assert!(!buffer.is_posted(0) && buffer.serve(0, |_| Ok(())) == (0, false));
        }
    }
}
