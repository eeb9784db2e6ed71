//! Turns on a line: one at a time, and nobody waits for one beyond a deadline.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Instant;

/// Hands out numbered turns.
#[derive(Default)]
pub(crate) struct Turns {
    state: Mutex<State>,
    over: Condvar,
}

#[derive(Default)]
struct State {
    taken: bool,
    last: u64,
}

/// The one turn there is; over when dropped.
pub(crate) struct Turn<'a> {
    turns: &'a Turns,
    /// One more than the turn's before it.
    pub(crate) number: u64,
}

impl Turns {
    /// Waits for a turn; `None` if others had theirs until `deadline`.
    pub(crate) fn take(&self, deadline: Instant) -> Option<Turn<'_>> {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self.over.wait_timeout_while(self.lock(), left, |state| state.taken);
        let (mut state, _) = waited.expect("turns");
        if state.taken {
            return None;
        }
        state.taken = true;
        state.last += 1;
        Some(Turn { turns: self, number: state.last })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("turns")
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.turns.lock().taken = false;
        self.turns.over.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn one_at_a_time_until_the_deadline() {
        let turns = Turns::default();
        let within = |limit| turns.take(Instant::now() + limit);
        let first = within(Duration::ZERO).unwrap();
        assert!(within(Duration::ZERO).is_none() && within(Duration::from_millis(1)).is_none());
        std::thread::scope(|scope| {
            let waiting = [(); 4].map(|()| {
                scope.spawn(|| within(Duration::from_secs(5)).expect("the one before is over").number)
            });
            drop(first);
            let mut numbers = waiting.map(|thread| thread.join().unwrap());
            numbers.sort_unstable();
            assert_eq!(numbers, [2, 3, 4, 5]);
        });
    }
}
