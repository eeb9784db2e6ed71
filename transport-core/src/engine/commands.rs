//! Commands in: controls take effect, submissions are activated.

use std::sync::Arc;

use super::{Control, Engine, LinkState, Submission};
use crate::observe::What;
use crate::op::OpId;
use crate::peer::PeerInner;
use crate::{Error, ErrorKind};

/// Commands per turn, so that posting and polling get theirs.
const PER_TURN: usize = 256;

impl Engine {
    /// Takes what others have queued. Mostly that is nothing: a look costs less than to try and take.
    #[inline(always)]
    pub(super) fn take_commands(&mut self) -> usize {
        if self.handle.has_commands() { self.take_queued(true) } else { 0 }
    }

    /// Takes an operation over that its submitter has just made, past the queue.
    #[inline(always)]
    pub(super) fn take_over(&mut self, submission: Submission) {
        // No turn goes on, and it was submitted in this very call.
        self.time = Some(submission.begun);
        self.activate(submission, true);
    }

    /// Takes what is queued; whether what comes alone may be posted at once.
    pub(super) fn take_queued(&mut self, posts: bool) -> usize {
        // Controls first: a link must be known before its first operation.
        let mut taken = self.take_controls();
        while taken < PER_TURN && !self.handle.submissions.is_empty() {
            let Some(submission) = self.handle.submissions.pop() else { break };
            let alone = posts && taken == 0 && self.handle.submissions.is_empty();
            taken += 1;
            self.activate(submission, alone);
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
                self.receives.add(id, now, (region, offset, len), &self.handle);
                self.receives.post(&mut self.rails, &self.handle);
            }
            // Its pool was closed on the way.
            Control::PoolReceive { pool, .. } if pool.is_closed() => {}
            Control::PoolReceive { pool, buffer } => {
                self.receives.add_pooled(pool, buffer);
                self.receives.post(&mut self.rails, &self.handle);
            }
            Control::PoolClosed { pool } => self.receives.close_pool(&pool, &mut self.rails, &self.handle),
            Control::Revoke { id, region, deadline } => self.revoke(id, region, deadline),
            Control::Alarm { at } => {
                self.next_alarm = self.next_alarm.min(at);
                self.next_deadline = self.next_deadline.min(at);
            }
            Control::Answered { link, peer } => self.answered_by(link, peer),
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
        let link = &peer.links[self.handle.group];
        let index = link.index;
        let slots: Vec<_> = link.rails.iter().map(|rail| rail.as_ref().map(|rail| rail.slot)).collect();
        let receiving: Vec<_> = link.receiving.iter().map(|(rail, paired)| (*rail, paired.slot)).collect();
        for (rail, pair) in link.pairs() {
            let (links, place) = (&mut self.slot_links[rail], pair.slot.0 as usize);
            links.resize(links.len().max(place + 1), None);
            links[place] = Some(index);
        }
        self.link_of.insert(peer.id, index);
        self.record(What::PeerLinked { peer: peer.short_id() });
        tracing::debug!(transport = %self.handle.label, peer = peer.id.0.get(), "peer admitted");
        if self.links.len() <= index as usize {
            self.links.resize_with(index as usize + 1, || None);
        }
        let steps = self.handle.ledger.given(peer.id).map_or([1; 2], |given| given.steps);
        // It was offered what was true then.
        (0..self.rails.len()).for_each(|rail| peer.tell_move(self.handle.group, rail));
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

    fn cancel(&mut self, id: OpId) {
        if !self.handle.table.is_under_way(id) || self.receives.cancel(id, &mut self.rails, &self.handle) {
            return;
        }
        // Controls overtake submissions: one that is still queued is activated first,
        // or its cancel would be lost.
        while !self.active[id.index as usize].as_ref().is_some_and(|active| active.id == id) {
            let Some(submission) = self.handle.submissions.pop() else { break };
            self.activate(submission, false);
        }
        self.record(What::Cancelled { op: id });
        self.cancel_active(id);
        self.cancel_revoke(id);
    }
}
