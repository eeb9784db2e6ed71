//! A lock that a caller waits for until a deadline.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Instant;

/// A lock that numbers its holders.
#[derive(Default)]
pub(crate) struct TimedLock {
    state: Mutex<LockState>,
    released: Condvar,
}

#[derive(Default)]
struct LockState {
    is_locked: bool,
    last: u64,
}

/// Holds the lock until it is dropped.
pub(crate) struct TimedLockGuard<'a> {
    lock: &'a TimedLock,
    /// The number of this holder: one more than that of the holder before.
    pub(crate) number: u64,
}

impl TimedLock {
    /// Waits for the lock. Returns `None` if other callers hold it until `deadline`.
    pub(crate) fn lock(&self, deadline: Instant) -> Option<TimedLockGuard<'_>> {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self.released.wait_timeout_while(self.state(), left, |state| state.is_locked);
        let (mut state, _) = waited.expect("timed lock");
        if state.is_locked {
            return None;
        }
        state.is_locked = true;
        state.last += 1;
        Some(TimedLockGuard { lock: self, number: state.last })
    }

    fn state(&self) -> MutexGuard<'_, LockState> {
        self.state.lock().expect("timed lock")
    }
}

impl Drop for TimedLockGuard<'_> {
    fn drop(&mut self) {
        self.lock.state().is_locked = false;
        self.lock.released.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn one_at_a_time_until_the_deadline() {
        let lock = TimedLock::default();
        let within = |limit| lock.lock(Instant::now() + limit);
        let first = within(Duration::ZERO).unwrap();
        assert!(within(Duration::ZERO).is_none() && within(Duration::from_millis(1)).is_none());
        std::thread::scope(|scope| {
            let waiting = [(); 4].map(|()| {
                scope.spawn(|| within(limit::HANG).expect("the holder before has released it").number)
            });
            drop(first);
            let mut numbers = waiting.map(|thread| thread.join().unwrap());
            numbers.sort_unstable();
            assert_eq!(numbers, [2, 3, 4, 5]);
        });
    }
}
