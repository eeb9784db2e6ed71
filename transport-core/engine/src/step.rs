//! The engine, and what it does in each step.
//!
//! The engine's methods are in three files: `post` (posting), `complete` (polling, and ending operations), and this one
//! (all else: the step itself, commands, deadlines, revocations, stalls, and drains: the calls of `Peer::drain` that
//! wait for operations).

// Over 800 lines: one of three files with `Engine`'s methods. (The limit is that of `ci/file-sizes`.)

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::{Duration, Instant};

use foldhash::HashMap;

use super::event_hash::{EventHash, HashedEvent};
use super::operation::{ActiveOp, ActiveRail, Drains, LocalUse, Revocations};
use super::peer::{
    ArrivalKind, EarlyEvents, Fence, Fences, LinkState, PathProbes, PeerState, SlotLink, UnconfirmedFailures,
};
use super::rail::{FULL_SPEED, Receives};
use super::snapshot::{RecentFailures, Snapshot};
use super::trace::{OperationKind, TraceEvent, peer_number};
use super::{Control, DrainReply, EngineHandle, Rail, Submission};
use crate::memory::{RegionInner, revoked};
use crate::op::OpId;
use crate::plan::RailRange;
use crate::spi::{Completions, DeliveredScope, FenceKind, WorkKind};
use crate::{Clock, Error, ErrorKind, Outcome, PeerId, Result, Time};

/// The most events that the engine takes from one poll of an endpoint.
const MAX_EVENTS_PER_POLL: usize = 256;

/// While operations run, the engine looks at the oldest request of each rail this often per
/// [`Rail::least_stuck_limit`].
const PATH_CHECKS: u32 = 4;

/// The most commands that the engine takes in one step, so that it also posts and polls.
const MAX_COMMANDS_PER_STEP: usize = 256;

/// How long `close` waits until the backend has released all posted requests.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// How long `close` polls without a pause.
const CLOSE_SPIN: Duration = Duration::from_micros(100);

/// The engine looks for stalled operations at most this many times per `stall_after`. This bounds the cost while many
/// operations start and end. So the engine reports a stall up to an eighth of `stall_after` late.
const STALL_CHECKS: u32 = 8;

/// What a step did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct StepReport {
    /// How much the step has done: commands taken, requests posted, events handled, and what else has ended or begun.
    /// If it is 0, nothing has happened, and a worker may sleep.
    pub events: usize,
    /// Requests posted.
    pub posted: usize,
    /// Operations that have not ended after the step.
    pub outstanding: usize,
}

/// The engine of one rail group. It owns the endpoints of the group's devices.
pub struct Engine {
    pub(super) handle: Arc<EngineHandle>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) rails: Vec<Rail>,
    /// The operations that have not ended, by their index in the op table.
    pub(super) active: Vec<Option<ActiveOp>>,
    /// The number of operations in `active`.
    pub(super) running: usize,
    /// Requests that `Engine::post_at_once` has posted since the last step. The next step adds them to its report.
    pub(super) posted_at_once: usize,
    /// The links, by their index (`Link::index`).
    pub(super) links: Vec<Option<LinkState>>,
    /// The index of the link of each peer whose link has not failed.
    pub(super) link_of: HashMap<PeerId, u32>,
    /// The link that each slot belongs to, by `[rail][slot]`.
    pub(super) slot_links: Vec<Vec<Option<SlotLink>>>,
    /// Events of peers whose `Link` command is still in its queue.
    pub(super) early_events: EarlyEvents,
    pub(super) unconfirmed_failures: UnconfirmedFailures,
    /// Whether a path has ever been broken: from then on, completions may come of requests that count as ended.
    pub(super) has_broken_paths: bool,
    /// The fences that peers have asked for.
    pub(super) fences: Fences,
    /// Broken paths, by rail and link, whose peer has answered, and that have requests which this side's device has not
    /// ended.
    pub(super) unsettled_paths: Vec<(usize, u32)>,
    /// Broken paths on their way back, and paths that carry little because they have just come back, by rail and link.
    pub(super) comebacks: Vec<(usize, u32)>,
    pub(super) probes: PathProbes,
    /// Per rail: its speed as a part of [`FULL_SPEED`].
    pub(super) speeds: Vec<u32>,
    pub(super) receives: Receives,
    pub(super) revocations: Revocations,
    /// The waits for operations: those of `Peer::drain` to a peer, those of `Fabric::drain_device` on a rail.
    pub(super) drains: Drains,
    /// Operations whose trigger was not due in the last step.
    pub(super) waiting_for_trigger: Vec<OpId>,
    /// Operations of which pieces are [handed over](ActiveOp::hand_over).
    pub(super) handed_over: Vec<OpId>,
    /// Whether a rail may have pieces that another one should take over: its send queue or its window was full, or
    /// `handed_over` is not empty.
    pub(super) may_take_over: bool,
    /// The events of the last poll.
    pub(super) completions: Completions,
    /// How many of these events the engine has handled.
    pub(super) handled_events: usize,
    /// The rail that these events are from.
    pub(super) handled_rail: usize,
    /// No deadline of an operation, a revocation or a drain is earlier than this, and no
    /// [`Timer`](super::timers::Timer) is due earlier.
    pub(super) next_deadline: Time,
    /// No operation stalls earlier than this.
    pub(super) next_stall_check: Time,
    /// The next look at the oldest request of each rail.
    pub(super) next_path_check: Time,
    /// The time between two such looks. `None` if there is only one rail, or if a rail cannot fence.
    pub(super) path_check_interval: Option<Duration>,
    /// No [`Timer`](super::timers::Timer) is due earlier than this.
    pub(super) next_timer: Time,
    /// The time of this step, once the engine has read the clock.
    pub(super) step_time: Option<Time>,
    /// Whether the last record is [`TraceEvent::Parked`].
    pub(super) last_record_is_parked: bool,
    pub(super) recent_failures: RecentFailures,
    /// Whether an imm must wait for a flush of the other rails: a completion of one rail says nothing about bytes that
    /// another rail has written ([`DeliveredScope::Device`]).
    pub(super) needs_flushes: bool,
    /// Allocations for [`ActiveOp::rails`], to be reused.
    pub(super) spare_rails: Vec<Vec<ActiveRail>>,
    /// The result of the last `split`; kept for its allocation.
    pub(super) ranges: Vec<RailRange>,
    pub(super) hash: EventHash,
}

impl Engine {
    pub fn new(handle: Arc<EngineHandle>, rails: Vec<Rail>, clock: Arc<dyn Clock>) -> Self {
        let operations = handle.table.capacity();
        let delivers_per_device =
            |rail: &Rail| rail.domain.capabilities().delivered_scope == DeliveredScope::Device;
        let needs_flushes = rails.iter().any(delivers_per_device);
        let can_heal = rails.len() > 1 && rails.iter().all(|rail| rail.domain.capabilities().fences);
        let interval = rails.iter().map(Rail::least_stuck_limit).max().filter(|_| can_heal);
        Self {
            clock,
            slot_links: rails.iter().map(|_| Default::default()).collect(),
            receives: Receives::new(rails.len()),
            speeds: vec![FULL_SPEED; rails.len()],
            rails,
            active: (0..operations).map(|_| None).collect(),
            running: 0,
            posted_at_once: 0,
            links: Vec::new(),
            link_of: HashMap::default(),
            early_events: EarlyEvents::default(),
            unconfirmed_failures: UnconfirmedFailures::default(),
            has_broken_paths: false,
            fences: Fences::default(),
            unsettled_paths: Vec::new(),
            comebacks: Vec::new(),
            probes: PathProbes::default(),
            revocations: Revocations::default(),
            drains: Drains::default(),
            waiting_for_trigger: Vec::new(),
            handed_over: Vec::new(),
            may_take_over: false,
            completions: Completions::with_room(MAX_EVENTS_PER_POLL),
            handled_events: 0,
            handled_rail: 0,
            next_deadline: Time::NEVER,
            next_stall_check: Time::NEVER,
            next_path_check: Time::NEVER,
            path_check_interval: interval.map(|interval| interval / PATH_CHECKS),
            next_timer: Time::NEVER,
            step_time: None,
            last_record_is_parked: false,
            recent_failures: RecentFailures::default(),
            needs_flushes,
            spare_rails: Vec::new(),
            ranges: Vec::new(),
            hash: EventHash::default(),
            handle,
        }
    }

    /// The rails. The worker arms their endpoints before it sleeps.
    pub fn rails_mut(&mut self) -> &mut [Rail] {
        &mut self.rails
    }

    pub fn handle(&self) -> &Arc<EngineHandle> {
        &self.handle
    }

    /// Describes everything that has not ended.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::of(self)
    }

    // ---- the step ----

    /// Takes commands, posts, polls, and checks deadlines, once. Never blocks.
    pub fn step(&mut self) -> StepReport {
        self.step_time = None;
        let mut events = self.take_commands();
        let (posted, untried_rails) = self.post();
        // If the queue of one peer is full, the endpoint may refuse a whole batch. Operations further back in the
        // rail's queue, to other peers, could still be posted. So the engine must try them all before the worker
        // sleeps: a rail with untried operations adds 1 to `events`, which keeps the worker awake.
        events += posted + untried_rails + self.poll_rails();
        let has_polled_work = self.has_polled_work();
        if has_polled_work {
            events += self.advance_polled_work();
        }
        // Without any operation, the engine does not even read the clock.
        let next_check = self.next_deadline.min(self.next_stall_check).min(self.next_path_check);
        if next_check != Time::NEVER {
            let now = self.now();
            if now >= self.next_deadline {
                events += self.expire(now);
            }
            if now >= self.next_stall_check {
                self.check_stalls(now);
            }
            if now >= self.next_path_check {
                events += self.check_paths(now);
                self.next_path_check = Time::NEVER;
                // Without requests in flight, the next batch schedules the next look.
                if self.rails.iter().any(|rail| rail.inflight.used_slots() > 0) {
                    self.schedule_path_check(now);
                }
            }
        }
        self.handle.hash.store(self.hash.value(), Ordering::Relaxed);
        // If there was no polled work above, there is none now: only a command adds some, and the commands were taken
        // before. So no revocation and no drain is outstanding, only the running operations.
        let outstanding = if has_polled_work { self.outstanding() } else { self.running };
        StepReport { events, posted, outstanding }
    }

    /// Operations that have not ended, posted receives excluded.
    pub fn outstanding(&self) -> usize {
        self.running + self.revocations.awaited() + self.drains.len()
    }

    /// Whether the engine has work that no event announces: it checks revocations, drains, triggers and fences in each
    /// step. Usually there is none. The bitwise or makes this one branch.
    #[inline]
    fn has_polled_work(&self) -> bool {
        self.revocations.len()
            | self.drains.len()
            | self.waiting_for_trigger.len()
            | self.fences.len()
            | self.unsettled_paths.len()
            != 0
    }

    /// Checks revocations, drains, triggers and fences. Returns how many ended or started.
    #[cold]
    fn advance_polled_work(&mut self) -> usize {
        let ended = self.advance_revocations() + self.drains.advance(&self.active);
        ended + self.start_triggered() + self.advance_fences() + self.settle_paths()
    }

    /// The time of this step. The engine reads the clock once per step, and only if it needs the time.
    #[inline]
    pub(super) fn now(&mut self) -> Time {
        *self.step_time.get_or_insert_with(|| self.clock.now())
    }

    // ---- idling and closing ----

    /// How long a worker that has been idle for `idle` may sleep: until something is due, and only briefly while the
    /// engine waits for something that wakes no thread. `None` means no limit.
    pub fn sleep_limit(&self, can_be_woken: bool, idle: Duration) -> Option<Duration> {
        let idle_backoff = self.rails.iter().map(|rail| rail.domain.capabilities().idle_backoff).min();
        // The rule is at `Capabilities::idle_backoff`.
        let backoff = idle_backoff.map(|it| (idle / 8).min(it * (self.rails.len() as u32 + 15) / 16));
        // A `revoke` operation waits until no peer accesses the region, and no event tells the engine when that is so.
        // So the engine polls while any `revoke` operation waits. A revocation without such an operation needs no
        // polling: it does not depend on peers, and ends with the last request or receive of this side on the region,
        // an event that wakes the worker.
        let poll_again = if can_be_woken && self.revocations.awaited() == 0 { None } else { backoff };
        // No event tells that a trigger is due.
        let waits_for_trigger = !self.waiting_for_trigger.is_empty();
        let poll_triggers = waits_for_trigger.then(|| (idle / 8).min(self.handle.posting.trigger_nap));
        let due = self.due();
        let due = (due != Time::NEVER).then(|| due.since(self.clock.now()));
        poll_again.into_iter().chain(poll_triggers).chain(due).min()
    }

    /// When the engine has something to do without a command or an event: a deadline, a stall check, the timer of a
    /// future or of an endpoint, or the eviction of requests that do not complete. An eviction is due only if no
    /// request has ended in the meantime.
    pub fn due(&self) -> Time {
        let rails = self.rails.iter().zip(&self.handle.counts).map(|(rail, counts)| rail.due(counts.ended()));
        let checks = self.next_stall_check.min(self.next_path_check);
        let due = rails.fold(self.next_deadline.min(checks), Time::min);
        match self.fences.len() {
            0 => due,
            _ => due.min(self.fences.due(self.clock.now())),
        }
    }

    /// The worker is about to sleep. If it wakes up without anything to do, this leaves no second record.
    pub fn on_park(&mut self) {
        self.step_time = None;
        // An event that wakes the worker does not say which operation can post now. So this resets
        // `refused_batches`: then `Engine::post` tries all queued operations again before the worker sleeps.
        self.rails.iter_mut().for_each(|rail| rail.refused_batches = 0);
        if !self.last_record_is_parked {
            self.record(TraceEvent::Parked);
            self.last_record_is_parked = true;
        }
    }

    /// Ends everything with `Closed`. Aborts the posted requests, and waits for them for a limited time.
    pub fn close(&mut self) {
        let error = Error::new(ErrorKind::Closed, "close", "the fabric was closed");
        self.step_time = None;
        self.take_queued(false);
        for link in 0..self.links.len() {
            self.fail_link(link as u32, &error);
        }
        self.receives.close(&error, &mut self.rails, &self.handle);
        let limit = Instant::now() + CLOSE_LIMIT;
        let mut last_progress = Instant::now();
        while self.is_busy() && Instant::now() < limit {
            if self.poll_rails() + self.take_queued(false) > 0 {
                last_progress = Instant::now();
            }
            // No event wakes this loop. So it sleeps as long as an idle worker would.
            let idle = last_progress.elapsed();
            if idle > CLOSE_SPIN {
                std::thread::sleep(idle / 8);
            }
        }
        for id in self.revocations.take_awaited() {
            self.handle.table.finish(id, Err(error.clone()));
        }
        if self.is_busy() {
            tracing::warn!("the fabric closes while requests are posted; closing the endpoints ends them");
        }
        // A closed endpoint touches no memory any more. So the operations can release theirs.
        self.rails.clear();
        for active in self.active.iter_mut().filter_map(Option::take) {
            active.leave_backlog(self.handle.group);
            let (id, is_elsewhere) = (active.id, active.is_elsewhere);
            active.work.note_failed();
            drop(active);
            if !is_elsewhere {
                self.handle.table.finish(id, Err(error.clone()));
            }
        }
        self.running = 0;
        self.drains.advance(&self.active);
        self.receives.end_all(&error, &self.handle);
        self.handle.close();
        // Operations whose rest another rail group carries end once that has ended, whoever closes first.
        for continuation in self.handle.continuations() {
            self.handle.control(Control::Continued(continuation));
        }
    }

    fn is_busy(&self) -> bool {
        self.running > self.handle.continuations().len()
            || self.receives.posted() > 0
            || self.handle.has_commands()
    }

    // ---- commands ----

    /// Takes commands out of the queues. Usually there are none, and to check this is cheaper than to pop.
    #[inline(always)]
    fn take_commands(&mut self) -> usize {
        if self.handle.has_commands() { self.take_queued(true) } else { 0 }
    }

    /// Activates an operation that the calling thread has just submitted, without the queue.
    #[inline(always)]
    pub(super) fn activate_now(&mut self, submission: Submission) {
        // No step is running. The time of the submission serves as the time of the step, which saves a clock read.
        self.step_time = Some(submission.submitted_at);
        self.activate(submission, true);
    }

    /// In place of the worker, which sleeps: activates an operation, and posts it.
    #[cold]
    pub(super) fn activate_and_post(&mut self, submission: Submission) {
        self.step_time = None;
        self.activate(submission, true);
        // What had to take credit is not posted yet.
        let (posted, _) = self.post();
        self.posted_at_once += posted;
    }

    /// Takes the queued commands; returns their number. With `may_post_at_once`, the engine posts an operation at once
    /// if no other command is queued.
    fn take_queued(&mut self, may_post_at_once: bool) -> usize {
        // Controls first: the engine must know a link before its first operation.
        let mut taken = self.take_controls();
        while taken < MAX_COMMANDS_PER_STEP && !self.handle.submissions.is_empty() {
            let Some(submission) = self.handle.submissions.pop() else { break };
            let is_only = taken == 0 && self.handle.submissions.is_empty();
            taken += 1;
            self.activate(submission, may_post_at_once && is_only);
        }
        taken
    }

    pub(super) fn take_controls(&mut self) -> usize {
        let mut taken = 0;
        while !self.handle.controls.is_empty()
            && let Some(control) = self.handle.controls.pop()
        {
            taken += 1;
            self.take_control(control);
        }
        taken
    }

    pub(super) fn take_control(&mut self, control: Control) {
        match control {
            Control::Link { peer } => self.add_link(peer),
            Control::Unlink { peer, error } => {
                if let Some(link) = self.link_of.remove(&peer) {
                    self.hash_event(HashedEvent::PeerFailed, link.into());
                    self.record(TraceEvent::PeerFailed { peer: peer_number(peer), error: error.kind() });
                    self.fail_link(link, &error);
                }
            }
            Control::Cancel(id) => self.cancel(id),
            Control::Start(id) => self.start(id),
            Control::Receive { id, region, offset, len } => {
                let now = self.now();
                self.receives.add(id, now, (region, offset, len));
                self.receives.post(&mut self.rails, &self.handle);
            }
            // The pool was closed while the command was queued.
            Control::PoolReceive { pool, .. } if pool.is_closed() => {}
            Control::PoolReceive { pool, buffer, freed_from } => {
                self.receives.add_pooled(pool, buffer);
                self.receives.post(&mut self.rails, &self.handle);
                if let Some(peer) = freed_from.filter(|_| self.handle.for_notifications) {
                    self.count_freed_buffer(peer);
                }
            }
            Control::PoolClosed { pool } => self.receives.close_pool(&pool, &mut self.rails, &self.handle),
            Control::Revoke { id, region, deadline } => self.revoke(id, region, deadline),
            Control::Timer { at } => {
                self.next_timer = self.next_timer.min(at);
                self.next_deadline = self.next_deadline.min(at);
            }
            Control::ProbeEnded { link, peer } => self.on_probe_ended(link, peer),
            Control::Fence { rail, slot, link, peer, kind, reply }
                if self.link_of.get(&peer) == Some(&link) =>
            {
                let requested_at = self.now();
                let slot_link = self.slot_links[rail].get_mut(slot.0 as usize).and_then(Option::as_mut);
                let pause = slot_link.map_or(Duration::ZERO, |slot| slot.note_fence(requested_at, kind));
                let not_before = requested_at.after(pause);
                let fence = Fence { rail, link, slot, kind, requested_at, not_before, reply };
                if kind == FenceKind::Lift {
                    self.fences.add_lift(fence);
                    self.lift_fences();
                } else {
                    self.fences.add(fence);
                    self.on_peer_path_lost(rail, link, slot, kind == FenceKind::DeviceLost);
                }
            }
            // The peer is gone, and learns from the dropped reply that there is no answer.
            Control::Fence { .. } => {}
            Control::Fenced { rail, slot, link, peer, kind: FenceKind::Lift, result } => {
                self.on_lifted((rail, slot), link, peer, result)
            }
            Control::Fenced { rail, slot, link, peer, result, .. } => {
                self.on_fenced((rail, slot), link, peer, result)
            }
            Control::MessagesPosted { rail, slot, link, peer, count } => {
                if self.link_of.get(&peer) == Some(&link) {
                    self.on_messages_posted((rail, slot), link, count);
                }
            }
            Control::Continued(continuation) => self.on_continued(&continuation),
            Control::Drain { peer, deadline, done } => self.drain(peer, deadline, done),
            Control::RetireRail { rail, deadline, done } => self.retire_rail(rail, deadline, done),
            Control::RestoreRail { rail } => self.restore_rail(rail),
            Control::GrantReceived { link } => self.on_grant_received(link),
            Control::RenewGrant { link, peer } if self.link_of.get(&peer) == Some(&link) => {
                self.renew_grant(link)
            }
            Control::RenewGrant { .. } => {}
            // An error means that the dump has given up waiting.
            Control::Dump { reply } => drop(reply.try_send(self.snapshot())),
        }
    }

    fn add_link(&mut self, peer: Arc<PeerState>) {
        let link = &peer.links[self.handle.group];
        let index = link.index;
        let is_whole = link.is_whole;
        let send_slots: Vec<_> = link.rails.iter().map(|rail| rail.as_ref().map(|rail| rail.slot)).collect();
        let receive_slots: Vec<_> =
            link.receiving.iter().map(|(rail, paired)| (*rail, paired.slot)).collect();
        for (rail, pair) in link.pairs() {
            let (links, slot) = (&mut self.slot_links[rail], pair.slot.0 as usize);
            links.resize(links.len().max(slot + 1), None);
            links[slot] = Some(SlotLink::new(index));
        }
        self.link_of.insert(peer.id, index);
        self.record(TraceEvent::PeerLinked { peer: peer_number(peer.id) });
        tracing::debug!(transport = %self.handle.label, peer = peer.id.number(), "peer admitted");
        if self.links.len() <= index as usize {
            self.links.resize_with(index as usize + 1, || None);
        }
        let grant = self.handle.receiver_credits.state(peer.id);
        let renew_after = grant.map_or([1; 2], |grant| grant.renew_after);
        // An endpoint may have got a new address since the handshake. So the core checks each rail, and sends the peer
        // the address if the peer does not have the current one.
        (0..self.rails.len()).for_each(|rail| peer.context.endpoint_changed(self.handle.group, rail));
        let mut state = LinkState::new(peer, send_slots, receive_slots, renew_after);
        state.set_weights(self.handle.group, self.speeds.iter().copied());
        // If a device was lost before, here or at the peer, messages may not go over the rail that both sides expect.
        state.announces = !is_whole;
        self.links[index as usize] = Some(state);
        if !is_whole {
            self.update_message_rail(index);
        }
        self.break_paths_of_lost_rails(index);
        self.handle_early_events(index);
    }

    /// Handles the events that arrived from a peer before its `Link` command.
    fn handle_early_events(&mut self, index: u32) {
        let Some(link) = &self.links[index as usize] else { return };
        let peer = Arc::clone(&link.peer);
        for (rail, slot) in link.all_slots().collect::<Vec<_>>() {
            let early = self.early_events.take(rail, slot);
            early.events.into_iter().for_each(|event| self.handle_event(rail, event));
            if early.overflowed {
                let why = "the peer sent more than this side has room for before it was admitted";
                peer.context.failed(Error::new(ErrorKind::Protocol, "peer", why));
            }
        }
    }

    fn cancel(&mut self, id: OpId) {
        // An engine for notifications has many posted receives. All belong to pools and none is an operation, so there
        // is no receive to cancel and none to search for.
        let may_receive = !self.handle.for_notifications;
        if !self.handle.table.is_under_way(id)
            || may_receive && self.receives.cancel(id, &mut self.rails, &self.handle)
        {
            return;
        }
        self.activate_queued(id);
        self.record(TraceEvent::Cancelled { op: id });
        self.cancel_active(id);
        if self.revocations.cancel(id) {
            let why = "revoke() was cancelled; the region stays revoked";
            self.end_revocation(id, Err(Error::new(ErrorKind::Cancelled, "revoke", why)));
        }
    }

    /// Activates an operation that is still queued, and those before it. Controls overtake submissions: a control for
    /// an operation that is still queued would find nothing.
    fn activate_queued(&mut self, id: OpId) {
        while !self.active[id.index as usize].as_ref().is_some_and(|active| active.id == id) {
            let Some(submission) = self.handle.submissions.pop() else { break };
            self.activate(submission, false);
        }
    }

    /// Starts an operation that was held ([`Trigger::held`]), if it has not ended.
    fn start(&mut self, id: OpId) {
        if !self.handle.table.is_under_way(id) {
            return;
        }
        self.activate_queued(id);
        let is_held =
            |active: &ActiveOp| active.id == id && active.trigger.is_some() && active.error.is_none();
        if self.active[id.index as usize].as_ref().is_some_and(is_held) {
            self.trigger(id.index);
        }
    }

    /// Counts a message of a peer whose buffer is free again. Nothing to do if the peer is gone.
    fn count_freed_buffer(&mut self, peer: PeerId) {
        let Some(&link) = self.link_of.get(&peer) else { return };
        let state = self.links[link as usize].as_mut();
        if state.is_some_and(|state| state.count_arrival(ArrivalKind::Message)) {
            self.renew_grant(link);
        }
    }

    /// Activates the operations that are queued. Controls overtake submissions, so the handler of a control that
    /// concerns all earlier operations calls this first.
    pub(super) fn activate_submitted(&mut self) {
        for _ in 0..self.handle.submissions.len() {
            let Some(submission) = self.handle.submissions.pop() else { break };
            self.activate(submission, false);
        }
    }

    /// Adds a drain: `done` gets its result once the operations of `peer` that are under way now have ended.
    fn drain(&mut self, peer: PeerId, deadline: Time, done: DrainReply) {
        self.activate_submitted();
        let ops = self.active.iter().flatten().filter(|active| active.peer.id == peer);
        let ops = ops.map(|active| active.id).collect();
        self.next_deadline = self.next_deadline.min(deadline);
        self.drains.add(ops, deadline, done);
    }

    // ---- triggers ----

    /// Starts the operations whose trigger is due; returns their number.
    fn start_triggered(&mut self) -> usize {
        let mut started = 0;
        // Removes the operations that start, and those that have ended while they waited.
        let mut waiting = std::mem::take(&mut self.waiting_for_trigger);
        waiting.retain(|id| {
            let active = self.active[id.index as usize].as_ref().filter(|active| active.id == *id);
            match active.and_then(|active| active.trigger.as_ref()) {
                None => false,
                Some(trigger) if !trigger.is_due() => true,
                Some(_) => {
                    self.trigger(id.index);
                    started += 1;
                    false
                }
            }
        });
        self.waiting_for_trigger = waiting;
        started
    }

    /// Starts an operation whose trigger is due.
    fn trigger(&mut self, op: u32) {
        let now = self.now();
        let Some(active) = &mut self.active[op as usize] else { return };
        let trigger = active.trigger.take();
        let link = &active.peer.links[self.handle.group];
        link.backlog.add(active.work.backlog_weight());
        // The peer may have changed its grant since the operation was activated.
        active.takes_credit = active.work.takes_credit(&link.credit);
        active.posted_at = now;
        // The remote region may have been revoked since the operation was submitted.
        let refused = active.work.check_remotes(active.work.operation_name()).err();
        let (id, deadline) = (active.id, active.deadline);
        self.hash_event(HashedEvent::Triggered, op.into());
        self.record(TraceEvent::Triggered { op: id });
        self.schedule_checks(now, deadline);
        match refused {
            Some(error) => self.fail_op(op, error),
            None => {
                self.await_takers(op);
                self.queue(op);
                self.settle_handed_over(op);
            }
        }
        // Last, because dropping a trigger runs the user's code.
        drop(trigger);
    }

    // ---- deadlines and stalls ----

    /// Makes a later step check an operation: at its deadline, and when it may have stalled.
    #[inline]
    pub(super) fn schedule_checks(&mut self, now: Time, deadline: Time) {
        self.next_deadline = self.next_deadline.min(deadline);
        self.next_stall_check = self.next_stall_check.min(now.after(self.handle.stall_monitor.stall_after));
        self.schedule_path_check(now);
    }

    /// Makes a later step look at the oldest request of each rail.
    #[inline]
    pub(super) fn schedule_path_check(&mut self, now: Time) {
        if let Some(interval) = self.path_check_interval
            && self.running > 0
        {
            self.next_path_check = self.next_path_check.min(now.after(interval));
        }
    }

    /// Clears the times of all checks of operations. Called when the last operation has ended.
    #[inline]
    pub(super) fn clear_checks(&mut self) {
        self.next_path_check = Time::NEVER;
        if self.revocations.awaited() == 0 && self.drains.is_empty() && self.comebacks.is_empty() {
            (self.next_deadline, self.next_stall_check) = (self.next_timer, Time::NEVER);
        }
    }

    /// Ends the operations, revocations and drains whose deadline has passed, and wakes the futures whose timers are
    /// due. Returns their number. Never inlined, so that an idle step saves no registers for it.
    #[inline(never)]
    fn expire(&mut self, now: Time) -> usize {
        let mut next = Time::NEVER;
        let mut expired = self.expire_operations(now, &mut next);
        expired += self.expire_revocations(now, &mut next);
        expired += self.drains.expire(now, &mut next);
        expired += self.advance_comebacks(now, &mut next);
        let (due, next_timer) = self.handle.timers.take_due(now);
        self.next_timer = next_timer;
        self.next_deadline = next.min(next_timer);
        expired + due.wake()
    }

    /// Finds operations that have made no progress for `stall_after`. Does not change the event hash: runs with other
    /// values of `stall_after` have the same hash.
    #[cold]
    fn check_stalls(&mut self, now: Time) {
        let monitor = Arc::clone(&self.handle.stall_monitor);
        let mut next = Time::NEVER;
        let mut found = Vec::new();
        let running = self.active.iter_mut().flatten().take(self.running);
        // An operation that waits for its trigger cannot make progress.
        // One that goes on over another rail group makes its progress there.
        let running = running.filter(|op| op.trigger.is_none() && !op.is_elsewhere);
        let running = running.map(|op| (op.id, op.last_progress(), &mut op.stalled));
        let revocations = self.revocations.iter_mut();
        let revocations = revocations.filter_map(|op| Some((op.id?, op.submitted_at, &mut op.stalled)));
        for (id, last_progress, stalled) in running.chain(revocations).filter(|(.., stalled)| !**stalled) {
            let due = last_progress.after(monitor.stall_after);
            if due > now {
                next = next.min(due);
                continue;
            }
            *stalled = true;
            found.push(id);
        }
        self.next_stall_check = next.max(now.after(monitor.stall_after / STALL_CHECKS));
        if next == Time::NEVER {
            self.next_stall_check = Time::NEVER;
        }
        for id in &found {
            self.record(TraceEvent::Stalled { op: *id });
            monitor.add(self.handle.group, *id);
        }
        if !found.is_empty() && !self.handle.is_driven_by_caller() {
            monitor.spawn_report();
        }
    }

    // ---- revocations ----

    /// Ends the operations and receives that use a region, and adds a revocation. `id` is the `revoke` operation that
    /// waits for the revocation; `None` if there is none.
    fn revoke(&mut self, id: Option<OpId>, region: Arc<RegionInner>, deadline: Time) {
        let now = self.now();
        if let Some(id) = id {
            self.record_started(id, OperationKind::Revoke, 0, region.len());
            self.schedule_checks(now, deadline);
        }
        let index = self.revocations.add(id, region, deadline, now);
        self.stop_users(index);
    }

    /// Ends the operations and receives that use the region of a revocation. If a waker of the user panics, the next
    /// step continues with the remaining operations and receives.
    fn stop_users(&mut self, index: usize) {
        let region = Arc::clone(&self.revocations.get(index).region);
        for op in 0..self.active.len() as u32 {
            let active = self.active[op as usize].as_ref().filter(|active| active.work.uses(&region));
            if let Some(name) = active.map(|active| active.work.operation_name()) {
                self.stop(op, revoked(name));
            }
        }
        self.receives.revoke(&region, &mut self.rails, &self.handle);
        self.revocations.get_mut(index).users_stopped = true;
    }

    /// Polls all revocations. Returns how many ended.
    fn advance_revocations(&mut self) -> usize {
        let mut ended = 0;
        let rails = self.handle.first_rail..self.handle.first_rail + self.rails.len();
        for index in (0..self.revocations.len()).rev() {
            if !self.revocations.get(index).users_stopped {
                self.stop_users(index);
            }
            if self.revocations.get(index).is_in_use() {
                let local_use = self.local_use_of(&self.revocations.get(index).region);
                self.revocations.get_mut(index).local_use = local_use;
            }
            let polled = self.revocations.get(index).poll(self.handle.transport, rails.clone());
            let Poll::Ready(result) = polled else { continue };
            ended += 1;
            match self.revocations.swap_remove(index) {
                Some(id) => self.end_revocation(id, result),
                None => drop(result.inspect_err(|error| tracing::warn!(%error, "a region stays registered"))),
            }
        }
        ended
    }

    /// Fails the revocations whose deadline has passed; returns their number. The regions stay revoked. If a
    /// device has one key for peers and for this side, the engine revokes that key later, once no operation or receive
    /// of this side uses the region.
    fn expire_revocations(&mut self, now: Time, next: &mut Time) -> usize {
        let mut expired = 0;
        for revocation in self.revocations.iter_mut() {
            let Some(id) = revocation.id else { continue };
            if revocation.deadline > now {
                *next = (*next).min(revocation.deadline);
                continue;
            }
            expired += 1;
            revocation.id = None;
            self.handle.flight_recorder.write(TraceEvent::Expired { op: id }.pack(now));
            let why = match revocation.local_use {
                LocalUse::None => {
                    "a peer is still copying to or from the region; it stays revoked, call revoke() again to \
                     keep waiting"
                }
                LocalUse::ReadsFrom | LocalUse::WritesInto => {
                    "the device still has a request or a receive of this side on the region; it stays revoked, \
                     call revoke() again to keep waiting"
                }
            };
            self.handle.table.finish(id, Err(Error::new(ErrorKind::DeadlineExceeded, "revoke", why)));
        }
        expired
    }

    fn end_revocation(&mut self, id: OpId, result: Result<()>) {
        self.record(TraceEvent::Ended { op: id, error: result.as_ref().err().map(Error::kind) });
        self.handle.table.finish(id, result.map(|()| Outcome::default()));
    }

    fn local_use_of(&self, region: &Arc<RegionInner>) -> LocalUse {
        if self.receives.has_receive_into(region) {
            return LocalUse::WritesInto;
        }
        let users = self.active.iter().flatten().filter(|active| active.work.uses(region));
        let uses = users.map(|active| match active.work.kind {
            WorkKind::Read => LocalUse::WritesInto,
            WorkKind::Write | WorkKind::Send => LocalUse::ReadsFrom,
        });
        uses.max().unwrap_or(LocalUse::None)
    }

    // ---- records and the event hash ----

    /// The number of a rail among the rails of the transport, as counters, records and messages show it.
    #[inline]
    pub(super) fn rail_number(&self, rail: usize) -> u16 {
        (self.handle.first_rail + rail) as u16
    }

    /// Writes a record into the flight recorder. Always inlined, because most words of a record are constants at the
    /// call.
    #[inline(always)]
    pub(super) fn record(&mut self, event: TraceEvent) {
        if self.handle.flight_recorder.is_off() {
            return;
        }
        let now = self.now();
        if self.last_record_is_parked {
            self.record_woken(now);
        }
        self.handle.flight_recorder.write(event.pack(now));
    }

    #[cold]
    fn record_woken(&mut self, now: Time) {
        self.last_record_is_parked = false;
        self.handle.flight_recorder.write(TraceEvent::Woken.pack(now));
    }

    #[inline]
    pub(super) fn record_started(&mut self, op: OpId, kind: OperationKind, peer: u32, bytes: u64) {
        self.record(TraceEvent::Started { op, kind, peer, bytes });
    }

    #[inline]
    pub(super) fn record_ended(&mut self, op: OpId, span: Option<&tracing::Span>, error: Option<&Error>) {
        self.record(TraceEvent::Ended { op, error: error.map(Error::kind) });
        match error {
            Some(error) => {
                self.handle.operations.failed(error.kind());
                tracing::debug!(parent: span.and_then(tracing::Span::id), op = %op, %error, "ended")
            }
            None => tracing::trace!(parent: span.and_then(tracing::Span::id), op = %op, "done"),
        }
    }

    /// Adds an event to the event hash.
    #[inline]
    pub(super) fn hash_event(&mut self, event: HashedEvent, value: u64) {
        self.hash.add(event, value);
    }
}
