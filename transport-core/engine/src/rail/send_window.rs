//! How many bytes a rail posts ahead of their completions.
//!
//! A NIC sends work requests in the order in which they were posted. If the engine filled the send queue with large
//! requests, a small write to any peer would wait for all of them: 4096 requests of 64 KiB take 22 ms at 100 Gbps.
//! So the engine posts only as many bytes as keep the link busy until the next completion arrives. The rest stays in
//! the operations' plans, where the engine schedules it fairly.

use std::time::Duration;

use super::speed_meter::FULL_SPEED;
use crate::spi::{Capabilities, Progress};

/// The window in round trips of the link rate. One round trip keeps the link busy if the engine sees completions
/// without delay. The second one covers the time until the engine sees a completion and acts on it.
const ROUND_TRIPS: u64 = 2;

/// The window of a device that does not report its link rate: a batch of pages of 64 KiB. The window of a device that
/// reports it may grow to this size, or to its own two round trips if they are more.
const DEFAULT_LIMIT: u64 = 4 << 20;

/// The largest window of a device that does not report its link rate: 5 ms at 100 Gbps. Linux rarely keeps a thread
/// off a shared core for longer than that.
const MAX_LIMIT: u64 = 16 * DEFAULT_LIMIT;

/// The send window of one rail: how many bytes may be posted and not acknowledged.
///
/// The window covers a few round trips as long as the engine polls more often than once per round trip. An engine
/// that polls rarely (its caller does other work, or its thread lost its core) finds all requests completed and the
/// link idle, although more bytes wait to be posted. Then the window doubles. This delays no other peer, because
/// everything in the window completes between two polls. If a later poll finds requests that are not completed, the
/// window shrinks by an eighth.
///
/// The engine calls the number of bytes that a request takes of the window its *cost*.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SendWindow {
    limit: u64,
    min_limit: u64,
    max_limit: u64,
    /// `min_limit` of a rail at its full speed.
    full_min_limit: u64,
    /// Whether the full window stopped the engine from posting since the last poll.
    was_blocked: bool,
    /// The smallest cost of a request: the bytes that the link could send while the device processes a request
    /// without bytes.
    min_cost: u64,
}

impl SendWindow {
    /// The window for a device. It has no limit if the posting thread itself moves the bytes.
    pub fn of(capabilities: &Capabilities) -> Self {
        if capabilities.progress == Progress::Manual {
            return Self::of_bytes(u64::MAX, 0);
        }
        let Some(bits) = capabilities.link_bits_per_s.filter(|bits| *bits > 0) else {
            return Self { max_limit: MAX_LIMIT, ..Self::of_bytes(DEFAULT_LIMIT, 0) };
        };
        let min_cost = capabilities.requests_per_s.map_or(0, |rate| bits / 8 / rate.max(1));
        Self::of_bytes(bytes_in(bits, capabilities.round_trip).saturating_mul(ROUND_TRIPS), min_cost)
    }

    fn of_bytes(limit: u64, min_cost: u64) -> Self {
        let max_limit = limit.max(DEFAULT_LIMIT);
        Self { limit, min_limit: limit, max_limit, full_min_limit: limit, was_blocked: false, min_cost }
    }

    /// The most bytes that are posted and not acknowledged.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Adapts the window. The engine calls this before it fills a batch; `cost_in_flight` is the sum of the costs of
    /// all requests that are not acknowledged.
    #[inline]
    pub fn adapt(&mut self, cost_in_flight: u64) {
        if std::mem::take(&mut self.was_blocked) {
            self.limit = match cost_in_flight {
                0 => self.limit.saturating_mul(2).min(self.max_limit),
                _ => (self.limit - self.limit / 8).max(self.min_limit),
            };
        }
    }

    /// Whether the window limits anything.
    pub fn is_limited(&self) -> bool {
        self.limit < u64::MAX
    }

    /// Whether the full window stopped the engine from posting since the last call of [`SendWindow::adapt`].
    #[inline]
    pub fn was_blocked(&self) -> bool {
        self.was_blocked
    }

    /// Fits the window to the speed of the rail, as a part of [`FULL_SPEED`]: what a slow rail has posted is what an
    /// operation waits for at its end.
    #[cold]
    pub fn set_speed(&mut self, speed: u32) {
        if self.is_limited() {
            let limit = u128::from(self.full_min_limit) * u128::from(speed) / u128::from(FULL_SPEED);
            self.min_limit = u64::try_from(limit).unwrap_or(self.full_min_limit);
            self.limit = match speed {
                FULL_SPEED => self.limit.max(self.min_limit),
                _ => self.min_limit,
            };
        }
    }

    /// Notes that the full window stopped the engine from posting a request.
    #[inline]
    pub fn on_blocked(&mut self) {
        self.was_blocked = true;
    }

    /// Notes that the engine evicted all requests from the window although they are not completed.
    pub fn on_evicted(&mut self) {
        self.was_blocked = false;
    }

    /// The cost of a request of `bytes` bytes.
    #[inline]
    pub fn cost(&self, bytes: u64) -> u64 {
        bytes.max(self.min_cost)
    }

    /// As [`SendWindow::cost`], for a piece of an operation. With the mask 0 the piece shares a request with others, and costs
    /// its bytes alone; otherwise all bits of the mask are set.
    #[inline]
    pub fn masked_cost(&self, bytes: u64, mask: u64) -> u64 {
        bytes.max(self.min_cost & mask)
    }

    /// Whether one more request of `cost` may be posted; see [`SendWindow::room`].
    #[inline]
    pub fn has_room(&self, cost_in_flight: u64, oldest_cost: u64, cost: u64) -> bool {
        self.limit_for(oldest_cost, cost) > cost_in_flight
    }

    /// How many more requests of `cost` may be posted. `cost_in_flight` is the sum of the costs of all requests that
    /// are not acknowledged; `oldest_cost` is the cost of a request of the oldest run among them. Two requests of these
    /// costs always fit, so that the link is never idle.
    #[inline]
    pub fn room(&self, cost_in_flight: u64, oldest_cost: u64, cost: u64) -> u64 {
        self.limit_for(oldest_cost, cost).saturating_sub(cost_in_flight).div_ceil(cost.max(1))
    }

    /// The limit, or twice the larger cost if that is more.
    #[inline]
    fn limit_for(&self, oldest_cost: u64, cost: u64) -> u64 {
        self.limit.max(2 * cost.max(oldest_cost))
    }
}

/// The bytes that a link of `bits_per_s` carries in `span`.
fn bytes_in(bits_per_s: u64, span: Duration) -> u64 {
    u64::try_from(u128::from(bits_per_s / 8) * span.as_nanos() / 1_000_000_000).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn p5() -> SendWindow {
        let mut nic = Capabilities::minimal();
        nic.progress = Progress::Auto;
        nic.link_bits_per_s = Some(100_000_000_000);
        nic.requests_per_s = Some(1_000_000);
        nic.round_trip = Duration::from_micros(16);
        SendWindow::of(&nic)
    }

    #[test]
    fn it_covers_two_round_trips() {
        let window = p5();
        assert_eq!((window.limit, window.cost(0), window.cost(1 << 20)), (400_000, 12_500, 1 << 20));
        assert_eq!(window.room(0, 0, 65536), 7);
        assert_eq!(window.room(7 * 65536, 65536, 65536), 0);
        // A request of no bytes keeps the device busy too.
        assert_eq!(window.room(0, 0, window.cost(0)), 32);
    }

    #[test]
    fn it_grows_where_polls_are_rare_and_shrinks_where_they_are_not() {
        let mut window = p5();
        window.adapt(0);
        assert_eq!(window.limit, 400_000, "the window blocked nothing");
        let mut limits = Vec::new();
        for posted in [0, 0, 0, 0, 65536, 65536] {
            window.on_blocked();
            window.adapt(posted);
            limits.push(window.limit);
        }
        assert_eq!(
            limits,
            [800_000, 1_600_000, 3_200_000, DEFAULT_LIMIT, DEFAULT_LIMIT - DEFAULT_LIMIT / 8, 3_211_264]
        );
        for _ in 0..20 {
            window.on_blocked();
            window.adapt(1);
        }
        assert_eq!(window.limit, 400_000);
    }

    #[test]
    fn two_requests_of_any_size_may_be_posted() {
        let (window, large) = (p5(), 1 << 30);
        assert_eq!([0, 1, 2].map(|posted| window.room(posted * large, large, large)), [2, 1, 0]);
        // A small request takes the place of a large one, and the next large one still fits.
        assert_eq!(window.room(large, large, 12_500).min(1), 1);
        assert_eq!(window.room(large + 12_500, large, large), 1);
    }

    #[test]
    fn a_backend_that_copies_in_the_posting_thread_has_no_window() {
        let mut other = Capabilities::minimal();
        assert!(SendWindow::of(&other).room(1 << 40, 1 << 30, 1 << 30) > 1 << 20);
        other.progress = Progress::Auto;
        let mut unknown = SendWindow::of(&other);
        let mut limits = Vec::new();
        for posted in [0, 0, 0, 0, 0, 1] {
            limits.push(unknown.limit / DEFAULT_LIMIT);
            unknown.on_blocked();
            unknown.adapt(posted);
        }
        assert_eq!(limits, [1, 2, 4, 8, 16, 16]);
        assert!(unknown.limit < MAX_LIMIT, "some requests were still posted at a poll");
    }
}
