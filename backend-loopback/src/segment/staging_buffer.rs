//! The staging buffer: shared memory with slots, for regions that the initiator cannot reach itself.
//!
//! The target makes a staging buffer for a peer at the first import that needs it. The initiator fills a slot and posts
//! a [`SlotRequest`] in it. The target's worker takes the slot, copies the bytes between the slot and the region, and
//! writes a response. Both sides use the slots in order, so each side keeps only the number of its next slot. Each side
//! checks all values that the other side wrote: the target checks every field of a request, and the initiator reads
//! nothing but the response.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use crossbeam_utils::CachePadded;
use multirail_spi::ErrorKind;
use multirail_spi::staging::{SlotRequest, decode_result, encode_result};

use super::SegmentContent;

/// Slots of a staging buffer. Each peer's buffer takes `SLOTS * SLOT_LEN`, 1 MiB.
pub(crate) const SLOTS: usize = 64;
/// Bytes of one slot: four pages, so that a revoke never waits for the copy of more.
pub(crate) const SLOT_LEN: usize = 16 << 10;
/// Slots that a target serves of one peer before it serves the next peer.
const SLOTS_PER_POLL: usize = 16;

/// The states of a slot. The initiator changes the state from free to posted, and from responded to free; the target
/// from posted to taken, and from taken to responded. A posted slot that the initiator takes back is free.
const FREE: u32 = 0;
const POSTED: u32 = 1;
const TAKEN: u32 = 2;
const RESPONDED: u32 = 3;

/// The content of the shared memory. Zeroed memory is the initial state.
#[repr(C)]
pub(crate) struct SharedStagingBuffer {
    /// The initiator sleeps and wants to be woken by the next response.
    armed: CachePadded<AtomicU32>,
    slots: [SlotHeader; SLOTS],
    data: [UnsafeCell<[u8; SLOT_LEN]>; SLOTS],
}

/// The state of a slot, the initiator's request and the target's response.
#[repr(C, align(64))]
struct SlotHeader {
    state: AtomicU32,
    response: AtomicU32,
    request: [AtomicU64; SlotRequest::WORDS],
}

// SAFETY: the data are only reached through raw pointers, by `copy`.
unsafe impl Sync for SharedStagingBuffer {}
// SAFETY: plain memory.
unsafe impl Send for SharedStagingBuffer {}
// SAFETY: atomics and raw bytes.
unsafe impl SegmentContent for SharedStagingBuffer {
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

impl SharedStagingBuffer {
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
        for (word, value) in slot.request.iter().zip(request.to_words()) {
            word.store(value, Ordering::Relaxed);
        }
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
                let result = decode_result(slot.response.load(Ordering::Relaxed));
                result.map_or(SlotStatus::Invalid, SlotStatus::Done)
            }
            _ => SlotStatus::Invalid,
        }
    }

    /// Initiator: frees slot `at`, whose response was read.
    pub(crate) fn release(&self, at: u64) {
        self.slot(at).state.store(FREE, Ordering::Release);
    }

    /// Initiator: asks the target for a wakeup at its next response. Returns false if slot `at` has one already. The
    /// fence pairs with the one in [`SharedStagingBuffer::serve`].
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
        slot.response.store(encode_result(run(at)), Ordering::Relaxed);
        slot.state.store(RESPONDED, Ordering::Release);
        true
    }

    /// Target: the request in slot `at`. Reads each word once, since the initiator may change it meanwhile.
    ///
    /// # Errors
    /// `RemoteAccess` if the request is of an unknown kind, or if the length exceeds a slot.
    pub(crate) fn request(&self, at: u64) -> Result<SlotRequest, ErrorKind> {
        let words = self.slot(at).request.each_ref().map(|word| word.load(Ordering::Relaxed));
        let request = SlotRequest::from_words(words).filter(|request| request.len <= SLOT_LEN as u64);
        request.ok_or(ErrorKind::RemoteAccess)
    }

    fn slot(&self, at: u64) -> &SlotHeader {
        &self.slots[at as usize % SLOTS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::Segment;

    #[test]
    fn an_invalid_slot_is_found() {
        let buffer = Segment::<SharedStagingBuffer>::create().unwrap();
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
