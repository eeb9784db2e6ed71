//! Completions of libfabric as events: of our own requests, and of what peers have sent.

use std::ffi::c_void;

use libfabric_sys as sys;
use multirail_spi::{Endpoint, ErrorKind, Event, PeerSlot, PostResult, ReceiveRequest, Status};

use crate::card;
use crate::context::{Contexts, Posted};
use crate::endpoint::{EfaEndpoint, refused};
use crate::endpoint_replacement::GRACE_OF_CARDS;
use crate::error_text::{self, ErrorText};
use crate::fabric_endpoint::EndpointGuard;
use crate::peers::View;
use crate::status::{is_ambiguous, is_unreachable, kind, status};
use crate::tag::{PeerTag, Tag};

/// The most completions that one call reads: as many as EFA's provider looks at in one call (`efa_cq_read_size`; 1.17,
/// 2.1), so that a call that brings fewer has left none.
pub(crate) const AT_ONCE: usize = 50;

/// The emulated writes of 64 KiB that 1.17 advances by one call: each takes ten packets of the card.
const EMULATED_PER_CALL: usize = AT_ONCE / 10;
/// The most calls in a poll that may bring fewer, as most packets do not end a write.
const IN_VAIN: usize = 15;

// Flags of completions.
pub(crate) const REMOTE_CQ_DATA: u64 = sys::FI_REMOTE_CQ_DATA as u64;
const REMOTE_WRITE: u64 = sys::FI_REMOTE_WRITE as u64;
const RECV: u64 = sys::FI_RECV as u64;
const SEND: u64 = sys::FI_SEND as u64;
/// Any flag of a request or receive that was posted here.
const POSTED: u64 = RECV | (sys::FI_SEND | sys::FI_READ | sys::FI_WRITE) as u64;

/// A buffer for the completions of one call, and for the addresses of their senders.
pub(crate) struct Entries {
    completions: Vec<sys::fi_cq_data_entry>,
    from: Vec<sys::fi_addr_t>,
}

// SAFETY: plain values; the pointers in them are compared, never followed.
unsafe impl Send for Entries {}

impl Entries {
    pub(crate) fn new() -> Self {
        // SAFETY: a plain value, for which zero will do.
        let entry = unsafe { std::mem::zeroed() };
        Self { completions: vec![entry; AT_ONCE], from: vec![sys::FI_ADDR_UNSPEC; AT_ONCE] }
    }
}

/// The sender of an arrival.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Sender {
    /// By the peer tag that travelled with the bytes.
    PeerTag(PeerTag),
    /// By the sender's address.
    Slot(u32),
    Unknown,
}

/// An imm or a message of a peer.
#[derive(Debug)]
pub(crate) enum Arrival {
    Imm {
        from: Sender,
        imm: u32,
    },
    /// A message of `len` bytes in the receive that it took. `is_recalled` if the engine has taken that receive back.
    Message {
        from: Sender,
        len: u64,
        imm: Option<u32>,
        receive: ReceiveRequest,
        is_recalled: bool,
    },
}

impl Arrival {
    /// Marks the receive `id` as taken back.
    pub(crate) fn recall(&mut self, id: u64) {
        if let Self::Message { receive, is_recalled, .. } = self {
            *is_recalled |= receive.id == id;
        }
    }
}

impl EfaEndpoint {
    /// Reads about `room` completions and files their events.
    ///
    /// Inlined, as every frame between a turn and the provider's system call costs: the kernel leaves no
    /// predictions for the returns on its way.
    #[inline(always)]
    pub(crate) fn drain(&mut self, guard: &mut EndpointGuard<'_>, room: usize) {
        let emulated = if guard.queues.emulates_writes { guard.posted.requests } else { 0 };
        let mut in_vain = (emulated / EMULATED_PER_CALL).min(IN_VAIN);
        let Some(mut entries) = self.entries.take() else { return };
        while self.waiting.len() < room {
            if !self.read(guard, &mut entries, room - self.waiting.len()) {
                if in_vain == 0 {
                    break;
                }
                in_vain -= 1;
            }
        }
        self.entries = Some(entries);
    }

    /// Reads once. Returns true if there may be more.
    #[inline]
    fn read(&mut self, guard: &mut EndpointGuard<'_>, entries: &mut Entries, room: usize) -> bool {
        let (cq, most) = (guard.queues.cq.as_ptr(), room.min(AT_ONCE));
        let into = entries.completions.as_mut_ptr();
        // SAFETY: the queue was opened for entries of this format, and there is room for so many.
        let read = unsafe {
            match self.local.data {
                8.. => sys::fi_cq_read(cq, into.cast(), most),
                _ => sys::fi_cq_readfrom(cq, into.cast(), most, entries.from.as_mut_ptr()),
            }
        };
        if read <= 0 {
            return read == -(sys::FI_EAVAIL as isize) && self.failed(guard);
        }
        let read = read as usize;
        let is_ours =
            |entry: &&sys::fi_cq_data_entry| entry.flags & (REMOTE_CQ_DATA | REMOTE_WRITE | RECV) == 0;
        let mut at = 0;
        while at < read {
            // Most completions are of our own requests. Neighbours among them are joined into one event, as that costs
            // the engine less.
            let contexts = entries.completions[at..read].iter().take_while(is_ours);
            if let Some((peer, first, count)) =
                guard.posted.end_requests(contexts.map(|entry| entry.op_context))
            {
                guard.posted.requests -= count as usize;
                self.outstanding[peer.0 as usize] -= count;
                self.waiting.push_back(Event::Done { first, count });
                at += count as usize;
            } else {
                self.arrived(guard, &entries.completions[at], entries.from[at]);
                at += 1;
            }
        }
        read == most
    }

    #[cold]
    #[inline(never)]
    fn arrived(
        &mut self,
        guard: &mut EndpointGuard<'_>,
        entry: &sys::fi_cq_data_entry,
        from: sys::fi_addr_t,
    ) {
        let has = |flags: u64| entry.flags & flags != 0;
        // shm of 2.1 leaves FI_REMOTE_WRITE out. The context is then one of the peer's.
        if has(REMOTE_WRITE) || (has(REMOTE_CQ_DATA) && !has(POSTED)) {
            if self.own.is_some()
                && let Some(Posted::Receive { receive, .. }) = self.end(guard.posted, entry.op_context)
                && let Some(own) = &mut self.own
            {
                own.idle.push(receive);
            }
            return self.imm(guard, entry, from);
        }
        match self.end(guard.posted, entry.op_context) {
            Some(Posted::Request { id, .. }) => self.waiting.push_back(Event::Done { first: id, count: 1 }),
            Some(Posted::Receive { receive, is_recalled }) => {
                self.received(guard, (receive, is_recalled), entry, from);
            }
            None => tracing::warn!(flags = entry.flags, "libfabric completes what was not posted"),
        }
    }

    /// Reads one error. Returns true if there was one.
    fn failed(&mut self, guard: &mut EndpointGuard<'_>) -> bool {
        let queues = guard.queues;
        // SAFETY: zero asks for no error data.
        let mut entry: sys::fi_cq_err_entry_1_20 = unsafe { std::mem::zeroed() };
        // SAFETY: the queue is open; the entry has room for what the latest interface that is asked for writes.
        let read = unsafe { sys::fi_cq_readerr(queues.cq.as_ptr(), (&raw mut entry).cast(), 0) };
        let mut entry = entry.known;
        if read < 0 {
            return false;
        }
        let words = error_text::provider(queues, entry.prov_errno, entry.err_data);
        if queues.device.info.card().is_some() {
            entry.err = card::error(entry.prov_errno, entry.err);
        }
        self.words = ErrorText::of(entry.err, words.clone());
        self.is_lost |= kind(entry.err) == ErrorKind::DeviceLost;
        match self.end(guard.posted, entry.op_context) {
            Some(Posted::Request { id, peer }) => {
                tracing::debug!(id, code = entry.err, words, "a request failed");
                // libfabric reports each packet of a failed message (2.1, `efa_rdm_txe_handle_error`).
                let is_message = queues.device.info.has_states() && entry.flags & SEND != 0;
                if queues.emulates_writes || is_message {
                    self.retire(guard.posted, entry.op_context);
                }
                if queues.emulates_writes {
                    self.pinned_addresses.insert(peer);
                }
                if is_ambiguous(entry.err) {
                    let kind = match is_unreachable(entry.err) {
                        true => ErrorKind::Unreachable,
                        false => ErrorKind::RemoteAccess,
                    };
                    let status = Status { kind, code: entry.err.abs() };
                    let doubted = Event::FailedUnconfirmed { id, peer, status };
                    // Cards have no connections.
                    match queues.device.info.card() {
                        Some(_) => self.waiting.push_back(doubted),
                        None => self.deferred.hold(self.shared.setup.clock.now(), peer, doubted),
                    }
                    return true;
                }
                self.waiting.push_back(Event::Failed { id, status: status(entry.err) });
            }
            Some(Posted::Receive { receive, .. }) => {
                let id = receive.id;
                tracing::debug!(id, code = entry.err, words, "a receive failed");
                if let Some(own) = self.own.as_mut().filter(|own| own.has(&receive)) {
                    own.idle.push(receive);
                    return true;
                }
                self.waiting.push_back(Event::ReceiveFailed { id, status: status(entry.err) });
            }
            None => {
                tracing::debug!(code = entry.err, words, "libfabric reports an error of a peer's request")
            }
        }
        true
    }

    /// Keeps a context that has just ended out of use for a while: the provider may report it once more.
    #[cold]
    pub(crate) fn retire(&self, posted: &mut Contexts, context: *mut c_void) {
        posted.retire(context, self.shared.setup.clock.now().after(GRACE_OF_CARDS));
    }

    /// The peer's slot, if the sender is one.
    fn peer(&self, from: Sender) -> Option<PeerSlot> {
        let slot = match from {
            Sender::PeerTag(peer_tag) if self.peer_tags.get(peer_tag.slot() as usize) == Some(&peer_tag) => {
                peer_tag.slot()
            }
            Sender::Slot(slot) => slot,
            _ => return None,
        };
        let view = self.slots.get(slot as usize);
        view.filter(|view| matches!(view, View::Up(_) | View::Waiting)).map(|_| PeerSlot(slot))
    }

    fn sender(guard: &EndpointGuard<'_>, tag: Option<Tag>, from: sys::fi_addr_t) -> Sender {
        let by_address = || guard.owner(from).map_or(Sender::Unknown, Sender::Slot);
        tag.and_then(|tag| tag.peer_tag).map_or_else(by_address, Sender::PeerTag)
    }

    /// Acts on a message that took `receive`.
    pub(crate) fn received(
        &mut self,
        guard: &EndpointGuard<'_>,
        (receive, is_recalled): (ReceiveRequest, bool),
        entry: &sys::fi_cq_data_entry,
        from: sys::fi_addr_t,
    ) {
        let tag = match self.local.hides_data {
            true => Some(Tag::from_data(entry.data, self.local.data)),
            false => self.tag(entry),
        };
        let (from, imm) = (Self::sender(guard, tag, from), tag.and_then(|tag| tag.imm));
        self.file(Arrival::Message { from, len: entry.len as u64, imm, receive, is_recalled });
    }

    pub(crate) fn imm(
        &mut self,
        guard: &EndpointGuard<'_>,
        entry: &sys::fi_cq_data_entry,
        from: sys::fi_addr_t,
    ) {
        let tag = self.tag(entry);
        if let Some(imm) = tag.and_then(|tag| tag.imm) {
            self.file(Arrival::Imm { from: Self::sender(guard, tag, from), imm });
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

    /// Reports an arrival: at once, or, if it took a receive of the backend itself, once the engine has posted one.
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

    /// The event of an arrival, if a peer has sent it.
    fn told(&self, arrival: &Arrival) -> Option<Event> {
        Some(match *arrival {
            Arrival::Imm { from, imm } => Event::Imm { peer: self.peer(from)?, imm },
            Arrival::Message { from, len, imm, receive, .. } => {
                Event::Received { id: receive.id, peer: self.peer(from)?, len, imm }
            }
        })
    }

    /// Reads the slots again for the arrivals whose senders were unknown.
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

    /// Drops an arrival that no peer has sent. The receive that it took is posted again, behind the others.
    fn stray(&mut self, arrival: Arrival) {
        tracing::debug!(?arrival, "an arrival from no connected peer");
        let Arrival::Message { len, imm, receive, is_recalled, .. } = arrival else { return };
        if let Some(own) = self.own.as_mut().filter(|own| own.has(&receive)) {
            return own.idle.push(receive);
        }
        let PostResult { accepted, error } = match is_recalled {
            true => refused(0, -(sys::FI_ECANCELED as isize)),
            // SAFETY: the receive was posted, and the engine has not got it back: its buffer is still valid.
            false => unsafe { self.post_recv(&[receive]) },
        };
        match error {
            Some(status) => self.waiting.push_back(Event::ReceiveFailed { id: receive.id, status }),
            None if accepted == 1 => {}
            // The queue is full.
            None => {
                let from = Sender::Unknown;
                self.doubtful.push(Arrival::Message { from, len, imm, receive, is_recalled });
            }
        }
    }
}
