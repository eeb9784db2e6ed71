//! How long a thread spins before it sleeps: as long as that has paid lately.

use std::time::Duration;

/// The shortest spin.
const LEAST: Duration = Duration::from_micros(5);

/// The length of the next spin of a thread that waits again and again.
///
/// A spin pays if what the thread waits for comes before the spin would be over. Otherwise it has only taken the core
/// from others, perhaps from the thread that it waits for. So each wait that took longer than the longest spin halves
/// the next one, and a shorter wait restores it. Waits that end at once need not be noted.
#[derive(Debug)]
pub(crate) struct AdaptiveSpin {
    most: Duration,
    limit: Duration,
}

impl AdaptiveSpin {
    /// A spin of at most `most`.
    pub(crate) const fn new(most: Duration) -> Self {
        Self { most, limit: most }
    }

    /// How long to spin.
    #[inline]
    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    /// Notes how long the thread has waited.
    #[inline]
    pub(crate) fn note(&mut self, waited: Duration) {
        self.limit = if waited <= self.most { self.most } else { (self.limit / 2).max(LEAST) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    #[test]
    fn long_waits_shorten_the_spin_and_a_short_one_restores_it() {
        let mut spin = AdaptiveSpin::new(100 * US);
        let limits = [1000; 6].map(|waited| {
            spin.note(waited * US);
            spin.limit()
        });
        assert_eq!(limits, [50 * US, 25 * US, 12_500 * US / 1000, 6250 * US / 1000, 5 * US, 5 * US]);
        spin.note(100 * US);
        assert_eq!(spin.limit(), 100 * US);
    }
}
