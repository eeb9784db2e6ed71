//! Latencies, without letting the clock become part of what is measured.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

/// Highest latency that is told apart: above every deadline.
const HIGHEST_NS: u64 = 120_000_000_000;

/// Times one operation in `every` and keeps a histogram of them.
pub struct Sampler {
    every: u32,
    left: u32,
    /// What two readings of the clock take by themselves.
    clock: Duration,
    histogram: Histogram<u64>,
}

impl Sampler {
    /// A sampler for operations that take about `each`; `Duration::MAX` samples none.
    pub fn new(each: Duration) -> Self {
        // Two readings take about 50 ns: keep them to a few percent of the loop.
        let every = match each {
            Duration::MAX => u32::MAX,
            each if each < Duration::from_nanos(500) => 64,
            each if each < Duration::from_micros(2) => 16,
            _ => 1,
        };
        let histogram = Histogram::new_with_bounds(1, HIGHEST_NS, 3).expect("1 ns to 120 s, 3 digits");
        Self { every, left: every, clock: clock(), histogram }
    }

    /// Whether to time the next operation.
    #[inline]
    pub fn due(&mut self) -> bool {
        self.left -= 1;
        if self.left == 0 {
            self.left = self.every;
            return self.every != u32::MAX;
        }
        false
    }

    /// Keeps one latency.
    #[inline]
    pub fn record(&mut self, took: Duration) {
        self.histogram.saturating_record(took.saturating_sub(self.clock).as_nanos() as u64);
    }

    /// The latency in µs that this share of the operations did not exceed.
    pub fn quantile_us(&self, share: f64) -> f64 {
        self.histogram.value_at_quantile(share) as f64 / 1e3
    }

    /// The highest latency seen, in µs.
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
    fn samples_as_often_as_said() {
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
}
