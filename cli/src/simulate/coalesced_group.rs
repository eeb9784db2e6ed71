//! A rail group whose pages travel in slots: they are copied into slots at the source, written, and copied to their
//! places at the target.
//!
//! The cards and the engine that posts are those of a [`BusyGroup`](super::group::BusyGroup). The slots are modelled:
//! this file has their stages. Each card has slots of its own, as each endpoint of `backend-staging` has. A slot passes
//! these stages, and each stage works on one slot at a time:
//!
//! 1. The source's core lists the slot's pages.
//! 2. The source's GPU copies them into the slot. In host memory the core does so.
//! 3. The card writes the slot: the request to empty it, the page table and the pages, in one message. On EFA cards the
//!    request follows the bytes. The engine posts such a request before slots that wait, and only a few slots at once.
//!    Otherwise the requests would wait for all of them.
//! 4. The target's core checks the page table.
//! 5. The target's GPU, or core, copies the pages to their places.
//! 6. The response travels back, and the slot is free. Responses keep no card busy here: they are one small request per
//!    slot, in the other direction.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use backend_loopback::Null;
use multirail::{
    Access, Clock, Fabric, FabricBuilder, Op, Pages, Peer, Region, RemoteRegion, Time, TransportConfig,
};

use super::group::untouched;
use super::host::{GroupStep, GroupTotals};
use super::profile::Profile;
use super::way_plan::SlotPlan;
use crate::failure::CommandResult;

/// One rail group that always has pages to coalesce.
pub struct CoalescedGroup {
    clock: Arc<dyn Clock>,
    plan: SlotPlan,
    request_ns: f64,
    latency: Duration,
    cards: Vec<SlotCard>,
    /// The card whose slot is filled next.
    next: usize,
    gather: CopyServer,
    scatter: CopyServer,
    copied_by_core: Duration,
}

/// A core of the target, which serves the groups of one core of the source.
#[derive(Default)]
pub struct TargetCore {
    server: CopyServer,
}

/// A card with its slots.
struct SlotCard {
    fabric: Fabric,
    _target: Fabric,
    peer: Peer,
    source: Region,
    landing: RemoteRegion,
    page: Pages,
    free: usize,
    /// When slots will be filled.
    filling: VecDeque<Time>,
    /// Slots that are filled and not posted.
    filled: usize,
    /// Slots that are being written.
    written: Vec<Op>,
    /// When slots will be free again.
    responses: VecDeque<Time>,
    /// The slots that were emptied.
    emptied: u64,
}

/// A copier, or a core: it works on one thing at a time.
struct CopyServer {
    free_at: Time,
    busy: Duration,
}

impl Default for CopyServer {
    fn default() -> Self {
        Self { free_at: Time::ZERO, busy: Duration::ZERO }
    }
}

impl CopyServer {
    /// Works for `nanos` nanoseconds, from `now` on or when it is free. Returns the time when it has ended.
    fn work(&mut self, now: Time, nanos: f64) -> Time {
        let takes = Duration::from_nanos(nanos as u64);
        self.busy += takes;
        self.free_at = self.free_at.max(now).after(takes);
        self.free_at
    }
}

impl TargetCore {
    /// For how long the core has worked.
    pub fn busy(&self) -> Duration {
        self.server.busy
    }
}

impl CoalescedGroup {
    /// Opens group `number` of `profile`.
    pub fn open(
        profile: &Profile,
        number: u32,
        plan: SlotPlan,
        request_ns: f64,
        clock: Arc<dyn Clock>,
    ) -> CommandResult<Self> {
        let cards = (0..profile.cards_of(number))
            .map(|card| SlotCard::open(profile, number * 64 + card, &plan, &clock))
            .collect::<CommandResult<Vec<_>>>()?;
        Ok(Self {
            clock,
            plan,
            request_ns,
            latency: profile.card.latency + profile.card.jitter,
            cards,
            next: 0,
            gather: CopyServer::default(),
            scatter: CopyServer::default(),
            copied_by_core: Duration::ZERO,
        })
    }

    /// Runs one turn: what is due, one more slot if there is a free one, and one step of each card's engine.
    pub fn step(&mut self, target: &mut TargetCore) -> CommandResult<GroupStep> {
        let now = self.clock.now();
        let mut step = GroupStep { cpu_ns: self.fill(now), had_event: false };
        step.had_event = step.cpu_ns > 0.0;
        for at in 0..self.cards.len() {
            let card = &mut self.cards[at];
            while card.responses.pop_front_if(|due| *due <= now).is_some() {
                (card.free, card.emptied, step.had_event) = (card.free + 1, card.emptied + 1, true);
            }
            for _ in 0..take_ended(&mut card.written)? {
                self.empty(at, target, now);
                step.had_event = true;
            }
            let card = &mut self.cards[at];
            while card.filling.pop_front_if(|due| *due <= now).is_some() {
                card.filled += 1;
            }
            while card.filled > 0 {
                card.filled -= 1;
                let bytes = self.plan.wire() as usize;
                card.written.push(card.peer.write_pages(
                    &card.source,
                    &card.page,
                    &card.landing,
                    &card.page,
                    bytes,
                )?);
                step.cpu_ns += self.request_ns;
            }
            let engine = card.fabric.step();
            step.had_event |= engine.posted > 0 || engine.events > 0;
        }
        Ok(step)
    }

    /// Fills a slot of the next card that has a free one. Returns the nanoseconds of the core.
    fn fill(&mut self, now: Time) -> f64 {
        let count = self.cards.len();
        let Some(at) = (0..count).map(|step| (self.next + step) % count).find(|at| self.cards[*at].free > 0)
        else {
            return 0.0;
        };
        self.next = at + 1;
        let side = self.plan.costs.source;
        let core = side.slot_ns + self.plan.pages as f64 * side.page_ns;
        let copy = self.copy_ns(side.copy.page_ns, side.copy.byte_ns);
        let starts = now.after(Duration::from_nanos(core as u64));
        let (filled, core) = match side.copy.on_processor {
            true => {
                self.copied_by_core += Duration::from_nanos(copy as u64);
                (starts.after(Duration::from_nanos(copy as u64)), core + copy)
            }
            false => {
                let start = Duration::from_nanos(side.copy.start_ns as u64);
                (self.gather.work(starts, copy).after(start), core)
            }
        };
        let card = &mut self.cards[at];
        card.free -= 1;
        card.filling.push_back(filled);
        core
    }

    /// The target empties a slot of card `at`, which has arrived.
    fn empty(&mut self, at: usize, target: &mut TargetCore, now: Time) {
        let side = self.plan.costs.target;
        let core = side.slot_ns + self.plan.pages as f64 * side.page_ns + self.plan.response_ns;
        let copy = self.copy_ns(side.copy.page_ns, side.copy.byte_ns);
        let emptied = match side.copy.on_processor {
            true => {
                self.copied_by_core += Duration::from_nanos(copy as u64);
                target.server.work(now, core + copy)
            }
            false => {
                let checked = target.server.work(now, core);
                let start = Duration::from_nanos(side.copy.start_ns as u64);
                self.scatter.work(checked, copy).after(start)
            }
        };
        self.cards[at].responses.push_back(emptied.after(self.latency));
    }

    fn copy_ns(&self, page_ns: f64, byte_ns: f64) -> f64 {
        self.plan.pages as f64 * (page_ns + self.plan.page as f64 * byte_ns)
    }

    /// The time of the next event.
    pub fn due(&self) -> Time {
        let of_card = |card: &SlotCard| {
            let slots = [card.filling.front(), card.responses.front()];
            slots.into_iter().flatten().fold(card.fabric.due(), |due, at| due.min(*at))
        };
        self.cards.iter().map(of_card).fold(Time::NEVER, Time::min)
    }

    /// What each card has carried, and how long the copiers have worked.
    pub fn totals(&self) -> GroupTotals {
        let slots = |card: &SlotCard| card.emptied;
        let requests = |card: &SlotCard| card.fabric.counters().iter().map(|rail| rail.completions).sum();
        GroupTotals {
            units: self.cards.iter().map(slots).collect(),
            requests: self.cards.iter().map(requests).collect(),
            copying: self.gather.busy.max(self.scatter.busy),
            copied_by_core: self.copied_by_core / 2,
        }
    }
}

impl SlotCard {
    fn open(profile: &Profile, number: u32, plan: &SlotPlan, clock: &Arc<dyn Clock>) -> CommandResult<Self> {
        let open = |side: u64| {
            let card = Null::new(1).link(profile.card.clone());
            FabricBuilder::new()
                .transport(TransportConfig::new("cards", Arc::new(card)))
                .clock(Arc::clone(clock))
                .seed(profile.seed.wrapping_mul(100_000).wrapping_add(u64::from(number) * 2 + side))
                .caller_driven()
                .open()
        };
        let (fabric, target) = (open(0)?, open(1)?);
        let (peer, _) = fabric.connect_local(&target)?;
        let bytes = plan.wire() as usize;
        let source = untouched(&fabric, bytes, Access::LOCAL)?;
        let landing = untouched(&target, bytes, Access::REMOTE_WRITE)?;
        let landing = peer.import(&landing.descriptor())?;
        Ok(Self {
            fabric,
            _target: target,
            peer,
            source,
            landing,
            page: Pages::new([0]),
            free: plan.slots,
            filling: VecDeque::new(),
            filled: 0,
            written: Vec::new(),
            responses: VecDeque::new(),
            emptied: 0,
        })
    }
}

/// Removes the operations that have ended. Returns how many there were.
fn take_ended(ops: &mut Vec<Op>) -> CommandResult<usize> {
    let (before, mut failed) = (ops.len(), None);
    ops.retain_mut(|op| match op.try_result() {
        None => true,
        Some(result) => {
            failed = failed.take().or(result.err());
            false
        }
    });
    match failed {
        None => Ok(before - ops.len()),
        Some(error) => Err(error.into()),
    }
}
