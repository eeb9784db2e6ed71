//! How slots and requests end, well or not.

use std::collections::VecDeque;

use multirail_spi::{ErrorKind, Event, Status};

use super::Outlet;
use super::request::End;
use super::slot::Step;
use crate::endpoint::Around;
use crate::ours::{Name, Role};
use crate::status::status;

impl Outlet {
    pub(super) fn ended(&mut self, place: usize, outcome: Result<(), Status>, around: &mut Around<'_>) {
        self.ended_by(place, outcome.map_err(|status| End { status, is_doubted: false }), around);
    }

    /// A slot is done with, and free.
    pub(super) fn ended_by(&mut self, place: usize, outcome: Result<(), End>, around: &mut Around<'_>) {
        *around.has_moved = true;
        let slot = &mut self.slots[place];
        slot.step = Step::Free;
        let number = slot.request.take();
        self.free.push(place);
        let Some(request) = self.request(number) else { return };
        request.open -= 1;
        if let Err(end) = outcome {
            request.fail(end);
        }
        if request.open == 0 && request.cut == request.work.len && request.has_imm_left {
            self.imms.extend(number);
        }
    }

    /// Ends all requests with `kind`: those that something of this side's is at, or the peer, once that is done.
    pub(crate) fn stop(&mut self, kind: ErrorKind, around: &mut Around<'_>) {
        self.retire(around.events);
        let end = End { status: status(kind), is_doubted: false };
        self.requests.values_mut().for_each(|request| request.fail(end));
        self.imms.clear();
        // What was not posted touches nothing.
        for place in std::mem::take(&mut self.held) {
            self.ended_by(place, Err(end), around);
        }
        let (mut unposted, mut repeated) = (Vec::new(), Vec::new());
        around.outbox.retain(|request| {
            let Some(name) = Name::of(request.id) else { return true };
            match name.role {
                Role::Reply | Role::Answer => true,
                Role::Ask if self.slots[name.slot].is_in_doubt => {
                    repeated.push(name.slot);
                    true
                }
                Role::Data | Role::Ask => {
                    unposted.push(name);
                    false
                }
            }
        });
        // The card has not taken these: they ask for nothing now.
        for place in repeated {
            let ask = self.asked(place);
            self.link.ring.set_ask(place, ask);
        }
        for name in unposted {
            self.slots[name.slot].is_ask_posted = false;
            self.ended_by(name.slot, Err(end), around);
        }
        self.retire(around.events);
    }

    /// Ends all requests with `kind` now. Nothing may be at them any more.
    pub(crate) fn fail(&mut self, kind: ErrorKind, events: &mut VecDeque<Event>) {
        self.retire(events);
        let end = End { status: status(kind), is_doubted: false };
        for request in self.requests.values_mut() {
            request.fail(end);
            request.open = 0;
        }
        self.retire(events);
    }

    /// Tells of requests that have ended.
    pub(super) fn retire(&mut self, events: &mut VecDeque<Event>) {
        let peer = self.link.slot;
        self.requests.retain(|_, request| {
            if !request.is_over() {
                return true;
            }
            let id = request.work.id;
            events.push_back(match request.failed {
                None => Event::Done { first: id, count: 1 },
                Some(End { status, is_doubted: false }) => Event::Failed { id, status },
                Some(End { status, is_doubted: true }) => Event::FailedUnconfirmed { id, peer, status },
            });
            false
        });
    }
}
