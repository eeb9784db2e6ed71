//! When to offer the next connection again. A connection cannot be made while a link is down: the kernel does not find
//! the peer's address, or the port is not active.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use multirail_spi::{PeerSlot, Time};

/// The wait after the first failure. It doubles with each further one.
pub(crate) const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_millis(3200);

/// The slots that wait before they offer the next connection again.
pub(crate) struct Retries {
    slots: Mutex<Vec<Retry>>,
    /// When the next wait is over, in nanoseconds of the clock.
    next: AtomicU64,
}

struct Retry {
    slot: PeerSlot,
    wait: Duration,
    /// `NEVER` once the wait is over.
    due: Time,
}

impl Default for Retries {
    fn default() -> Self {
        Self { slots: Mutex::default(), next: AtomicU64::new(u64::MAX) }
    }
}

impl Retries {
    fn lock(&self) -> MutexGuard<'_, Vec<Retry>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn update_next(&self, slots: &[Retry]) {
        let next = slots.iter().map(|retry| retry.due.as_nanos()).min();
        self.next.store(next.unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Notes that the next connection of a slot could not be made. Returns the wait until the next attempt.
    pub(crate) fn note_failure(&self, slot: PeerSlot, now: Time) -> Duration {
        let mut slots = self.lock();
        let known = slots.iter_mut().find(|retry| retry.slot == slot);
        let wait = known.as_ref().map_or(FIRST_WAIT, |retry| (retry.wait * 2).min(LONGEST_WAIT));
        let retry = Retry { slot, wait, due: now.after(wait) };
        match known {
            Some(known) => *known = retry,
            None => slots.push(retry),
        }
        self.update_next(&slots);
        wait
    }

    /// Forgets the failures of a slot: it is connected, or its peer has left.
    pub(crate) fn forget(&self, slot: PeerSlot) {
        let mut slots = self.lock();
        slots.retain(|retry| retry.slot != slot);
        self.update_next(&slots);
    }

    /// Whether a wait is over. Each one counts once.
    pub(crate) fn take_due(&self, now: Time) -> bool {
        if self.next.load(Ordering::Relaxed) > now.as_nanos() {
            return false;
        }
        let mut slots = self.lock();
        let mut is_due = false;
        for retry in slots.iter_mut().filter(|retry| retry.due <= now) {
            (retry.due, is_due) = (Time::NEVER, true);
        }
        self.update_next(&slots);
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_until_the_slot_is_connected() {
        let (retries, slot) = (Retries::default(), PeerSlot(3));
        let mut now = Time::ZERO;
        for wait in [100, 200, 400, 800, 1600, 3200, 3200] {
            let wait = Duration::from_millis(wait);
            assert_eq!(retries.note_failure(slot, now), wait);
            assert!(!retries.take_due(now.after(wait / 2)));
            now = now.after(wait);
            assert!(retries.take_due(now) && !retries.take_due(now));
        }
        retries.forget(slot);
        assert_eq!(retries.note_failure(slot, now), FIRST_WAIT);
        // Another slot has its own wait.
        retries.note_failure(slot, now);
        assert_eq!(retries.note_failure(PeerSlot(4), now), FIRST_WAIT);
        assert!(retries.take_due(now.after(FIRST_WAIT)) && !retries.take_due(now.after(FIRST_WAIT)));
        retries.forget(slot);
        assert!(!retries.take_due(Time::from_nanos(u64::MAX - 1)));
    }
}
