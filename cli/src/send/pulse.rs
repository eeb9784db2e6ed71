//! When to tell a server that we are at work.

use std::time::{Duration, Instant};

/// Beats once in a while.
pub struct Pulse {
    every: Duration,
    last: Instant,
}

impl Pulse {
    /// Beats after `every`, and not before.
    pub fn new(every: Duration) -> Self {
        Self { every, last: Instant::now() }
    }

    /// Whether it is time; then it is not for a while.
    pub fn is_due(&mut self) -> bool {
        let due = self.last.elapsed() >= self.every;
        if due {
            self.last = Instant::now();
        }
        due
    }
}
