//! How fast a rail is, measured by what it completes while it has more to post than it may.

use std::time::Duration;

use crate::Time;

/// The speed of a rail that is as fast as its device reports, or as the fastest other rail.
pub(crate) const FULL_SPEED: u32 = 64;

/// A sample covers at least this many send windows, without a moment in which the rail had nothing to wait for. Shorter
/// ones tell how the engine's polls fall, and not how fast a rail is. The engine begins anew where it polls too rarely:
/// simulated cards on a busy processor got up to four times as many bytes as others before.
const WINDOWS: u64 = 4;

/// A sample covers at least this many round trips of the device, and [`LEAST_SAMPLE`].
const ROUND_TRIPS: u32 = 8;
const LEAST_SAMPLE: Duration = Duration::from_micros(100);

/// A mean without a new sample for so long counts no more.
const MAX_AGE: Duration = Duration::from_millis(50);

/// A new sample counts this part of the mean.
const NEWEST: u64 = 4;

/// A rail counts as slow if it has less than a quarter of the fastest one's speed. Rails of equal speed may differ by a
/// factor of two from sample to sample, and their shares should stay equal. Rails that are less slow leave pieces to
/// others (`ActiveOp::take_over`).
const SLOW: u32 = FULL_SPEED / 4;

/// A slow rail counts as a little slower than it is, by 1 in [`MARGIN`]. An operation ends when its last piece does, and a
/// rail whose queue is always full makes others wait for it: without the margin, 32 cards of which one is ten times slower
/// reached 94 % of what they can do together, and 99 % with it (`healing_throughput::a_slow_card_costs_what_it_is_slower`).
const MARGIN: u32 = 8;

/// Measures the speed of one rail: an exponentially weighted mean of samples. A sample is the cost (see
/// [`SendWindow`](super::send_window::SendWindow)) of the requests that have ended in a span of time, during which the
/// send window or the send queue was full all the time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SpeedMeter {
    /// What the device reports, in cost per second. `None` if it reports nothing: its speed is not measured.
    nominal: Option<u64>,
    sample_span: Duration,
    least_cost: u64,
    /// The beginning of the sample, and the cost of all requests that had ended by then.
    begin: Option<(Time, u64)>,
    /// The mean, in cost per second.
    mean: Option<u64>,
    /// The time of the last sample.
    sampled_at: Time,
}

impl SpeedMeter {
    /// The meter of a device that reports `nominal` bytes per second, and whose send window has `window` bytes.
    pub fn new(nominal: Option<u64>, round_trip: Duration, window: u64) -> Self {
        let sample_span = LEAST_SAMPLE.max(round_trip * ROUND_TRIPS);
        let least_cost = window.saturating_mul(WINDOWS);
        Self { nominal, sample_span, least_cost, begin: None, mean: None, sampled_at: Time::ZERO }
    }

    #[inline]
    pub fn is_on(&self) -> bool {
        self.nominal.is_some()
    }

    /// Notes the cost of all requests that have ended. `was_full`: the rail could not post all it had since the last
    /// call. Returns true if the mean has changed: there is a sample, or the last one is so old that it counts no more.
    /// A rail with a small share may never fill its window, and must not be held slow for ever.
    pub fn note(&mut self, now: Time, ended_cost: u64, was_full: bool) -> bool {
        if self.mean.is_some() && now.since(self.sampled_at) >= MAX_AGE {
            (self.mean, self.begin) = (None, Some((now, ended_cost)));
            return true;
        }
        let Some((since, ended_before)) = self.begin.filter(|_| was_full) else {
            self.begin = Some((now, ended_cost));
            return false;
        };
        let span = now.since(since);
        if span < self.sample_span || ended_cost - ended_before < self.least_cost {
            return false;
        }
        let cost = u128::from(ended_cost - ended_before) * 1_000_000_000 / span.as_nanos();
        let sample = u64::try_from(cost).unwrap_or(u64::MAX / NEWEST).min(u64::MAX / NEWEST);
        self.mean = Some(self.mean.map_or(sample, |mean| mean - mean / NEWEST + sample / NEWEST));
        (self.begin, self.sampled_at) = (Some((now, ended_cost)), now);
        true
    }

    /// Begins a new sample: the rail has stopped for another reason than its speed.
    pub fn restart(&mut self) {
        self.begin = None;
    }

    /// The mean relative to what the device reports, in 1/[`FULL_SPEED`].
    pub fn relative(&self) -> Option<u32> {
        let (mean, nominal) = (self.mean?, self.nominal?);
        let relative = u128::from(mean) * u128::from(FULL_SPEED) / u128::from(nominal.max(1));
        Some(u32::try_from(relative).unwrap_or(u32::MAX))
    }
}

/// The speed of each rail relative to the fastest: at most [`FULL_SPEED`], and exactly that if the rail is not slow or
/// was not measured. A rail that was not measured has had nothing to wait for, so it is as fast as its device reports.
/// `relative` are those of [`SpeedMeter::relative`].
pub(crate) fn speeds(
    relative: impl Iterator<Item = Option<u32>> + Clone,
) -> impl Iterator<Item = u32> + Clone {
    let fastest = relative.clone().map(|relative| relative.unwrap_or(FULL_SPEED)).max().unwrap_or(1).max(1);
    relative.map(move |relative| {
        let speed = relative.map_or(FULL_SPEED, |relative| {
            (u64::from(relative) * u64::from(FULL_SPEED) / u64::from(fastest)) as u32
        });
        if speed < SLOW { (speed - speed.div_ceil(MARGIN)).max(1) } else { FULL_SPEED }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_rail_is_found_while_it_is_full_and_forgotten_later() {
        let mut meter = SpeedMeter::new(Some(1_000_000_000), Duration::from_micros(10), 10_000 / WINDOWS);
        let at = |us| Time::ZERO.after(Duration::from_micros(us));
        assert!(!meter.note(at(0), 0, true));
        assert!(!meter.note(at(50), 5_000, true), "too short");
        assert!(meter.note(at(100), 10_000, true));
        assert_eq!(meter.relative(), Some(6), "a tenth");
        assert!(!meter.note(at(300), 210_000, false), "it was idle meanwhile");
        assert!(!meter.note(at(390), 300_000, true));
        assert!(meter.note(at(400), 310_000, true));
        assert_eq!(meter.relative(), Some(20), "three parts of a tenth, and one of the full speed");
        assert!(!meter.note(at(49_000), 310_000, false) && meter.relative().is_some());
        assert!(meter.note(at(51_000), 310_000, false));
        assert_eq!(meter.relative(), None);
    }

    #[test]
    fn rails_are_compared_with_the_fastest() {
        let of = |relative: &[Option<u32>]| speeds(relative.iter().copied()).collect::<Vec<_>>();
        assert_eq!(of(&[None, None]), [64, 64]);
        assert_eq!(of(&[Some(32), Some(15), None]), [64, 13, 64]);
        assert_eq!(of(&[Some(60), Some(6), Some(0)]), [64, 5, 1]);
    }
}
