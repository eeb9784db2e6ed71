//! What peers send: whose it is, and what becomes of what is nobody's.

use libfabric_sys as sys;
use multirail_spi::{Endpoint, Event, PeerSlot, PostResult, ReceiveRequest};

use crate::endpoint::EfaEndpoint;
use crate::lane::Turn;
use crate::peers::View;
use crate::posting::refused;
use crate::report::REMOTE_CQ_DATA;
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
    /// A message of so many bytes, and the receive that it took, perhaps one that is to be taken back.
    Message {
        from: Sender,
        len: u64,
        imm: Option<u32>,
        receive: ReceiveRequest,
        is_recalled: bool,
    },
}

impl Arrival {
    /// The receive `id` is to be taken back.
    pub(crate) fn recall(&mut self, id: u64) {
        if let Self::Message { receive, is_recalled, .. } = self {
            *is_recalled |= receive.id == id;
        }
    }
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
        (receive, is_recalled): (ReceiveRequest, bool),
        entry: &sys::fi_cq_data_entry,
        from: sys::fi_addr_t,
    ) {
        let tag = match self.local.hides_data {
            true => Some(Tag::from_data(entry.data, self.local.data)),
            false => self.tag(entry),
        };
        let (from, imm) = (Self::sender(turn, tag, from), tag.and_then(|tag| tag.imm));
        self.file(Arrival::Message { from, len: entry.len as u64, imm, receive, is_recalled });
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
            Some(event) => self.tell(event, &arrival),
            None => self.doubtful.push(arrival),
        }
    }

    /// Tells of an arrival: at once, or where it took a receive of the backend's own once the user has one for it.
    fn tell(&mut self, event: Event, arrival: &Arrival) {
        match (&mut self.own, event, arrival) {
            (Some(own), Event::Received { peer, len, imm, .. }, Arrival::Message { receive, .. })
                if own.has(receive) =>
            {
                own.arrived(*receive, peer, len, imm);
            }
            _ => self.waiting.push_back(event),
        }
    }

    /// What there is to tell of an arrival from a peer.
    fn told(&self, arrival: &Arrival) -> Option<Event> {
        Some(match *arrival {
            Arrival::Imm { from, imm } => Event::Imm { peer: self.peer(from)?, imm },
            Arrival::Message { from, len, imm, receive, .. } => {
                Event::Received { id: receive.id, peer: self.peer(from)?, len, imm }
            }
        })
    }

    /// Looks again at the slots of what came from nobody.
    #[cold]
    pub(crate) fn settle(&mut self) {
        self.refresh();
        for arrival in std::mem::take(&mut self.doubtful) {
            match self.told(&arrival) {
                Some(event) => self.tell(event, &arrival),
                None => self.stray(arrival),
            }
        }
    }

    /// What is nobody's is dropped. A receive that it took is posted again, behind the others.
    fn stray(&mut self, arrival: Arrival) {
        tracing::debug!(?arrival, "from a peer that is gone, or was none");
        let Arrival::Message { len, imm, receive, is_recalled, .. } = arrival else { return };
        if let Some(own) = self.own.as_mut().filter(|own| own.has(&receive)) {
            return own.idle.push(receive);
        }
        let PostResult { accepted, error } = match is_recalled {
            true => refused(0, -(sys::FI_ECANCELED as isize)),
            // SAFETY: posted until it was taken, and not given back: it is still as promised.
            false => unsafe { self.post_recv(&[receive]) },
        };
        match error {
            Some(status) => self.waiting.push_back(Event::ReceiveFailed { id: receive.id, status }),
            None if accepted == 1 => {}
            // There is no room now.
            None => {
                let from = Sender::Unknown;
                self.doubtful.push(Arrival::Message { from, len, imm, receive, is_recalled });
            }
        }
    }
}
