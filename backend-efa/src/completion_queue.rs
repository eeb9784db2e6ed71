//! Reads libfabric's completions and turns them into events: ends of requests and receives, and arrivals from peers.

use std::ffi::c_void;

use libfabric_sys as sys;
use multirail_spi::{Endpoint, ErrorKind, Event, PeerSlot, PostResult, ReceiveRequest, Status};

use crate::context::{Contexts, Posted};
use crate::endpoint::{EfaEndpoint, refused_post};
use crate::endpoint_replacement::EFA_GRACE;
use crate::fabric_endpoint::{EndpointGuard, FabricEndpoint};
use crate::peers::SlotView;
use crate::status::{ErrorText, card_error, is_ambiguous, is_unreachable, kind, provider_text, status};
use crate::tag::{PeerTag, Tag};

/// The most completions that one call reads. EFA's provider polls its card for the same number in one call
/// (`efa_cq_read_size`; 1.17, 2.1). So the queue is empty if a call returns fewer.
pub(crate) const MAX_READ: usize = 50;

/// The number of emulated writes of 64 KiB that one `fi_cq_read` of libfabric 1.17 completes: each write consists of
/// ten packets.
const EMULATED_WRITES_PER_READ: usize = MAX_READ / 10;
/// With emulated writes, a call that returns fewer completions than asked for does not mean that the queue is empty:
/// most packets do not end a write. So one poll goes on reading after up to this many such calls.
const MAX_SHORT_READS: usize = 15;

// The flags of completions.
pub(crate) const REMOTE_CQ_DATA: u64 = sys::FI_REMOTE_CQ_DATA as u64;
const REMOTE_WRITE: u64 = sys::FI_REMOTE_WRITE as u64;
const RECV: u64 = sys::FI_RECV as u64;
const SEND: u64 = sys::FI_SEND as u64;
/// The flags of requests and receives that were posted here.
const LOCAL_FLAGS: u64 = RECV | (sys::FI_SEND | sys::FI_READ | sys::FI_WRITE) as u64;

/// A buffer for the completions of one call, and for the source addresses of arrivals.
pub(crate) struct Entries {
    completions: Vec<sys::fi_cq_data_entry>,
    from: Vec<sys::fi_addr_t>,
}

// SAFETY: plain values; the pointers in them are compared, never followed.
unsafe impl Send for Entries {}

impl Entries {
    pub(crate) fn new() -> Self {
        // SAFETY: a plain value, which may be zero.
        let entry = unsafe { std::mem::zeroed() };
        Self { completions: vec![entry; MAX_READ], from: vec![sys::FI_ADDR_UNSPEC; MAX_READ] }
    }
}

/// How an arrival identifies its sender.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Sender {
    /// By a peer tag in the completion data: the number that this side has given the peer.
    PeerTag(PeerTag),
    /// By the source address, which belongs to this slot.
    Slot(u32),
    Unknown,
}

/// An imm or a message that has arrived.
#[derive(Debug)]
pub(crate) enum Arrival {
    Imm {
        from: Sender,
        imm: u32,
    },
    /// A message of `len` bytes, and the receive that it consumed. `is_cancelled` if the engine has cancelled that
    /// receive.
    Message {
        from: Sender,
        len: u64,
        imm: Option<u32>,
        receive: ReceiveRequest,
        is_cancelled: bool,
    },
}

impl Arrival {
    /// Notes that the engine has cancelled the receive `id`.
    pub(crate) fn mark_cancelled(&mut self, id: u64) {
        if let Self::Message { receive, is_cancelled, .. } = self {
            *is_cancelled |= receive.id == id;
        }
    }
}

impl EfaEndpoint {
    /// Reads about `room` completions, and queues their events.
    ///
    /// Inlined: after a system call the CPU has lost its predictions of returns, so every stack frame between the poll
    /// and the provider's system call costs time.
    #[inline(always)]
    pub(crate) fn read_completions(&mut self, guard: &mut EndpointGuard<'_>, room: usize) {
        let emulated = if guard.queues.emulates_writes { guard.posted.requests } else { 0 };
        let mut short_reads_left = (emulated / EMULATED_WRITES_PER_READ).min(MAX_SHORT_READS);
        let Some(mut entries) = self.entries.take() else { return };
        while self.events.len() < room {
            if !self.read_once(guard, &mut entries, room - self.events.len()) {
                if short_reads_left == 0 {
                    break;
                }
                short_reads_left -= 1;
            }
        }
        self.entries = Some(entries);
    }

    /// Takes everything that the card has acknowledged to peers. Many packets give no completion (those of emulated
    /// writes, and those that a lost card ends), so a poll does not tell whether there are more. A card has at most as
    /// many as its receive queue has room for.
    #[cold]
    pub(crate) fn read_whole_receive_queue(&mut self, endpoint: &mut FabricEndpoint) {
        if !endpoint.queues.device.info.is_card() {
            return;
        }
        for _ in 0..=endpoint.queues.device.info.rx().size / MAX_READ {
            self.read_completions(&mut endpoint.guard(), usize::MAX);
        }
    }

    /// Reads completions by one call. Returns true if there may be more.
    #[inline]
    fn read_once(&mut self, guard: &mut EndpointGuard<'_>, entries: &mut Entries, room: usize) -> bool {
        let (cq, most) = (guard.queues.cq.as_ptr(), room.min(MAX_READ));
        let into = entries.completions.as_mut_ptr();
        // SAFETY: the queue was opened for entries of this format, and there is room for so many.
        let read = unsafe {
            match self.post_config.cq_data_size {
                8.. => sys::fi_cq_read(cq, into.cast(), most),
                _ => sys::fi_cq_readfrom(cq, into.cast(), most, entries.from.as_mut_ptr()),
            }
        };
        if read <= 0 {
            return read == -(sys::FI_EAVAIL as isize) && self.read_error(guard);
        }
        let read = read as usize;
        let is_request_end =
            |entry: &&sys::fi_cq_data_entry| entry.flags & (REMOTE_CQ_DATA | REMOTE_WRITE | RECV) == 0;
        let mut at = 0;
        while at < read {
            // Most completions are ends of requests. Requests with consecutive ids are reported by one event, which the
            // engine handles faster than many.
            let contexts = entries.completions[at..read].iter().take_while(is_request_end);
            if let Some((peer, first, count)) =
                guard.posted.end_requests(contexts.map(|entry| entry.op_context))
            {
                guard.posted.requests -= count as usize;
                self.outstanding[peer.0 as usize] -= count;
                self.events.push_back(Event::Done { first, count });
                at += count as usize;
            } else {
                self.handle_entry(guard, &entries.completions[at], entries.from[at]);
                at += 1;
            }
        }
        read == most
    }

    /// Handles a completion that [`Contexts::end_requests`] has not taken, for example an arrival.
    #[cold]
    #[inline(never)]
    fn handle_entry(
        &mut self,
        guard: &mut EndpointGuard<'_>,
        entry: &sys::fi_cq_data_entry,
        from: sys::fi_addr_t,
    ) {
        let has = |flags: u64| entry.flags & flags != 0;
        // With internal receives (on cards), an imm consumes one of them, and `op_context` is that receive's. Otherwise
        // the backend must not look `op_context` up: with the provider shm of 2.1, which does not set FI_REMOTE_WRITE,
        // it is a pointer of the peer's process.
        if has(REMOTE_WRITE) || (has(REMOTE_CQ_DATA) && !has(LOCAL_FLAGS)) {
            if self.internal_receives.is_some()
                && let Some(Posted::Receive { receive, .. }) = self.end(guard.posted, entry.op_context)
                && let Some(internal_receives) = &mut self.internal_receives
            {
                internal_receives.unposted.push(receive);
            }
            return self.on_imm(guard, entry, from);
        }
        match self.end(guard.posted, entry.op_context) {
            Some(Posted::Request { id, .. }) => self.events.push_back(Event::Done { first: id, count: 1 }),
            Some(Posted::Receive { receive, is_cancelled }) => {
                self.on_message(guard, (receive, is_cancelled), entry, from);
            }
            None => tracing::warn!(
                flags = entry.flags,
                "libfabric reports a completion of something that was not posted"
            ),
        }
    }

    /// Reads one error completion. Returns true if there was one.
    fn read_error(&mut self, guard: &mut EndpointGuard<'_>) -> bool {
        let queues = guard.queues;
        // SAFETY: zero asks for no error data.
        let mut entry: sys::fi_cq_err_entry_1_20 = unsafe { std::mem::zeroed() };
        // SAFETY: the queue is open; the entry is as large as in the latest API version that is asked for.
        let read = unsafe { sys::fi_cq_readerr(queues.cq.as_ptr(), (&raw mut entry).cast(), 0) };
        let mut entry = entry.known;
        if read < 0 {
            return false;
        }
        let text = provider_text(queues, entry.prov_errno, entry.err_data);
        if queues.device.info.is_card() {
            entry.err = card_error(entry.prov_errno, entry.err);
        }
        self.last_error = ErrorText::new(entry.err, text.clone());
        if kind(entry.err) == ErrorKind::DeviceLost {
            match queues.device.info.is_card() {
                true => self.is_lost = true,
                // `Event::DeviceLost` follows for cards only.
                false => entry.err = sys::FI_EIO as _,
            }
        }
        match self.end(guard.posted, entry.op_context) {
            Some(Posted::Request { id, peer }) => {
                tracing::debug!(id, code = entry.err, text, "a request failed");
                // libfabric reports one error for each packet of a failed message (2.1, `efa_rdm_txe_handle_error`).
                let is_message = queues.device.info.uses_efa_protocols() && entry.flags & SEND != 0;
                if queues.emulates_writes || is_message {
                    self.retire(guard.posted, entry.op_context);
                }
                if queues.emulates_writes {
                    self.pinned_addresses.insert(peer);
                }
                // An ambiguous error says only that the connection has ended: the peer has died, or it does not have
                // the key of the request. The engine probes the peer to find out.
                if is_ambiguous(entry.err) {
                    let kind = match is_unreachable(entry.err) {
                        true => ErrorKind::Unreachable,
                        false => ErrorKind::RemoteAccess,
                    };
                    let status = Status { kind, code: entry.err.abs() };
                    let unconfirmed = Event::FailedUnconfirmed { id, peer, status };
                    // A software provider (`tcp`) first has to connect to the peer again. The engine's next request
                    // would fail before that, so the engine learns of this failure later. A card has no connection.
                    match queues.device.info.is_card() {
                        true => self.events.push_back(unconfirmed),
                        false => self.deferred.push(self.domain.setup.clock.now(), peer, unconfirmed),
                    }
                    return true;
                }
                self.events.push_back(Event::Failed { id, status: status(entry.err) });
            }
            Some(Posted::Receive { receive, .. }) => {
                let id = receive.id;
                tracing::debug!(id, code = entry.err, text, "a receive failed");
                if let Some(internal_receives) =
                    self.internal_receives.as_mut().filter(|internal| internal.contains(&receive))
                {
                    internal_receives.unposted.push(receive);
                    return true;
                }
                self.events.push_back(Event::ReceiveFailed { id, status: status(entry.err) });
            }
            None => {
                tracing::debug!(code = entry.err, text, "libfabric reports an error of a peer's request")
            }
        }
        true
    }

    /// Keeps a context that was just freed out of use for a while, because the provider may report it once more.
    #[cold]
    pub(crate) fn retire(&self, posted: &mut Contexts, context: *mut c_void) {
        posted.retire(context, self.domain.setup.clock.now().after(EFA_GRACE));
    }

    /// The slot of the sender, if the sender is a connected peer.
    fn peer(&self, from: Sender) -> Option<PeerSlot> {
        let slot = match from {
            Sender::PeerTag(peer_tag) if self.peer_tags.get(peer_tag.slot() as usize) == Some(&peer_tag) => {
                peer_tag.slot()
            }
            Sender::Slot(slot) => slot,
            _ => return None,
        };
        let view = self.slots.get(slot as usize);
        view.filter(|view| matches!(view, SlotView::Up(_) | SlotView::AwaitingConfirmation))
            .map(|_| PeerSlot(slot))
    }

    /// The sender of an arrival: by its tag, if the completion data has a peer tag, else by the source address.
    fn sender(guard: &EndpointGuard<'_>, tag: Option<Tag>, from: sys::fi_addr_t) -> Sender {
        let by_address = || guard.owner(from).map_or(Sender::Unknown, Sender::Slot);
        tag.and_then(|tag| tag.peer_tag).map_or_else(by_address, Sender::PeerTag)
    }

    /// Handles a message that consumed `receive`.
    fn on_message(
        &mut self,
        guard: &EndpointGuard<'_>,
        (receive, is_cancelled): (ReceiveRequest, bool),
        entry: &sys::fi_cq_data_entry,
        from: sys::fi_addr_t,
    ) {
        let tag = match self.post_config.omits_data_flag {
            true => Some(Tag::from_data(entry.data, self.post_config.cq_data_size)),
            false => self.tag_of(entry),
        };
        let (from, imm) = (Self::sender(guard, tag, from), tag.and_then(|tag| tag.imm));
        self.report_or_keep(Arrival::Message { from, len: entry.len as u64, imm, receive, is_cancelled });
    }

    /// Handles the imm of a peer's write.
    fn on_imm(&mut self, guard: &EndpointGuard<'_>, entry: &sys::fi_cq_data_entry, from: sys::fi_addr_t) {
        let tag = self.tag_of(entry);
        if let Some(imm) = tag.and_then(|tag| tag.imm) {
            self.report_or_keep(Arrival::Imm { from: Self::sender(guard, tag, from), imm });
        }
    }

    /// The tag in the completion data of an entry, if it has any.
    fn tag_of(&self, entry: &sys::fi_cq_data_entry) -> Option<Tag> {
        (entry.flags & REMOTE_CQ_DATA != 0).then(|| Tag::from_data(entry.data, self.post_config.cq_data_size))
    }

    /// Reports an arrival, or keeps it for [`EfaEndpoint::retry_unmatched`] if its sender is unknown.
    ///
    /// The sender may be a peer that has connected since the slots were read. This method cannot read the slots again:
    /// the caller may hold the lock of the address vector, which other threads take while they hold the lock of the
    /// slots.
    fn report_or_keep(&mut self, arrival: Arrival) {
        match self.event_of(&arrival) {
            Some(event) => self.report(event, &arrival),
            None => self.unmatched.push(arrival),
        }
    }

    /// Reports an arrival. A message in an internal receive is reported once the engine has posted a receive for it.
    fn report(&mut self, event: Event, arrival: &Arrival) {
        match (&mut self.internal_receives, event, arrival) {
            (
                Some(internal_receives),
                Event::Received { peer, len, imm, .. },
                Arrival::Message { receive, .. },
            ) if internal_receives.contains(receive) => {
                internal_receives.add_message(*receive, peer, len, imm);
            }
            _ => self.events.push_back(event),
        }
    }

    /// The event of an arrival, if its sender is a connected peer.
    fn event_of(&self, arrival: &Arrival) -> Option<Event> {
        Some(match *arrival {
            Arrival::Imm { from, imm } => Event::Imm { peer: self.peer(from)?, imm },
            Arrival::Message { from, len, imm, receive, .. } => {
                Event::Received { id: receive.id, peer: self.peer(from)?, len, imm }
            }
        })
    }

    /// Reads the slots again, and reports or drops the arrivals whose senders were unknown.
    #[cold]
    pub(crate) fn retry_unmatched(&mut self) {
        self.refresh_slots();
        for arrival in std::mem::take(&mut self.unmatched) {
            match self.event_of(&arrival) {
                Some(event) => self.report(event, &arrival),
                None => self.drop_unmatched(arrival),
            }
        }
    }

    /// Drops an arrival that no connected peer has sent. The receive that it consumed is posted again, behind the
    /// others.
    fn drop_unmatched(&mut self, arrival: Arrival) {
        tracing::debug!(?arrival, "dropped an arrival from no connected peer");
        let Arrival::Message { len, imm, receive, is_cancelled, .. } = arrival else { return };
        if let Some(internal_receives) =
            self.internal_receives.as_mut().filter(|internal| internal.contains(&receive))
        {
            return internal_receives.unposted.push(receive);
        }
        let PostResult { accepted, error } = match is_cancelled {
            true => refused_post(0, -(sys::FI_ECANCELED as isize)),
            // SAFETY: the receive was posted, and no event has given it back to the engine yet: its buffer is still
            // valid.
            false => unsafe { self.post_recv(&[receive]) },
        };
        match error {
            Some(status) => self.events.push_back(Event::ReceiveFailed { id: receive.id, status }),
            None if accepted == 1 => {}
            // The queue is full: tries again at the next poll.
            None => {
                let from = Sender::Unknown;
                self.unmatched.push(Arrival::Message { from, len, imm, receive, is_cancelled });
            }
        }
    }
}
