//! The delays between attempts to reach what does not answer.

use std::time::Duration;

/// Delays that double, each shortened by a random share of up to a half, so that the processes of a fleet do not all
/// come back at the same moment.
#[derive(Debug)]
pub(crate) struct Backoff {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Backoff {
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, next: first }
    }

    /// The delay before the next attempt.
    pub fn next(&mut self) -> Duration {
        let whole = self.next;
        self.next = whole.saturating_mul(2).min(self.longest);
        whole.mul_f64(1.0 - 0.5 * fastrand::f64())
    }

    /// Begins again with the first delay.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_longest() {
        let millis = Duration::from_millis;
        let mut backoff = Backoff::new(millis(50), millis(300));
        for whole in [50, 100, 200, 300, 300].map(millis) {
            let delay = backoff.next();
            assert!(delay <= whole && delay >= whole.mul_f64(0.499), "{delay:?} of {whole:?}");
        }
        backoff.reset();
        assert!(backoff.next() <= millis(50));
    }
}
