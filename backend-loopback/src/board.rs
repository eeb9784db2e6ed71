//! Lease words: who may touch a region, and who is touching it now.
//!
//! Each peer has a board of its own, one word per region slot of the target:
//! `generation << 32 | CLOSED | writers`. The initiator enters before it moves
//! bytes and leaves after; the target closes a word and waits until its writers
//! have left. All moves are read-modify-writes of one word, so either the
//! initiator sees the closing or the target sees the initiator. A hostile peer
//! can only spoil its own board.

use std::sync::atomic::{AtomicU64, Ordering};

/// Regions a domain may have at once, and words on a board.
pub(crate) const SLOTS: usize = 1 << 16;

const CLOSED: u64 = 1 << 31;
const WRITERS: u64 = CLOSED - 1;

/// One region's lease word on one peer's board.
#[repr(transparent)]
pub(crate) struct Lease(AtomicU64);

impl Lease {
    /// Target: opens the word for `generation`, keeping count of strays that
    /// are about to find out that their key is stale.
    pub(crate) fn open(&self, generation: u32) {
        let word = u64::from(generation) << 32;
        self.0.update(Ordering::AcqRel, Ordering::Relaxed, |old| word | (old & WRITERS));
    }

    /// Target: lets nobody in any more.
    pub(crate) fn close(&self) {
        self.0.fetch_or(CLOSED, Ordering::AcqRel);
    }

    /// As it was at first, nobody else looking.
    pub(crate) fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Target: whether nobody is inside. Everything the leavers wrote is visible then.
    pub(crate) fn is_quiet(&self) -> bool {
        self.0.load(Ordering::Acquire) & WRITERS == 0
    }

    /// Initiator: goes in, if the word is still open for `generation`.
    #[inline]
    pub(crate) fn enter(&self, generation: u32) -> bool {
        let open = u64::from(generation) << 32;
        // Looking first keeps those with a stale key from disturbing the count.
        if self.0.load(Ordering::Relaxed) & !WRITERS != open {
            return false;
        }
        let before = self.0.fetch_add(1, Ordering::Acquire);
        if before & !WRITERS == open {
            return true;
        }
        self.leave();
        false
    }

    /// Initiator: goes out. The bytes it moved come before.
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
        assert!(!lease.is_quiet());
        lease.close();
        assert!(!lease.enter(1));
        lease.leave();
        assert!(lease.is_quiet());
        lease.open(2);
        assert!(!lease.enter(1) && lease.enter(2));
    }

    #[test]
    fn nobody_is_inside_once_closed_and_quiet() {
        let rounds = if cfg!(miri) { 5 } else { 2000 };
        let lease = Lease(AtomicU64::new(0));
        let taken_back = AtomicBool::new(false);
        for generation in 1..=rounds {
            taken_back.store(false, Ordering::SeqCst);
            lease.open(generation);
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        while lease.enter(generation) {
                            assert!(!taken_back.load(Ordering::SeqCst));
                            lease.leave();
                        }
                    });
                }
                lease.close();
                while !lease.is_quiet() {
                    std::thread::yield_now();
                }
                taken_back.store(true, Ordering::SeqCst);
            });
        }
    }
}
