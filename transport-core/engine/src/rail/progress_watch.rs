//! Whether the oldest request of a rail makes progress.

use std::time::Duration;

use crate::Time;

/// The limit for a request is this many times the longest time that one has taken lately on the rail.
const TIMES_LONGEST: u32 = 4;

/// Watches the oldest request in flight of a rail. The engine looks at it every few milliseconds while operations run,
/// after a poll: so a thread that was kept off its core does not take a completed request for one that is stuck.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ProgressWatch {
    /// The number of the oldest run, and since when it has been the oldest.
    oldest: Option<(u64, Time)>,
    /// The longest time for which one run was the oldest, and then ended. It falls again with time.
    longest: Duration,
}

/// For how long the oldest request of a rail has made no progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stuck {
    pub since: Time,
    pub span: Duration,
    /// The path counts as broken after this time.
    pub limit: Duration,
}

impl ProgressWatch {
    /// Looks at the number of the oldest run in flight. Returns how long it has been that, if it was at the last look.
    pub fn look(&mut self, oldest: Option<u64>, now: Time, least_limit: Duration) -> Option<Stuck> {
        match (self.oldest, oldest) {
            (Some((known, since)), Some(number)) if known == number => {
                let limit = least_limit.max(self.longest * TIMES_LONGEST);
                return Some(Stuck { since, span: now.since(since), limit });
            }
            (Some((_, since)), _) => self.longest = (self.longest - self.longest / 64).max(now.since(since)),
            (None, _) => {}
        }
        self.oldest = oldest.map(|number| (number, now));
        None
    }

    /// Begins anew.
    pub fn reset(&mut self) {
        self.oldest = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_stuck_if_it_stays_the_oldest_and_slow_ones_get_more_time() {
        let (mut watch, limit) = (ProgressWatch::default(), Duration::from_millis(10));
        let at = |ms| Time::ZERO.after(Duration::from_millis(ms));
        let ms = Duration::from_millis;
        assert_eq!(watch.look(Some(1), at(0), limit), None);
        assert_eq!(watch.look(Some(2), at(5), limit), None);
        assert_eq!(
            watch.look(Some(2), at(9), limit),
            Some(Stuck { since: at(5), span: ms(4), limit: ms(20) })
        );
        // It has taken 15 ms.
        assert_eq!(watch.look(None, at(20), limit), None);
        assert_eq!(watch.look(Some(3), at(30), limit), None);
        assert_eq!(watch.look(Some(3), at(31), limit).unwrap().limit, ms(60));
        watch.reset();
        assert_eq!(watch.look(Some(3), at(40), limit), None);
    }
}
