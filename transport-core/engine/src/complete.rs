//! Completing: the engine polls the endpoints, finds the operation, peer or receive that each event is about, and ends
//! operations. It also moves pieces away from rails that are lost, taken out of service, or far behind.

// Over 800 lines: one of three files with `Engine`'s methods. (The limit is that of `ci/file-sizes`.)

use std::sync::Arc;

use super::event_hash::HashedEvent;
use super::operation::{ActiveOp, ActiveRail, Stage};
use super::peer::{
    ArrivalKind, BrokenPath, Comeback, FenceKind, FenceRequest, GOOD_PROBES, Link, LinkState, LostArrivals,
    MAX_REFUSED_PROBES, PathProbe, PathProbes, PeerProbe, PeerState, SlotLink, UnconfirmedFailure,
};
use super::rail::{FULL_SPEED, LEAST_STUCK_EMULATED, MAX_RUN, PostedPiece, speeds};
use super::snapshot::RecentFailures;
use super::trace::{TraceEvent, peer_number};
use super::{Continuation, DrainReply, Engine, EngineHandle, Rail, Submission, Work};
use crate::index::GroupIndex;
use crate::op::OpId;
use crate::spi::{Event, FenceReport, Paths, PeerSlot, Status, WorkKind};
use crate::{Error, ErrorKind, Outcome, PeerId, Result, Time};

/// How often one step polls a rail at most for one fence. These polls take what has arrived before the fence is
/// answered.
const MAX_POLLS_PER_FENCE: usize = 64;

impl Engine {
    // ---- polling ----

    /// Polls each rail once. Returns the number of events.
    #[inline(always)]
    pub(super) fn poll_rails(&mut self) -> usize {
        let mut events = 0;
        // Only after a panic: the previous step did not handle all events.
        if self.handled_events > 0 {
            events += self.handle_remaining_events();
        }
        for rail in 0..self.rails.len() {
            self.rails[rail].endpoint.poll(&mut self.completions);
            if !self.completions.is_untouched() {
                events += self.handle_poll(rail);
            }
        }
        events
    }

    /// Counts and handles the events of a poll of a rail. Never inlined, so that an idle step saves no registers for
    /// it.
    #[inline(never)]
    fn handle_poll(&mut self, rail: usize) -> usize {
        let count = self.completions.as_slice().len();
        let (done, failed) = count_completions(self.completions.as_slice());
        if done + failed > 0 {
            self.handle.counts[rail].completed(done, failed);
            let (requests, failed) = (done as u32, failed as u32);
            self.record(TraceEvent::Completed { rail: self.rail_number(rail), requests, failed });
        }
        let events = count + usize::from(self.completions.made_progress());
        self.handle_events(rail);
        if failed > 0 || self.has_broken_paths {
            self.recount_outstanding(rail);
        }
        events
    }

    /// Handles each event of the last poll exactly once. That poll was of `rail`.
    ///
    /// This also holds if a waker of the user panics: an event counts as handled before any waker runs.
    ///
    /// A completion may cover several runs. Then the engine handles one run, and replaces the event by one for the
    /// rest.
    #[inline]
    fn handle_events(&mut self, rail: usize) {
        self.handled_rail = rail;
        while let Some(event) = self.completions.as_slice().get(self.handled_events) {
            self.handled_events += 1;
            match *event {
                Event::Done { first, count } => {
                    // The id of a request is the number of its run times `MAX_RUN`, plus its index in the run.
                    let count_in_run = (MAX_RUN - (first % u64::from(MAX_RUN)) as u32).min(count);
                    if count_in_run < count {
                        let rest = Event::Done {
                            first: first + u64::from(count_in_run),
                            count: count - count_in_run,
                        };
                        self.handled_events -= 1;
                        self.completions.replace(self.handled_events, rest);
                    }
                    self.acknowledge(rail, first, count_in_run, None);
                }
                Event::Failed { id, status } => {
                    self.on_failed(rail, id, status, status.kind == ErrorKind::Unreachable)
                }
                Event::FailedUnconfirmed { id, peer, status } => {
                    self.on_unconfirmed_failure(rail, id, peer, status)
                }
                other => self.handle_event(rail, other),
            }
        }
        self.completions.clear();
        self.handled_events = 0;
    }

    /// Handles the events that a panic has left; returns their number.
    #[cold]
    fn handle_remaining_events(&mut self) -> usize {
        let left = self.completions.as_slice().len() - self.handled_events;
        self.handle_events(self.handled_rail);
        left
    }

    /// Handles the end of requests of this engine, all of one run.
    #[inline]
    fn acknowledge(&mut self, rail: usize, id: u64, count: u32, failed: Option<Status>) {
        self.hash_event(HashedEvent::Acknowledged, id);
        let inflight = &mut self.rails[rail].inflight;
        match inflight.acknowledge(id, count).or_else(|| self.acknowledge_evicted(rail, id, count)) {
            Some((op, pieces)) => self.on_pieces_ended(rail, op, pieces, failed),
            None if PathProbes::is_probe(id) => self.on_path_probe_ended(rail, id, failed.is_none()),
            None => tracing::error!(rail, id, "ignored the completion of a request that is not outstanding"),
        }
    }

    /// Handles the failure of a request of this engine. `by_path`: the path to the peer has failed, and the peer lives.
    #[cold]
    fn on_failed(&mut self, rail: usize, id: u64, status: Status, by_path: bool) {
        // `Event::DeviceLost` is about all requests of a lost device.
        let is_lost = status.kind == ErrorKind::DeviceLost && self.rails[rail].endpoint.is_lost();
        if by_path && !is_lost {
            self.on_path_failed(rail, id, status);
        }
        if !is_lost && !self.keep_lost(rail, id) {
            self.acknowledge(rail, id, 1, Some(status));
        }
    }

    /// Acknowledges requests that may have been evicted from the send window because nothing had completed for long. If
    /// they were, this completion shows that the peer responds again, and the rail serves the peer's link again.
    /// Returns their operation and their number.
    #[cold]
    fn acknowledge_evicted(&mut self, rail: usize, id: u64, count: u32) -> Option<(u32, u32)> {
        let this = &mut self.rails[rail];
        let (op, pieces) = this.inflight.acknowledge_evicted(id, count)?;
        if let Some(active) = &self.active[op as usize] {
            this.queue.resume(active.link);
        }
        Some((op, pieces))
    }

    /// Counts pieces of an operation as ended. The pieces of one call belong to one run, or were lost on one broken
    /// path. Always inlined into [`Engine::acknowledge`]; the other callers are rare.
    #[inline(always)]
    fn on_pieces_ended(&mut self, rail: usize, op: u32, pieces: u32, failed: Option<Status>) {
        let now = self.now();
        let Some(active) = &mut self.active[op as usize] else { return };
        active.outstanding -= pieces;
        let takes_credit = active.takes_credit;
        active.ended_at = now;
        active.note_progress(now, &mut self.next_stall_check);
        let is_over = active.is_over();
        if takes_credit {
            self.return_credit(op, pieces, failed.is_some());
        }
        if let Some(status) = failed {
            self.note_failed_arrival(op, rail);
            self.fail_with(op, rail, status);
        } else if is_over {
            self.finish_if_over(op);
        }
    }

    /// Handles an event that is not the end of a request of this engine.
    pub(super) fn handle_event(&mut self, rail: usize, event: Event) {
        match event {
            Event::Imm { peer, imm } => {
                let Some(slot) = self.slot_link(rail, peer, event) else { return };
                slot.imms += 1;
                let link = slot.link;
                self.hash_event(HashedEvent::ImmArrived, imm.into());
                if let Some(state) = &mut self.links[link as usize] {
                    let peer = peer_number(state.peer.id);
                    let renew = state.count_arrival(ArrivalKind::Imm);
                    self.record(TraceEvent::Imm { rail: self.rail_number(rail), peer, imm });
                    if renew {
                        self.renew_grant(link);
                    }
                }
                // Last, because wakers run the user's code.
                if let Some(state) = &self.links[link as usize] {
                    state.peer.imms.arrived(imm);
                }
            }
            Event::Received { id, peer, len, imm } => {
                let Some(slot) = self.slot_link(rail, peer, event) else { return };
                slot.messages += 1;
                let link = slot.link;
                self.hash_event(HashedEvent::MessageArrived, id);
                let sender = self.links[link as usize].as_ref().map(|link| link.peer.id);
                let peer = sender.map_or(0, peer_number);
                self.record(TraceEvent::Message { rail: self.rail_number(rail), peer, bytes: len });
                let state = self.links[link as usize].as_mut();
                // In an engine for notifications, a message counts when its buffer is free again.
                if !self.handle.for_notifications
                    && state.is_some_and(|state| state.count_arrival(ArrivalKind::Message))
                {
                    self.renew_grant(link);
                }
                // Last, because wakers run the user's code.
                self.receives.received(id, rail, (sender, len, imm), &mut self.rails, &self.handle);
            }
            Event::ReceiveFailed { id, status } => {
                self.hash_event(HashedEvent::ReceiveFailed, id);
                let text = self.rails[rail].endpoint.describe(status);
                let error = Error::new(status.kind, "recv", text);
                if !matches!(status.kind, ErrorKind::Cancelled | ErrorKind::DeviceLost) {
                    // Perhaps a message that was too long: its sender may take it for arrived.
                    self.slot_links[rail].iter_mut().flatten().for_each(|slot| slot.is_uncounted = true);
                }
                self.receives.failed(id, rail, error, &mut self.rails, &self.handle);
            }
            Event::PeerGone { peer } => self.on_peer_gone(rail, peer),
            Event::EndpointChanged => self.on_endpoint_changed(rail),
            Event::DeviceLost { status } => self.on_device_lost(rail, status),
            Event::Done { .. } | Event::Failed { .. } | Event::FailedUnconfirmed { .. } => {}
        }
    }

    /// The link of a slot. If the engine does not know the peer yet, keeps the event for later.
    fn slot_link(&mut self, rail: usize, peer: PeerSlot, event: Event) -> Option<&mut SlotLink> {
        let slot = peer.0 as usize;
        let is_known = self.slot_links[rail].get(slot).is_some_and(Option::is_some);
        if !is_known
            && !self.early_events.keep(rail, peer, event)
            && let Event::Received { id, .. } = event
        {
            let why = "a peer sent too many messages before it was admitted; this one is dropped";
            let error = Error::new(ErrorKind::Protocol, "recv", why);
            self.receives.failed(id, rail, error, &mut self.rails, &self.handle);
        }
        self.slot_links[rail].get_mut(slot).and_then(Option::as_mut)
    }

    // ---- failures of peers and devices ----

    /// The last event of a slot. The link fails if it has not failed before.
    fn on_peer_gone(&mut self, rail: usize, peer: PeerSlot) {
        let take_link =
            |this: &mut Self| this.slot_links[rail].get_mut(peer.0 as usize).and_then(Option::take);
        let mut link = take_link(self);
        if link.is_none() {
            // The fabric sends the `Link` command before any thread can disconnect the peer: it is queued by now.
            self.take_controls();
            link = take_link(self);
        }
        let Some(SlotLink { link: index, .. }) = link else {
            // The slot was prepared, and its peer was never admitted.
            self.early_events.take(rail, peer);
            return;
        };
        self.hash_event(HashedEvent::PeerGone, index.into());
        let number = self.links[index as usize].as_ref().map_or(0, |link| peer_number(link.peer.id));
        self.record(TraceEvent::PeerGone { rail: self.rail_number(rail), peer: number });
        let Some(link) = &mut self.links[index as usize] else { return };
        link.remove_slot(rail, peer);
        if !link.has_failed {
            // There are two cases:
            // - The backend has noticed the end of the connection before the control plane.
            // - Another thread has ended the connection, and has told the backend, but not this engine yet. Then the
            //   reason is known.
            // `context` is the core's side of the peer (`PeerEvents`).
            let gone = link.peer.clone();
            let lost = || Error::new(ErrorKind::PeerDied, "poll", "the backend lost the connection");
            let error = gone.close_reason().unwrap_or_else(lost);
            self.fail_link(index, &error);
            gone.context.failed(error);
        }
        self.retire_link(index);
    }

    /// The endpoint of a rail has a new address: tells all peers.
    fn on_endpoint_changed(&self, rail: usize) {
        for link in self.links.iter().flatten().filter(|link| !link.has_failed) {
            link.peer.context.endpoint_changed(self.handle.group, rail);
        }
    }

    /// A device is lost, and with it a path to each peer.
    fn on_device_lost(&mut self, rail: usize, status: Status) {
        self.hash_event(HashedEvent::DeviceLost, rail as u64);
        self.record(TraceEvent::DeviceLost { rail: self.rail_number(rail) });
        let text = self.rails[rail].endpoint.describe(status);
        let text = if text.is_empty() { text } else { format!(": {text}") };
        let why = format!("the device of rail {} is lost{text}", self.rail_number(rail));
        let error = Error::new(ErrorKind::DeviceLost, "poll", why);
        let (transport, device) = (&self.handle.label, &self.handle.devices[rail]);
        tracing::warn!(%transport, %device, "the device is lost: what it has posted goes over other rails{text}");
        self.rails[rail].lost = Some(status);
        self.handle.counts[rail].set_lost();
        self.handle.set_out_of_service(rail, true);
        for active in self.active.iter_mut().flatten() {
            active.rails[rail].weight = 0;
        }
        self.unconfirmed_failures.drop_rail(rail);
        let posted: Vec<_> = self.rails[rail].inflight.unacknowledged().collect();
        for link in 0..self.links.len() as u32 {
            self.end_comeback(rail, link);
            self.break_path(rail, link, &error);
            self.announce_loss(rail, link);
        }
        // The queue may still name operations of peers that are gone. Their indices are reused, and a new operation
        // must not count as queued here.
        self.rails[rail].queue.clear();
        for PostedPiece { id, .. } in posted {
            if self.rails[rail].inflight.find(id).is_some() && !self.keep_lost(rail, id) {
                let status = Status { kind: ErrorKind::DeviceLost, code: status.code };
                self.acknowledge(rail, id, 1, Some(status));
            }
        }
        self.receives.on_device_lost(rail, &self.handle);
        self.take_unclaimed(rail, None);
        match self.rails.iter().all(|rail| rail.lost.is_some()) {
            true => self.receives.on_all_lost(&error, &self.handle),
            false => self.place_receives(),
        }
    }

    /// This side's device of a rail is lost, or the peer's, or the path between them: nothing is sent to the peer of a
    /// link over the rail. Other rails post what is not posted. What is posted may still arrive, so the peer is asked to
    /// fence its end.
    fn break_path(&mut self, rail: usize, link: u32, error: &Error) {
        let Some(state) = self.links[link as usize].as_mut().filter(|state| !state.has_failed) else {
            return;
        };
        let peer = state.peer.id;
        let Some(slot) = state.break_path(self.handle.group, rail, error) else { return };
        self.update_message_rail(link);
        self.probes.forget_path(rail, link);
        self.rails[rail].watch.reset();
        self.rails[rail].meter.restart();
        self.has_broken_paths = true;
        self.handle.counts[rail].path_changed(false);
        self.hash_event(HashedEvent::PathBroken, rail as u64);
        self.record(TraceEvent::PathBroken { rail: self.rail_number(rail), peer: peer_number(peer) });
        for op in 0..self.active.len() as u32 {
            let Some(active) = self.active[op as usize].as_mut().filter(|active| active.link == link) else {
                continue;
            };
            active.rails[rail].weight = 0;
            active.take_back(rail);
            if active.rails[rail].left() == 0 || self.hand_over(op, rail) || self.set_aside(op, rail) {
                self.settle_handed_over(op);
            } else if !self.resend_imm(op) {
                self.fail_op(op, error.clone());
            }
            self.rails[rail].queue.remove(link, op);
            if let Some(active) = &mut self.active[op as usize]
                && !active.rails[rail].is_handed_over
            {
                active.rails[rail].queued = false;
            }
        }
        if self.rails[rail].lost.is_none() {
            self.rails[rail].endpoint.abort(slot);
        } else {
            let posted = self.rails[rail].inflight.unacknowledged();
            let posted: Vec<_> = posted.filter(|posted| is_of_link(&self.active, link, posted)).collect();
            for PostedPiece { id, .. } in posted {
                self.keep_lost(rail, id);
            }
        }
        self.recount_outstanding(rail);
        self.ask_peer((rail, slot), link, self.fence_kind(rail));
    }

    /// A peer was admitted after devices were lost.
    pub(super) fn break_paths_of_lost_rails(&mut self, link: u32) {
        for rail in 0..self.rails.len() {
            if self.rails[rail].lost.is_some() {
                let why = format!("the device of rail {} is lost", self.rail_number(rail));
                self.break_path(rail, link, &Error::new(ErrorKind::DeviceLost, "poll", why));
                self.announce_loss(rail, link);
            }
        }
    }

    /// This side's device of a rail is lost. If the peer has more rails than this side, some slots of the rail only
    /// receive. Asks the peer for a fence of each such slot, so that the peer learns of the loss. This side ignores the
    /// answers.
    fn announce_loss(&self, rail: usize, link: u32) {
        let Some(state) = self.links[link as usize].as_ref().filter(|state| !state.has_failed) else {
            return;
        };
        for slot in state.slots_that_only_receive(rail) {
            self.ask_peer((rail, slot), link, self.fence_kind(rail));
        }
    }

    /// Asks the peer of a link for a fence of a pair of rails, or to lift it.
    fn ask_peer(&self, (rail, slot): (usize, PeerSlot), link: u32, kind: FenceKind) {
        let Some(Some(state)) = self.links.get(link as usize) else { return };
        let request = FenceRequest::new(Arc::clone(&self.handle), (rail, slot), link, state.peer.id, kind);
        state.peer.context.fence_wanted(self.handle.group, request);
    }

    /// The peer has lost its path from the other end of a slot, or its device there (`is_device_lost`): then the path
    /// does not come back.
    pub(super) fn on_peer_path_lost(&mut self, rail: usize, link: u32, slot: PeerSlot, is_device_lost: bool) {
        let Some(Some(state)) = self.links.get(link as usize) else { return };
        if state.send_slots[rail] == Some(slot) {
            let (transport, device) = (&self.handle.label, &self.handle.devices[rail]);
            let peer = state.peer.id.number();
            tracing::warn!(%transport, %device, peer, "the peer has lost its device or its path: other rails go on");
            let (kind, why) = match is_device_lost {
                true => (ErrorKind::DeviceLost, "the peer's device behind it is lost"),
                false => (ErrorKind::Unreachable, "the peer has lost its path over it"),
            };
            let why = format!("rail {}: {why}", self.rail_number(rail));
            self.break_path(rail, link, &Error::new(kind, "poll", why));
        }
        let Some(Some(state)) = self.links.get_mut(link as usize) else { return };
        if let Some(path) = state.broken_path(rail).filter(|path| path.slot == slot && is_device_lost) {
            path.stays_broken = true;
            if path.comeback != Comeback::Unsettled {
                path.comeback = Comeback::Never;
            }
            self.update_message_rail(link);
            self.fail_unreached(link);
        }
    }

    // ---- messages that change their rail ----

    /// Messages to the peer of a link go over the first rail whose path works, or may come back.
    pub(super) fn update_message_rail(&mut self, link: u32) {
        let Some(Some(state)) = self.links.get(link as usize) else { return };
        let reaches = |rail: &usize| {
            let broken = state.broken_paths().iter().find(|path| path.rail == *rail);
            broken.map_or(state.send_slots[*rail].is_some(), |path| self.may_come_back(path))
        };
        let mut rails = 0..self.rails.len();
        let Some(next) = rails.find(reaches) else { return };
        // Once the peer has announced messages, it alone says over which rail they come.
        let is_receiving = match state.has_announced {
            true => self.rails[state.receive_rail].lost.is_none(),
            false => reaches(&state.receive_rail),
        };
        let has_changed = next != state.message_rail;
        let peer = state.peer.id.number();
        let Some(Some(state)) = self.links.get_mut(link as usize) else { return };
        state.message_rail = next;
        if !is_receiving {
            // The peer decides in the same way, and says so if it does not.
            state.receive_rail = next;
            self.place_receives();
        }
        if !has_changed {
            return;
        }
        let mut waiting = 0;
        for active in self.active.iter_mut().flatten().filter(|active| active.link == link) {
            active.message_rail = next as u16;
            waiting += u64::from(active.work.kind == WorkKind::Send && active.unposted > 0);
        }
        if let Some(Some(state)) = self.links.get_mut(link as usize) {
            state.add_messages(self.handle.group, waiting);
        }
        let (transport, device) = (&self.handle.label, &self.handle.devices[next]);
        tracing::info!(%transport, %device, peer, "messages go over another device from now on");
    }

    /// The peer of a link has posted so many messages to a slot.
    pub(super) fn on_messages_posted(&mut self, (rail, slot): (usize, PeerSlot), link: u32, count: u64) {
        let slot_link = self.slot_links[rail].get_mut(slot.0 as usize).and_then(Option::as_mut);
        let (Some(slot_link), Some(Some(state))) = (slot_link, self.links.get_mut(link as usize)) else {
            return;
        };
        slot_link.announced = count;
        (state.receive_rail, state.has_announced) = (rail, true);
        if !std::mem::replace(&mut state.announces, true) {
            state.announce_messages(self.handle.group, state.message_rail);
        }
        self.place_receives();
    }

    /// Posts receives on the rails that peers send messages over.
    #[cold]
    fn place_receives(&mut self) {
        let works = |rail: usize| self.rails[rail].lost.is_none();
        let live = self.links.iter().flatten().filter(|state| !state.has_failed);
        let mut used: Vec<_> = live.map(|state| state.receive_rail).filter(|rail| works(*rail)).collect();
        let awaits = |rail: &usize| self.slot_links[*rail].iter().flatten().any(|slot| slot.awaited() > 0);
        used.extend((0..self.rails.len()).filter(|rail| works(*rail)).filter(awaits));
        used.sort_unstable();
        used.dedup();
        if used.is_empty() {
            used.extend((0..self.rails.len()).find(|rail| works(*rail)));
        }
        if used.is_empty() {
            return;
        }
        if used.len() > 1 {
            // A receive goes where a message waits for it, so each peer has to say where that is. An announcement asks
            // for the peer's.
            for state in self.links.iter_mut().flatten().filter(|state| !state.has_failed) {
                state.announces = true;
                if !std::mem::replace(&mut state.asked_to_announce, true) {
                    state.announce_messages(self.handle.group, state.message_rail);
                }
            }
        }
        let used = used.into_iter().map(|rail| {
            let slots = self.slot_links[rail].iter().flatten();
            (rail, slots.map(|slot| slot.awaited()).fold(0, u64::saturating_add))
        });
        self.receives.set_used(used.collect(), &mut self.rails, &self.handle);
    }

    /// Takes the messages that wait for a receive of a rail: of one slot, or all.
    fn take_unclaimed(&mut self, rail: usize, slot: Option<PeerSlot>) {
        // In an engine for notifications, a message counts for the grant when its buffer is free again.
        let counts = !self.handle.for_notifications;
        let mut due = Vec::new();
        let Self { rails, slot_links, links, receives, .. } = self;
        rails[rail].endpoint.take_unclaimed(slot, &mut |slot, bytes, imm| {
            let slot_link = slot_links[rail].get_mut(slot.0 as usize).and_then(Option::as_mut);
            if let Some(slot_link) = slot_link
                && let Some(Some(state)) = links.get_mut(slot_link.link as usize)
            {
                slot_link.messages += 1;
                if counts && state.count_arrival(ArrivalKind::Message) {
                    due.push(slot_link.link);
                }
                receives.keep(state.peer.id, bytes, imm);
            }
        });
        due.dedup();
        due.into_iter().for_each(|link| self.renew_grant(link));
    }

    // ---- paths that fail, and that come back ----

    /// A request failed because of its path, which counts as broken from now on. An engine with one rail fails the
    /// request instead, and the next requests try the path again.
    #[cold]
    fn on_path_failed(&mut self, rail: usize, id: u64, status: Status) {
        let op = self.rails[rail].inflight.find(id).map(|posted| posted.op);
        let Some(link) = op.and_then(|op| self.active[op as usize].as_ref()).map(|active| active.link) else {
            return;
        };
        if self.heals() {
            let text = self.rails[rail].endpoint.describe(status);
            let why = format!("rail {} does not reach the peer any more: {text}", self.rail_number(rail));
            self.on_path_lost(rail, link, &Error::new(ErrorKind::Unreachable, "poll", why));
        }
    }

    /// A path is broken although both devices work, as far as this side knows.
    fn on_path_lost(&mut self, rail: usize, link: u32, error: &Error) {
        let Some(Some(state)) = self.links.get(link as usize) else { return };
        if state.send_slots[rail].is_some() {
            let (transport, device, peer) =
                (&self.handle.label, &self.handle.devices[rail], state.peer.id.number());
            tracing::warn!(%transport, %device, peer, %error, "a path to a peer is broken: other rails go on");
            self.break_path(rail, link, error);
        }
    }

    /// Whether broken paths come back, and others carry the requests meanwhile: there are several rails, and all can
    /// fence.
    fn heals(&self) -> bool {
        self.path_check_interval.is_some()
    }

    /// Whether a path to the peer of a link is broken that may come back, and that can carry an operation of this kind:
    /// a message needs the rail for messages.
    #[cold]
    pub(super) fn may_return(&self, link: u32, kind: WorkKind) -> bool {
        let Some(Some(state)) = self.links.get(link as usize) else { return false };
        let is_meant = |path: &BrokenPath| kind != WorkKind::Send || path.rail == state.message_rail;
        !state.has_failed
            && state.broken_paths().iter().any(|path| is_meant(path) && self.may_come_back(path))
    }

    /// Whether a broken path may come back.
    fn may_come_back(&self, path: &BrokenPath) -> bool {
        path.comeback != Comeback::Never
            && !path.stays_broken
            && self.rails[path.rail].lost.is_none()
            && self.rails[path.rail].domain.capabilities().fences
    }

    /// Looks for paths that make no progress, while the same peer answers over another one. Returns their number.
    #[cold]
    pub(super) fn check_paths(&mut self, now: Time) -> usize {
        let mut broken = 0;
        for rail in 0..self.rails.len() {
            let this = &mut self.rails[rail];
            if this.lost.is_some() {
                continue;
            }
            // A message may wait for the peer's receive.
            let is_no_message = |op: u32| {
                self.active[op as usize].as_ref().is_some_and(|active| active.work.kind != WorkKind::Send)
            };
            let oldest = this.inflight.oldest(is_no_message);
            let active = oldest.and_then(|(_, op)| self.active[op as usize].as_ref());
            let least = this.least_stuck_limit();
            let look = this.watch.look(oldest.map(|(run, _)| run), now, least);
            let Some(mut stuck) = look else { continue };
            // The peer's processor takes part in requests that go through slots.
            let path = active.map(|active| active.work.path(self.handle.transport, Paths::empty));
            if path.is_some_and(|path| path.intersects(Paths::STAGED | Paths::COALESCED)) {
                stuck.limit = stuck.limit.max(LEAST_STUCK_EMULATED);
            }
            let Some(link) = active.map(|active| active.link) else { continue };
            let has_failed = self.links[link as usize].as_ref().is_none_or(|state| state.has_failed);
            if has_failed || stuck.span * 2 < stuck.limit {
                continue;
            }
            // A peer that has answered lately over another rail would have answered over this one too.
            let lately = stuck.since.after(stuck.limit / 2);
            if !self.has_answered_since(link, lately) {
                self.probe_other_path(rail, link, lately, now);
            } else if stuck.span >= stuck.limit && self.has_other_path(rail, link) {
                let why = format!(
                    "no request over rail {} to the peer has ended for {:?}, and requests over other rails have",
                    self.rail_number(rail),
                    stuck.span
                );
                self.on_path_lost(rail, link, &Error::new(ErrorKind::Unreachable, "poll", why));
                broken += 1;
            }
        }
        broken
    }

    /// Whether another rail reaches the peer of a link.
    fn has_other_path(&self, rail: usize, link: u32) -> bool {
        let Some(Some(state)) = self.links.get(link as usize) else { return false };
        let works = |other: usize| state.send_slots[other].is_some() && self.rails[other].lost.is_none();
        (0..self.rails.len()).any(|other| other != rail && works(other))
    }

    /// Whether a request to the peer of a link has ended well since then.
    fn has_answered_since(&self, link: u32, since: Time) -> bool {
        self.links[link as usize].as_ref().is_some_and(|state| state.last_success > since)
    }

    /// Finds out whether the peer of a link answers over another rail than one that is stuck.
    fn probe_other_path(&mut self, rail: usize, link: u32, since: Time, now: Time) {
        let Some(Some(state)) = self.links.get(link as usize) else { return };
        let slots: Vec<_> = state.send_slots.iter().enumerate().map(|(other, slot)| (other, *slot)).collect();
        for (other, slot) in slots {
            let Some(slot) = slot.filter(|_| other != rail && self.rails[other].lost.is_none()) else {
                continue;
            };
            let is_asked = self.probes.is_checking(other, link, since);
            if !is_asked && let Some(id) = self.post_probe(other, slot) {
                let probe = PathProbe { id, rail: other, link, posted_at: now, is_comeback: false };
                return self.probes.add(probe);
            }
        }
    }

    /// Nothing that was posted over a broken path can arrive any more, and all of it is settled: the path may come back
    /// later, unless a device is lost or the peer cannot fence. The peer may wait for this to send there again itself.
    fn begin_comeback(&mut self, rail: usize, link: u32) {
        let (now, random) = (self.now(), self.hash.value());
        let this = &self.rails[rail];
        let capabilities = this.domain.capabilities();
        let may_return = this.lost.is_none() && capabilities.fences;
        let Some(Some(state)) = self.links.get_mut(link as usize) else { return };
        let Some(path) = state.broken_path(rail).filter(|path| path.comeback == Comeback::Unsettled) else {
            return;
        };
        let report = path.fenced.clone().and_then(Result::ok);
        let may_return = may_return && !path.stays_broken;
        path.comeback = Comeback::Never;
        if let Some(report) = report {
            state.set_sent(rail, report);
            if may_return {
                self.wait_for_comeback(rail, link, now, random);
                if !self.comebacks.contains(&(rail, link)) {
                    self.comebacks.push((rail, link));
                }
            }
        }
        self.update_message_rail(link);
        self.fail_unreached(link);
        self.lift_fences();
    }

    /// Lets a broken path wait before its next attempt to come back.
    fn wait_for_comeback(&mut self, rail: usize, link: u32, now: Time, random: u64) {
        let round_trip = self.rails[rail].domain.capabilities().round_trip;
        let Some(Some(state)) = self.links.get_mut(link as usize) else { return };
        let until = now.after(state.histories[rail].note_break(now, round_trip, random));
        if let Some(path) = state.broken_path(rail) {
            path.comeback = Comeback::Waiting { until };
            self.next_deadline = self.next_deadline.min(until);
        }
    }

    /// This side's device of a rail is lost while its path to a peer was broken. The peer learns of the loss: it may have
    /// lifted its fence meanwhile, and may wait for the path to come back.
    fn end_comeback(&mut self, rail: usize, link: u32) {
        let Some(Some(state)) = self.links.get_mut(link as usize) else { return };
        self.probes.forget_path(rail, link);
        let Some(path) = state.broken_path(rail) else { return };
        if path.comeback != Comeback::Unsettled {
            path.comeback = Comeback::Never;
        }
        let slot = path.slot;
        self.ask_peer((rail, slot), link, FenceKind::DeviceLost);
        self.update_message_rail(link);
        self.fail_unreached(link);
    }

    /// Why this side asks for a fence of a pair with this rail.
    fn fence_kind(&self, rail: usize) -> FenceKind {
        if self.rails[rail].lost.is_some() { FenceKind::DeviceLost } else { FenceKind::PathLost }
    }

    /// Lifts the fences that peers want lifted, once this side has settled what it had posted over the same pair.
    pub(super) fn lift_fences(&mut self) {
        loop {
            let (rails, links) = (&self.rails, &self.links);
            let next = self.fences.next_lift(|lift| {
                let state = links.get(lift.link as usize).and_then(Option::as_ref);
                let is_unsettled = |path: &BrokenPath| {
                    (path.rail, path.slot) == (lift.rail, lift.slot) && path.comeback == Comeback::Unsettled
                };
                rails[lift.rail].lost.is_none()
                    && state.is_some_and(|state| !state.broken_paths().iter().any(is_unsettled))
            });
            let Some(lift) = next else { return };
            let result = self.rails[lift.rail].domain.connector().lift_fence(lift.slot);
            if let Some(Some(state)) = self.links.get(lift.link as usize) {
                state.peer.context.endpoint_changed(self.handle.group, lift.rail);
            }
            let slot = self.slot_links[lift.rail].get(lift.slot.0 as usize).copied().flatten();
            (lift.reply)(result.map(|()| slot.map_or_else(FenceReport::default, SlotLink::report)));
        }
    }

    /// The peer has lifted its fence, or cannot. This side's own fence of the pair, if there is one, falls too: the peer
    /// lifts its fence once it has settled what it had posted.
    pub(super) fn on_lifted(
        &mut self,
        (rail, slot): (usize, PeerSlot),
        link: u32,
        peer: PeerId,
        result: Result<FenceReport>,
    ) {
        if self.link_of.get(&peer) != Some(&link) || self.rails[rail].lost.is_some() {
            return;
        }
        let (now, random) = (self.now(), self.hash.value());
        let Some(Some(state)) = self.links.get_mut(link as usize) else { return };
        let pause = state.histories[rail].probe_pause();
        let context = Arc::clone(&state.peer);
        let asked = |path: &&mut BrokenPath| path.slot == slot && path.comeback == Comeback::Asked;
        let Some(path) = state.broken_path(rail).filter(asked) else { return };
        let result = result.and_then(|_| self.rails[rail].domain.connector().lift_fence(slot));
        match result {
            Ok(()) => {
                let next = now.after(pause);
                path.comeback = Comeback::Probing { good: 0, refused: 0, next, is_under_way: false };
                self.next_deadline = self.next_deadline.min(next);
                context.context.endpoint_changed(self.handle.group, rail);
            }
            Err(error) => {
                tracing::debug!(peer = peer.number(), rail, %error, "a fence is not lifted yet");
                self.wait_for_comeback(rail, link, now, random);
            }
        }
    }

    /// Moves the paths on that are on their way back. Lowers `next` to the time of the next such move. Returns
    /// the number of moves.
    pub(super) fn advance_comebacks(&mut self, now: Time, next: &mut Time) -> usize {
        let mut moves = 0;
        for (rail, link) in std::mem::take(&mut self.comebacks) {
            let Some((due, moved)) = self.advance_comeback(rail, link, now) else { continue };
            *next = (*next).min(due);
            moves += usize::from(moved);
            self.comebacks.push((rail, link));
        }
        moves
    }

    /// Moves one path on. Returns when the next move is due, and whether there was one; `None` if there will be none.
    fn advance_comeback(&mut self, rail: usize, link: u32, now: Time) -> Option<(Time, bool)> {
        let state = self.links.get_mut(link as usize)?.as_mut().filter(|state| !state.has_failed)?;
        let pause = state.histories[rail].probe_pause();
        let trial = state.on_trial_until(rail);
        let Some(path) = state.broken_path(rail) else {
            let until = trial?;
            if until > now {
                return Some((until, false));
            }
            state.end_trial(rail);
            state.set_weights(self.handle.group, self.speeds.iter().copied());
            return None;
        };
        match path.comeback {
            Comeback::Unsettled | Comeback::Never => None,
            Comeback::Asked | Comeback::Probing { is_under_way: true, .. } => Some((Time::NEVER, false)),
            Comeback::Waiting { until } if until > now => Some((until, false)),
            Comeback::Waiting { .. } => {
                path.comeback = Comeback::Asked;
                let slot = (rail, path.slot);
                self.ask_peer(slot, link, FenceKind::Lift);
                Some((Time::NEVER, true))
            }
            Comeback::Probing { next, .. } if next > now => Some((next, false)),
            Comeback::Probing { refused: MAX_REFUSED_PROBES, .. } => {
                let random = self.hash.value();
                self.wait_for_comeback(rail, link, now, random);
                Some((self.next_deadline, true))
            }
            Comeback::Probing { good, refused, .. } => {
                let slot = path.slot;
                let posted = self.post_probe(rail, slot);
                let next = now.after(pause);
                let is_under_way = posted.is_some();
                let refused = if is_under_way { 0 } else { refused + 1 };
                if let Some(id) = posted {
                    self.probes.add(PathProbe { id, rail, link, posted_at: now, is_comeback: true });
                }
                if let Some(Some(state)) = self.links.get_mut(link as usize)
                    && let Some(path) = state.broken_path(rail)
                {
                    path.comeback = Comeback::Probing { good, refused, next, is_under_way };
                }
                Some((if is_under_way { Time::NEVER } else { next }, is_under_way))
            }
        }
    }

    /// A probe of a path has ended.
    #[cold]
    fn on_path_probe_ended(&mut self, rail: usize, id: u64, is_good: bool) {
        let probes = &mut self.rails[rail].probes;
        *probes = probes.saturating_sub(1);
        // `None` if the path has broken since then, or if the peer is gone.
        let Some(probe) = self.probes.take(id) else { return };
        let (now, random, link) = (self.now(), self.hash.value(), probe.link);
        let is_in_time = now.since(probe.posted_at) <= self.rails[rail].least_stuck_limit();
        let Some(Some(state)) = self.links.get_mut(link as usize) else { return };
        if !probe.is_comeback {
            if is_good {
                state.last_success = now;
            }
            return;
        }
        let next = now.after(state.histories[rail].probe_pause());
        let Some(path) = state.broken_path(rail) else { return };
        let Comeback::Probing { good, .. } = path.comeback else { return };
        let good = if is_in_time { good + 1 } else { 0 };
        if !is_good {
            tracing::debug!(rail, peer = state.peer.id.number(), "a path is still broken");
            self.wait_for_comeback(rail, link, now, random);
        } else if good == GOOD_PROBES {
            self.mend_path(rail, link, now);
        } else {
            path.comeback = Comeback::Probing { good, refused: 0, next, is_under_way: false };
            self.next_deadline = self.next_deadline.min(next);
        }
    }

    /// A broken path works again.
    fn mend_path(&mut self, rail: usize, link: u32, now: Time) {
        let Some(Some(state)) = self.links.get_mut(link as usize) else { return };
        let until = state.mend_path(rail, now);
        state.set_weights(self.handle.group, self.speeds.iter().copied());
        let peer = state.peer.id;
        self.next_deadline = self.next_deadline.min(until);
        self.rails[rail].queue.resume(link);
        self.handle.counts[rail].path_changed(true);
        self.hash_event(HashedEvent::PathMended, rail as u64);
        self.record(TraceEvent::PathMended { rail: self.rail_number(rail), peer: peer_number(peer) });
        let (transport, device) = (&self.handle.label, &self.handle.devices[rail]);
        tracing::info!(%transport, %device, peer = peer.number(), "a path to a peer works again");
        self.offer_rail(rail, link);
    }

    // ---- how fast the rails are ----

    /// Measures the speed of a rail, which is about to post.
    pub(super) fn measure_speed(&mut self, rail: usize) {
        let now = self.now();
        let this = &mut self.rails[rail];
        // If all requests have ended since the last poll, this thread is too slow, and not the rail.
        let is_busy = this.inflight.cost_in_flight() > 0;
        let was_full = is_busy && (this.window.was_blocked() || this.queue_full_logged);
        if this.meter.note(now, this.inflight.ended_cost(), was_full) {
            self.update_speeds();
        }
    }

    /// A slow rail gets a smaller share of later operations, and may post less at once.
    #[cold]
    fn update_speeds(&mut self) {
        let relative =
            self.rails.iter().map(|rail| rail.lost.map_or_else(|| rail.meter.relative(), |_| None));
        let speeds: Vec<_> = speeds(relative).collect();
        // A change of the weights concerns every link.
        if self.speeds.iter().zip(&speeds).all(|(old, new)| is_about(*old, *new)) {
            return;
        }
        for (rail, speed) in self.rails.iter_mut().zip(&speeds) {
            rail.window.set_speed(*speed);
        }
        for state in self.links.iter_mut().flatten() {
            state.set_weights(self.handle.group, speeds.iter().copied());
        }
        self.speeds = speeds;
    }

    // ---- fences ----

    /// Whether all outstanding requests of an operation are on broken paths, and wait for the peer's answer.
    #[cold]
    fn waits_for_fence_alone(&self, op: u32) -> bool {
        let Some(active) = &self.active[op as usize] else { return false };
        let Some(Some(state)) = self.links.get(active.link as usize) else { return false };
        let lost =
            state.broken_paths().iter().flat_map(|path| &path.lost).filter(|posted| posted.op == op).count();
        lost > 0 && lost == active.outstanding as usize
    }

    /// Keeps a request of a broken path after this side's device has ended it. Only the peer's answer tells whether it
    /// arrives. Returns false if its path is not broken.
    #[cold]
    fn keep_lost(&mut self, rail: usize, id: u64) -> bool {
        let Some(posted) = self.rails[rail].inflight.find(id) else { return false };
        let Some(link) = self.active[posted.op as usize].as_ref().map(|active| active.link) else {
            return false;
        };
        let state = self.links[link as usize].as_mut().filter(|state| !state.has_failed);
        let Some(path) = state.and_then(|state| state.broken_path(rail)) else { return false };
        path.lost.push(posted);
        let inflight = &mut self.rails[rail].inflight;
        let _ = inflight.acknowledge(id, 1).or_else(|| inflight.acknowledge_evicted(id, 1));
        // If the request was evicted, the rail skips the link since then, because the peer does not respond.
        self.rails[rail].queue.resume(link);
        self.settle_path(rail, link);
        true
    }

    /// The peer has answered the request of a fence, or cannot any more.
    pub(super) fn on_fenced(
        &mut self,
        (rail, slot): (usize, PeerSlot),
        link: u32,
        peer: PeerId,
        result: Result<FenceReport>,
    ) {
        // If the peer is gone, an `Unlink` command follows, and ends all its requests.
        if self.link_of.get(&peer) != Some(&link) {
            return;
        }
        let Some(Some(state)) = self.links.get_mut(link as usize) else { return };
        if state.peer.close_reason().is_some() {
            return;
        }
        let Some(path) = state.broken_path(rail).filter(|path| path.slot == slot) else { return };
        path.fenced = Some(result.clone());
        if result.is_ok() && self.rails[rail].lost.is_none() {
            self.rails[rail].endpoint.peer_fenced(slot);
        }
        self.hash_event(HashedEvent::Fenced, rail as u64);
        let (rail_number, confirmed) = (self.rail_number(rail), result.is_ok());
        self.record(TraceEvent::Fenced { rail: rail_number, peer: peer_number(peer), confirmed });
        if let Err(error) = result {
            tracing::warn!(peer = peer.number(), rail = rail_number, %error, "the peer has not fenced a lost rail");
        }
        self.settle_path(rail, link);
    }

    /// Acts once this side's device has ended all requests on a broken path and the peer has answered. If the peer has
    /// fenced its end, nothing of these requests can arrive any more: other rails post them again, except imms that
    /// have arrived. An operation fails if nobody knows whether its imms have arrived. If the peer cannot fence its
    /// end, all of them fail.
    fn settle_path(&mut self, rail: usize, link: u32) {
        let Some(Some(state)) = self.links.get_mut(link as usize) else { return };
        let sent = state.sent_imms(rail);
        let Some(path) = state.broken_path(rail) else { return };
        let Some(result) = path.fenced.clone() else { return };
        let mut posted = self.rails[rail].inflight.unacknowledged();
        let is_under_way = posted.any(|posted| is_of_link(&self.active, link, &posted));
        drop(posted);
        if is_under_way {
            if !self.unsettled_paths.contains(&(rail, link)) {
                self.unsettled_paths.push((rail, link));
            }
            return;
        }
        let (error, mut pieces) = (path.error.clone(), std::mem::take(&mut path.lost));
        pieces.sort_unstable_by_key(|posted| (posted.op, posted.piece));
        let imm_of = |posted: &PostedPiece| {
            self.active[posted.op as usize]
                .as_ref()
                .and_then(|active| Some((active.counted_imm()?, active.stage)))
        };
        let imms: Vec<_> = pieces.iter().filter_map(imm_of).collect();
        let are_alike = imms.iter().all(|(imm, stage)| *stage == Stage::Imm && *imm == imms[0].0);
        let is_message = |posted: &&PostedPiece| {
            self.active[posted.op as usize].as_ref().is_some_and(|active| active.work.kind == WorkKind::Send)
        };
        let messages = pieces.iter().filter(is_message).count() as u64;
        let state = self.links[link as usize].as_ref();
        let sent_messages = state.and_then(|state| state.sent_messages(rail, messages));
        let report = result.as_ref().ok();
        let mut lost_imms = LostArrivals::new(imms.len() as u64, sent, report.map(|report| report.imms));
        let mut lost_messages =
            LostArrivals::new(messages, sent_messages, report.map(|report| report.messages));
        tracing::debug!(
            rail,
            lost = pieces.len(),
            ?lost_imms,
            imms_posted = sent,
            ?lost_messages,
            messages_posted = sent_messages,
            ?report,
            "a broken path is settled"
        );
        let why = match &result {
            Ok(_) => "nobody knows whether all that it had posted has arrived".to_owned(),
            Err(error) => format!("bytes that it has sent may still arrive: {error}"),
        };
        let error = Error::new(error.kind(), error.operation(), format!("{}, and {why}", error.context()));
        for pieces in pieces.chunk_by(|one, next| one.op == next.op) {
            self.settle_lost(
                rail,
                pieces,
                result.is_ok(),
                (&mut lost_imms, are_alike),
                &mut lost_messages,
                &error,
            );
        }
        self.begin_comeback(rail, link);
    }

    /// Settles the broken paths whose last request has ended since the peer's answer. Returns their number.
    pub(super) fn settle_paths(&mut self) -> usize {
        let paths = std::mem::take(&mut self.unsettled_paths);
        let count = paths.len();
        // Those with a request that has not ended come back.
        paths.into_iter().for_each(|(rail, link)| self.settle_path(rail, link));
        count - self.unsettled_paths.len()
    }

    /// Ends requests of one operation that a lost device had posted, or lets other rails post them again.
    fn settle_lost(
        &mut self,
        rail: usize,
        pieces: &[PostedPiece],
        is_fenced: bool,
        (lost_imms, are_alike): (&mut LostArrivals, bool),
        lost_messages: &mut LostArrivals,
        error: &Error,
    ) {
        let (op, count) = (pieces[0].op, pieces.len() as u32);
        let Some(active) = &self.active[op as usize] else { return };
        let has_arrived = match active.counted_imm() {
            _ if !is_fenced || !active.may_repeat() => None,
            None if active.work.kind == WorkKind::Send => lost_messages.take(false),
            None => Some(false),
            Some(_) => {
                let arrived: Vec<_> = pieces.iter().map(|_| lost_imms.take(are_alike)).collect();
                arrived[0].filter(|first| arrived.iter().all(|arrived| *arrived == Some(*first)))
            }
        };
        match has_arrived {
            Some(true) => {
                self.on_pieces_ended(rail, op, count, None);
                // The operation hands on what is left only once nothing is outstanding: these may have been the last.
                self.settle_handed_over(op);
            }
            Some(false) if active.error.is_none() => self.replay(op, rail, pieces),
            _ => {
                self.fail_op(op, error.clone());
                let status = Status { kind: ErrorKind::DeviceLost, code: 0 };
                self.on_pieces_ended(rail, op, count, Some(status));
            }
        }
    }

    /// Lets other rails post pieces again that a lost device had posted. None of them can arrive any more.
    fn replay(&mut self, op: u32, rail: usize, pieces: &[PostedPiece]) {
        let (rail_number, requests) = (self.rail_number(rail), pieces.len() as u32);
        let Some(active) = &mut self.active[op as usize] else { return };
        let id = active.id;
        if active.takes_credit {
            self.return_credit(op, requests, true);
        }
        let Some(active) = &mut self.active[op as usize] else { return };
        let bytes = match active.stage {
            Stage::Data => active.replay(rail, pieces.iter().map(|posted| posted.piece)),
            Stage::Flush | Stage::Imm => {
                active.outstanding -= requests;
                active.work_requests -= requests;
                0
            }
        };
        let (stage, link) = (active.stage, active.link);
        if active.work.kind == WorkKind::Send
            && let Some(Some(state)) = self.links.get_mut(link as usize)
        {
            state.add_messages(self.handle.group, 1);
        }
        self.handle.counts[rail].replayed(requests, bytes);
        self.record(TraceEvent::Replayed { rail: rail_number, op: id, requests, bytes });
        if stage == Stage::Imm {
            return self.begin_imm(op);
        }
        self.settle_handed_over(op);
        self.await_takers(op);
    }

    /// Puts the pieces that an operation has not posted on a broken path aside, until a path comes back. Returns false if
    /// none will, or if the pieces cannot change their rail.
    #[cold]
    fn set_aside(&mut self, op: u32, rail: usize) -> bool {
        let Some(active) = &self.active[op as usize] else { return false };
        let has_changed =
            active.work.kind == WorkKind::Send && active.rails[usize::from(active.message_rail)].usable();
        let may_wait = has_changed
            || self.may_return(active.link, active.work.kind)
            || self.link_around(active).is_some();
        let Some(active) = &mut self.active[op as usize] else { return false };
        let is_aside = may_wait && active.set_aside(rail);
        if is_aside {
            self.await_takers(op);
        }
        is_aside
    }

    /// Fails the operations that no path reaches any more, after a broken path turned out to stay broken.
    #[cold]
    fn fail_unreached(&mut self, link: u32) {
        for op in 0..self.active.len() as u32 {
            let is_of_link = |active: &&ActiveOp| active.link == link && active.error.is_none();
            let Some(active) = self.active[op as usize].as_ref().filter(is_of_link) else { continue };
            if active.awaits_rail_for_imm() && !self.may_return(link, active.work.kind) {
                self.begin_imm(op);
            } else {
                self.settle_handed_over(op);
            }
        }
    }

    /// Lets another rail post the imm that a lost rail was to post. Returns false if the operation has no such imm.
    fn resend_imm(&mut self, op: u32) -> bool {
        let Some(active) = &mut self.active[op as usize] else { return false };
        let is_due = active.stage == Stage::Imm && active.unposted > 0 && active.error.is_none();
        if is_due {
            active.drop_unposted();
            self.begin_imm(op);
        }
        is_due
    }

    /// Notes that an imm or a message may have arrived although its request has failed.
    #[cold]
    fn note_failed_arrival(&mut self, op: u32, rail: usize) {
        let Some(active) = &self.active[op as usize] else { return };
        let kind = active.work.kind;
        if (active.counted_imm().is_some() || kind == WorkKind::Send)
            && let Some(Some(link)) = self.links.get_mut(active.link as usize)
        {
            link.note_failed(kind, rail);
        }
    }

    /// Takes what has arrived on a rail. Returns false if there may be more.
    #[cold]
    fn take_arrivals(&mut self, rail: usize) -> bool {
        // A poll that returns fewer events than it could has taken all.
        (0..MAX_POLLS_PER_FENCE).any(|_| {
            self.rails[rail].endpoint.poll(&mut self.completions);
            let took_all = self.completions.spare() > 0;
            self.handle_poll(rail);
            took_all
        })
    }

    /// Advances the fences that peers have asked for: answers those that the backend has finished, with what has
    /// arrived before. Returns their number.
    #[cold]
    pub(super) fn advance_fences(&mut self) -> usize {
        let mut answered = 0;
        let now = self.now();
        while let Some((fence, result)) = self.fences.next_ready(now, |rail| &*self.rails[rail].domain) {
            answered += 1;
            if result.is_ok() && !self.take_arrivals(fence.rail) {
                // The next step goes on.
                self.fences.add(fence);
                break;
            }
            if result.is_ok() {
                self.take_unclaimed(fence.rail, Some(fence.slot));
                self.receives.claim(&mut self.rails, &self.handle);
            }
            let slot = self.slot_links[fence.rail].get_mut(fence.slot.0 as usize).and_then(Option::as_mut);
            let slot = slot.map(|slot| {
                // The peer posts the others elsewhere.
                slot.announced = slot.messages;
                *slot
            });
            let Some(slot) = slot.filter(|slot| slot.link == fence.link) else { continue };
            (fence.reply)(result.map(|()| slot.report()));
        }
        answered
    }

    /// A request failed, and the reason may be the peer's death: the engine probes the peer.
    #[cold]
    fn on_unconfirmed_failure(&mut self, rail: usize, id: u64, peer: PeerSlot, status: Status) {
        let link = self.slot_links[rail].get(peer.0 as usize).copied().flatten().map(|slot| slot.link);
        let is_alive = |link: &u32| self.links[*link as usize].as_ref().is_some_and(|link| !link.has_failed);
        match link.filter(is_alive) {
            Some(link) if self.unconfirmed_failures.add(rail, id, link, status) => self.probe(link),
            Some(_) => {}
            None => self.acknowledge(rail, id, 1, Some(Status { kind: ErrorKind::PeerDied, ..status })),
        }
    }

    fn probe(&self, link: u32) {
        let Some(state) = &self.links[link as usize] else { return };
        let probe = PeerProbe::new(Arc::clone(&self.handle), link, state.peer.id);
        state.peer.context.probe_wanted(probe);
    }

    /// A probe of the peer of a link has ended. If the peer is alive, ends the requests that failed before the probe
    /// with their own status.
    pub(super) fn on_probe_ended(&mut self, link: u32, peer: PeerId) {
        let Some(state) = self.links.get(link as usize).and_then(Option::as_ref) else { return };
        // If the peer is gone, an `Unlink` command follows, and ends all its requests.
        if self.link_of.get(&peer) != Some(&link) || state.peer.close_reason().is_some() {
            return;
        }
        let (resolved, probe_again) = self.unconfirmed_failures.on_answer(link);
        for failure in resolved {
            // The peer lives.
            let by_path = matches!(failure.status.kind, ErrorKind::Unreachable | ErrorKind::PeerDied);
            self.on_failed(failure.rail, failure.id, failure.status, by_path);
        }
        if probe_again {
            self.probe(link);
        }
    }

    /// Fails a link whose peer is gone. The waiters of its operations get their errors at once; the engine aborts the
    /// posted requests.
    pub(super) fn fail_link(&mut self, link: u32, error: &Error) {
        let Some(state) = self.links.get_mut(link as usize).and_then(Option::as_mut) else { return };
        if std::mem::replace(&mut state.has_failed, true) {
            return;
        }
        if error.kind() != ErrorKind::Closed {
            let failed = RecentFailures::describe(self, link, error);
            self.recent_failures.add(failed);
        }
        self.link_of.retain(|_, known| *known != link);
        for op in 0..self.active.len() as u32 {
            if self.active[op as usize].as_ref().is_some_and(|active| active.link == link) {
                self.complete_early(op, error.clone());
            }
        }
        self.abort_link(link);
        self.fences.remove_link(link);
        self.probes.forget_link(link);
        let broken = self.links[link as usize].as_mut().map(LinkState::take_broken_paths);
        for BrokenPath { rail, lost, .. } in broken.into_iter().flatten() {
            for PostedPiece { op, .. } in lost {
                self.on_pieces_ended(rail, op, 1, Some(Status { kind: ErrorKind::PeerDied, code: 0 }));
            }
        }
        for UnconfirmedFailure { rail, id, status, .. } in self.unconfirmed_failures.take_link(link) {
            self.acknowledge(rail, id, 1, Some(Status { kind: ErrorKind::PeerDied, ..status }));
        }
        self.retire_link(link);
    }

    /// Aborts the posted requests to the peer of a link.
    fn abort_link(&mut self, link: u32) {
        let Some(Some(state)) = self.links.get(link as usize) else { return };
        let peer = peer_number(state.peer.id);
        for (rail, slot) in state.send_slots.iter().enumerate() {
            if let Some(slot) = slot {
                self.rails[rail].endpoint.abort(PeerSlot(slot.0));
            }
        }
        self.record(TraceEvent::Aborted { peer });
    }

    /// Frees the index of a failed link once the backend has released all its slots and no operation is left.
    fn retire_link(&mut self, link: u32) {
        let Some(Some(state)) = self.links.get(link as usize) else { return };
        let in_use = self.active.iter().flatten().any(|active| active.link == link);
        if state.has_failed && state.all_slots().next().is_none() && !in_use {
            // A peer's credits belong to the whole transport: the engine of the first rail alone gives them back.
            if self.handle.first_rail == 0 {
                self.handle.receiver_credits.close(state.peer.id);
            }
            self.links[link as usize] = None;
            // The next link with this index must not find itself paused.
            self.rails.iter_mut().for_each(|rail| rail.queue.resume(link));
            self.handle.release_link(link);
        }
    }

    // ---- rails out of service, and pieces that change their rail ----

    /// Takes a rail out of service. Other rails post what is not posted, if they can. `done` gets its result once the
    /// operations that use the rail now have ended.
    pub(super) fn retire_rail(&mut self, rail: usize, deadline: Time, done: DrainReply) {
        self.activate_submitted();
        self.set_retired(rail, true);
        let mut ops = Vec::new();
        for op in 0..self.active.len() as u32 {
            if !self.hand_over(op, rail) {
                self.settle_handed_over(op);
            }
            let active = self.active[op as usize].as_ref();
            ops.extend(active.filter(|active| active.rails[rail].is_awaited()).map(|active| active.id));
        }
        self.next_deadline = self.next_deadline.min(deadline);
        self.drains.add(ops, deadline, done);
    }

    /// Takes a rail back into service.
    pub(super) fn restore_rail(&mut self, rail: usize) {
        self.set_retired(rail, false);
        if self.rails[rail].lost.is_some() {
            return;
        }
        for op in 0..self.active.len() as u32 {
            let Some(active) = &mut self.active[op as usize] else { continue };
            if active.rails[rail].usable() {
                active.take_back(rail);
                if active.trigger.is_none() {
                    self.queue(op);
                }
            }
        }
    }

    fn set_retired(&mut self, rail: usize, is_retired: bool) {
        let this = &mut self.rails[rail];
        if std::mem::replace(&mut this.is_retired, is_retired) == is_retired {
            return;
        }
        let is_out = !this.is_in_service();
        self.handle.counts[rail].set_retired(is_retired);
        self.handle.set_out_of_service(rail, is_out);
        let number = self.rail_number(rail);
        self.record(match is_retired {
            true => TraceEvent::RailRetired { rail: number },
            false => TraceEvent::RailRestored { rail: number },
        });
        let (device, change) = (&self.handle.devices[rail], if is_retired { "out of" } else { "into" });
        tracing::info!(transport = %self.handle.label, %device, "the device is taken {change} service");
    }

    /// If no rail in service reaches an operation any more, its pieces that wait for a rail go to retired ones. If
    /// every rail that reaches it is lost, it fails.
    #[cold]
    pub(super) fn settle_handed_over(&mut self, op: u32) {
        let Some(active) = &mut self.active[op as usize] else { return };
        if !active.has_untaken() || active.is_reached_by(&self.rails, Rail::is_in_service) {
            return;
        }
        if !active.is_reached_by(&self.rails, |rail| rail.lost.is_none()) {
            let (link, kind) = (active.link, active.work.kind);
            if self.may_return(link, kind) {
                return;
            }
            let why = "every device that reaches the peer and the memory is lost";
            return self.leave_group(op, Error::new(ErrorKind::DeviceLost, "poll", why));
        }
        for rail in 0..self.rails.len() {
            if self.rails[rail].lost.is_none() && active.rails[rail].usable() {
                active.take_back(rail);
            }
        }
        if active.trigger.is_none() {
            self.queue(op);
        }
    }

    // ---- operations that go on over another rail group ----

    /// The link over which an operation goes on if no rail of this group can carry what is left.
    fn link_around<'a>(&self, active: &'a ActiveOp) -> Option<&'a Link> {
        // A lost rail cannot be flushed, so its last bytes may become visible only after an imm of another group that
        // announces them. While something is outstanding, the fence may still tell that nothing of it has arrived.
        let is_flushed = active.work.imm_comes_last() || active.work.is_announced();
        let is_unflushed = self.needs_flushes
            && is_flushed
            && active.outstanding == 0
            && active.rails.iter().any(ActiveRail::has_posted);
        let may_change = active.may_change_group() && !is_unflushed;
        may_change.then(|| active.peer.link_around(self.handle.group, &active.work)).flatten()
    }

    /// Whether another rail group can carry an operation that no rail of this group can.
    #[cold]
    pub(super) fn may_go_around(&self, peer: &PeerState, work: &Work) -> bool {
        work.may_change_group() && peer.link_around(self.handle.group, work).is_some()
    }

    /// No rail of this group can carry what is left of an operation, and none will: another rail group of the transport
    /// carries it, once nothing can arrive any more of what was posted. If there is none, the operation fails with `error`.
    ///
    /// This ends after at most one move per loss: the links of an engine that hands operations on carry nothing.
    #[cold]
    pub(super) fn leave_group(&mut self, op: u32, error: Error) {
        let Some(active) = &self.active[op as usize] else { return };
        let Some(link) = self.link_around(active) else { return self.fail_op(op, error) };
        // `settle_path` or `trigger` comes back here.
        if active.outstanding > 0 || active.trigger.is_some() {
            return;
        }
        let name = active.work.operation_name();
        // The region may have been revoked since the operation began.
        let slot = active.work.check_remotes(name).and_then(|()| link.engine.insert(name));
        let (group, engine) = (link.engine.group, Arc::clone(&link.engine));
        match slot {
            Ok(rest) => self.continue_over(op, group, engine, rest),
            Err(refused) if refused.kind() == ErrorKind::Revoked => self.fail_op(op, refused),
            Err(busy) => {
                let why = format!("{}; rail group {}: {}", error.context(), engine.label, busy.context());
                self.fail_op(op, Error::new(error.kind(), error.operation(), why));
            }
        }
    }

    /// Hands what is left of an operation to the engine of another rail group, which carries it as the operation `rest`.
    #[cold]
    fn continue_over(&mut self, op: u32, group: GroupIndex, engine: Arc<EngineHandle>, rest: OpId) {
        let Some(active) = &mut self.active[op as usize] else { return engine.table.take_back(rest) };
        let work = active.take_rest();
        let (first, link, requests, bytes) = (active.id, active.link, work.pieces.len(), work.bytes());
        let (peer, submitted_at, deadline) = (Arc::clone(&active.peer), active.submitted_at, active.deadline);
        peer.links[group].backlog.add(work.backlog_weight());
        let submission =
            Submission { id: rest, peer, submitted_at, trigger: None, deadline, work, span: None };
        let home = Arc::clone(&self.handle);
        let continuation = Arc::new(Continuation::new(home, first, Arc::clone(&engine), rest));
        self.handle.add_continuation(Arc::clone(&continuation));
        self.hash_event(HashedEvent::Continued, op.into());
        self.record(TraceEvent::Continued { op: first, rail: engine.first_rail as u16, rest });
        let (transport, other) = (&self.handle.label, &engine.label);
        tracing::debug!(%transport, %other, op = %first, %rest, requests, bytes, "handed to another rail group");
        if let Some(Some(state)) = self.links.get_mut(link as usize)
            && !std::mem::replace(&mut state.has_continued, true)
        {
            let peer = state.peer.id.number();
            tracing::warn!(%transport, %other, peer, "no rail is left: operations are handed to another rail group");
        }
        engine.submit(submission, false);
        self.on_continued(&continuation);
    }

    /// There may be news of the rest of an operation, which another rail group carries. The operation ends as its rest has.
    #[cold]
    pub(super) fn on_continued(&mut self, continuation: &Arc<Continuation>) {
        let Some((result, receipt)) = continuation.poll() else { return };
        self.handle.remove_continuation(continuation);
        let (now, first) = (self.now(), continuation.first());
        let active = self.active[first.index as usize].as_mut();
        let Some(active) = active.filter(|active| active.id == first) else { return };
        active.outstanding = 0;
        active.ended_at = now;
        match result {
            Ok(outcome) => {
                active.work_requests = active.work_requests.saturating_add(outcome.work_requests);
                if let Some(receipt) = receipt.filter(|_| active.error.is_none()) {
                    self.handle.table.note_continued(first, receipt);
                }
                self.finish_if_over(first.index);
            }
            Err(error) => self.fail_op(first.index, error),
        }
    }

    /// Hands the pieces that an operation has not posted on a rail to other rails. Returns false if there are none, or
    /// if no rail can take them. A rail in service can; a retired one can only if `rail` is lost.
    #[cold]
    fn hand_over(&mut self, op: u32, rail: usize) -> bool {
        let Some(active) = &mut self.active[op as usize] else { return false };
        // Its device is lost, or the peer's.
        let (link, is_lost) = (active.link, !active.rails[rail].usable());
        // A rail on which the link is paused takes nothing: it may stay paused for ever. Retired rails take what a lost
        // one leaves.
        let takes = |other: usize| {
            let other = &self.rails[other];
            !other.queue.is_paused(link) && (other.is_in_service() || is_lost && other.lost.is_none())
        };
        if !active.hand_over(rail, takes) {
            return false;
        }
        self.rails[rail].queue.remove(link, op);
        self.await_takers(op);
        true
    }

    /// From the next step on, the engine looks for rails that take what an operation has handed over. Does nothing if
    /// the operation waits for its trigger: the trigger calls this again.
    pub(super) fn await_takers(&mut self, op: u32) {
        let Some(active) = &self.active[op as usize] else { return };
        if active.has_untaken() && active.trigger.is_none() && !self.handed_over.contains(&active.id) {
            self.handed_over.push(active.id);
            self.may_take_over = true;
        }
    }

    /// Gives pieces that wait for a rail to those that may take them. An idle rail also takes pieces of a rail that is
    /// far behind. Returns how often a rail took some: it posts them in this step.
    #[cold]
    pub(super) fn take_over_pieces(&mut self) -> usize {
        self.may_take_over = false;
        let mut taken = 0;
        for index in 0..self.handed_over.len() {
            taken += self.take_over_handed(self.handed_over[index]);
        }
        let is_waiting = |id: &OpId| {
            self.active[id.index as usize]
                .as_ref()
                .is_some_and(|active| active.id == *id && active.has_untaken())
        };
        self.handed_over.retain(is_waiting);
        self.may_take_over = !self.handed_over.is_empty();
        for rail in 0..self.rails.len() {
            if self.rails[rail].is_in_service() && self.rails[rail].queue.is_idle() {
                taken += usize::from(self.take_over_far_behind(rail));
            }
        }
        taken
    }

    /// Lets the rails that have posted their own pieces of an operation take what was handed over. Retired rails take
    /// some only if no rail in service can.
    fn take_over_handed(&mut self, id: OpId) -> usize {
        let mut taken = 0;
        let Some(active) = &mut self.active[id.index as usize] else { return 0 };
        if active.id != id {
            return 0;
        }
        let any_in_service = active.is_reached_by(&self.rails, Rail::is_in_service);
        for (number, rail) in self.rails.iter().enumerate() {
            let may_take = if any_in_service { rail.is_in_service() } else { rail.lost.is_none() };
            if may_take && !rail.queue.is_paused(active.link) {
                let unplaced = active.take_unplaced(number);
                let pieces = if unplaced > 0 { unplaced } else { active.take_over(number, |_| u64::MAX) };
                self.handle.counts[number].taken_over(pieces);
                taken += usize::from(pieces > 0);
            }
        }
        if taken > 0 {
            self.queue(id.index);
        }
        taken
    }

    /// Lets an idle rail take pieces of the operation that another rail serves next, if that rail is far behind.
    fn take_over_far_behind(&mut self, rail: usize) -> bool {
        for other in 0..self.rails.len() {
            let Some(op) = self.rails[other].queue.front() else { continue };
            let active = self.active[op as usize].as_mut().filter(|active| active.trigger.is_none());
            let Some(active) = active else { continue };
            let piece = active.piece_bytes().max(1);
            // What a rail may post at once. Rails of equal speed may be apart by twice that.
            let most = |of: &Rail| of.window.limit().min(of.depth as u64 * piece);
            let pieces = active.take_over(rail, |other| most(&self.rails[other]).saturating_mul(2));
            if pieces > 0 {
                self.handle.counts[rail].taken_over(pieces);
                self.queue(op);
                return true;
            }
        }
        false
    }

    // ---- the end of an operation ----
    //
    // An operation ends in two steps (`op::table`): it gets its result, and it is over, that is, none of its requests
    // is posted. Either may come first.
    //
    // - `finish_if_over` publishes the result and releases the memory, once no request is posted and none is left to
    //   post. All functions below lead to it.
    // - `fail_op` sets the error, and posts no more. `fail_with` calls it with the status of a failed request.
    // - `complete_early` publishes the result at once, and then calls `fail_op`: for a failed link, and at a deadline.
    // - `stop` calls `fail_op`. If the operation is not over by its deadline, the engine aborts the link. A revoked
    //   region stops its operations, and `cancel_active` stops one.
    // - `expire_operations` ends the operations whose deadline has passed, by these functions.

    /// Ends an operation if nothing of it is posted and nothing is left to post. A successful one may have to send its
    /// imm first.
    pub(super) fn finish_if_over(&mut self, op: u32) {
        let Some(active) = &self.active[op as usize] else { return };
        if !active.is_over() {
            return;
        }
        let imm_comes_last = active.work.imm_comes_last();
        if active.stage != Stage::Imm
            && active.error.is_none()
            // `is_announced`: something else than this operation's imm announces the bytes, so they have to be visible before.
            && (imm_comes_last || self.needs_flushes && active.work.is_announced())
        {
            if active.stage == Stage::Data && self.needs_flushes && self.begin_flush(op) {
                return;
            }
            let active = self.active[op as usize].as_ref();
            let shared = active.and_then(|active| active.work.shared.as_ref());
            if imm_comes_last && shared.is_none_or(|shared| shared.count_down()) {
                self.begin_imm(op);
                return;
            }
        }
        let Some(active) = &mut self.active[op as usize] else { return };
        let error = active.error.take();
        if error.is_some() {
            active.work.note_failed();
        }
        if active.work.kind == WorkKind::Send && error.is_none() {
            let rail = active.rails.iter().position(ActiveRail::is_used);
            if let (Some(rail), Some(Some(state))) = (rail, self.links.get_mut(active.link as usize)) {
                state.count_acknowledged_message(rail);
            }
        }
        let outcome = Outcome {
            bytes: active.bytes,
            work_requests: active.work_requests,
            merged: active.work.merged(),
            ..Outcome::default()
        };
        let bare_path = || self.rails[0].domain.capabilities().path;
        let path = active.work.path(self.handle.transport, bare_path);
        let (submitted_at, posted_at) = (active.submitted_at, active.posted_at);
        active.leave_backlog(self.handle.group);
        let (id, link, waits_for_credit) = (active.id, active.link, active.waits_for_credit);
        let span = active.span.take();
        let mut rails = std::mem::take(&mut active.rails);
        self.hash_event(HashedEvent::Ended, op.into());
        self.running -= 1;
        if self.running == 0 {
            self.clear_checks();
        }
        if waits_for_credit {
            self.stop_waiting_for_credit(link, op);
        }
        // Releases the memory before the waiter learns that the operation is over.
        self.active[op as usize] = None;
        self.record_ended(id, span.as_deref(), error.as_ref());
        match error {
            Some(error) => {
                if let Some(Some(link)) = self.links.get(link as usize) {
                    link.peer.links[self.handle.group].counts.failed();
                }
                self.handle.table.finish(id, Err(error));
            }
            None => {
                let ended_at = self.now();
                if let Some(Some(link)) = self.links.get_mut(link as usize) {
                    link.last_success = ended_at;
                    link.peer.links[self.handle.group].counts.succeeded(outcome.bytes);
                }
                let nanos = ended_at.as_nanos().saturating_sub(submitted_at.as_nanos());
                self.handle.operations.succeeded(outcome.bytes, nanos, path);
                self.handle.table.succeed(id, outcome, |notes| {
                    (notes.submitted_at, notes.posted_at, notes.ended_at) =
                        (submitted_at, posted_at, ended_at);
                    notes.path = path;
                    notes.set_shares(&rails, |rail| rail.is_used().then_some(rail.bytes));
                });
            }
        }
        rails.clear();
        self.spare_rails.push(rails);
        if self.links[link as usize].as_ref().is_some_and(|link| link.has_failed) {
            self.retire_link(link);
        }
    }

    /// Gives an operation its error, if it has none yet, and posts no more of it. The operation ends once none of its
    /// requests is posted.
    pub(super) fn fail_op(&mut self, op: u32, error: Error) {
        let Some(active) = &mut self.active[op as usize] else { return };
        active.error.get_or_insert(error);
        active.drop_unposted();
        self.finish_if_over(op);
    }

    /// Fails an operation with the status of one of its requests.
    pub(super) fn fail_with(&mut self, op: u32, rail: usize, status: Status) {
        let text = self.rails[rail].endpoint.describe(status);
        let active = self.active[op as usize].as_ref();
        let name = active.map_or("write", |active| active.work.operation_name());
        let mut error = Error::new(status.kind, name, text);
        if status.kind == ErrorKind::PeerDied
            && let Some(reason) =
                self.active[op as usize].as_ref().and_then(|active| active.peer.close_reason())
        {
            // The backend only sees that the connection ended. The peer's state says why.
            error = reason;
        }
        self.fail_op(op, error);
    }

    /// Completes an operation with an error at once. Its memory stays in use until none of its requests is posted.
    fn complete_early(&mut self, op: u32, error: Error) {
        let Some(active) = &self.active[op as usize] else { return };
        self.handle.table.complete(active.id, Err(error.clone()));
        self.fail_op(op, error);
    }

    /// Cancels an active operation. Does nothing if it has ended.
    pub(super) fn cancel_active(&mut self, id: OpId) {
        let Some(active) = &self.active[id.index as usize] else { return };
        if active.id == id {
            let error = interrupted(ErrorKind::Cancelled, &active.work);
            self.stop(id.index, error);
        }
    }

    /// Stops an operation: it ends with `error` once none of its requests is posted. If that takes until its deadline,
    /// the engine aborts its link.
    pub(super) fn stop(&mut self, op: u32, error: Error) {
        let Some(active) = &mut self.active[op as usize] else { return };
        active.stopped = true;
        self.next_deadline = self.next_deadline.min(active.deadline);
        if active.is_elsewhere
            && let Some(continuation) = self.handle.continuation_of(active.id)
        {
            continuation.cancel();
        }
        self.hash_event(HashedEvent::Stopped, op.into());
        self.fail_op(op, error);
    }

    /// Ends the operations whose deadline has passed; returns their number. Lowers `next` to the earliest deadline of
    /// the others.
    pub(super) fn expire_operations(&mut self, now: Time, next: &mut Time) -> usize {
        let mut expired = 0;
        for op in 0..self.active.len() as u32 {
            let Some(active) = &mut self.active[op as usize] else { continue };
            if active.deadline > now {
                *next = (*next).min(active.deadline);
            } else if active.stopped && !active.aborted {
                // The operation was stopped (`stop`), and its requests have not ended by the deadline.
                active.aborted = true;
                expired += 1;
                let cancelled = || interrupted(ErrorKind::Cancelled, &active.work);
                let (link, error) = (active.link, active.error.clone().unwrap_or_else(cancelled));
                self.complete_early(op, error);
                // An abort does not end requests that wait for a fence. Another rail group aborts its own.
                let is_elsewhere =
                    self.active[op as usize].as_ref().is_some_and(|active| active.is_elsewhere);
                if !is_elsewhere && !self.waits_for_fence_alone(op) {
                    self.abort_link(link);
                }
            } else if !active.expired {
                active.expired = true;
                expired += 1;
                let error = interrupted(ErrorKind::DeadlineExceeded, &active.work);
                let id = active.id;
                self.hash_event(HashedEvent::Expired, op.into());
                self.record(TraceEvent::Expired { op: id });
                self.complete_early(op, error);
            }
        }
        expired
    }
}

/// Whether two speeds differ by less than an eighth, and neither or both are full.
fn is_about(old: u32, new: u32) -> bool {
    old.abs_diff(new) * 8 <= old.max(new) && (old == FULL_SPEED) == (new == FULL_SPEED)
}

/// Whether a posted request is one to the peer of a link.
fn is_of_link(active: &[Option<ActiveOp>], link: u32, posted: &PostedPiece) -> bool {
    active[posted.op as usize].as_ref().is_some_and(|active| active.link == link)
}

/// The numbers of requests that succeeded and that failed.
fn count_completions(events: &[Event]) -> (u64, u64) {
    let (mut done, mut failed) = (0, 0);
    for event in events {
        match event {
            Event::Done { count, .. } => done += u64::from(*count),
            Event::Failed { .. } | Event::FailedUnconfirmed { .. } => failed += 1,
            _ => {}
        }
    }
    (done, failed)
}

/// The error of an operation that was cancelled, or whose deadline has passed.
fn interrupted(kind: ErrorKind, work: &Work) -> Error {
    let why = match kind {
        ErrorKind::DeadlineExceeded => {
            "not complete in time; its memory stays in use until the device has released it"
        }
        _ => "before it was complete",
    };
    Error::new(kind, work.operation_name(), why)
}
