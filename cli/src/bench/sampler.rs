//! Latencies, measured so that reading the clock changes the result little.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

/// The highest latency of the histogram, above every deadline.
const HIGHEST_NS: u64 = 120_000_000_000;

/// Times one of `every` operations and keeps a histogram of the latencies.
pub struct Sampler {
    every: u32,
    left: u32,
    /// The time of two readings of the clock.
    clock: Duration,
    /// The time that posting took, of all recorded operations.
    posting: Duration,
    histogram: Histogram<u64>,
}

impl Sampler {
    /// A sampler for operations that take about `each`. `Duration::MAX` samples none.
    pub fn new(each: Duration) -> Self {
        // Three readings take about 75 ns. They must be a few percent of the loop at most.
        let every = match each {
            Duration::MAX => u32::MAX,
            each if each < Duration::from_nanos(500) => 64,
            each if each < Duration::from_micros(2) => 16,
            _ => 1,
        };
        let histogram = Histogram::new_with_bounds(1, HIGHEST_NS, 3).expect("1 ns to 120 s, 3 digits");
        Self { every, left: every, clock: clock(), posting: Duration::ZERO, histogram }
    }

    /// Returns true if the next operation should be timed.
    #[inline]
    pub fn due(&mut self) -> bool {
        self.left -= 1;
        if self.left == 0 {
            self.left = self.every;
            return self.every != u32::MAX;
        }
        false
    }

    /// Records one latency.
    #[inline]
    pub fn record(&mut self, took: Duration) {
        self.histogram.saturating_record(took.saturating_sub(self.clock).as_nanos() as u64);
    }

    /// Records an operation that was posted between `begun` and `posted`.
    #[inline]
    pub fn record_op(&mut self, begun: Instant, posted: Instant, ended: Instant) {
        let posting = (posted - begun).saturating_sub(self.clock);
        self.posting += posting;
        self.record(posting + (ended - posted));
    }

    /// The mean time in µs that posting took.
    pub fn mean_posting_us(&self) -> f64 {
        self.posting.as_nanos() as f64 / 1e3 / self.histogram.len().max(1) as f64
    }

    /// The latency in µs that this share of the operations did not exceed.
    pub fn quantile_us(&self, share: f64) -> f64 {
        self.histogram.value_at_quantile(share) as f64 / 1e3
    }

    /// The highest latency in µs.
    pub fn max_us(&self) -> f64 {
        self.histogram.max() as f64 / 1e3
    }
}

fn clock() -> Duration {
    let mut readings: Vec<_> = (0..101).map(|_| Instant::now().elapsed()).collect();
    readings.sort_unstable();
    readings[readings.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampling_follows_the_duration() {
        let mut all = Sampler::new(Duration::from_micros(10));
        assert!((0..10).all(|_| all.due()));
        let mut few = Sampler::new(Duration::from_nanos(100));
        assert_eq!((0..640).filter(|_| few.due()).count(), 10);
        let mut none = Sampler::new(Duration::MAX);
        assert!((0..1000).all(|_| !none.due()));
    }

    #[test]
    fn quantiles() {
        let mut sampler = Sampler::new(Duration::from_micros(10));
        (1..=1000).for_each(|us| sampler.record(Duration::from_micros(us)));
        assert!((sampler.quantile_us(0.5) - 500.0).abs() < 5.0);
        assert!((sampler.max_us() - 1000.0).abs() < 5.0);
    }

    #[test]
    fn posting_is_a_part_of_the_latency() {
        let mut sampler = Sampler::new(Duration::from_micros(10));
        let begun = Instant::now();
        for us in [100, 300] {
            let posted = begun + Duration::from_micros(us);
            sampler.record_op(begun, posted, posted + Duration::from_micros(600));
        }
        assert!((sampler.mean_posting_us() - 200.0).abs() < 5.0);
        assert!((sampler.max_us() - 900.0).abs() < 5.0);
    }
}
