//! A host in virtual time: its cores, and the rail groups that each core drives.
//!
//! Groups share only the core that drives them. So cores are simulated one after another, each with its own clock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use multirail::way::Stage;
use multirail::{Clock, Time, VirtualClock};

use super::coalesced_group::{CoalescedGroup, TargetCore};
use super::group::BusyGroup;
use super::profile::{Profile, ProfileName};
use super::way_plan::WayPlan;
use crate::failure::{CommandFailure, CommandResult};

/// The cores of a host.
pub struct SimulatedHost {
    cores: Vec<SimulatedCore>,
    plan: WayPlan,
    profile: Profile,
}

/// One core and its groups, and the core of the target that serves them.
struct SimulatedCore {
    clock: VirtualClock,
    groups: Vec<SimulatedGroup>,
    meter: CpuMeter,
    busy: Duration,
    target: TargetCore,
}

/// A rail group that always has work.
enum SimulatedGroup {
    /// Its cards carry pages themselves.
    Pages(BusyGroup),
    /// Its cards carry slots.
    Slots(CoalescedGroup),
}

/// What one turn of a group cost.
pub struct GroupStep {
    /// The core's time, in nanoseconds.
    pub cpu_ns: f64,
    /// Whether something happened, so that the clock need not jump to the next event.
    pub had_event: bool,
}

/// What a group has done since it was opened.
#[derive(Default)]
pub struct GroupTotals {
    /// The payloads that each card has delivered: [`WayPlan::payload`] bytes each.
    pub units: Vec<u64>,
    /// The work requests that each card has completed.
    pub requests: Vec<u64>,
    /// The time for which the busier GPU has copied.
    pub copying: Duration,
    /// The time for which cores have copied, per side.
    pub copied_by_core: Duration,
}

/// The result of a simulated host.
pub struct HostResult {
    /// The payload of all cards, in Gbps.
    pub gbps: f64,
    /// The bytes of each card.
    pub bytes: Vec<u64>,
    /// The CPU time, as a number of busy cores, with copies.
    pub busy_cores: f64,
    /// The CPU time of the other host for this transfer, likewise. 0 where its cards do everything.
    pub target_cores: f64,
    pub usage: StageUsage,
}

/// How busy each stage was, from 0 to 1. The busiest one is the limit.
#[derive(Debug, Clone, Copy)]
pub struct StageUsage {
    /// The cards' lines, with the page tables of slots.
    pub line: f64,
    /// The cards' rate of requests.
    pub requests: f64,
    /// The cores of the busier side, without copies.
    pub cpu: f64,
    /// The GPUs of the busier side. If cores copy, they and what else they do.
    pub copy: f64,
}

impl StageUsage {
    /// The busiest stage.
    pub fn limit(&self) -> Stage {
        let others = [(Stage::Requests, self.requests), (Stage::Cpu, self.cpu), (Stage::Copy, self.copy)];
        let busier =
            |busiest: (Stage, f64), stage: (Stage, f64)| if stage.1 > busiest.1 { stage } else { busiest };
        others.into_iter().fold((Stage::Line, self.line), busier).0
    }
}

impl SimulatedGroup {
    fn step(&mut self, target: &mut TargetCore) -> CommandResult<GroupStep> {
        match self {
            Self::Pages(group) => group.step(),
            Self::Slots(group) => group.step(target),
        }
    }

    fn due(&self) -> Time {
        match self {
            Self::Pages(group) => group.due(),
            Self::Slots(group) => group.due(),
        }
    }

    fn totals(&self) -> GroupTotals {
        match self {
            Self::Pages(group) => group.totals(),
            Self::Slots(group) => group.totals(),
        }
    }
}

impl SimulatedHost {
    /// A host whose groups are distributed over `cores` cores.
    pub fn new(profile: &Profile, cores: u32, plan: &WayPlan) -> CommandResult<Self> {
        let mut host = Self { cores: Vec::new(), plan: *plan, profile: profile.clone() };
        for core in 0..cores {
            let clock = VirtualClock::default();
            let open = |number: u32| -> CommandResult<SimulatedGroup> {
                let shared = Arc::new(clock.clone());
                Ok(match plan.slots {
                    None => SimulatedGroup::Pages(BusyGroup::open(profile, number, plan, shared)?),
                    Some(slots) => SimulatedGroup::Slots(CoalescedGroup::open(
                        profile,
                        number,
                        slots,
                        plan.request_ns,
                        shared,
                    )?),
                })
            };
            let groups = (core..profile.groups).step_by(cores as usize);
            let groups = groups.map(open).collect::<CommandResult<Vec<_>>>()?;
            let meter = CpuMeter::new(0.0);
            let (busy, target) = (Duration::ZERO, TargetCore::default());
            host.cores.push(SimulatedCore { clock, groups, meter, busy, target });
        }
        Ok(host)
    }

    /// Runs for a tenth of `span` to fill the queues, then measures `span`.
    pub fn run(&mut self, span: Duration) -> CommandResult<HostResult> {
        let warm = Time::ZERO.after(span / 10);
        let mut total = GroupTotals::default();
        let (mut busy, mut target_busy) = (Duration::ZERO, Duration::ZERO);
        for core in &mut self.cores {
            core.run(warm)?;
            let (before, busy_before, target_before) = (core.totals(), core.busy, core.target.busy());
            core.run(warm.after(span))?;
            let after = core.totals();
            let new = |after: Vec<u64>, before: Vec<u64>| {
                after.into_iter().zip(before).map(|(after, before)| after - before)
            };
            total.units.extend(new(after.units, before.units));
            total.requests.extend(new(after.requests, before.requests));
            total.copying += after.copying - before.copying;
            total.copied_by_core += after.copied_by_core - before.copied_by_core;
            busy += core.busy - busy_before;
            target_busy += core.target.busy() - target_before;
        }
        Ok(self.result(span.as_secs_f64(), total, busy.as_secs_f64(), target_busy.as_secs_f64()))
    }

    fn result(&self, span: f64, total: GroupTotals, busy: f64, target_busy: f64) -> HostResult {
        let (plan, profile) = (&self.plan, &self.profile);
        let bytes: Vec<u64> = total.units.iter().map(|units| units * plan.payload).collect();
        let gbps = bytes.iter().sum::<u64>() as f64 * 8.0 / span / 1e9;
        let on_line = plan.slots.map_or(1.0, |slots| slots.wire() as f64 / plan.payload as f64);
        let requests = total.requests.iter().sum::<u64>() as f64 / span;
        let most_requests = f64::from(profile.all_cards()) * profile.card.ops_per_s.unwrap_or(0) as f64;
        let cores = span * self.cores.len() as f64;
        let (by_core, by_gpu) = (total.copied_by_core.as_secs_f64(), total.copying.as_secs_f64());
        let busier = busy.max(target_busy);
        let usage = StageUsage {
            line: gbps * on_line / profile.ceiling_gbps(),
            requests: if most_requests > 0.0 { requests / most_requests } else { 0.0 },
            cpu: (busier - by_core) / cores,
            copy: match by_core > 0.0 {
                true => busier / cores,
                false => by_gpu / (span * f64::from(profile.groups)),
            },
        };
        HostResult { gbps, bytes, busy_cores: busy / span, target_cores: target_busy / span, usage }
    }
}

impl SimulatedCore {
    /// Drives the groups in turn until `end`.
    fn run(&mut self, end: Time) -> CommandResult {
        while self.clock.now() < end {
            let mut any_event = false;
            for group in &mut self.groups {
                let step = group.step(&mut self.target)?;
                any_event |= step.had_event;
                let spent = self.meter.spend(step.cpu_ns);
                self.busy += spent;
                self.clock.advance(spent);
            }
            if any_event {
                continue;
            }
            // No card has an event before this time.
            let due = self.groups.iter().map(SimulatedGroup::due).fold(Time::NEVER, Time::min);
            if due == Time::NEVER {
                return Err(CommandFailure::new(
                    "the simulation makes no progress; this is a bug, please report it",
                ));
            }
            self.clock.advance(due.since(self.clock.now()).max(Duration::from_nanos(1)));
        }
        Ok(())
    }

    fn totals(&self) -> GroupTotals {
        let mut totals = GroupTotals::default();
        for group in self.groups.iter().map(SimulatedGroup::totals) {
            totals.units.extend(group.units);
            totals.requests.extend(group.requests);
            totals.copying += group.copying;
            totals.copied_by_core += group.copied_by_core;
        }
        totals
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
    let mut group =
        BusyGroup::open(&profile, 0, &WayPlan::direct(64 << 10), Arc::new(VirtualClock::default()))?;
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

/// Charges CPU time in whole nanoseconds, and carries the rest over.
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
        self.spend(requests as f64 * self.cost)
    }

    /// The CPU time of work that takes `nanos` nanoseconds.
    pub fn spend(&mut self, nanos: f64) -> Duration {
        self.remainder += nanos;
        let spent = Duration::from_nanos(self.remainder as u64);
        self.remainder -= spent.as_nanos() as f64;
        spent
    }
}
