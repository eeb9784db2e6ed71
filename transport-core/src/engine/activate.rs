//! Submissions become active operations: a share of every usable rail.

use std::sync::atomic::Ordering::Relaxed;

use super::active::{Stage, kind_of};
use super::alone::Lone;
use super::receive::RAIL as MESSAGES;
use super::{Active, ActiveRail, Engine, Submission, Work, credit};
use crate::peer::PeerInner;
use crate::plan::{RailRange, Shape, split};
use crate::region::revoked;
use crate::spi::WorkKind;
use crate::{Error, ErrorKind};

impl Engine {
    /// The live link of a submission's peer.
    fn live_link(&self, peer: &PeerInner) -> Option<u32> {
        let index = peer.links[self.handle.group].index;
        let known = self.links.get(index as usize)?.as_ref()?;
        (!known.dead && known.peer.id == peer.id).then_some(index)
    }

    /// Gives a submission its share of every usable rail and queues it there; one that comes `alone`
    /// is posted at once if nothing stands before it.
    pub(super) fn activate(&mut self, mut submission: Submission, alone: bool) {
        let (id, peer) = (submission.id, &submission.peer);
        // Its link was queued after the controls were taken, and before it. What was queued
        // behind it stays there: it may be about this very submission.
        let mut link = self.live_link(peer);
        while link.is_none()
            && peer.death().is_none()
            && let Some(control) = self.handle.controls.pop()
        {
            self.take_control(control);
            link = self.live_link(peer);
        }
        let Some(link) = link else { return self.refuse(submission) };
        let work = &mut submission.work;
        if !self.handle.posting.lazy && work.items.len() > 1 {
            work.shape = work.shape.written();
        }
        let mut rails = self.spare.pop().unwrap_or_default();
        self.fill_rails(work, link, &mut rails);
        let metered = credit::is_metered(work, &peer.links[self.handle.group].credit);
        let error = refusal(work, &rails);
        let (unposted, only) = match error {
            Some(_) => (0, None),
            None => self.share(work, &mut rails),
        };
        let waits = submission.trigger.is_some();
        // Before it is booked: who waits for the answer waits that much less.
        let lone = match only {
            Some(rail) if alone && !metered && !waits => self.post_alone(id, work, rail, &mut rails[rail]),
            _ => None,
        };
        let kind = kind_of(work);
        let Submission { peer, begun, trigger, deadline, work, span, .. } = submission;
        let (short_id, bytes, now) = (peer.short_id(), work.bytes(), self.now());
        self.active[id.index as usize] = Some(Active {
            id,
            metered,
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
            unposted,
            outstanding: 0,
            work_requests: 0,
            error,
            cancelled: false,
            expired: false,
            aborted: false,
        });
        self.running += 1;
        self.note(2, id.index.into());
        self.begins(id, kind, short_id, bytes);
        self.watch_until(now, deadline);
        match lone {
            Some(Lone { rail, bytes, result }) => {
                self.posted_alone += self.book(rail, bytes, result, 0);
            }
            None if waits => self.untriggered.push(id),
            None => self.queue(id.index),
        }
        self.finish_if_over(id.index);
    }

    /// Gives the rails their shares; how many pieces there are. Where all is one request, says over
    /// which it goes.
    fn share(&mut self, work: &Work, rails: &mut [ActiveRail]) -> (u32, Option<usize>) {
        if work.is_whole() {
            // An imm alone, or one message: the first usable rail, whole.
            let first = rails.iter().position(ActiveRail::usable);
            if let Some(first) = first {
                rails[first].range = RailRange { start: 0, end: 1 };
            }
            return (1, first);
        }
        let turn = self.handle.turn.load(Relaxed);
        self.handle.turn.store(turn.wrapping_add(1), Relaxed);
        let pieces = work.items.len();
        if let ([rail], 1) = (&mut rails[..], pieces) {
            (rail.range, rail.next) = (work.items, work.items.start);
            return (1, Some(0));
        }
        // A touch is one for every rail, whatever that carries.
        let alike = matches!(work.shape, Shape::Touch { .. });
        let weight = |rail: &ActiveRail| if alike { rail.weight.min(1) } else { rail.weight };
        split(work.items, rails.iter().map(weight), turn, &mut self.ranges);
        rails.iter_mut().zip(&self.ranges).for_each(|(rail, range)| {
            rail.range = *range;
            rail.next = range.start;
        });
        let only = if pieces > 1 { None } else { rails.iter().position(|rail| rail.left() > 0) };
        (pieces, only)
    }

    /// Ends an operation whose peer is gone.
    #[cold]
    fn refuse(&mut self, submission: Submission) {
        let Submission { id, peer, trigger, work, span, .. } = submission;
        let died = || Error::new(ErrorKind::PeerDied, "submit", "the peer is gone");
        let error = peer.death().unwrap_or_else(died);
        if trigger.is_none() {
            peer.links[self.handle.group].backlog.ended(&work);
        }
        self.note(2, id.index.into());
        self.begins(id, kind_of(&work), peer.short_id(), work.bytes());
        self.ends(id, &span, Some(&error));
        self.handle.table.end(id, Err(error));
    }

    fn fill_rails(&self, work: &Work, link: u32, rails: &mut Vec<ActiveRail>) {
        let (transport, first) = (self.handle.transport, self.handle.first_rail);
        rails.clear();
        let Some(Some(state)) = self.links.get(link as usize) else { return };
        let paired = &state.peer.links[self.handle.group].rails;
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

    /// All bytes are delivered, over each rail before what comes over that rail alone: the rails but the one
    /// that carries the imm are flushed. Where engines share an operation, each flushes all of its rails, as
    /// another one may send the imm. `false` if nothing is to be flushed.
    #[cold]
    pub(super) fn begin_flush(&mut self, op: u32) -> bool {
        let Some(active) = &mut self.active[op as usize] else { return false };
        let kept = usize::from(active.work.gate.is_none());
        active.stage = Stage::Flush;
        for rail in active.rails.iter_mut().filter(|rail| rail.is_used()).skip(kept) {
            rail.range = RailRange { start: 0, end: 1 };
            rail.next = 0;
            active.unposted += 1;
        }
        if active.unposted == 0 {
            return false;
        }
        if !self.fails_unflushed(op) {
            self.queue(op);
        }
        true
    }

    /// Fails an operation that has delivered bytes over a rail which was lost: nothing tells any more when
    /// they are visible.
    fn fails_unflushed(&mut self, op: u32) -> bool {
        let Some(active) = &self.active[op as usize] else { return true };
        let is_lost = active.rails.iter().any(|rail| rail.is_used() && !rail.usable());
        if is_lost {
            let why = "a rail was lost before its bytes were known to be visible: write them again";
            self.fail_op(op, Error::new(ErrorKind::DeviceLost, "write", why));
        }
        is_lost
    }

    /// All bytes are delivered: the one imm that announces them goes out.
    pub(super) fn begin_imm(&mut self, op: u32) {
        if self.needs_flushes && self.fails_unflushed(op) {
            return;
        }
        let needs_flushes = self.needs_flushes;
        let Some(active) = &mut self.active[op as usize] else { return };
        active.stage = Stage::Imm;
        // Over a rail that has carried bytes, where its imm waits for those alone. A share may have had none: then the
        // engines that carried them have flushed all their rails.
        let carries = |rail: &ActiveRail| rail.usable() && (rail.is_used() || !needs_flushes);
        let place = active.rails.iter().position(carries);
        let place = place.or_else(|| active.rails.iter().position(ActiveRail::usable));
        let Some(rail) = place.map(|place| &mut active.rails[place]) else {
            let why = "every rail to the peer was lost before the imm";
            self.fail_op(op, Error::new(ErrorKind::DeviceLost, "write", why));
            return;
        };
        rail.range = RailRange { start: 0, end: 1 };
        rail.next = 0;
        active.unposted = 1;
        self.queue(op);
    }
}

/// Why an operation cannot be carried, if no rail is left that may.
fn refusal(work: &Work, rails: &[ActiveRail]) -> Option<Error> {
    // Checked again on the thread that posts: the revocation may be over, and with it the key that requests name.
    if work.local.as_ref().is_some_and(|local| local.is_revoked()) {
        return Some(revoked(Engine::operation_name(work.kind)));
    }
    let (operation, why) = if !rails.iter().any(ActiveRail::usable) {
        ("submit", "no rail to this peer is left; open the fabric anew")
    } else if work.kind == WorkKind::Send && !rails[MESSAGES].usable() {
        ("send", "the rail that carries messages is lost; open the fabric anew")
    } else {
        return None;
    };
    Some(Error::new(ErrorKind::DeviceLost, operation, why))
}
