//! How much a device is given ahead of its line.
//!
//! A card sends what it was given in order. With a whole send queue of large requests
//! ahead, a small write to anybody waits for all of them: 4096 requests of 64 KiB are
//! 22 ms of a line of 100 Gbps. So the engine posts only what keeps the line busy until
//! the next completion is here, and keeps the rest as plans, where it is fair.

use std::time::Duration;

use crate::spi::{Capabilities, Progress};

/// Round trips' worth of line that are posted. One keeps the line busy if completions
/// come back without delay; the second covers how late they are seen and acted upon.
const ROUND_TRIPS: u64 = 2;

/// The window of a device that does not know its line rate, and the most that one is opened to that
/// does: a batch of pages of 64 KiB.
const UNKNOWN: u64 = 4 << 20;

/// The most that the window is opened to of a device that does not know its line rate: 5 ms of a line of
/// 100 Gbps, which is longer than Linux mostly keeps a thread off a core that it shares.
const WIDEST: u64 = 16 * UNKNOWN;

/// Bytes that may be posted on a rail and not be acknowledged.
///
/// Round trips bound it while somebody looks more often than that. Who looks later (a caller with
/// other things to do, a thread that was not on its core) finds that all has ended, and the line
/// idle while more was to be sent: then it is opened, to twice as much each time. Nobody waits
/// longer for that, as all of it ends between two looks. When some is still posted at a look it
/// closes again, by an eighth each time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    limit: u64,
    /// What it is at least, and at most.
    base: u64,
    widest: u64,
    /// It kept something from being posted since the last look.
    is_short: bool,
    /// What a request takes of it at least: the line that passes while the device is busy
    /// with a request of no bytes.
    least: u64,
}

impl Window {
    /// Of a device. Where posting itself moves the bytes there is nothing to bound.
    pub fn of(capabilities: &Capabilities) -> Self {
        if capabilities.progress == Progress::Manual {
            return Self::of_bytes(u64::MAX, 0);
        }
        let Some(bits) = capabilities.link_bits_per_s.filter(|bits| *bits > 0) else {
            return Self { widest: WIDEST, ..Self::of_bytes(UNKNOWN, 0) };
        };
        let least = capabilities.requests_per_s.map_or(0, |rate| bits / 8 / rate.max(1));
        Self::of_bytes(bytes_in(bits, capabilities.round_trip).saturating_mul(ROUND_TRIPS), least)
    }

    fn of_bytes(base: u64, least: u64) -> Self {
        Self { limit: base, base, widest: base.max(UNKNOWN), is_short: false, least }
    }

    /// Somebody looks, and finds `posted` of charges.
    #[inline]
    pub fn look(&mut self, posted: u64) {
        if std::mem::take(&mut self.is_short) {
            self.limit = match posted {
                0 => self.limit.saturating_mul(2).min(self.widest),
                _ => (self.limit - self.limit / 8).max(self.base),
            };
        }
    }

    /// There was no room for something.
    #[inline]
    pub fn falls_short(&mut self) {
        self.is_short = true;
    }

    /// What was posted does not count any more, and has not ended.
    pub fn settles(&mut self) {
        self.is_short = false;
    }

    /// What a request of so many bytes takes.
    #[inline]
    pub fn charge(&self, bytes: u64) -> u64 {
        bytes.max(self.least)
    }

    /// Whether one of `charge` may: see [`Window::room`].
    #[inline]
    pub fn has_room(&self, posted: u64, largest: u64, charge: u64) -> bool {
        self.limit_for(largest, charge) > posted
    }

    /// Requests of `charge` that may follow `posted` of charges, the largest of which
    /// is `largest`. Two of any size always may, so that the line is never idle.
    #[inline]
    pub fn room(&self, posted: u64, largest: u64, charge: u64) -> u64 {
        self.limit_for(largest, charge).saturating_sub(posted).div_ceil(charge.max(1))
    }

    /// The limit, or what two of the larger one take.
    #[inline]
    fn limit_for(&self, largest: u64, charge: u64) -> u64 {
        self.limit.max(2 * charge.max(largest))
    }
}

/// Bytes that a line of so many bits per second carries in `span`.
fn bytes_in(bits_per_s: u64, span: Duration) -> u64 {
    u64::try_from(u128::from(bits_per_s / 8) * span.as_nanos() / 1_000_000_000).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn p5() -> Window {
        let mut card = Capabilities::minimal();
        card.progress = Progress::Auto;
        card.link_bits_per_s = Some(100_000_000_000);
        card.requests_per_s = Some(1_000_000);
        card.round_trip = Duration::from_micros(16);
        Window::of(&card)
    }

    #[test]
    fn it_covers_two_round_trips_of_line() {
        let window = p5();
        assert_eq!((window.limit, window.charge(0), window.charge(1 << 20)), (400_000, 12_500, 1 << 20));
        assert_eq!(window.room(0, 0, 65536), 7);
        assert_eq!(window.room(7 * 65536, 65536, 65536), 0);
        // A request of no bytes keeps the device busy too.
        assert_eq!(window.room(0, 0, window.charge(0)), 32);
    }

    #[test]
    fn it_opens_where_looks_are_rare_and_closes_where_they_are_not() {
        let mut window = p5();
        window.look(0);
        assert_eq!(window.limit, 400_000, "nothing was kept from being posted");
        let mut limits = Vec::new();
        for posted in [0, 0, 0, 0, 65536, 65536] {
            window.falls_short();
            window.look(posted);
            limits.push(window.limit);
        }
        assert_eq!(limits, [800_000, 1_600_000, 3_200_000, UNKNOWN, UNKNOWN - UNKNOWN / 8, 3_211_264]);
        for _ in 0..20 {
            window.falls_short();
            window.look(1);
        }
        assert_eq!(window.limit, 400_000);
    }

    #[test]
    fn two_requests_of_any_size_may_be_posted() {
        let (window, large) = (p5(), 1 << 30);
        assert_eq!([0, 1, 2].map(|posted| window.room(posted * large, large, large)), [2, 1, 0]);
        // A small one gets the place of a large one, and the next large one still goes.
        assert_eq!(window.room(large, large, 12_500).min(1), 1);
        assert_eq!(window.room(large + 12_500, large, large), 1);
    }

    #[test]
    fn who_copies_in_the_posting_thread_has_none() {
        let mut other = Capabilities::minimal();
        assert!(Window::of(&other).room(1 << 40, 1 << 30, 1 << 30) > 1 << 20);
        other.progress = Progress::Auto;
        let mut unknown = Window::of(&other);
        let mut limits = Vec::new();
        for posted in [0, 0, 0, 0, 0, 1] {
            limits.push(unknown.limit / UNKNOWN);
            unknown.falls_short();
            unknown.look(posted);
        }
        assert_eq!(limits, [1, 2, 4, 8, 16, 16]);
        assert!(unknown.limit < WIDEST, "some is still posted at a look");
    }
}
