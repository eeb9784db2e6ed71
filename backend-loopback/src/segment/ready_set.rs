//! The ready set of a domain: the peers that have written while the endpoint did not look at their message rings.
//!
//! An endpoint with many peers looks only at the rings of those that have written of late. Before it stops to look at a
//! ring, it *arms* the ring: the next entry takes the arming back, and marks the peer's slot here. So a turn of the
//! endpoint costs one load for all of its silent peers.
//!
//! Peers in this process mark a set in private memory, peers in other processes one in a segment. A hostile process can
//! set and clear marks of others. A mark too many costs a look at the arming of a ring. A mark that was cleared delays
//! an entry, but loses none: before an endpoint sleeps, and now and then while it does not sleep, it looks at the
//! arming of all rings, which lies in the segment of each peer and which no other peer can change.

use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_utils::CachePadded;

use super::SegmentContent;
use super::ring::AtomicWord;

/// Words of marks.
const WORDS: usize = 256;
/// Slots that can be marked. An endpoint looks at the rings of greater slots in each turn.
pub(crate) const READY_SLOTS: u32 = WORDS as u32 * u64::BITS;

/// Marks of slots. Zeroed memory is an empty set.
#[repr(C)]
pub(crate) struct ReadySet<W = AtomicU64, const N: usize = WORDS> {
    /// Not zero if there may be marks.
    news: CachePadded<W>,
    marks: [W; N],
}

// SAFETY: atomics; zeroed memory is an empty set.
unsafe impl SegmentContent for ReadySet {
    const HEAD: usize = size_of::<Self>();
}

impl Default for ReadySet {
    fn default() -> Self {
        Self { news: CachePadded::default(), marks: std::array::from_fn(|_| AtomicU64::new(0)) }
    }
}

impl<W: AtomicWord, const N: usize> ReadySet<W, N> {
    /// Marks `slot`. The caller has written its entry before. The slot may be a number that a peer wrote.
    pub(crate) fn mark(&self, slot: u32) {
        let Some(word) = self.marks.get((slot / u64::BITS) as usize) else { return };
        word.set_bits(1 << (slot % u64::BITS), Ordering::Release);
        // A plain store would hide the marks behind an earlier store of another thread.
        self.news.set_bits(1, Ordering::Release);
    }

    /// Returns true if there may be marks.
    #[inline]
    pub(crate) fn has_news(&self) -> bool {
        self.news.load(Ordering::Relaxed) != 0
    }

    /// Takes all marks, and calls `ready` for each slot.
    #[cold]
    pub(crate) fn take(&self, mut ready: impl FnMut(u32)) {
        // Marks that come after this are found in the next call, if this one does not.
        if self.news.swap(0, Ordering::Acquire) == 0 {
            return;
        }
        for (number, word) in self.marks.iter().enumerate() {
            if word.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut marks = word.swap(0, Ordering::Acquire);
            while marks != 0 {
                ready(number as u32 * u64::BITS + marks.trailing_zeros());
                marks &= marks - 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(set: &ReadySet) -> Vec<u32> {
        let mut slots = Vec::new();
        set.take(|slot| slots.push(slot));
        slots
    }

    #[test]
    fn each_mark_is_taken_once() {
        let set = ReadySet::default();
        assert!(!set.has_news() && taken(&set).is_empty());
        for slot in [READY_SLOTS - 1, 0, 64, 63, 64] {
            set.mark(slot);
        }
        assert!(set.has_news());
        assert_eq!(taken(&set), [0, 63, 64, READY_SLOTS - 1]);
        assert!(!set.has_news() && taken(&set).is_empty());
    }

    #[test]
    fn a_slot_that_a_peer_made_up_is_passed_over() {
        let set = ReadySet::default();
        [READY_SLOTS, u32::MAX].into_iter().for_each(|slot| set.mark(slot));
        assert!(taken(&set).is_empty());
    }
}

#[cfg(all(test, multirail_loom))]
mod exhaustive {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU64, fence};

    use super::*;

    /// What an endpoint and two peers share: a word per peer in place of its ring, and whether the ring is armed.
    struct Rings {
        set: ReadySet<AtomicU64, 1>,
        entries: [AtomicU64; 2],
        armed: [AtomicU64; 2],
    }

    fn word(value: u64) -> AtomicU64 {
        AtomicU64::new(value)
    }

    /// Two peers, whose rings are armed or not.
    fn rings(armed: u64) -> Arc<Rings> {
        let set = ReadySet { news: CachePadded::new(word(0)), marks: [word(0)] };
        Arc::new(Rings { set, entries: [word(0), word(0)], armed: [word(armed), word(armed)] })
    }

    /// A peer writes an entry, and marks its slot if its ring is armed.
    fn write(rings: &Rings, slot: usize) {
        rings.entries[slot].store(1, Ordering::Release);
        fence(Ordering::SeqCst);
        if rings.armed[slot].load(Ordering::Relaxed) != 0 && rings.armed[slot].swap(0, Ordering::AcqRel) != 0
        {
            rings.set.mark(slot as u32);
        }
    }

    #[test]
    fn marks_of_two_peers_show_their_entries() {
        loom::model(|| {
            let rings = rings(1);
            let peers = [0, 1].map(|slot| {
                let rings = rings.clone();
                loom::thread::spawn(move || write(&rings, slot))
            });
            let mut found = [false; 2];
            let look = |found: &mut [bool; 2]| {
                rings.set.take(|slot| {
                    let slot = slot as usize;
                    assert_eq!(
                        rings.entries[slot].load(Ordering::Relaxed),
                        1,
                        "marked before it was written"
                    );
                    found[slot] = true;
                });
            };
            look(&mut found);
            peers.into_iter().for_each(|peer| peer.join().unwrap());
            look(&mut found);
            assert_eq!(found, [true; 2]);
        });
    }

    /// The owner looks at the arming itself, as an endpoint does before it sleeps and when it is woken.
    #[test]
    fn an_entry_whose_mark_another_peer_clears_is_found_by_its_arming() {
        loom::model(|| {
            let rings = rings(1);
            let peer = {
                let rings = rings.clone();
                loom::thread::spawn(move || write(&rings, 0))
            };
            let hostile = {
                let rings = rings.clone();
                loom::thread::spawn(move || rings.set.take(|_| {}))
            };
            let look = || {
                let has_written = rings.armed[0].load(Ordering::Acquire) == 0;
                let entry = rings.entries[0].load(Ordering::Relaxed);
                assert!(!has_written || entry == 1, "the arming shows the entry");
                has_written
            };
            let found_early = look();
            // The peer wakes the owner after it has taken the arming back.
            peer.join().unwrap();
            assert!(look() || found_early);
            hostile.join().unwrap();
        });
    }

    #[test]
    fn a_ring_that_is_armed_meanwhile_loses_no_entry() {
        loom::model(|| {
            let rings = rings(0);
            let peer = {
                let rings = rings.clone();
                loom::thread::spawn(move || write(&rings, 0))
            };
            rings.armed[0].store(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            let found_at_once = rings.entries[0].load(Ordering::Acquire) != 0;
            peer.join().unwrap();
            let mut is_marked = false;
            rings.set.take(|_| is_marked = true);
            assert!(found_at_once || is_marked);
        });
    }
}
