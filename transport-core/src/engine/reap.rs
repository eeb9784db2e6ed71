//! Events back: each finds its operation, its peer or its receive.

use super::Engine;
use super::posted::RUN;
use crate::observe::What;
use crate::spi::{Event, PeerSlot, Status};
use crate::{Error, ErrorKind};

impl Engine {
    /// Polls every rail once. Returns the number of events.
    #[inline(always)]
    pub(super) fn reap(&mut self) -> usize {
        let mut events = 0;
        // Not 0 only after a panic, in the turn that follows.
        if self.acted > 0 {
            events += self.act_on_rest();
        }
        for rail in 0..self.rails.len() {
            self.rails[rail].endpoint.poll(&mut self.completions);
            if !self.completions.is_untouched() {
                events += self.take_completions(rail);
            }
        }
        events
    }

    /// Acts on what a poll of a rail has brought. A call, so that an idle turn saves no registers for it.
    #[inline(never)]
    fn take_completions(&mut self, rail: usize) -> usize {
        let count = self.completions.as_slice().len();
        let (done, failed) = tally(self.completions.as_slice());
        if done + failed > 0 {
            self.handle.counts[rail].completed(done, failed);
            let requests = done as u32;
            self.record(What::Completed { rail: self.numbered(rail), requests, failed: failed as u32 });
        }
        let events = count + usize::from(self.completions.made_progress());
        self.act(rail);
        events
    }

    /// Acts on each event of the last poll, which was of `rail`, once: also where a waker of the user's panics, as an
    /// event is behind us before anybody is woken for it. A joined completion may span several runs: it is behind us
    /// run by run.
    #[inline]
    fn act(&mut self, rail: usize) {
        self.acting_on = rail;
        while let Some(event) = self.completions.as_slice().get(self.acted) {
            self.acted += 1;
            match *event {
                Event::Done { first, count } => {
                    let here = (RUN - (first % u64::from(RUN)) as u32).min(count);
                    if here < count {
                        let rest = Event::Done { first: first + u64::from(here), count: count - here };
                        self.acted -= 1;
                        self.completions.replace(self.acted, rest);
                    }
                    self.acknowledge(rail, first, here, None);
                }
                Event::Failed { id, status } => {
                    self.acknowledge(rail, id, 1, Some(status));
                }
                Event::FailedUnconfirmed { id, peer, status } => self.doubts(rail, id, peer, status),
                other => self.take_event(rail, other),
            }
        }
        self.completions.clear();
        self.acted = 0;
    }

    /// Acts on what a panic has left of the events of a poll.
    #[cold]
    fn act_on_rest(&mut self) -> usize {
        let left = self.completions.as_slice().len() - self.acted;
        self.act(self.acting_on);
        left
    }

    /// Requests of ours ended, all of one run.
    #[inline]
    pub(super) fn acknowledge(&mut self, rail: usize, id: u64, count: u32, failed: Option<Status>) {
        self.note(4, id);
        match self.rails[rail].posted.acknowledge(id, count).or_else(|| self.answered(rail, id, count)) {
            Some((op, pieces)) => self.pieces_ended(rail, op, pieces, failed),
            None => tracing::error!(rail, id, "a completion of nothing that is outstanding; ignored"),
        }
    }

    fn pieces_ended(&mut self, rail: usize, op: u32, pieces: u32, failed: Option<Status>) {
        let now = self.now();
        let Some(active) = &mut self.active[op as usize] else { return };
        active.outstanding -= pieces;
        let metered = active.metered;
        active.moves(now, &mut self.next_look);
        let over = active.is_over();
        if metered {
            self.metered_ended(op, pieces, failed.is_some());
        }
        if let Some(status) = failed {
            self.fail_with(op, rail, status);
        } else if over {
            self.finish_if_over(op);
        }
    }

    /// An event that is not the end of one of our requests.
    pub(super) fn take_event(&mut self, rail: usize, event: Event) {
        match event {
            Event::Imm { peer, imm } => {
                let Some(link) = self.link_at(rail, peer, event) else { return };
                self.note(5, imm.into());
                if let Some(state) = &mut self.links[link as usize] {
                    let (peer, is_due) = (state.peer.short_id(), state.arrives(0));
                    self.record(What::Imm { rail: self.numbered(rail), peer, imm });
                    if is_due {
                        self.grant_more(link);
                    }
                }
                // Wakers run the user's code, last.
                if let Some(state) = &self.links[link as usize] {
                    state.peer.imms.arrived(imm);
                }
            }
            Event::Received { id, peer, len, imm } => {
                let Some(link) = self.link_at(rail, peer, event) else { return };
                self.note(6, id);
                let sender = self.links[link as usize].as_ref().map(|link| link.peer.id);
                let from = sender.map_or(0, |peer| peer.0.get() as u32);
                self.record(What::Message { rail: self.numbered(rail), peer: from, bytes: len });
                if self.links[link as usize].as_mut().is_some_and(|state| state.arrives(1)) {
                    self.grant_more(link);
                }
                // Wakers run the user's code, last.
                self.receives.received(id, sender, len, imm, &mut self.rails, &self.handle);
            }
            Event::ReceiveFailed { id, status } => {
                self.note(7, id);
                let words = self.rails[rail].endpoint.describe(status);
                self.receives.failed(
                    id,
                    Error::new(status.kind, "recv", words),
                    &mut self.rails,
                    &self.handle,
                );
            }
            Event::PeerGone { peer } => self.peer_gone(rail, peer),
            Event::EndpointChanged => self.rail_moved(rail),
            Event::DeviceLost { status } => self.lose_rail(rail, status),
            Event::Done { .. } | Event::Failed { .. } | Event::FailedUnconfirmed { .. } => {}
        }
    }

    /// The link of a slot. An event of a peer that is being admitted is kept.
    fn link_at(&mut self, rail: usize, peer: PeerSlot, event: Event) -> Option<u32> {
        let link = self.slot_links[rail].get(peer.0 as usize).copied().flatten();
        if link.is_none()
            && !self.early.keep(rail, peer, event)
            && let Event::Received { id, .. } = event
        {
            let why = "a peer flooded us before it was admitted; its messages are dropped";
            let error = Error::new(ErrorKind::Protocol, "recv", why);
            self.receives.failed(id, error, &mut self.rails, &self.handle);
        }
        link
    }

    /// The last event of a slot: the link is over when this was its last rail.
    fn peer_gone(&mut self, rail: usize, peer: PeerSlot) {
        let linked = |this: &mut Self| this.slot_links[rail].get_mut(peer.0 as usize).and_then(Option::take);
        let mut link = linked(self);
        if link.is_none() {
            // Admission queues `Link` before anyone can disconnect: it is here by now.
            self.take_controls();
            link = linked(self);
        }
        let Some(index) = link else {
            // Prepared and never admitted.
            self.early.take(rail, peer);
            return;
        };
        self.note(8, index.into());
        let known = self.links[index as usize].as_ref().map_or(0, |link| link.peer.short_id());
        self.record(What::PeerGone { rail: self.numbered(rail), peer: known });
        let Some(link) = &mut self.links[index as usize] else { return };
        link.forget(rail, peer);
        if !link.dead {
            // The backend noticed before the control plane did.
            let gone = link.peer.clone();
            let lost = || Error::new(ErrorKind::PeerDied, "poll", "the backend lost the connection");
            // Or whoever ended it told the backend before this engine.
            let error = gone.death().unwrap_or_else(lost);
            self.fail_link(index, &error);
            crate::Peer(gone).fail(error);
        }
        self.retire_link(index);
    }

    /// The endpoint of a rail has moved: every peer is told.
    fn rail_moved(&self, rail: usize) {
        for link in self.links.iter().flatten().filter(|link| !link.dead) {
            link.peer.tell_move(self.handle.group, rail);
        }
    }

    /// A device is lost: what is posted on it will not move, what uses it fails.
    fn lose_rail(&mut self, rail: usize, status: Status) {
        self.note(9, rail as u64);
        self.record(What::DeviceLost { rail: self.numbered(rail) });
        let words = self.rails[rail].endpoint.describe(status);
        let words = if words.is_empty() { words } else { format!(": {words}") };
        let error = Error::new(ErrorKind::DeviceLost, "poll", format!("rail {}{words}", self.numbered(rail)));
        self.rails[rail].lost = Some(status);
        self.handle.counts[rail].lose();
        for active in self.active.iter_mut().flatten() {
            active.rails[rail].weight = 0;
        }
        self.doubts.forget(rail);
        let posted: Vec<_> = self.rails[rail].posted.unacknowledged().collect();
        for op in 0..self.active.len() as u32 {
            let uses = |active: &super::Active| {
                active.rails[rail].left() > 0 || posted.iter().any(|(_, of)| *of == op)
            };
            if self.active[op as usize].as_ref().is_some_and(uses) {
                self.fail_op(op, error.clone());
            }
        }
        for (id, _) in posted {
            self.acknowledge(rail, id, 1, Some(Status { kind: ErrorKind::DeviceLost, code: status.code }));
        }
        self.receives.lost(rail, &error, &self.handle);
    }
}

/// Requests that were done, and that failed.
fn tally(events: &[Event]) -> (u64, u64) {
    events.iter().fold((0, 0), |(done, failed), event| match event {
        Event::Done { count, .. } => (done + u64::from(*count), failed),
        Event::Failed { .. } | Event::FailedUnconfirmed { .. } => (done, failed + 1),
        _ => (done, failed),
    })
}
