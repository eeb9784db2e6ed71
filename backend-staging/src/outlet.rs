//! The initiator's end: requests to one peer that have a staged side, a slot's worth at a time.
//!
//! A slot is filled (where this side's memory is staged), written to the peer's ring, asked about (where the peer's is
//! staged), and free once the peer has answered: then the bytes are where they belong, so that `Delivered` holds.
//! Slots are independent of each other, and end in any order.

mod ending;
mod request;
mod slot;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use multirail_spi::{KeyMaterial, WorkKind, WorkRequest};

use crate::endpoint::Around;
use crate::link::Link;
use crate::region::Entry;
use crate::ring::{SLOT, SLOTS};
use request::Request;
use slot::{Slot, Step};

pub(crate) struct Outlet {
    link: Arc<Link>,
    /// Those that have not ended, by number.
    requests: BTreeMap<u64, Request>,
    /// The number of the next one.
    count: u64,
    /// All before it have no bytes that wait for a slot.
    next: u64,
    /// Requests of several slots whose bytes are there, and whose imm is due.
    imms: VecDeque<u64>,
    slots: Vec<Slot>,
    free: Vec<usize>,
    /// Slots whose copy had no room.
    held: VecDeque<usize>,
}

impl Outlet {
    pub(crate) fn new(link: Arc<Link>) -> Self {
        let slot = |_| Slot {
            step: Step::Free,
            request: None,
            at: 0,
            len: 0,
            imm: None,
            turn: 0,
            is_ask_posted: false,
            is_in_doubt: false,
            is_ask_due: false,
        };
        Self {
            link,
            requests: BTreeMap::new(),
            count: 0,
            next: 0,
            imms: VecDeque::new(),
            slots: (0..SLOTS).map(slot).collect(),
            free: (0..SLOTS).rev().collect(),
            held: VecDeque::new(),
        }
    }

    /// Whether one more request of that kind is taken: as many as fill the slots twice. What the engine has posted goes
    /// before what it is asked for later, and before other peers' requests. Messages, which wait for receives, leave
    /// half of the slots to others.
    pub(crate) fn has_room(&self, kind: WorkKind) -> bool {
        let is_message = |request: &&Request| request.work.kind == WorkKind::Send;
        self.requests.len() < 2 * SLOTS
            && (kind != WorkKind::Send || self.requests.values().filter(is_message).count() < SLOTS / 2)
    }

    /// Takes a request of which `local`, or the peer's side, is staged.
    pub(crate) fn push(&mut self, work: &WorkRequest, local: Option<Arc<Entry>>) {
        let is_far = work.kind != WorkKind::Send && work.remote & KeyMaterial::STAGED != 0;
        // The first one of no bytes takes a slot as well: see `fill`.
        let has_imm_left = true;
        let is_told = !is_far && self.link.is_knock(work.kind, work.imm);
        let failed = None;
        let request = Request { work: *work, local, is_far, is_told, cut: 0, open: 0, has_imm_left, failed };
        self.requests.insert(self.count, request);
        self.count += 1;
    }

    /// Moves on what can be moved.
    pub(crate) fn advance(&mut self, around: &mut Around<'_>) {
        for _ in 0..self.held.len() {
            if let Some(slot) = self.held.pop_front() {
                self.copy(slot, around);
            }
        }
        for slot in 0..SLOTS {
            self.look(slot, around);
        }
        self.fill(around);
        self.retire(around.events);
    }

    fn request(&mut self, number: Option<u64>) -> Option<&mut Request> {
        self.requests.get_mut(&number?)
    }

    /// Gives free slots to what waits for one.
    fn fill(&mut self, around: &mut Around<'_>) {
        while !self.free.is_empty() {
            if let Some(number) = self.imms.pop_front() {
                let imm = self.request(Some(number)).and_then(|request| {
                    let is_due = std::mem::take(&mut request.has_imm_left);
                    request.work.imm.filter(|_| is_due)
                });
                if imm.is_some() {
                    self.begin(number, 0, 0, imm, around);
                }
                continue;
            }
            let Some((&number, request)) = self.requests.range_mut(self.next..).next() else { return };
            let (at, len) = (request.cut, (request.work.len - request.cut).min(SLOT as u64));
            if request.failed.is_some() || (len == 0 && (at > 0 || !request.has_imm_left)) {
                self.next = number + 1;
                continue;
            }
            // What fits one slot takes its imm along; else that comes when all bytes are there.
            let is_whole = len == request.work.len;
            let imm = request.work.imm.filter(|_| is_whole);
            if is_whole || request.work.imm.is_none() {
                request.has_imm_left = false;
            }
            request.cut += len;
            self.begin(number, at, len, imm, around);
        }
    }

    fn begin(&mut self, number: u64, at: u64, len: u64, imm: Option<u32>, around: &mut Around<'_>) {
        let Some(place) = self.free.pop() else { return };
        let Some(request) = self.request(Some(number)) else { return self.free.push(place) };
        request.open += 1;
        let is_filled = request.work.kind != WorkKind::Read && request.local.is_some() && len > 0;
        let slot = &mut self.slots[place];
        (slot.request, slot.at, slot.len, slot.imm) = (Some(number), at, len, imm);
        (slot.is_in_doubt, slot.is_ask_due) = (false, false);
        if is_filled {
            slot.step = Step::Filling;
            self.copy(place, around);
        } else {
            self.send(place, around);
        }
    }
}
