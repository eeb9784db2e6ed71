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

/// The window of a device that does not know its line rate: a batch of pages of 64 KiB.
const UNKNOWN: u64 = 4 << 20;

/// Bytes that may be posted on a rail and not be acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    limit: u64,
    /// What a request takes of it at least: the line that passes while the device is busy
    /// with a request of no bytes.
    least: u64,
}

impl Window {
    /// Of a device. Where posting itself moves the bytes there is nothing to bound.
    pub fn of(capabilities: &Capabilities) -> Self {
        if capabilities.progress == Progress::Manual {
            return Self { limit: u64::MAX, least: 0 };
        }
        let Some(bits) = capabilities.link_bits_per_s.filter(|bits| *bits > 0) else {
            return Self { limit: UNKNOWN, least: 0 };
        };
        let least = capabilities.requests_per_s.map_or(0, |rate| bits / 8 / rate.max(1));
        Self { limit: bytes_in(bits, capabilities.round_trip).saturating_mul(ROUND_TRIPS), least }
    }

    /// What a request of so many bytes takes.
    #[inline]
    pub fn charge(&self, bytes: u64) -> u64 {
        bytes.max(self.least)
    }

    /// Whether one of `charge` may: see [`Window::room`].
    #[inline]
    pub fn has_room(&self, posted: u64, largest: u64, charge: u64) -> bool {
        self.limit.max(2 * charge.max(largest)) > posted
    }

    /// Requests of `charge` that may follow `posted` of charges, the largest of which
    /// is `largest`. Two of any size always may, so that the line is never idle.
    #[inline]
    pub fn room(&self, posted: u64, largest: u64, charge: u64) -> u64 {
        let limit = self.limit.max(2 * charge.max(largest));
        limit.saturating_sub(posted).div_ceil(charge.max(1))
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
        assert_eq!(Window::of(&other).limit, UNKNOWN);
    }
}
