//! Completions of libfabric as events.

use std::ffi::c_void;

use libfabric_sys as sys;
use multirail_spi::{ErrorKind, Event, Status};

use crate::card;
use crate::context::{Contexts, Posted};
use crate::endpoint::EfaEndpoint;
use crate::lane::Turn;
use crate::moving::GRACE_OF_CARDS;
use crate::status::{is_ambiguous, is_unreachable, kind, status};
use crate::words::{self, Words};

/// Completions read by one call: as many of a card's as EFA's provider looks at in one
/// (`efa_cq_read_size`; 1.17, 2.1), so that a call that brings fewer has left none there.
pub(crate) const AT_ONCE: usize = 50;

/// Emulated writes of 64 KiB that 1.17 gets on with by one call: each is ten packets of the card's.
const EMULATED_PER_CALL: usize = AT_ONCE / 10;
/// The most calls in a turn that may bring less, as the ends of most packets are not a write's.
const IN_VAIN: usize = 15;

// Flags of completions.
pub(crate) const REMOTE_CQ_DATA: u64 = sys::FI_REMOTE_CQ_DATA as u64;
const REMOTE_WRITE: u64 = sys::FI_REMOTE_WRITE as u64;
const RECV: u64 = sys::FI_RECV as u64;
const SEND: u64 = sys::FI_SEND as u64;
/// Of what was posted here.
const POSTED: u64 = RECV | (sys::FI_SEND | sys::FI_READ | sys::FI_WRITE) as u64;

/// Where the completions of one call, and the addresses of their senders, are read into.
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

impl EfaEndpoint {
    /// Reads about `room` completions and files their events.
    ///
    /// Inlined, as every frame between a turn and the provider's system call costs: the kernel leaves no
    /// predictions for the returns on its way.
    #[inline(always)]
    pub(crate) fn drain(&mut self, turn: &mut Turn<'_>, room: usize) {
        let emulated = if turn.queues.emulates_writes { turn.posted.requests } else { 0 };
        let mut in_vain = (emulated / EMULATED_PER_CALL).min(IN_VAIN);
        let Some(mut entries) = self.entries.take() else { return };
        while self.waiting.len() < room {
            if !self.read(turn, &mut entries, room - self.waiting.len()) {
                if in_vain == 0 {
                    break;
                }
                in_vain -= 1;
            }
        }
        self.entries = Some(entries);
    }

    /// One call; whether there may be more.
    #[inline]
    fn read(&mut self, turn: &mut Turn<'_>, entries: &mut Entries, room: usize) -> bool {
        let (cq, most) = (turn.queues.cq.as_ptr(), room.min(AT_ONCE));
        let into = entries.completions.as_mut_ptr();
        // SAFETY: the queue was opened for entries of this format, and there is room for so many.
        let read = unsafe {
            match self.local.data {
                8.. => sys::fi_cq_read(cq, into.cast(), most),
                _ => sys::fi_cq_readfrom(cq, into.cast(), most, entries.from.as_mut_ptr()),
            }
        };
        if read <= 0 {
            return read == -(sys::FI_EAVAIL as isize) && self.failed(turn);
        }
        let read = read as usize;
        let is_ours =
            |entry: &&sys::fi_cq_data_entry| entry.flags & (REMOTE_CQ_DATA | REMOTE_WRITE | RECV) == 0;
        let mut at = 0;
        while at < read {
            // Requests of ours, by far the most, are joined with their neighbours: many of them
            // cost the engine one event.
            let contexts = entries.completions[at..read].iter().take_while(is_ours);
            if let Some((peer, first, count)) =
                turn.posted.end_requests(contexts.map(|entry| entry.op_context))
            {
                turn.posted.requests -= count as usize;
                self.outstanding[peer.0 as usize] -= count;
                self.waiting.push_back(Event::Done { first, count });
                at += count as usize;
            } else {
                self.arrived(turn, &entries.completions[at], entries.from[at]);
                at += 1;
            }
        }
        read == most
    }

    #[cold]
    #[inline(never)]
    fn arrived(&mut self, turn: &mut Turn<'_>, entry: &sys::fi_cq_data_entry, from: sys::fi_addr_t) {
        let has = |flags: u64| entry.flags & flags != 0;
        // shm of 2.1 leaves FI_REMOTE_WRITE out, and the context is then a peer's.
        if has(REMOTE_WRITE) || (has(REMOTE_CQ_DATA) && !has(POSTED)) {
            if self.own.is_some()
                && let Some(Posted::Receive { receive, .. }) = self.end(turn.posted, entry.op_context)
                && let Some(own) = &mut self.own
            {
                own.idle.push(receive);
            }
            return self.imm(turn, entry, from);
        }
        match self.end(turn.posted, entry.op_context) {
            Some(Posted::Request { id, .. }) => self.waiting.push_back(Event::Done { first: id, count: 1 }),
            Some(Posted::Receive { receive, is_recalled }) => {
                self.received(turn, (receive, is_recalled), entry, from);
            }
            None => tracing::warn!(flags = entry.flags, "libfabric completes what was not posted"),
        }
    }

    /// Reads one error; whether there was one.
    fn failed(&mut self, turn: &mut Turn<'_>) -> bool {
        let queues = turn.queues;
        // SAFETY: zero asks for no error data.
        let mut entry: sys::fi_cq_err_entry_1_20 = unsafe { std::mem::zeroed() };
        // SAFETY: the queue is open; the entry has room for what the latest interface that is asked for writes.
        let read = unsafe { sys::fi_cq_readerr(queues.cq.as_ptr(), (&raw mut entry).cast(), 0) };
        let mut entry = entry.known;
        if read < 0 {
            return false;
        }
        let words = words::provider(queues, entry.prov_errno, entry.err_data);
        if queues.device.info.card().is_some() {
            entry.err = card::error(entry.prov_errno, entry.err);
        }
        self.words = Words::of(entry.err, words.clone());
        self.is_lost |= kind(entry.err) == ErrorKind::DeviceLost;
        match self.end(turn.posted, entry.op_context) {
            Some(Posted::Request { id, peer }) => {
                tracing::debug!(id, code = entry.err, words, "a request failed");
                // Each packet of a message that failed is reported (2.1, `efa_rdm_txe_handle_error`).
                let is_message = queues.device.info.has_states() && entry.flags & SEND != 0;
                if queues.emulates_writes || is_message {
                    self.retire(turn.posted, entry.op_context);
                }
                if queues.emulates_writes {
                    self.haunted.insert(peer);
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
                        None => self.settling.hold(self.shared.setup.clock.now(), peer, doubted),
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

    /// Nobody takes a context that has just ended for a while: the provider may report it once more.
    #[cold]
    pub(crate) fn retire(&self, posted: &mut Contexts, context: *mut c_void) {
        posted.retire(context, self.shared.setup.clock.now().after(GRACE_OF_CARDS));
    }
}
