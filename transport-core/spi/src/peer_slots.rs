//! A table of peer slots, for backends that keep one. Control threads change it, and the endpoint reads it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::{Event, PeerSlot};

/// A table that any thread may change under a lock. The endpoint locks it only if it has changed.
#[derive(Debug, Default)]
pub struct SlotTable<T> {
    table: Mutex<T>,
    /// The number of changes.
    changes: AtomicU64,
}

impl<T> SlotTable<T> {
    /// Locks the table. If a caller has changed something that the endpoint reads, it calls
    /// [`SlotTable::mark_changed`].
    pub fn lock(&self) -> MutexGuard<'_, T> {
        // No holder of the lock panics in the middle of a change. So a poisoned table is consistent.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the endpoint read the table again.
    pub fn mark_changed(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// The number of changes so far.
    #[inline]
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Locks the table if it has changed since the last call with this `seen`, which holds the number of changes at
    /// that call. The first call passes [`u64::MAX`].
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

/// The index of the first slot that `is_free`; of a new slot if there is none.
pub fn claim_slot<S: Default>(slots: &mut Vec<S>, is_free: impl Fn(&S) -> bool) -> usize {
    slots.iter().position(is_free).unwrap_or_else(|| {
        slots.push(S::default());
        slots.len() - 1
    })
}

/// Disconnected slots that are not free yet.
///
/// The endpoint queues [`Event::PeerGone`] for a slot, and adds the slot here. A poll takes the event. The engine acts
/// on the event before it polls again. In that next poll the endpoint takes the slot out, and makes it free. If the
/// slot were free earlier, a new peer could get it, and the engine would apply the event to the new peer.
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

    /// Takes the slots on whose events the engine has acted. The endpoint calls this at the beginning of a poll.
    /// `queued` are the events that no poll has taken yet.
    pub fn take_free<'a>(&'a mut self, queued: &'a VecDeque<Event>) -> impl Iterator<Item = PeerSlot> + 'a {
        let is_taken = |peer: &mut PeerSlot| !queued.contains(&Event::PeerGone { peer: *peer });
        self.0.extract_if(.., is_taken)
    }

    /// Takes all slots. For an endpoint that is closed.
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
        assert!(table.lock_if_changed(&mut seen).is_none(), "the change is not marked");
        table.mark_changed();
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
        assert_eq!(closed.take_free(&waiting).collect::<Vec<_>>(), [one]);
        waiting.clear();
        assert_eq!(closed.take_free(&waiting).collect::<Vec<_>>(), [two]);
        assert!(closed.is_empty());
    }
}
