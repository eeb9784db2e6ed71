//! The target's end: what a peer asks for, slot by slot.

use std::sync::Arc;

use multirail_spi::{Access, ErrorKind, Event, Status};

use crate::endpoint::{Around, Copied};
use crate::link::Link;
use crate::ours::{Name, Role};
use crate::region::Inside;
use crate::ring::{Ring, SLOT, SLOTS};
use crate::wire::{Ask, Verb, answer};

pub(crate) struct Service {
    link: Arc<Link>,
    slots: Vec<Served>,
}

#[derive(Default)]
struct Served {
    step: Step,
    /// The last turn that was taken.
    turn: u32,
    ask: Option<Ask>,
    /// While the region is touched, or is about to be.
    inside: Option<Inside>,
    /// What was to go out has failed, and goes out anew at the next turn: another's work was stopped, maybe, and this with it.
    has_failed: bool,
}

#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum Step {
    #[default]
    Idle,
    /// The copy has had no room.
    Held,
    Copying,
    Replying,
    Answering,
}

impl Service {
    pub(crate) fn new(link: Arc<Link>) -> Self {
        Self { link, slots: (0..SLOTS).map(|_| Served::default()).collect() }
    }

    /// Takes what the peer asks for by now.
    pub(crate) fn advance(&mut self, around: &mut Around<'_>) {
        for place in 0..SLOTS {
            match self.slots[place].step {
                Step::Idle => self.look(place, around),
                Step::Held => self.copy(place, around),
                Step::Replying | Step::Answering if self.slots[place].has_failed => {
                    self.repeat(place, around)
                }
                _ => {}
            }
        }
    }

    fn look(&mut self, place: usize, around: &mut Around<'_>) {
        let Some(ask) = self.link.ring.ask_in(place) else { return };
        let served = &mut self.slots[place];
        if ask.turn == served.turn {
            return;
        }
        *around.has_moved = true;
        (served.turn, served.ask) = (ask.turn, Some(ask));
        let need = match ask.verb {
            Verb::Nothing => return self.answer(place, Ok(()), around),
            Verb::Tell => {
                *around.has_told = true;
                return self.copied(place, Ok(()), around);
            }
            Verb::Write => Access::REMOTE_WRITE,
            Verb::Read => Access::REMOTE_READ,
        };
        if ask.len > SLOT as u64 {
            return self.answer(place, Err(ErrorKind::RemoteAccess), around);
        }
        match around.regions.enter(ask.key, need, ask.offset, ask.len) {
            Err(kind) => self.answer(place, Err(kind), around),
            Ok(_) if ask.len == 0 => self.copied(place, Ok(()), around),
            Ok(inside) => {
                self.slots[place].inside = Some(inside);
                self.copy(place, around);
            }
        }
    }

    fn copy(&mut self, place: usize, around: &mut Around<'_>) {
        let served = &mut self.slots[place];
        let (Some(ask), Some(inside)) = (served.ask, &served.inside) else { return };
        let slot = self.link.ring.theirs(place);
        let ends = match ask.verb {
            Verb::Read => (slot, inside.start.cast_const(), ask.len),
            _ => (inside.start, slot.cast_const(), ask.len),
        };
        let name = Copied::Theirs { peer: self.link.slot, slot: place };
        // SAFETY: `inside` holds the region, whose range was checked, until the copy has ended; `len` bytes fit the
        // slot, and the ring stays until no copy is under way. The peer may write there meanwhile: its own bytes.
        let has_begun = unsafe { around.copies.begin(inside.place(), Some(&self.link.ring), ends, name) };
        served.step = if has_begun { Step::Copying } else { Step::Held };
    }

    /// The copy of a slot has ended.
    pub(crate) fn copied(&mut self, place: usize, outcome: Result<(), ErrorKind>, around: &mut Around<'_>) {
        let served = &mut self.slots[place];
        served.inside = None;
        let Some(ask) = served.ask else { return };
        match (ask.verb, outcome) {
            (Verb::Read, Ok(())) if ask.len > 0 => self.reply(place, ask, around),
            (verb, outcome) => {
                if let (Verb::Write | Verb::Tell, Ok(()), Some(imm)) = (verb, outcome, ask.imm) {
                    around.events.push_back(Event::Imm { peer: self.link.slot, imm });
                }
                self.answer(place, outcome, around);
            }
        }
    }

    /// Sends what was read.
    fn reply(&mut self, place: usize, ask: Ask, around: &mut Around<'_>) {
        let Some(there) = self.link.there() else { return };
        let ring = &self.link.ring;
        let name = Name { role: Role::Reply, peer: self.link.slot, slot: place };
        let posted = name.write(ring.theirs(place), ring.lkey(), ask.len, there.ours(place), there.rkey);
        around.outbox.push_back(posted);
        self.slots[place].step = Step::Replying;
    }

    fn answer(&mut self, place: usize, outcome: Result<(), ErrorKind>, around: &mut Around<'_>) {
        self.link.ring.set_answer(place, answer(self.slots[place].turn, outcome));
        self.post_answer(place, around);
    }

    fn post_answer(&mut self, place: usize, around: &mut Around<'_>) {
        let Some(there) = self.link.there() else { return };
        let ring = &self.link.ring;
        let name = Name { role: Role::Answer, peer: self.link.slot, slot: place };
        let mut posted =
            name.write(ring.answer_out(place), ring.lkey(), Ring::ANSWER, there.answer(place), there.rkey);
        posted.imm = there.knock;
        around.outbox.push_back(posted);
        self.slots[place].step = Step::Answering;
    }

    /// A request of ours for a slot has ended.
    pub(crate) fn posted(&mut self, name: Name, outcome: Result<(), Status>, around: &mut Around<'_>) {
        let place = name.slot;
        let Some(served) = self.slots.get_mut(place) else { return };
        served.has_failed = outcome.is_err();
        match (name.role, outcome) {
            (_, Err(_)) => {}
            (Role::Reply, Ok(())) => self.answer(place, Ok(()), around),
            _ => {
                served.step = Step::Idle;
                self.look(place, around);
            }
        }
    }

    fn repeat(&mut self, place: usize, around: &mut Around<'_>) {
        let served = &mut self.slots[place];
        served.has_failed = false;
        match (served.step, served.ask) {
            (Step::Replying, Some(ask)) => self.reply(place, ask, around),
            _ => self.post_answer(place, around),
        }
    }
}
