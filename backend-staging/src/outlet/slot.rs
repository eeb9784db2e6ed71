//! A slot's way, from being filled to being free.

use multirail_spi::{ErrorKind, KeyMaterial, Status, WorkKind};

use super::Outlet;
use super::request::{End, Request};
use crate::endpoint::{Around, Copied};
use crate::ours::{Name, Role};
use crate::ring::Ring;
use crate::status::status;
use crate::wire::{Ask, Verb, answered};

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Free,
    /// From this side's region into the slot.
    Filling,
    /// On the line, the bytes.
    Moving,
    /// The peer has to answer.
    Asked,
    /// From the slot into this side's region.
    Emptying,
}

pub(super) struct Slot {
    pub(super) step: Step,
    /// The request's number; `None` once it has ended.
    pub(super) request: Option<u64>,
    /// First byte of the request's.
    pub(super) at: u64,
    pub(super) len: u64,
    pub(super) imm: Option<u32>,
    pub(super) turn: u32,
    pub(super) is_ask_posted: bool,
    /// An ask of this turn has failed: whether it came there is not known.
    pub(super) is_in_doubt: bool,
    /// And the next one is due. The peer takes one of them, by its turn.
    pub(super) is_ask_due: bool,
}

impl Outlet {
    /// Begins the copy of a slot, from this side's region or into it.
    pub(super) fn copy(&mut self, place: usize, around: &mut Around<'_>) {
        let (step, number, at, len) = {
            let slot = &self.slots[place];
            (slot.step, slot.request, slot.at, slot.len)
        };
        let Some(request) = self.request(number) else { return };
        let local = request.work.local.wrapping_add(at as usize);
        let memory =
            request.local.as_ref().map_or_else(|| around.far.place(local as u64), |entry| entry.place);
        let ring = &self.link.ring;
        let ends = if step == Step::Filling {
            (ring.ours(place), local.cast_const())
        } else {
            (local, ring.ours(place).cast_const())
        };
        let name = Copied::Ours { peer: self.link.slot, slot: place };
        // SAFETY: the local span is valid until the request has ended, by the contract of `post`, and it has not while
        // the slot is open; the slot is this copy's, and the ring stays until no copy is under way.
        if !unsafe { around.copies.begin(memory, Some(ring), (ends.0, ends.1, len), name) } {
            self.held.push_back(place);
        }
    }

    /// Posts the bytes of a slot; or asks, where there are none to post.
    pub(super) fn send(&mut self, place: usize, around: &mut Around<'_>) {
        let (number, at, len, imm) = {
            let slot = &mut self.slots[place];
            slot.step = Step::Moving;
            (slot.request, slot.at, slot.len, slot.imm)
        };
        let Some(request) = self.request(number) else { return };
        let (work, is_far, is_filled) = (request.work, request.is_far, request.local.is_some());
        let is_asked = request.is_asked(imm);
        if is_asked && (work.kind == WorkKind::Read || len == 0) {
            return self.ask(place, around);
        }
        let (mut local, mut key) = (self.link.ring.ours(place), self.link.ring.lkey());
        if !is_filled && work.kind != WorkKind::Read {
            (local, key) = (work.local.wrapping_add(at as usize), work.lkey);
        }
        let name = Name { role: Role::Data, peer: self.link.slot, slot: place };
        let mut posted = name.write(local, key, len, work.remote.wrapping_add(at), work.rkey);
        if is_far {
            let Some(there) = self.link.there() else {
                return self.ended(place, Err(status(ErrorKind::Unreachable)), around);
            };
            (posted.remote, posted.rkey) = (there.theirs(place), there.rkey);
        } else {
            (posted.kind, posted.imm) = (work.kind, imm.filter(|_| !is_asked));
        }
        around.outbox.push_back(posted);
    }

    pub(super) fn ask(&mut self, place: usize, around: &mut Around<'_>) {
        let slot = &mut self.slots[place];
        slot.turn = slot.turn.wrapping_add(1).max(1);
        slot.step = Step::Asked;
        self.post_ask(place, around);
    }

    /// What is asked for a slot in its turn: nothing, where its request has failed meanwhile.
    pub(super) fn asked(&mut self, place: usize) -> Ask {
        let (number, turn, imm) = (self.slots[place].request, self.slots[place].turn, self.slots[place].imm);
        let (at, len) = (self.slots[place].at, self.slots[place].len);
        let nothing = Ask { turn, verb: Verb::Nothing, key: 0, offset: 0, len: 0, imm: None };
        let Some(request) = self.request(number).filter(|request| request.failed.is_none()) else {
            return nothing;
        };
        if !request.is_far {
            return Ask { verb: Verb::Tell, imm, ..nothing };
        }
        let work = request.work;
        let verb = if work.kind == WorkKind::Read { Verb::Read } else { Verb::Write };
        let offset = (work.remote & !KeyMaterial::STAGED) + at;
        Ask { turn, verb, key: work.rkey, offset, len, imm }
    }

    fn post_ask(&mut self, place: usize, around: &mut Around<'_>) {
        let ask = self.asked(place);
        let Some(there) = self.link.there() else { return };
        let ring = &self.link.ring;
        ring.set_ask(place, ask);
        let name = Name { role: Role::Ask, peer: self.link.slot, slot: place };
        let mut posted =
            name.write(ring.ask_out(place), ring.lkey(), Ring::ASK, there.ask(place), there.rkey);
        posted.imm = there.knock;
        around.outbox.push_back(posted);
        self.slots[place].is_ask_posted = true;
    }

    /// The copy of a slot has ended.
    pub(crate) fn copied(&mut self, place: usize, outcome: Result<(), ErrorKind>, around: &mut Around<'_>) {
        let number = self.slots[place].request;
        let is_alive = self.request(number).is_some_and(|request| request.failed.is_none());
        match (self.slots[place].step, outcome) {
            (_, Err(kind)) => self.ended(place, Err(status(kind)), around),
            (Step::Filling, Ok(())) if is_alive => self.send(place, around),
            _ => self.ended(place, Ok(()), around),
        }
    }

    /// A request of ours for a slot has ended.
    pub(crate) fn posted(
        &mut self,
        name: Name,
        outcome: Result<(), Status>,
        is_doubted: bool,
        around: &mut Around<'_>,
    ) {
        let place = name.slot;
        let Some(slot) = self.slots.get(place) else { return };
        let (number, imm) = (slot.request, slot.imm);
        match (name.role, outcome) {
            (Role::Data, Ok(())) => {
                let Some(request) = self.request(number) else { return };
                match (request.work.kind, request.is_asked(imm), request.failed.is_some()) {
                    (_, _, true) => self.ended(place, Ok(()), around),
                    (WorkKind::Write, true, _) => self.ask(place, around),
                    (WorkKind::Read, ..) => self.empty(place, around),
                    _ => self.ended(place, Ok(()), around),
                }
            }
            (Role::Data, Err(status)) => self.ended_by(place, Err(End { status, is_doubted }), around),
            (_, Ok(())) => {
                self.slots[place].is_ask_posted = false;
                self.look(place, around);
            }
            (_, Err(status)) => {
                let slot = &mut self.slots[place];
                (slot.is_ask_posted, slot.is_in_doubt, slot.is_ask_due) = (false, true, true);
                // No backend repeats what may have told of an imm; this may come twice. A peer that is dead is told of
                // elsewhere.
                let is_cut = is_doubted && status.kind == ErrorKind::Unreachable;
                tracing::debug!(place, status.code, is_cut, "staging: an ask has failed");
                if let Some(request) = self.request(number).filter(|_| !is_cut) {
                    request.fail(End { status, is_doubted });
                }
            }
        }
    }

    /// Sees whether the peer has answered; until then it may be at the slot, and at its own region.
    pub(super) fn look(&mut self, place: usize, around: &mut Around<'_>) {
        let slot = &mut self.slots[place];
        if slot.step != Step::Asked || slot.is_ask_posted {
            return;
        }
        let Some(outcome) = answered(self.link.ring.answer_in(place), slot.turn) else {
            if std::mem::take(&mut slot.is_ask_due) {
                self.post_ask(place, around);
            }
            return;
        };
        let number = slot.request;
        let is_read = |request: &mut Request| request.work.kind == WorkKind::Read && request.failed.is_none();
        let reads = self.request(number).is_some_and(is_read);
        *around.has_moved = true;
        match outcome {
            Ok(()) if reads => self.empty(place, around),
            outcome => self.ended(place, outcome.map_err(status), around),
        }
    }

    /// Moves what was read to where it belongs.
    pub(super) fn empty(&mut self, place: usize, around: &mut Around<'_>) {
        self.slots[place].step = Step::Emptying;
        self.copy(place, around);
    }
}
