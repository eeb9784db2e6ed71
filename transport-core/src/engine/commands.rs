//! Commands in: submissions become active operations, controls take effect.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::active::{Stage, kind_of};
use super::receive::RAIL as MESSAGES;
use super::{Active, ActiveRail, Control, Engine, LinkState, Revoking, Submission, Work, credit};
use crate::observe::{OperationKind, What};
use crate::op::OpId;
use crate::peer::PeerInner;
use crate::plan::{RailRange, Shape, split};
use crate::spi::WorkKind;
use crate::{Error, ErrorKind};

/// Commands per turn, so that posting and polling get theirs.
const PER_TURN: usize = 256;

impl Engine {
    pub(super) fn take_commands(&mut self) -> usize {
        // Controls first: a link must be known before its first operation.
        let mut taken = self.take_controls();
        while taken < PER_TURN {
            let Some(submission) = self.handle.submissions.pop() else { break };
            taken += 1;
            self.activate(submission);
        }
        taken
    }

    pub(super) fn take_controls(&mut self) -> usize {
        let mut taken = 0;
        while let Some(control) = self.handle.controls.pop() {
            taken += 1;
            self.take_control(control);
        }
        taken
    }

    fn take_control(&mut self, control: Control) {
        match control {
            Control::Link { peer } => self.link(peer),
            Control::Unlink { peer, error } => {
                if let Some(link) = self.link_of.remove(&peer) {
                    self.note(1, link.into());
                    self.record(What::PeerFailed { peer: peer.0.get() as u32, error: error.kind() });
                    self.fail_link(link, &error);
                }
            }
            Control::Cancel(id) => self.cancel(id),
            Control::Receive { id, region, offset, len } => {
                let now = self.now();
                self.receives.add(id, now, region, offset, len);
                self.receives.post(&mut self.rails, &self.handle);
            }
            // Its pool was closed on the way.
            Control::PoolReceive { pool, .. } if pool.is_closed() => {}
            Control::PoolReceive { pool, buffer } => {
                self.receives.add_pooled(pool, buffer);
                self.receives.post(&mut self.rails, &self.handle);
            }
            Control::PoolClosed { pool } => self.receives.close_pool(&pool, &mut self.rails, &self.handle),
            Control::Revoke { id, region, deadline } => {
                let begun = self.now();
                self.begins(id, OperationKind::Revoke, 0, region.len);
                self.watch_until(begun, deadline);
                self.revoking.push(Revoking { id, region, deadline, begun, stalled: false });
            }
            Control::Alarm { at } => self.next_deadline = self.next_deadline.min(at),
            Control::Drain { peer, deadline, done } => self.drain(peer, deadline, done),
            Control::Granted { link } => self.granted(link),
            Control::Regrant { link, peer } if self.link_of.get(&peer) == Some(&link) => {
                self.grant_more(link)
            }
            Control::Regrant { .. } => {}
            // Nobody may wait for it any more.
            Control::Dump { answer } => drop(answer.try_send(self.snapshot())),
        }
    }

    fn link(&mut self, peer: Arc<PeerInner>) {
        let link = &peer.links[self.handle.position];
        let index = link.index;
        let slots: Vec<_> = link.rails.iter().map(|rail| rail.as_ref().map(|rail| rail.slot)).collect();
        let receiving: Vec<_> = link.receiving.iter().map(|(rail, paired)| (*rail, paired.slot)).collect();
        for (rail, pair) in link.pairs() {
            self.slot_links[rail].insert(pair.slot, index);
        }
        self.link_of.insert(peer.id, index);
        self.record(What::PeerLinked { peer: peer.short_id() });
        tracing::debug!(transport = %self.handle.label, peer = peer.id.0.get(), "peer admitted");
        if self.links.len() <= index as usize {
            self.links.resize_with(index as usize + 1, || None);
        }
        let steps = self.handle.ledger.given(peer.id).map_or([1; 2], |given| given.steps);
        // It was offered what was true then.
        (0..self.rails.len()).for_each(|rail| peer.tell_move(self.handle.position, rail));
        self.links[index as usize] = Some(LinkState::new(peer, slots, receiving, steps));
        self.replay(index);
    }

    /// What arrived from a peer before its link did.
    fn replay(&mut self, index: u32) {
        let Some(link) = &self.links[index as usize] else { return };
        let peer = Arc::clone(&link.peer);
        for (rail, slot) in link.all_slots().collect::<Vec<_>>() {
            let kept = self.early.take(rail, slot);
            kept.events.into_iter().for_each(|event| self.take_event(rail, event));
            if kept.flooded {
                let why = "sent more than there is room for before it was admitted";
                crate::Peer(Arc::clone(&peer)).fail(Error::new(ErrorKind::Protocol, "peer", why));
            }
        }
    }

    /// The live link of a submission's peer.
    fn live_link(&self, peer: &PeerInner) -> Option<u32> {
        let index = peer.links[self.handle.position].index;
        let known = self.links.get(index as usize)?.as_ref()?;
        (!known.dead && known.peer.id == peer.id).then_some(index)
    }

    /// Gives a submission its share of every usable rail and queues it there.
    pub(super) fn activate(&mut self, submission: Submission) {
        let Submission { id, peer, begun, trigger, deadline, mut work, span } = submission;
        self.note(2, id.index.into());
        self.begins(id, kind_of(&work), peer.short_id(), work.bytes());
        // Its link was queued after the controls were taken, and before it. What was queued
        // behind it stays there: it may be about this very submission.
        while self.live_link(&peer).is_none()
            && peer.death().is_none()
            && let Some(control) = self.handle.controls.pop()
        {
            self.take_control(control);
        }
        let Some(link) = self.live_link(&peer) else {
            let died = || Error::new(ErrorKind::PeerDied, "submit", "the peer is gone");
            let error = peer.death().unwrap_or_else(died);
            if trigger.is_none() {
                peer.links[self.handle.position].backlog.ended(&work);
            }
            self.ends(id, &span, Some(&error));
            self.handle.table.end(id, Err(error));
            return;
        };
        if !self.handle.posting.lazy && work.items.len() > 1 {
            work.shape = work.shape.written();
        }
        let mut rails = self.spare.pop().unwrap_or_default();
        self.fill_rails(&work, link, &mut rails);
        let now = self.now();
        self.watch_until(now, deadline);
        self.running += 1;
        let mut active = Active {
            id,
            metered: credit::is_metered(&work, &peer.links[self.handle.position].credit),
            parked: false,
            work,
            link,
            peer,
            trigger,
            deadline,
            begun,
            moved: now,
            stalled: false,
            span,
            stage: Stage::Data,
            rails,
            unposted: 0,
            outstanding: 0,
            work_requests: 0,
            error: None,
            cancelled: false,
            expired: false,
            aborted: false,
        };
        let usable = ActiveRail::usable;
        if !active.rails.iter().any(usable) {
            active.error = Some(Error::new(
                ErrorKind::DeviceLost,
                "submit",
                "no rail to this peer is left; open the fabric anew",
            ));
        } else if active.work.kind == WorkKind::Send && !active.rails[MESSAGES].usable() {
            let why = "the rail that carries messages is lost; open the fabric anew";
            active.error = Some(Error::new(ErrorKind::DeviceLost, "send", why));
        } else if active.work.is_whole() {
            // An imm alone, or one message: the first usable rail, whole.
            if let Some(rail) = active.rails.iter_mut().find(|rail| rail.usable()) {
                rail.range = RailRange { start: 0, end: 1 };
            }
            active.unposted = 1;
        } else {
            // A touch is one for every rail, whatever that carries.
            let alike = matches!(active.work.shape, Shape::Touch { .. });
            let weight = |rail: &ActiveRail| if alike { rail.weight.min(1) } else { rail.weight };
            let weights = active.rails.iter().map(weight);
            let turn = self.handle.turn.load(Relaxed);
            split(active.work.items, weights, turn, &mut self.ranges);
            self.handle.turn.store(turn.wrapping_add(1), Relaxed);
            active.rails.iter_mut().zip(&self.ranges).for_each(|(rail, range)| {
                rail.range = *range;
                rail.next = range.start;
            });
            active.unposted = active.work.items.len();
        }
        let index = id.index as usize;
        let waits = active.trigger.is_some();
        self.active[index] = Some(active);
        if waits {
            self.untriggered.push(id)
        } else {
            self.queue(id.index)
        }
        self.finish_if_over(id.index);
    }

    fn fill_rails(&self, work: &Work, link: u32, rails: &mut Vec<ActiveRail>) {
        let (transport, first) = (self.handle.transport, self.handle.first_rail);
        rails.clear();
        let Some(Some(state)) = self.links.get(link as usize) else { return };
        let paired = &state.peer.links[self.handle.position].rails;
        for (rail, local_rail) in self.rails.iter().enumerate() {
            let mut filled = ActiveRail::default();
            if let (Some(Some(slot)), None) = (state.slots.get(rail), local_rail.lost) {
                filled.slot = slot.0;
                filled.weight = paired[rail].as_ref().map_or(0, |paired| paired.weight);
                if let Some(region) = &work.local {
                    match &region.regions[transport][first + rail] {
                        Some(registered) => filled.lkey = registered.lkey(),
                        None => filled.weight = 0,
                    }
                }
                if let Some(remote) = &work.remote {
                    match remote.imports.get(first + rail) {
                        Some(Some(import)) => (filled.rkey, filled.base) = (import.rkey(), import.base()),
                        _ => filled.weight = 0,
                    }
                }
            }
            rails.push(filled);
        }
    }

    /// Puts an operation into the rotation of each rail it has pieces for.
    pub(super) fn queue(&mut self, op: u32) {
        let Some(active) = &mut self.active[op as usize] else { return };
        for (rail, share) in self.rails.iter_mut().zip(&mut active.rails) {
            if share.left() > 0 && !share.queued {
                share.queued = true;
                rail.rotation.push(active.link, op);
            }
        }
    }

    /// All bytes are delivered: the one imm that announces them goes out.
    pub(super) fn begin_imm(&mut self, op: u32) {
        let Some(active) = &mut self.active[op as usize] else { return };
        active.stage = Stage::Imm;
        let Some(rail) = active.rails.iter_mut().find(|rail| rail.usable()) else {
            let why = "every rail to the peer was lost before the imm";
            self.fail_op(op, Error::new(ErrorKind::DeviceLost, "write", why));
            return;
        };
        rail.range = RailRange { start: 0, end: 1 };
        rail.next = 0;
        active.unposted = 1;
        self.queue(op);
    }

    fn cancel(&mut self, id: OpId) {
        if !self.handle.table.is_under_way(id) || self.receives.cancel(id, &mut self.rails, &self.handle) {
            return;
        }
        // Controls overtake submissions: one that is still queued is activated first,
        // or its cancel would be lost.
        while !self.active[id.index as usize].as_ref().is_some_and(|active| active.id == id) {
            let Some(submission) = self.handle.submissions.pop() else { break };
            self.activate(submission);
        }
        self.record(What::Cancelled { op: id });
        self.cancel_active(id);
        if let Some(place) = self.revoking.iter().position(|revoking| revoking.id == id) {
            let revoking = self.revoking.swap_remove(place);
            let error =
                Error::new(ErrorKind::Cancelled, "revoke", "no longer awaited; the region stays revoked");
            self.record(What::Ended { op: id, error: Some(error.kind()) });
            self.handle.table.end(revoking.id, Err(error));
        }
    }
}
