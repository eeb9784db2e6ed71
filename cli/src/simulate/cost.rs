//! What a request costs this machine's processor: the engine on devices that move nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use multirail::VirtualClock;

use super::group::Group;
use super::profile::{Name, Profile};
use crate::failure::Done;

/// How long each round is measured.
const ROUND: Duration = Duration::from_millis(50);
/// Rounds; the cheapest counts, as the others were disturbed.
const ROUNDS: usize = 5;

/// Nanoseconds of one request from submission to completion, on `cards` null devices.
pub fn measured(cards: u32) -> Done<f64> {
    let mut profile = Profile::named(Name::P5);
    (profile.cards, profile.card) = (cards, Default::default());
    let mut group = Group::open(&profile, 0, 64 << 10, Arc::new(VirtualClock::default()))?;
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let (begun, mut posted) = (Instant::now(), 0);
        while begun.elapsed() < ROUND {
            for _ in 0..64 {
                posted += group.turn()?.0;
            }
        }
        best = best.min(begun.elapsed().as_nanos() as f64 / posted.max(1) as f64);
    }
    Ok(best)
}

/// Charges processor time for requests, in whole nanoseconds.
pub struct Meter {
    /// Of one request, in nanoseconds.
    cost: f64,
    /// Of which less than a nanosecond is still to be charged.
    owed: f64,
}

impl Meter {
    /// At `cost` nanoseconds a request.
    pub fn new(cost: f64) -> Self {
        Self { cost, owed: 0.0 }
    }

    /// What `requests` more take.
    pub fn charge(&mut self, requests: usize) -> Duration {
        self.owed += requests as f64 * self.cost;
        let spent = Duration::from_nanos(self.owed as u64);
        self.owed -= spent.as_nanos() as f64;
        spent
    }
}
