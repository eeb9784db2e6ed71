//! Posting: the engine activates operations, splits them over its rails, and posts their work requests.
//!
//! A plan is expanded into work requests only when they are posted. An operation is in the queue of each rail for
//! which it has pieces; each step posts one batch per rail. If an operation has only one piece, and no other operation
//! waits on its rail, the engine usually posts the piece without the queue ([`Engine::post_at_once`]).

// Over 800 lines: one of three files with `Engine`'s methods. (The limit is that of `ci/file-sizes`.)

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::event_hash::HashedEvent;
use super::flow_control::CreditCounter;
use super::operation::{ActiveOp, ActiveRail, NextRun, Stage, Unplaced};
use super::peer::PeerState;
use super::rail::{FIRST_MESSAGE_RAIL, Run};
use super::trace::{TraceEvent, peer_number};
use super::{Engine, Rail, Submission, Work};
use crate::memory::revoked;
use crate::op::OpId;
use crate::plan::{RailRange, Shape, split};
use crate::spi::{PeerSlot, PostResult, Status, WorkKind, WorkRequest};
use crate::{Error, ErrorKind, Time, Trigger};

/// A batch of coalesced pages is so many times as long as one of requests: the pages ring no doorbell each. With four times,
/// a small write behind them would wait too long (`fair::small_beside_large_to_one_peer`).
const COALESCED_BATCHES: usize = 2;

/// What [`Engine::post_at_once`] posted. The engine still has to record it.
struct PostedAtOnce {
    rail: usize,
    bytes: u64,
    result: PostResult,
}

impl Engine {
    // ---- activating an operation ----

    /// Activates an operation: gives each usable rail its share, and queues the operation there. If
    /// `may_post_at_once` is true and the operation has only one piece, the engine posts the piece without the queue
    /// where possible.
    pub(super) fn activate(&mut self, mut submission: Submission, may_post_at_once: bool) {
        let (id, peer) = (submission.id, &submission.peer);
        // The `Link` command may have been queued after the engine took the controls, and before this submission. The
        // controls behind it stay queued: one of them may cancel this submission, so it must come later.
        let mut link = self.live_link(peer);
        while link.is_none()
            && peer.close_reason().is_none()
            && let Some(control) = self.handle.controls.pop()
        {
            self.take_control(control);
            link = self.live_link(peer);
        }
        let Some(link) = link else { return self.refuse(submission) };
        let work = &mut submission.work;
        // Eager posting (for measurements) makes the list of all pieces first.
        if !self.handle.posting.lazy && work.pieces.len() > 1 {
            work.shape = work.shape.listed();
        }
        let mut rails = self.spare_rails.pop().unwrap_or_default();
        self.prepare_rails(work, link, Rail::is_in_service, &mut rails);
        let takes_credit = work.takes_credit(&peer.links[self.handle.group].credit);
        let message_rail =
            if work.kind == WorkKind::Send { self.next_message(link) } else { FIRST_MESSAGE_RAIL };
        let mut error = refusal(work, &rails, message_rail);
        if error.is_some() && self.rails.iter().any(|rail| rail.is_retired) {
            // What no rail in service can carry goes over those that are retired.
            self.prepare_rails(work, link, |rail| rail.lost.is_none(), &mut rails);
            error = refusal(work, &rails, message_rail);
        }
        let bytes = work.bytes();
        let mut unplaced = Unplaced::default();
        let is_unreached = error.as_ref().is_some_and(|error| error.kind() == ErrorKind::DeviceLost);
        let is_warm_up = matches!(work.shape, Shape::WarmUp { .. });
        if is_unreached && !is_warm_up && (self.may_return(link, work.kind) || self.may_go_around(peer, work))
        {
            // All paths that can carry the operation are broken. It waits until one comes back, or goes over another group.
            error = None;
            unplaced = Unplaced::of(work);
        }
        let (unposted, only_rail) = match error {
            None if !unplaced.is_empty() => (unplaced.len(), None),
            Some(_) => (0, None),
            None => self.split_over_rails(work, bytes, message_rail, &mut rails),
        };
        let waits_for_trigger = submission.trigger.is_some();
        // Posted before the engine records the operation: the latency does not include the bookkeeping.
        let posted = match only_rail {
            Some(rail) if may_post_at_once && !takes_credit && !waits_for_trigger => {
                self.post_at_once(id, work, rail, &mut rails[rail])
            }
            _ => None,
        };
        let kind = work.operation_kind();
        let cost_mask = if work.coalesce { 0 } else { u64::MAX };
        let Submission { peer, submitted_at, trigger, deadline, work, span, .. } = submission;
        let (number, now) = (peer_number(peer.id), self.now());
        self.active[id.index as usize] = Some(ActiveOp {
            id,
            bytes,
            takes_credit,
            waits_for_credit: false,
            work,
            link,
            peer,
            trigger,
            deadline,
            submitted_at,
            posted_at: now,
            ended_at: now,
            stalled: false,
            span,
            stage: Stage::Data,
            message_rail: message_rail as u16,
            cost_mask,
            rails,
            unplaced,
            unposted,
            outstanding: 0,
            work_requests: 0,
            is_elsewhere: false,
            error,
            stopped: false,
            expired: false,
            aborted: false,
        });
        self.running += 1;
        self.hash_event(HashedEvent::Activated, id.index.into());
        self.record_started(id, kind, number, bytes);
        self.schedule_checks(now, deadline);
        match posted {
            Some(PostedAtOnce { rail, bytes, result }) => {
                self.posted_at_once += self.record_posted(rail, bytes, result, 0);
            }
            None if waits_for_trigger => self.wait_for_trigger(id),
            None => self.queue(id.index),
        }
        if self.active[id.index as usize].as_ref().is_some_and(|active| !active.unplaced.is_empty()) {
            self.await_takers(id.index);
            self.settle_handed_over(id.index);
        }
        // With a piece to post, the operation is not over. If posting has failed, `fail_with` has ended the operation.
        if unposted == 0 {
            self.finish_if_over(id.index);
        }
    }

    /// Polls the trigger of an operation in each step, unless a command starts the operation.
    #[cold]
    fn wait_for_trigger(&mut self, id: OpId) {
        let trigger = self.active[id.index as usize].as_ref().and_then(|active| active.trigger.as_ref());
        if trigger.is_some_and(Trigger::is_polled) {
            self.waiting_for_trigger.push(id);
        }
    }

    /// Counts a message to the peer of a link, and announces it if the peer is to be told. Returns the rail over which it
    /// goes.
    fn next_message(&mut self, link: u32) -> usize {
        let Some(Some(state)) = self.links.get_mut(link as usize) else { return FIRST_MESSAGE_RAIL };
        state.add_messages(self.handle.group, 1);
        state.message_rail
    }

    /// The link to a peer; `None` if the engine does not know the peer yet, or if the link has failed.
    fn live_link(&self, peer: &PeerState) -> Option<u32> {
        let index = peer.links[self.handle.group].index;
        let known = self.links.get(index as usize)?.as_ref()?;
        (!known.has_failed && known.peer.id == peer.id).then_some(index)
    }

    /// Ends an operation whose peer is gone.
    #[cold]
    fn refuse(&mut self, submission: Submission) {
        let Submission { id, peer, trigger, work, span, .. } = submission;
        let died = || Error::new(ErrorKind::PeerDied, "submit", "the peer is gone");
        let error = peer.close_reason().unwrap_or_else(died);
        if trigger.is_none() {
            peer.links[self.handle.group].backlog.remove(work.backlog_weight());
        }
        work.note_failed();
        self.hash_event(HashedEvent::Activated, id.index.into());
        self.record_started(id, work.operation_kind(), peer_number(peer.id), work.bytes());
        self.record_ended(id, span.as_deref(), Some(&error));
        // Before the waiter learns of it, as in `finish_if_over`.
        drop(work);
        self.handle.table.finish(id, Err(error));
    }

    /// Fills in slot, keys and weight of each rail. A rail that does not reach the peer or a region, or that
    /// `may_carry` is false for, gets weight 0.
    fn prepare_rails(
        &self,
        work: &Work,
        link: u32,
        may_carry: impl Fn(&Rail) -> bool,
        rails: &mut Vec<ActiveRail>,
    ) {
        let (transport, first) = (self.handle.transport, self.handle.first_rail);
        rails.clear();
        let Some(Some(state)) = self.links.get(link as usize) else { return };
        for (rail, local_rail) in self.rails.iter().enumerate() {
            let mut prepared = ActiveRail::default();
            if let (Some(Some(slot)), true) = (state.send_slots.get(rail), may_carry(local_rail)) {
                prepared.slot = slot.0;
                prepared.weight = state.weights[rail];
                prepared.find_keys(work, transport, first + rail);
            }
            rails.push(prepared);
        }
    }

    /// A rail reaches the peer of a link again: operations under way may use it.
    #[cold]
    pub(super) fn offer_rail(&mut self, rail: usize, link: u32) {
        let (transport, first) = (self.handle.transport, self.handle.first_rail);
        let Some(Some(state)) = self.links.get(link as usize) else { return };
        let Some(slot) = state.send_slots[rail] else { return };
        for active in self.active.iter_mut().flatten().filter(|active| active.link == link) {
            let share = &mut active.rails[rail];
            // A flush over the new connection says nothing about bytes that the old one has delivered.
            let is_flushed = active.work.imm_comes_last() || active.work.is_announced();
            if self.needs_flushes && is_flushed && share.is_used() {
                continue;
            }
            (share.slot, share.weight) = (slot.0, state.weights[rail]);
            share.find_keys(&active.work, transport, first + rail);
            if share.usable() {
                active.take_back(rail);
            }
        }
        for op in 0..self.active.len() as u32 {
            let is_of_link = |active: &&ActiveOp| active.link == link && active.error.is_none();
            let Some(active) = self.active[op as usize].as_ref().filter(is_of_link) else { continue };
            if active.awaits_rail_for_imm() {
                self.begin_imm(op);
            } else if active.trigger.is_none() {
                self.queue(op);
                self.await_takers(op);
                self.settle_handed_over(op);
            }
        }
        self.may_take_over = true;
    }

    /// Posts a write without bytes to a slot. Nothing of it arrives at the peer. Returns `None` if the endpoint takes no
    /// request now.
    #[cold]
    pub(super) fn post_probe(&mut self, rail: usize, slot: PeerSlot) -> Option<u64> {
        if self.rails[rail].free_send_slots() == 0 {
            return None;
        }
        let id = self.probes.next_id();
        let this = &mut self.rails[rail];
        this.batch.clear();
        this.batch_runs.clear();
        this.batch.push(WorkRequest::warm_up(id, slot));
        let posted = self.post_batch(rail);
        self.rails[rail].probes += posted.accepted;
        (posted.accepted == 1).then_some(id)
    }

    /// Splits the pieces over the rails. `bytes` is their sum. Returns the number of pieces and, if there is only one
    /// piece and the operation is no list, its rail.
    fn split_over_rails(
        &mut self,
        work: &Work,
        bytes: u64,
        message_rail: usize,
        rails: &mut [ActiveRail],
    ) -> (u32, Option<usize>) {
        if work.is_one_request() {
            // An imm alone goes over the first usable rail, and a message over the rail for messages.
            let first = match work.kind {
                WorkKind::Send => Some(message_rail),
                _ => rails.iter().position(ActiveRail::usable),
            };
            if let Some(first) = first {
                rails[first].range = RailRange { start: 0, end: 1 };
                rails[first].bytes = bytes;
            }
            return (1, first);
        }
        // The split begins with another rail for each operation, so that the first rail does not get all single pieces.
        let split_from = self.handle.next_split_from.load(Relaxed);
        self.handle.next_split_from.store(split_from.wrapping_add(1), Relaxed);
        let pieces = work.pieces.len();
        let is_list = work.shape.list().is_some();
        if let ([rail], 1, false) = (&mut rails[..], pieces, is_list) {
            (rail.range, rail.next, rail.bytes) = (work.pieces, work.pieces.start, bytes);
            return (1, Some(0));
        }
        // A warm-up has one piece for each rail, whatever the weights are.
        let is_warm_up = matches!(work.shape, Shape::WarmUp { .. });
        let weight = |rail: &ActiveRail| if is_warm_up { rail.weight.min(1) } else { rail.weight };
        split(&work.shape, work.pieces, rails.iter().map(weight), split_from, &mut self.ranges);
        rails.iter_mut().zip(&self.ranges).for_each(|(rail, range)| {
            rail.range = *range;
            rail.next = range.start;
            rail.bytes = work.shape.bytes_of(range.start..range.end);
        });
        let only = if pieces > 1 || is_list { None } else { rails.iter().position(|rail| rail.left() > 0) };
        (pieces, only)
    }

    /// Posts the only piece of an operation over `rail`, past the rail's queue. Returns `None`, and posts nothing, if
    /// other operations wait there or if there is no room.
    ///
    /// Operations share a rail by means of its queue and of the limits of a batch. An operation that waits alone needs
    /// neither.
    fn post_at_once(
        &mut self,
        op: OpId,
        work: &Work,
        rail: usize,
        share: &mut ActiveRail,
    ) -> Option<PostedAtOnce> {
        let this = &mut self.rails[rail];
        let piece = share.next;
        // The send window counts a request by its cost: its bytes, or `min_cost` if that is more. The window is at
        // least twice the larger of two costs: of this request, and of a request of the oldest run in flight. So one
        // large request in flight never keeps the next one from being posted.
        let cost = this.window.cost(work.shape.piece_bytes().min(work.shape.bytes()));
        let has_room = this.free_send_slots() > 0
            && this.window.has_room(this.inflight.cost_in_flight(), this.inflight.oldest_cost(), cost);
        if !this.queue.is_idle() || !has_room {
            return None;
        }
        this.queue_full_logged = false;
        this.batch.clear();
        this.batch_runs.clear();
        share.next += 1;
        let imm = work.imm_of_pieces();
        let bytes = work.expand(piece..piece + 1, share, imm, this.inflight.id_of(0), &mut this.batch);
        this.batch_runs.push(Run { op: op.index, first_piece: piece, count: 1, cost });
        Some(PostedAtOnce { rail, bytes, result: self.post_batch(rail) })
    }

    /// Queues an operation on each rail for which it has pieces.
    pub(super) fn queue(&mut self, op: u32) {
        let Some(active) = &mut self.active[op as usize] else { return };
        for (rail, share) in self.rails.iter_mut().zip(&mut active.rails) {
            if share.left() > 0 && !share.queued {
                share.queued = true;
                rail.queue.push(active.link, op);
            }
        }
    }

    // ---- later stages of an operation ----

    /// Starts to flush the rails that have delivered bytes, because a completion of one rail says nothing about the
    /// bytes of another rail. Returns false if no rail needs a flush.
    #[cold]
    pub(super) fn begin_flush(&mut self, op: u32) -> bool {
        let Some(active) = &mut self.active[op as usize] else { return false };
        // The rail that will carry the imm needs no flush: it is the first used rail. If several engines share the
        // operation, each engine flushes all its used rails, because another engine may send the imm.
        let rails_of_imm = usize::from(active.work.shared.is_none());
        active.stage = Stage::Flush;
        for rail in active.rails.iter_mut().filter(|rail| rail.is_used()).skip(rails_of_imm) {
            rail.range = RailRange { start: 0, end: 1 };
            rail.next = 0;
            active.unposted += 1;
        }
        if active.unposted == 0 {
            return false;
        }
        if !self.fail_if_used_rail_lost(op) {
            self.queue(op);
        }
        true
    }

    /// Fails an operation that has delivered bytes over a rail which was lost since then: the engine cannot find out
    /// when these bytes are visible. Returns true if the operation has failed, or has ended already.
    fn fail_if_used_rail_lost(&mut self, op: u32) -> bool {
        let Some(active) = &self.active[op as usize] else { return true };
        let is_lost = active.rails.iter().any(|rail| rail.is_used() && !rail.usable());
        if is_lost {
            let why = "a rail was lost before its bytes were known to be visible: write them again";
            self.fail_op(op, Error::new(ErrorKind::DeviceLost, "write", why));
        }
        is_lost
    }

    /// Starts to post the one imm that announces all bytes, which are delivered.
    pub(super) fn begin_imm(&mut self, op: u32) {
        if self.needs_flushes && self.fail_if_used_rail_lost(op) {
            return;
        }
        let needs_flushes = self.needs_flushes;
        let Some(active) = &mut self.active[op as usize] else { return };
        active.stage = Stage::Imm;
        // `begin_flush` did not flush the first rail that has carried bytes, so the imm must use the same rail. If
        // this engine has carried no bytes, the other engines have flushed all their rails, and any rail will do.
        let may_carry = |rail: &ActiveRail| rail.usable() && (rail.is_used() || !needs_flushes);
        // A rail in service comes first, and then a retired one.
        let in_service = |(rail, this): (&ActiveRail, &Rail)| may_carry(rail) && this.is_in_service();
        let index = active.rails.iter().zip(&self.rails).position(in_service);
        let index = index.or_else(|| active.rails.iter().position(may_carry));
        let index = index.or_else(|| active.rails.iter().position(ActiveRail::usable));
        let Some(rail) = index.map(|index| &mut active.rails[index]) else {
            let link = active.link;
            let may_return = self.may_return(link, WorkKind::Write);
            let Some(active) = &mut self.active[op as usize] else { return };
            active.unposted = 1;
            if may_return {
                // Until a path comes back.
                return;
            }
            let why = "all rails to the peer were lost before the imm was sent";
            return self.leave_group(op, Error::new(ErrorKind::DeviceLost, "write", why));
        };
        rail.range = RailRange { start: 0, end: 1 };
        rail.next = 0;
        active.unposted = 1;
        self.queue(op);
    }

    // ---- batches ----

    /// Posts one batch per rail. Returns two numbers: that of accepted requests, and that of reasons not to sleep,
    /// which are rails with untried operations and rails that have taken over pieces. After an endpoint has refused a
    /// whole batch, the operations that the engine has not offered since then are untried: other peers may accept them.
    /// The worker must not sleep before the engine has tried all.
    #[inline(always)]
    pub(super) fn post(&mut self) -> (usize, usize) {
        let (mut posted, mut untried_rails) = (std::mem::take(&mut self.posted_at_once), 0);
        if self.may_take_over && (self.rails.len() > 1 || !self.handed_over.is_empty()) {
            untried_rails += self.take_over_pieces();
        }
        for rail in 0..self.rails.len() {
            let this = &mut self.rails[rail];
            // This sets the count to 0. If the endpoint then accepts nothing of the next batch, `record_posted` sets it
            // to the old count plus 1. So it counts only consecutive batches, and a step without a batch resets it.
            let refused_batches = std::mem::take(&mut this.refused_batches);
            if this.queue.front().is_none() {
                continue;
            }
            posted += self.post_rail(rail, refused_batches);
            let this = &self.rails[rail];
            // Each refused batch moves its first operation to the end of the queue. So once there were more refused
            // batches than operations, the endpoint has refused all of them.
            untried_rails += usize::from((1..=this.queue.len()).contains(&this.refused_batches));
        }
        (posted, untried_rails)
    }

    /// Posts one batch on a rail. Returns the number of accepted requests.
    fn post_rail(&mut self, rail: usize, refused_batches: usize) -> usize {
        let this = &mut self.rails[rail];
        if this.meter.is_on() {
            self.measure_speed(rail);
        }
        let this = &mut self.rails[rail];
        this.window.adapt(this.inflight.cost_in_flight());
        let mut bytes = self.fill_batch(rail);
        if self.rails[rail].batch.is_empty() {
            if self.rails[rail].queue.front().is_none() || !self.evict_unresponsive(rail) {
                return 0;
            }
            bytes = self.fill_batch(rail);
        }
        if self.rails[rail].batch.is_empty() {
            return 0;
        }
        let result = self.post_batch(rail);
        if self.next_path_check == Time::NEVER {
            let now = self.now();
            self.schedule_path_check(now);
        }
        self.record_posted(rail, bytes, result, refused_batches)
    }

    /// Builds the next batch of a rail. Returns its bytes.
    fn fill_batch(&mut self, rail: usize) -> u64 {
        let this = &mut self.rails[rail];
        this.batch.clear();
        this.batch_runs.clear();
        let mut room = this.free_send_slots().min(this.max_batch) as u32;
        let was_full = std::mem::replace(&mut this.queue_full_logged, room == 0);
        self.may_take_over |= room == 0;
        if room == 0 && !was_full {
            self.record(TraceEvent::QueueFull { rail: self.rail_number(rail) });
            return 0;
        }
        // Only bytes that the posting thread copies itself count towards the limit of a batch.
        let (mut bytes, mut copied) = (0, 0);
        let (number, max_bytes) = (self.handle.first_rail + rail, this.batch_bytes);
        let (mut cost_in_flight, oldest) = (this.inflight.cost_in_flight(), this.inflight.oldest_cost());
        while room > 0 && copied < max_bytes {
            let this = &mut self.rails[rail];
            let Some(op) = this.queue.front() else { break };
            let Some(active) = &mut self.active[op as usize] else {
                this.queue.pop();
                continue;
            };
            let share = &active.rails[rail];
            let (next, left) = (share.next, share.left());
            let NextRun { most, piece_bytes, segment } = active.next_run(share);
            let cost_mask = active.cost_mask;
            if cost_mask == 0 && this.batch_runs.is_empty() {
                room = this.free_send_slots().min(this.max_batch * COALESCED_BATCHES) as u32;
            }
            let mut cost = this.window.masked_cost(piece_bytes, cost_mask);
            let fit_window = this.window.room(cost_in_flight, oldest, cost);
            if fit_window == 0 && left > 0 {
                this.window.on_blocked();
                self.may_take_over = true;
                break;
            }
            let fit_batch = match active.work.device_memory {
                true => fit_window,
                false => (max_bytes - copied).div_ceil(piece_bytes.max(1)).min(fit_window),
            };
            let mut count = most.min(room).min(u32::try_from(fit_batch).unwrap_or(u32::MAX));
            if count < most
                && let Some(list) = active.work.shape.list()
            {
                // The first pieces may be longer than the mean of all.
                let mean = |count: u32| list.bytes_of(next..next + count).div_ceil(count.into());
                let cost_of = |count| this.window.masked_cost(mean(count), cost_mask);
                let fit = this.window.room(cost_in_flight, oldest, cost_of(count));
                count = count.min(u32::try_from(fit).unwrap_or(u32::MAX)).max(1);
                cost = cost_of(count);
            }
            if active.takes_credit
                && count > 0
                && let Some(link) = &mut self.links[active.link as usize]
            {
                // Notifications are delivered in order, so none may take the credit that one before it waits for.
                let is_behind = self.handle.for_notifications && !link.waiting_for_credit.is_empty();
                count = if is_behind { 0 } else { active.take_credit(self.handle.group, link, count) };
                if count == 0 {
                    self.wait_for_credit(rail, op);
                    continue;
                }
            }
            if count > 0 {
                active.rails[rail].segment = segment;
                cost_in_flight += cost * u64::from(count);
                let first_id = this.inflight.id_of(this.batch_runs.len());
                let share = &active.rails[rail];
                let expanded = active.expand(next..next + count, number, share, first_id, &mut this.batch);
                bytes += expanded;
                copied += if active.work.device_memory { 0 } else { expanded };
                this.batch_runs.push(Run { op, first_piece: next, count, cost });
                room -= count;
                active.rails[rail].next = next + count;
            }
            let share = &mut active.rails[rail];
            if count == left {
                share.queued = false;
                this.queue.pop();
            } else {
                this.queue.rotate();
            }
        }
        bytes
    }

    /// Hands the batch to the endpoint. The caller then calls [`Engine::record_posted`].
    #[inline]
    fn post_batch(&mut self, rail: usize) -> PostResult {
        let this = &mut self.rails[rail];
        // SAFETY: every request's spans were checked when it was submitted. `self.active` holds its regions and imports
        // until `poll_rails` has seen its end. If `activate` posts before it fills `self.active`, it holds them itself
        // until then.
        unsafe { this.endpoint.post(&this.batch) }
    }

    /// Records the outcome of a batch of `bytes` bytes. Returns the number of accepted requests.
    fn record_posted(
        &mut self,
        rail: usize,
        bytes: u64,
        result: PostResult,
        refused_batches: usize,
    ) -> usize {
        let offered = self.rails[rail].batch.len();
        let accepted = result.accepted.min(offered);
        let cut_short = accepted < offered;
        let bytes = if cut_short {
            self.rails[rail].batch.requests().take(accepted).map(|request| request.len).sum()
        } else {
            bytes
        };
        self.handle.counts[rail].batch(accepted as u64, bytes);
        if cut_short {
            let failed = usize::from(result.error.is_some());
            self.handle.counts[rail].backpressure((offered - accepted - failed) as u64);
        }
        if accepted == 0 {
            self.rails[rail].refused_batches = refused_batches + 1;
        }
        self.record_batch(rail, accepted as u32, bytes);
        // The other rails post what a lost device has refused: `Event::DeviceLost` follows.
        let is_own =
            |status: &Status| status.kind != ErrorKind::DeviceLost || !self.rails[rail].endpoint.is_lost();
        let error = result.error.filter(is_own);
        self.account_batch(rail, accepted as u32, cut_short, error);
        self.hash_event(HashedEvent::Posted, accepted as u64);
        accepted
    }

    /// Counts the outstanding requests of a rail anew. Where requests fail or paths break, what is posted and what
    /// completes does not tell their number.
    #[cold]
    pub(super) fn recount_outstanding(&self, rail: usize) {
        let outstanding = self.rails[rail].inflight.unacknowledged().count();
        self.handle.counts[rail].set_outstanding(outstanding);
    }

    #[inline]
    fn record_batch(&mut self, rail: usize, requests: u32, bytes: u64) {
        let first = self.rails[rail].batch_runs.first();
        let first = first.and_then(|run| self.active[run.op as usize].as_ref());
        if let Some(op) = first.filter(|_| requests > 0).map(|active| active.id) {
            self.rails[rail].backpressure_logged = false;
            self.record(TraceEvent::Posted { rail: self.rail_number(rail), op, requests, bytes });
        }
    }

    /// Counts the accepted requests as in flight. Puts the other requests back into their plans; if the endpoint
    /// failed one of them (`failure`), fails its operation.
    fn account_batch(&mut self, rail: usize, accepted: u32, cut_short: bool, failure: Option<Status>) {
        if cut_short {
            return self.account_cut_batch(rail, accepted, failure);
        }
        let now = self.now();
        for index in 0..self.rails[rail].batch_runs.len() {
            let run = self.rails[rail].batch_runs[index];
            self.count_posted(rail, run, now);
        }
    }

    /// Counts the requests of an accepted run as in flight.
    #[inline(always)]
    fn count_posted(&mut self, rail: usize, run: Run, now: Time) {
        let Some(active) = &mut self.active[run.op as usize] else { return };
        active.unposted -= run.count;
        active.outstanding += run.count;
        active.work_requests += run.count;
        self.rails[rail].inflight.push(run);
        active.rails[rail].refused_by_endpoint = false;
        active.note_progress(now, &mut self.next_stall_check);
        active.posted_at = now;
        if active.work.imm.is_some()
            && active.counted_imm().is_some()
            && let Some(Some(link)) = self.links.get_mut(active.link as usize)
        {
            link.count_sent_imms(rail, run.count);
        }
    }

    /// As [`Engine::account_batch`], for a batch of which the endpoint did not accept all.
    #[cold]
    fn account_cut_batch(&mut self, rail: usize, accepted: u32, mut failure: Option<Status>) {
        self.return_refused_credit(rail, accepted);
        let mut left = accepted;
        let mut cut_at = None;
        let now = self.now();
        for index in 0..self.rails[rail].batch_runs.len() {
            let run = self.rails[rail].batch_runs[index];
            let taken = run.count.min(left);
            left -= taken;
            if taken > 0 {
                self.count_posted(rail, Run { count: taken, ..run }, now);
            }
            let Some(active) = &mut self.active[run.op as usize] else { continue };
            if taken == run.count || active.error.is_some() {
                continue;
            }
            // A batch may have several runs of one operation, in order. The engine posts again from the first refused
            // piece on, so a later run must not raise `next`.
            let share = &mut active.rails[rail];
            share.next = share.next.min(run.first_piece + taken);
            // The endpoint has refused the run at the cut, unless one of that run's requests failed. It has not looked
            // at the runs behind the cut.
            share.refused_by_endpoint |= cut_at.is_none() && failure.is_none();
            self.queue(run.op);
            cut_at.get_or_insert(index);
            if let Some(status) = failure.take() {
                self.handle.counts[rail].completed(0, 1);
                self.recount_outstanding(rail);
                self.fail_with(run.op, rail, status);
            }
        }
        if let Some(cut_at) = cut_at {
            self.record_backpressure(rail, cut_at, accepted);
            self.reorder_after_cut(rail, cut_at);
        }
    }

    #[cold]
    fn record_backpressure(&mut self, rail: usize, cut_at: usize, accepted: u32) {
        let offered: u32 = self.rails[rail].batch_runs.iter().map(|run| run.count).sum();
        let op =
            self.active[self.rails[rail].batch_runs[cut_at].op as usize].as_ref().map(|active| active.id);
        // While a peer's queue is full, the engine offers it the same requests in each step. It records the first
        // refusal alone.
        let was_logged = std::mem::replace(&mut self.rails[rail].backpressure_logged, accepted == 0);
        if let Some(op) = op.filter(|_| !was_logged) {
            let refused = offered - accepted;
            self.record(TraceEvent::Backpressure { rail: self.rail_number(rail), op, refused });
        }
    }

    /// Orders a rail's queue after a batch that the endpoint cut short. The operations behind the cut come first, in
    /// the same order. The operation at the cut comes last: its peer's queue is full, and other peers' may not be.
    #[cold]
    fn reorder_after_cut(&mut self, rail: usize, cut_at: usize) {
        let Rail { queue, batch_runs, .. } = &mut self.rails[rail];
        let link = |run: &Run| self.active[run.op as usize].as_ref().map(|active| active.link);
        for run in batch_runs[cut_at + 1..].iter().rev() {
            if let Some(link) = link(run) {
                queue.move_to_front(link, run.op);
            }
        }
        if let Some(link) = link(&batch_runs[cut_at]) {
            queue.move_to_back(link, batch_runs[cut_at].op);
        }
    }

    /// Removes the requests in flight from the send window of a rail that has had no room for too long. Pauses their
    /// peers until they respond. Returns true if the rail has room now.
    #[cold]
    fn evict_unresponsive(&mut self, rail: usize) -> bool {
        let (now, ended) = (self.now(), self.handle.counts[rail].ended());
        let Some(ops) = self.rails[rail].evict_unresponsive(now, ended) else { return false };
        for op in &ops {
            let Some(active) = &self.active[*op as usize] else { continue };
            self.rails[rail].queue.pause(active.link);
        }
        if let Some(op) = ops.first() {
            self.hash_event(HashedEvent::Evicted, u64::from(*op));
            tracing::debug!(rail, runs = ops.len(), "no request completes: evicted the requests in flight");
        }
        !ops.is_empty()
    }

    // ---- credit of peers' grants ----
    //
    // Most peers grant without limit. An operation to such a peer takes no credit, and nothing below runs for its
    // requests.

    /// Removes the front operation from a rail's queue until its peer grants more: other operations go on.
    #[cold]
    fn wait_for_credit(&mut self, rail: usize, op: u32) {
        self.rails[rail].queue.pop();
        self.handle.counts[rail].grant_wait();
        let Some(active) = &mut self.active[op as usize] else { return };
        active.rails[rail].queued = false;
        if !std::mem::replace(&mut active.waits_for_credit, true)
            && let Some(Some(link)) = self.links.get_mut(active.link as usize)
        {
            link.waiting_for_credit.push_back(op);
        }
    }

    /// Puts the operations of a link that wait for credit back into the rails' queues.
    fn retry_waiting(&mut self, link: u32) {
        // Queueing an operation adds nothing to this list. Popping keeps the list's memory.
        while let Some(Some(state)) = self.links.get_mut(link as usize)
            && let Some(op) = state.waiting_for_credit.pop_front()
        {
            if let Some(active) = &mut self.active[op as usize] {
                active.waits_for_credit = false;
            }
            self.queue(op);
        }
    }

    /// Removes an operation that has ended from its link's list of operations that wait for credit.
    #[cold]
    pub(super) fn stop_waiting_for_credit(&mut self, link: u32, op: u32) {
        if let Some(Some(state)) = self.links.get_mut(link as usize) {
            state.waiting_for_credit.retain(|waiting| *waiting != op);
        }
    }

    /// Gives back the bytes of completed requests. If they failed, also gives back their imms and messages: as far as
    /// this side knows they did not arrive, and the receiver will not count them.
    #[cold]
    pub(super) fn return_credit(&mut self, op: u32, pieces: u32, failed: bool) {
        let Some(active) = &self.active[op as usize] else { return };
        let (link, bytes) = (active.link, active.piece_bytes() * u64::from(pieces));
        if failed && let Some(counter) = active.credit_counter(self.handle.group) {
            self.give_credit_back(active, counter, pieces);
        }
        let Some(Some(state)) = self.links.get_mut(link as usize) else { return };
        state.posted_bytes -= bytes;
        if bytes > 0 || failed {
            self.retry_waiting(link);
        }
    }

    /// Gives back imms or messages. Other rail groups learn of it if one may wait for them: if each refused request told
    /// them, two groups of one worker would keep it awake for as long as a peer's queue is full.
    fn give_credit_back(&self, active: &ActiveOp, counter: &CreditCounter, count: u32) {
        counter.give_back(count);
        if counter.take_is_short() {
            active.peer.notify_other_groups(self.handle.group);
        }
    }

    /// Gives back the credit of requests that the endpoint did not accept.
    #[cold]
    fn return_refused_credit(&mut self, rail: usize, accepted: u32) {
        let mut left = accepted;
        for index in 0..self.rails[rail].batch_runs.len() {
            let run = self.rails[rail].batch_runs[index];
            let taken = run.count.min(left);
            left -= taken;
            let refused = run.count - taken;
            let has_credit = |active: &&ActiveOp| active.takes_credit && refused > 0;
            let Some(active) = self.active[run.op as usize].as_ref().filter(has_credit) else { continue };
            if let Some(counter) = active.credit_counter(self.handle.group) {
                self.give_credit_back(active, counter, refused);
            }
            let link = active.link;
            if let Some(Some(state)) = self.links.get_mut(link as usize) {
                state.posted_bytes -= active.piece_bytes() * u64::from(refused);
            }
            self.retry_waiting(link);
        }
    }

    /// Puts the operations that wait for credit back into the rails' queues: the peer has granted more, or another
    /// engine or a thread on the direct path has given credit back.
    pub(super) fn on_grant_received(&mut self, link: u32) {
        let Some(Some(state)) = self.links.get(link as usize) else { return };
        state.peer.links[self.handle.group].credit.clear_notified();
        self.hash_event(HashedEvent::GrantReceived, link.into());
        self.retry_waiting(link);
    }

    /// Reports the arrivals that this engine has polled since a peer's last grant, and grants the peer more.
    #[cold]
    pub(super) fn renew_grant(&mut self, link: u32) {
        let Some(Some(state)) = self.links.get_mut(link as usize) else { return };
        let peer = Arc::clone(&state.peer);
        let [imms, messages] = std::mem::take(&mut state.arrivals);
        let announce = |grant| peer.context.grant_renewed(self.handle.transport, grant);
        match self.handle.receiver_credits.renew(peer.grantee(), imms, messages, announce) {
            Ok(grant) => state.renew_after = grant.renew_after,
            Err(error) => peer.context.failed(error),
        }
    }
}

/// The error of an operation that the engine cannot start; `None` if it can.
fn refusal(work: &Work, rails: &[ActiveRail], message_rail: usize) -> Option<Error> {
    // The submitting thread has checked this too. But the revocation may be over by now, and then the key that the
    // requests would name is no longer valid.
    if work.is_local_revoked() {
        return Some(revoked(work.operation_name()));
    }
    let (operation, why) = if !rails.iter().any(ActiveRail::usable) {
        ("submit", "no rail to this peer is left; open the fabric again")
    } else if work.kind == WorkKind::Send && !rails[message_rail].usable() {
        ("send", "the rail that carries messages does not reach the peer")
    } else {
        return None;
    };
    Some(Error::new(ErrorKind::DeviceLost, operation, why))
}
