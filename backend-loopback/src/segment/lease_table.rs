//! The lease table: which regions a peer may access, and how many accesses are under way.
//!
//! Each peer has a table of its own, with a word for each region slot of the target: `generation << 32 | CLOSED |
//! users`. The initiator enters a lease before it moves bytes and leaves it after. The target closes a lease and
//! waits until all users have left. Every change is one read-modify-write of one word, so either the initiator
//! sees that the lease is closed, or the target sees the initiator. A hostile peer can spoil only its own table.

use std::sync::atomic::{AtomicU64, Ordering};

/// Regions that a domain may have at once, and leases in a table.
pub(crate) const REGION_SLOTS: usize = 1 << 16;

/// Leases that get memory together: a small page of them.
pub(crate) const LEASES_PER_PAGE: usize = 512;

/// A bit of local keys: the region is in device memory. The CPU cannot use its addresses.
pub(crate) const DEVICE_MEMORY: u64 = 1 << 31;

const CLOSED: u64 = 1 << 31;
const USERS: u64 = CLOSED - 1;

/// The slot and generation of a region. Generations start at 1. A slot has each generation once.
#[derive(Default, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RegionKey {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
}

impl RegionKey {
    /// The key as a number, for peers.
    pub(crate) fn to_wire(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.slot)
    }

    /// Reads a peer's number. Returns `None` for a number that no key has.
    pub(crate) fn from_wire(key: u64) -> Option<Self> {
        let (slot, generation) = (key as u32, (key >> 32) as u32);
        ((slot as usize) < REGION_SLOTS && generation != 0).then_some(Self { slot, generation })
    }
}

/// The lease of one peer on one region.
#[repr(transparent)]
pub(crate) struct Lease(AtomicU64);

impl Lease {
    /// Target: opens the lease for `generation`. Keeps the count of users: an initiator with a stale key may have
    /// entered and be about to leave.
    pub(crate) fn open(&self, generation: u32) {
        let word = u64::from(generation) << 32;
        self.0.update(Ordering::AcqRel, Ordering::Relaxed, |old| word | (old & USERS));
    }

    /// Target: lets no initiator enter any more.
    pub(crate) fn close(&self) {
        self.0.fetch_or(CLOSED, Ordering::AcqRel);
    }

    /// Zeroes the lease. No other thread may use it any more.
    pub(crate) fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Target: returns true if no initiator is inside. All bytes that initiators wrote before they left are visible
    /// then.
    pub(crate) fn is_quiescent(&self) -> bool {
        self.0.load(Ordering::Acquire) & USERS == 0
    }

    /// Initiator: enters, if the lease is open for `generation`. Returns false if it is not.
    #[inline]
    pub(crate) fn enter(&self, generation: u32) -> bool {
        let open = u64::from(generation) << 32;
        // The load keeps initiators with a stale key from changing the count.
        if self.0.load(Ordering::Relaxed) & !USERS != open {
            return false;
        }
        let before = self.0.fetch_add(1, Ordering::Acquire);
        if before & !USERS == open {
            return true;
        }
        self.leave();
        false
    }

    /// Initiator: leaves. The bytes that it moved become visible before.
    #[inline]
    pub(crate) fn leave(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn a_stale_generation_never_enters() {
        let lease = Lease(AtomicU64::new(0));
        assert!(!lease.enter(1));
        lease.open(1);
        assert!(lease.enter(1));
        assert!(!lease.is_quiescent());
        lease.close();
        assert!(!lease.enter(1));
        lease.leave();
        assert!(lease.is_quiescent());
        lease.open(2);
        assert!(!lease.enter(1) && lease.enter(2));
    }

    #[test]
    fn no_initiator_is_inside_a_closed_quiescent_lease() {
        let rounds = if cfg!(miri) { 5 } else { 2000 };
        let lease = Lease(AtomicU64::new(0));
        let revoked = AtomicBool::new(false);
        for generation in 1..=rounds {
            revoked.store(false, Ordering::SeqCst);
            lease.open(generation);
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        while lease.enter(generation) {
                            assert!(!revoked.load(Ordering::SeqCst));
                            lease.leave();
                        }
                    });
                }
                lease.close();
                while !lease.is_quiescent() {
                    std::thread::yield_now();
                }
                revoked.store(true, Ordering::SeqCst);
            });
        }
    }
}
