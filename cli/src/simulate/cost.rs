//! The CPU cost of a request on this machine, measured with the engine on null devices.

use std::sync::Arc;
use std::time::{Duration, Instant};

use multirail::VirtualClock;

use super::group::BusyGroup;
use super::profile::{Profile, ProfileName};
use crate::failure::CommandResult;

/// The duration of a round.
const ROUND: Duration = Duration::from_millis(50);
/// The number of rounds. The cheapest counts, because the others were disturbed.
const ROUNDS: usize = 5;

/// Measures the nanoseconds of one request, from submission to completion, on `cards` null devices.
pub fn measured(cards: u32) -> CommandResult<f64> {
    let mut profile = Profile::named(ProfileName::P5);
    (profile.cards, profile.card) = (cards, Default::default());
    let mut group = BusyGroup::open(&profile, 0, 64 << 10, Arc::new(VirtualClock::default()))?;
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let (begun, mut posted) = (Instant::now(), 0);
        while begun.elapsed() < ROUND {
            for _ in 0..64 {
                posted += group.step()?.0;
            }
        }
        best = best.min(begun.elapsed().as_nanos() as f64 / posted.max(1) as f64);
    }
    Ok(best)
}

/// Charges CPU time for requests, in whole nanoseconds.
pub struct CpuMeter {
    /// The cost of one request, in nanoseconds.
    cost: f64,
    /// The part of a nanosecond that was not charged yet.
    remainder: f64,
}

impl CpuMeter {
    /// A meter with `cost` nanoseconds per request.
    pub fn new(cost: f64) -> Self {
        Self { cost, remainder: 0.0 }
    }

    /// The CPU time of `requests` more requests.
    pub fn charge(&mut self, requests: usize) -> Duration {
        self.remainder += requests as f64 * self.cost;
        let spent = Duration::from_nanos(self.remainder as u64);
        self.remainder -= spent.as_nanos() as f64;
        spent
    }
}
