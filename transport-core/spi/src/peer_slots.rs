//! What backends share that keep a table of slots, one per peer: the control side changes it, the endpoint reads it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::{Event, PeerSlot};

/// A table that any thread changes under a lock, and that the endpoint reads only after a change.
#[derive(Debug, Default)]
pub struct SlotTable<T> {
    table: Mutex<T>,
    /// The number of changes.
    changes: AtomicU64,
}

impl<T> SlotTable<T> {
    /// Locks the table. A caller that changes what the endpoint reads calls [`SlotTable::changed`] after it.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        // No holder panics half way through a change, so that a poisoned table is still whole.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the endpoint read the table once more.
    pub fn changed(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// The number of changes so far.
    #[inline]
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Locks the table if it has changed since the count in `seen`, which is brought up to date. [`u64::MAX`] counts as
    /// never read.
    #[inline]
    pub fn lock_if_changed(&self, seen: &mut u64) -> Option<MutexGuard<'_, T>> {
        let changes = self.changes();
        if changes == *seen {
            return None;
        }
        *seen = changes;
        Some(self.lock())
    }
}

/// The index of a free slot: the first one that `is_free`, else a new one.
pub fn claim_slot<S: Default>(slots: &mut Vec<S>, is_free: impl Fn(&S) -> bool) -> usize {
    slots.iter().position(is_free).unwrap_or_else(|| {
        slots.push(S::default());
        slots.len() - 1
    })
}

/// Slots whose [`Event::PeerGone`] the endpoint has queued. The engine has acted on such an event when it polls once
/// more after it took the event. Only then the slot may be another peer's: else the event would be taken for that
/// peer's.
#[derive(Debug, Default)]
pub struct ClosedSlots(Vec<PeerSlot>);

impl ClosedSlots {
    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a slot whose event is queued.
    pub fn push(&mut self, slot: PeerSlot) {
        self.0.push(slot);
    }

    /// Takes the slots on whose events the engine has acted. The endpoint calls this at the beginning of a poll, with the
    /// events that had no room in the polls before.
    pub fn take_heard<'a>(&'a mut self, waiting: &'a VecDeque<Event>) -> impl Iterator<Item = PeerSlot> + 'a {
        let was_heard = |peer: &mut PeerSlot| !waiting.contains(&Event::PeerGone { peer: *peer });
        self.0.extract_if(.., was_heard)
    }

    /// Takes all, as the endpoint is closed.
    pub fn take_all(&mut self) -> impl Iterator<Item = PeerSlot> + '_ {
        self.0.drain(..)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_read_once_per_change() {
        let (table, mut seen) = (SlotTable::<Vec<u8>>::default(), u64::MAX);
        assert!(table.lock_if_changed(&mut seen).is_some(), "never read");
        assert!(table.lock_if_changed(&mut seen).is_none());
        table.lock().push(1);
        assert!(table.lock_if_changed(&mut seen).is_none(), "not announced");
        table.changed();
        assert_eq!(table.lock_if_changed(&mut seen).as_deref(), Some(&vec![1]));
    }

    #[test]
    fn a_free_slot_is_claimed_before_a_new_one() {
        let mut slots = vec![1, 0, 0];
        assert_eq!(claim_slot(&mut slots, |slot| *slot == 0), 1);
        slots[1] = 5;
        slots[2] = 6;
        assert_eq!((claim_slot(&mut slots, |slot| *slot == 0), slots.len()), (3, 4));
    }

    #[test]
    fn a_slot_is_kept_until_its_event_was_taken() {
        let (one, two) = (PeerSlot(1), PeerSlot(2));
        let mut closed = ClosedSlots::default();
        closed.push(one);
        closed.push(two);
        let mut waiting = VecDeque::from([Event::PeerGone { peer: two }]);
        assert_eq!(closed.take_heard(&waiting).collect::<Vec<_>>(), [one]);
        waiting.clear();
        assert_eq!(closed.take_heard(&waiting).collect::<Vec<_>>(), [two]);
        assert!(closed.is_empty());
    }
}
