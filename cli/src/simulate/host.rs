//! A host in virtual time: its cores, and the rail groups that each core drives.
//!
//! Groups share only the core that drives them. So cores are simulated one after another, each with its own clock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use multirail::{Clock, Time, VirtualClock};

use super::group::BusyGroup;
use super::profile::{Profile, ProfileName};
use crate::failure::{CommandFailure, CommandResult};

/// The cores of a host.
pub struct SimulatedHost {
    cores: Vec<SimulatedCore>,
    page: u64,
}

/// One core and its groups.
struct SimulatedCore {
    clock: VirtualClock,
    groups: Vec<BusyGroup>,
    meter: CpuMeter,
    busy: Duration,
}

/// The result of a simulated host.
pub struct HostResult {
    /// The payload of all cards, in Gbps.
    pub gbps: f64,
    /// The bytes of each card.
    pub bytes: Vec<u64>,
    /// The CPU time, as a number of busy cores.
    pub busy_cores: f64,
}

impl SimulatedHost {
    /// A host whose groups are distributed over `cores` cores.
    pub fn new(profile: &Profile, cores: u32, cost: f64, page: u64) -> CommandResult<Self> {
        let mut host = Self { cores: Vec::new(), page };
        for core in 0..cores {
            let clock = VirtualClock::default();
            let groups = (core..profile.groups).step_by(cores as usize);
            let groups = groups
                .map(|number| BusyGroup::open(profile, number, page, Arc::new(clock.clone())))
                .collect::<CommandResult<Vec<_>>>()?;
            host.cores.push(SimulatedCore {
                clock,
                groups,
                meter: CpuMeter::new(cost),
                busy: Duration::ZERO,
            });
        }
        Ok(host)
    }

    /// Runs for a tenth of `span` to fill the queues, then measures `span`.
    pub fn run(&mut self, span: Duration) -> CommandResult<HostResult> {
        let warm = Time::ZERO.after(span / 10);
        let (mut bytes, mut busy) = (Vec::new(), 0.0);
        for core in &mut self.cores {
            core.run(warm)?;
            let (before, busy_before) = (core.completed(), core.busy);
            core.run(warm.after(span))?;
            let requests = core.completed().into_iter().zip(before).map(|(after, before)| after - before);
            bytes.extend(requests.map(|requests| requests * self.page));
            busy += (core.busy - busy_before).as_secs_f64() / span.as_secs_f64();
        }
        let total: u64 = bytes.iter().sum();
        Ok(HostResult { gbps: total as f64 * 8.0 / span.as_secs_f64() / 1e9, bytes, busy_cores: busy })
    }
}

impl SimulatedCore {
    /// Drives the groups in turn until `end`.
    fn run(&mut self, end: Time) -> CommandResult {
        while self.clock.now() < end {
            let mut any_event = false;
            for group in &mut self.groups {
                let (posted, had_event) = group.step()?;
                any_event |= had_event;
                let spent = self.meter.charge(posted);
                self.busy += spent;
                self.clock.advance(spent);
            }
            if any_event {
                continue;
            }
            // No card has an event before this time.
            let due = self.groups.iter().map(BusyGroup::due).fold(Time::NEVER, Time::min);
            if due == Time::NEVER {
                return Err(CommandFailure::new(
                    "the simulation makes no progress; this is a bug, please report it",
                ));
            }
            self.clock.advance(due.since(self.clock.now()).max(Duration::from_nanos(1)));
        }
        Ok(())
    }

    fn completed(&self) -> Vec<u64> {
        self.groups.iter().flat_map(BusyGroup::completed).collect()
    }
}

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
