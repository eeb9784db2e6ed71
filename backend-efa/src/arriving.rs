//! What peers send: whose it is, and what becomes of what is nobody's.

use libfabric_sys as sys;
use transport_core::spi::{Event, PeerSlot, ReceiveRequest};

use crate::endpoint::EfaEndpoint;
use crate::lane::Turn;
use crate::peers::View;
use crate::report::REMOTE_CQ_DATA;
use crate::status::status;
use crate::tag::{Seat, Tag};

/// Who sent something.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Sender {
    /// By what travelled with it.
    Seat(Seat),
    /// By its address.
    Slot(u32),
    Unknown,
}

/// Something that a peer has sent.
#[derive(Debug)]
pub(crate) enum Arrival {
    Imm {
        from: Sender,
        imm: u32,
    },
    /// A message of so many bytes, and the receive that it took.
    Message {
        from: Sender,
        len: u64,
        imm: Option<u32>,
        receive: ReceiveRequest,
    },
}

impl EfaEndpoint {
    /// The peer's slot, if the sender is one.
    fn peer(&self, from: Sender) -> Option<PeerSlot> {
        let slot = match from {
            Sender::Seat(seat) if self.seats.get(seat.slot() as usize) == Some(&seat) => seat.slot(),
            Sender::Slot(slot) => slot,
            _ => return None,
        };
        let view = self.slots.get(slot as usize);
        view.filter(|view| matches!(view, View::Up(_) | View::Waiting)).map(|_| PeerSlot(slot))
    }

    fn sender(turn: &Turn<'_>, tag: Option<Tag>, from: sys::fi_addr_t) -> Sender {
        let by_address = || turn.owner(from).map_or(Sender::Unknown, Sender::Slot);
        tag.and_then(|tag| tag.seat).map_or_else(by_address, Sender::Seat)
    }

    /// A message took that receive.
    pub(crate) fn received(
        &mut self,
        turn: &Turn<'_>,
        receive: ReceiveRequest,
        entry: &sys::fi_cq_data_entry,
        from: sys::fi_addr_t,
    ) {
        let tag = match self.local.hides_data {
            true => Some(Tag::from_data(entry.data, self.local.data)),
            false => self.tag(entry),
        };
        let (from, imm) = (Self::sender(turn, tag, from), tag.and_then(|tag| tag.imm));
        self.file(Arrival::Message { from, len: entry.len as u64, imm, receive });
    }

    pub(crate) fn imm(&mut self, turn: &Turn<'_>, entry: &sys::fi_cq_data_entry, from: sys::fi_addr_t) {
        let tag = self.tag(entry);
        if let Some(imm) = tag.and_then(|tag| tag.imm) {
            self.file(Arrival::Imm { from: Self::sender(turn, tag, from), imm });
        }
    }

    fn tag(&self, entry: &sys::fi_cq_data_entry) -> Option<Tag> {
        (entry.flags & REMOTE_CQ_DATA != 0).then(|| Tag::from_data(entry.data, self.local.data))
    }

    /// Files what came. Who has connected since the slots were looked at may have sent something already; they
    /// are not looked at again in a turn, whose lock is taken after theirs elsewhere.
    fn file(&mut self, arrival: Arrival) {
        match self.told(&arrival) {
            Some(event) => self.waiting.push_back(event),
            None => self.doubtful.push(arrival),
        }
    }

    /// What there is to tell of an arrival from a peer.
    fn told(&self, arrival: &Arrival) -> Option<Event> {
        Some(match *arrival {
            Arrival::Imm { from, imm } => Event::Imm { peer: self.peer(from)?, imm },
            Arrival::Message { from, len, imm, receive } => {
                Event::Received { id: receive.id, peer: self.peer(from)?, len, imm }
            }
        })
    }

    /// Looks again at the slots of what came from nobody.
    #[cold]
    pub(crate) fn settle(&mut self) {
        self.refresh();
        for arrival in std::mem::take(&mut self.doubtful) {
            match (self.told(&arrival), arrival) {
                (Some(event), _) => self.waiting.push_back(event),
                (None, Arrival::Message { receive, .. }) => self.stray(receive),
                (None, arrival) => tracing::debug!(?arrival, "an imm of a peer that is gone, or was none"),
            }
        }
    }

    /// A message of nobody's took that receive, which is posted again.
    fn stray(&mut self, receive: ReceiveRequest) {
        tracing::debug!("a message of a peer that is gone, or was none, is dropped");
        let accepted = self.lane.take().map_or(0, |mut lane| {
            // SAFETY: posted until it was taken, and not given back: it is still as promised.
            let result = unsafe { self.post_receives(&mut lane.turn(), &[receive]) };
            self.lane = Some(lane);
            result.accepted
        });
        if accepted == 0 {
            let status = status(sys::FI_ENOTCONN as i32);
            self.waiting.push_back(Event::ReceiveFailed { id: receive.id, status });
        }
    }
}
