//! What ends at the endpoint: copies, requests, connections.

use multirail_spi::{Completions, ErrorKind, Event, PeerSlot, PostResult, Status, WorkKind};

use super::{BATCH, Copied, StagedEndpoint};
use crate::ours::{Name, Role};
use crate::wire::KNOCK;

impl StagedEndpoint {
    /// Launches copies, and acts on those that have ended.
    pub(super) fn launch(&mut self) {
        while let Some((copied, outcome)) = self.copies.ended() {
            self.has_moved = true;
            match copied {
                Copied::Received { id } => self.events.extend(self.receives.copied(id, outcome)),
                Copied::Ours { peer, slot } => {
                    self.with(peer, |local, around| {
                        local.outlet.copied(slot, outcome, &mut around.with(&mut local.outbox))
                    });
                }
                Copied::Theirs { peer, slot } => {
                    self.with(peer, |local, around| {
                        local.service.copied(slot, outcome, &mut around.with(&mut local.outbox));
                    });
                }
            }
        }
    }

    /// Posts what is to go out to the peer of slot `at`, as far as the card takes it.
    pub(super) fn post_ours(&mut self, at: usize) {
        while let Some(local) = self.locals[at].as_mut().filter(|local| !local.outbox.is_empty()) {
            self.batch.clear();
            local.outbox.iter().take(BATCH).for_each(|request| self.batch.push(*request));
            // SAFETY: their local spans are the ring's, which is there until the card says that the peer is gone, or
            // those of a request that has not ended; the peer's ring was imported with the link.
            let PostResult { accepted, error } = unsafe { self.inner.post(&self.batch) };
            let offered = self.batch.len();
            local.outbox.drain(..accepted.min(offered));
            if let Some(refused) = error.and_then(|status| Some((local.outbox.pop_front()?, status))) {
                self.ended(refused.0.id, Err(refused.1), false);
                // What is to be repeated is looked at in the next turn; a peer that leaves ends it all.
                self.has_moved |= self.locals[at].as_ref().is_some_and(|local| !local.link.is_leaving());
            } else if accepted < offered {
                return;
            }
        }
    }

    /// A request of ours has ended. `false` where it is none.
    pub(super) fn ended(&mut self, id: u64, outcome: Result<(), Status>, is_doubted: bool) -> bool {
        let Some(name) = Name::of(id) else { return false };
        self.with(name.peer, |local, around| {
            let around = &mut around.with(&mut local.outbox);
            match name.role {
                Role::Data | Role::Ask => local.outlet.posted(name, outcome, is_doubted, around),
                Role::Reply | Role::Answer => local.service.posted(name, outcome, around),
            }
        });
        true
    }

    /// Takes what the card has to tell; whether there may be more that is to be taken at once.
    pub(super) fn poll_inner(&mut self, into: &mut Completions) -> bool {
        self.inner.poll(&mut self.polled);
        // After it: the card may tell of a connection that was not there before.
        self.refresh();
        if self.polled.made_progress() {
            into.note_progress();
        }
        let is_full = self.polled.spare() == 0;
        for place in 0..self.polled.as_slice().len() {
            self.take(self.polled.as_slice()[place]);
        }
        self.polled.clear();
        self.has_moved |= is_full;
        is_full
    }

    fn is_knock(&self, peer: PeerSlot, imm: u32) -> bool {
        let local = self.locals.get(peer.0 as usize).and_then(Option::as_ref);
        // A device that is lost has no connections here any more.
        let is_agreed = || local.is_some_and(|local| local.link.is_knock(WorkKind::Write, Some(imm)));
        imm == KNOCK && (self.is_lost || is_agreed())
    }

    /// Acts on an event of the card's.
    pub(super) fn take(&mut self, event: Event) {
        match event {
            Event::Done { first, count } if Name::of(first).is_some() => {
                for id in first..first + u64::from(count) {
                    self.ended(id, Ok(()), false);
                }
            }
            // What it tells of is looked at in this turn.
            Event::Imm { peer, imm } if self.is_knock(peer, imm) => {}
            Event::Failed { id, status } if self.ended(id, Err(status), false) => {}
            Event::FailedUnconfirmed { id, status, .. } if self.ended(id, Err(status), true) => {}
            Event::PeerGone { peer } => {
                self.part(peer);
                self.events.push_back(event);
            }
            Event::DeviceLost { .. } => {
                // What was posted is the engine's to end: nothing may touch its memory any more.
                self.wait_for_copies();
                self.is_lost = true;
                for local in self.locals.drain(..).flatten() {
                    self.shared.links.remove(&local.link);
                }
                self.events.push_back(event);
            }
            // Its bytes would be copied to memory that is the owner's again.
            Event::Received { .. } if self.is_lost => {}
            other => self.events.extend(self.receives.event(other, &mut self.copies)),
        }
    }

    /// A peer is gone: its requests end, its ring goes.
    pub(super) fn part(&mut self, peer: PeerSlot) {
        self.wait_for_copies();
        let local = self.locals.get_mut(peer.0 as usize);
        match local.and_then(|local| local.take_if(|local| local.link.is_leaving())) {
            Some(mut local) => {
                local.outlet.fail(ErrorKind::PeerDied, &mut self.events);
                self.shared.links.remove(&local.link);
            }
            // It came and went between two looks.
            None => {
                if let Some(link) = self.shared.links.of(peer).filter(|link| link.is_leaving()) {
                    self.shared.links.remove(&link);
                }
            }
        }
    }

    /// Waits until no copy is under way: some tens of microseconds, at the end of a connection.
    pub(super) fn wait_for_copies(&mut self) {
        while self.copies.is_busy() {
            self.launch();
            std::hint::spin_loop();
        }
    }
}
