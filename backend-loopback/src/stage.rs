//! A bounce segment: bytes for memory that the initiator cannot reach itself.
//!
//! The target makes one per peer, at the first import that needs it. A slot is
//! filled by the initiator, taken by the target's worker, which moves the bytes
//! between slot and region, and answered. Slots are used in ring order, so both
//! sides need one number each. What the other side wrote is checked, never trusted:
//! the target bounds every field, the initiator believes nothing but the answer.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use crossbeam_utils::CachePadded;
use multirail_spi::{
    Access, ErrorKind, WorkKind,
    copy::{self, CopyStrategy},
};

use crate::region::{Key, Regions};
use crate::segment::Plain;

/// Slots of a stage; one peer's share of the memory set aside is `SLOTS * SLOT`, 1 MiB.
pub(crate) const SLOTS: usize = 64;
/// Bytes of one slot: four pages, so that a revoke never waits for more.
pub(crate) const SLOT: usize = 16 << 10;
/// Slots that a target serves before its next peer's turn.
const TURN: usize = 16;

const FREE: u32 = 0;
const POSTED: u32 = 1;
const TAKEN: u32 = 2;
const ANSWERED: u32 = 3;

/// What lies in the shared memory. Zeroed memory is its initial state.
#[repr(C)]
pub(crate) struct Stage {
    /// The initiator sleeps: ring at the next answer.
    waiting: CachePadded<AtomicU32>,
    slots: [Slot; SLOTS],
    data: [UnsafeCell<[u8; SLOT]>; SLOTS],
}

#[repr(C, align(64))]
struct Slot {
    state: AtomicU32,
    answer: AtomicU32,
    kind: AtomicU32,
    len: AtomicU32,
    key: AtomicU64,
    remote: AtomicU64,
}

// SAFETY: the data are only reached through raw pointers, by `copy`.
unsafe impl Sync for Stage {}
// SAFETY: plain memory.
unsafe impl Send for Stage {}
// SAFETY: atomics and raw bytes.
unsafe impl Plain for Stage {
    const HEAD: usize = size_of::<Self>();
}

/// What became of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The target has not answered.
    Open,
    /// It has.
    Answered(Result<(), ErrorKind>),
    /// It wrote what cannot be.
    Nonsense,
}

/// The target's numbers in a slot's `answer`.
const ANSWERS: [(u32, Result<(), ErrorKind>); 3] =
    [(0, Ok(())), (1, Err(ErrorKind::RemoteAccess)), (2, Err(ErrorKind::Revoked))];

/// What a slot asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ask {
    pub(crate) kind: WorkKind,
    pub(crate) key: Key,
    pub(crate) remote: u64,
    pub(crate) len: usize,
}

impl Stage {
    /// Initiator: the bytes of slot `at`.
    pub(crate) fn bytes(&self, at: u64) -> *mut u8 {
        self.data[at as usize % SLOTS].get().cast()
    }

    /// Initiator: whether slot `at` may be filled.
    pub(crate) fn is_free(&self, at: u64) -> bool {
        self.slot(at).state.load(Ordering::Acquire) == FREE
    }

    /// Initiator: hands slot `at` over; its bytes are in place.
    pub(crate) fn post(&self, at: u64, ask: &Ask) {
        let slot = self.slot(at);
        slot.kind.store(u32::from(ask.kind == WorkKind::Read), Ordering::Relaxed);
        slot.len.store(ask.len as u32, Ordering::Relaxed);
        slot.key.store(ask.key.to_wire(), Ordering::Relaxed);
        slot.remote.store(ask.remote, Ordering::Relaxed);
        slot.state.store(POSTED, Ordering::Release);
    }

    /// Initiator: takes slot `at` back, unless the target has it already.
    pub(crate) fn take_back(&self, at: u64) -> bool {
        let state = &self.slot(at).state;
        state.compare_exchange(POSTED, FREE, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Initiator: what became of slot `at`. An answer's bytes are visible.
    pub(crate) fn progress(&self, at: u64) -> Progress {
        let slot = self.slot(at);
        match slot.state.load(Ordering::Acquire) {
            POSTED | TAKEN => Progress::Open,
            ANSWERED => {
                let answer = slot.answer.load(Ordering::Relaxed);
                let known = ANSWERS.iter().find(|(number, _)| *number == answer);
                known.map_or(Progress::Nonsense, |(_, outcome)| Progress::Answered(*outcome))
            }
            _ => Progress::Nonsense,
        }
    }

    /// Initiator: slot `at` was answered and is done with.
    pub(crate) fn release(&self, at: u64) {
        self.slot(at).state.store(FREE, Ordering::Release);
    }

    /// Initiator: asks to be rung at the next answer. `false` if slot `at` has one
    /// already. The fence pairs with the one in [`Stage::serve`].
    pub(crate) fn arm(&self, at: u64) -> bool {
        self.waiting.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.progress(at) == Progress::Open
    }

    /// Target: whether slot `at` waits to be served.
    pub(crate) fn is_due(&self, at: u64) -> bool {
        self.slot(at).state.load(Ordering::Acquire) == POSTED
    }

    /// Target: serves what was posted from slot `at` on, up to a turn's worth.
    /// Says how many, and whether the initiator sleeps and is to be rung.
    pub(crate) fn serve(&self, at: u64, regions: &Regions) -> (u64, bool) {
        let mut served = 0;
        while served < TURN as u64 && self.serve_one(at + served, regions) {
            served += 1;
        }
        fence(Ordering::SeqCst);
        let sleeps = served > 0
            && self.waiting.load(Ordering::Relaxed) != 0
            && self.waiting.swap(0, Ordering::AcqRel) != 0;
        (served, sleeps)
    }

    fn serve_one(&self, at: u64, regions: &Regions) -> bool {
        let slot = self.slot(at);
        // Taken: the initiator cannot take it back under our hands.
        if slot.state.compare_exchange(POSTED, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return false;
        }
        let outcome = self.run(at, regions);
        let known = ANSWERS.iter().find(|(_, known)| *known == outcome);
        slot.answer.store(known.map_or(1, |(number, _)| *number), Ordering::Relaxed);
        slot.state.store(ANSWERED, Ordering::Release);
        true
    }

    fn run(&self, at: u64, regions: &Regions) -> Result<(), ErrorKind> {
        let slot = self.slot(at);
        // Each field is read once: the initiator may change it meanwhile.
        let reads = slot.kind.load(Ordering::Relaxed) != 0;
        let (len, remote) = (slot.len.load(Ordering::Relaxed), slot.remote.load(Ordering::Relaxed));
        let key = Key::from_wire(slot.key.load(Ordering::Relaxed)).ok_or(ErrorKind::RemoteAccess)?;
        if len as usize > SLOT {
            return Err(ErrorKind::RemoteAccess);
        }
        let need = if reads { Access::REMOTE_READ } else { Access::REMOTE_WRITE };
        let inside = regions.enter(key, need, remote, u64::from(len))?;
        let (to, from) = if reads {
            (self.bytes(at), inside.start().cast_const())
        } else {
            (inside.start(), self.bytes(at).cast_const())
        };
        // SAFETY: `enter` checked the range and keeps the region's bytes until `inside`
        // is dropped; `len` bytes fit the slot, which stays mapped with `self`.
        unsafe { copy::copy(CopyStrategy::Plain, to, from, len as usize) };
        Ok(())
    }

    fn slot(&self, at: u64) -> &Slot {
        &self.slots[at as usize % SLOTS]
    }
}

#[cfg(test)]
mod tests;
