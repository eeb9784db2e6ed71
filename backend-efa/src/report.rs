//! Completions of libfabric as events.

use std::ffi::c_int;

use libfabric_sys as sys;
use transport_core::spi::{Event, PeerSlot};

use crate::context::Posted;
use crate::endpoint::EfaEndpoint;
use crate::queues::Queues;
use crate::status::{is_ambiguous, status};
use crate::tag::Tag;

/// Completions read by one call.
const AT_ONCE: usize = 64;

impl EfaEndpoint {
    /// Reads about `room` completions and files their events.
    pub(crate) fn drain(&mut self, room: usize) {
        let Some(queues) = self.queues.take() else { return };
        let turn = queues.addresses.turn();
        while self.waiting.len() < room && self.read(&queues, room - self.waiting.len()) {}
        drop(turn);
        self.queues = Some(queues);
    }

    /// One call; whether there may be more.
    fn read(&mut self, queues: &Queues, room: usize) -> bool {
        // SAFETY: plain values, for which zero will do.
        let mut entries: [sys::fi_cq_data_entry; AT_ONCE] = unsafe { std::mem::zeroed() };
        let mut from = [u64::MAX; AT_ONCE];
        let (cq, most) = (queues.cq.as_ptr(), room.min(AT_ONCE));
        // SAFETY: the queue was opened for entries of this format, and there is room for so many.
        let read = unsafe {
            match self.data {
                8.. => sys::fi_cq_read(cq, entries.as_mut_ptr().cast(), most),
                _ => sys::fi_cq_readfrom(cq, entries.as_mut_ptr().cast(), most, from.as_mut_ptr()),
            }
        };
        if read == -(sys::FI_EAVAIL as isize) {
            self.failed(queues);
            return true;
        }
        if read <= 0 {
            return false;
        }
        for (entry, from) in entries.iter().zip(from).take(read as usize) {
            self.arrived(entry, from);
        }
        read as usize == most
    }

    fn arrived(&mut self, entry: &sys::fi_cq_data_entry, from: sys::fi_addr_t) {
        let has = |flag: u32| entry.flags & u64::from(flag) != 0;
        let tag = has(sys::FI_REMOTE_CQ_DATA).then(|| Tag::from_data(entry.data, self.data));
        // shm of 2.1 leaves FI_REMOTE_WRITE out, and the context is then a peer's.
        if has(sys::FI_REMOTE_WRITE) || (tag.is_some() && !has(sys::FI_RECV)) {
            self.imm(tag, from);
            return;
        }
        match self.end(entry.op_context) {
            Some(Posted::Request { id, .. }) => self.done(id),
            Some(Posted::Receive { id }) => {
                let sender = tag.and_then(|tag| tag.slot).or_else(|| self.slot_of(from));
                match sender.filter(|slot| self.knows(*slot)) {
                    Some(slot) => self.waiting.push_back(Event::Received {
                        id,
                        peer: PeerSlot(slot),
                        len: entry.len as u64,
                        imm: tag.and_then(|tag| tag.imm),
                    }),
                    None => self.stray(id),
                }
            }
            None => tracing::warn!(flags = entry.flags, "libfabric completes what was not posted"),
        }
    }

    fn imm(&mut self, tag: Option<Tag>, from: sys::fi_addr_t) {
        let Some(Tag { slot, imm: Some(imm) }) = tag else { return };
        match slot.or_else(|| self.slot_of(from)).filter(|slot| self.knows(*slot)) {
            Some(slot) => self.waiting.push_back(Event::Imm { peer: PeerSlot(slot), imm }),
            None => tracing::debug!(imm, "an imm of a peer that is gone, or was none"),
        }
    }

    /// A message of nobody's took a receive.
    fn stray(&mut self, id: u64) {
        tracing::debug!("a message of a peer that is gone, or was none");
        let status = status(sys::FI_ENOTCONN as c_int);
        self.waiting.push_back(Event::ReceiveFailed { id, status });
    }

    /// Joins neighbours, so that many requests cost the engine one event.
    fn done(&mut self, id: u64) {
        match self.waiting.back_mut() {
            Some(Event::Done { first, count }) if *first + u64::from(*count) == id => *count += 1,
            _ => self.waiting.push_back(Event::Done { first: id, count: 1 }),
        }
    }

    /// Reads one error.
    fn failed(&mut self, queues: &Queues) {
        // SAFETY: zero asks for no error data.
        let mut entry: sys::fi_cq_err_entry = unsafe { std::mem::zeroed() };
        // SAFETY: the queue is open.
        let read = unsafe { sys::fi_cq_readerr(queues.cq.as_ptr(), &raw mut entry, 0) };
        if read < 0 {
            return;
        }
        let words = self.words(queues, &entry);
        match self.end(entry.op_context) {
            Some(Posted::Request { id, peer }) => {
                tracing::debug!(id, code = entry.err, words, "a request failed");
                if is_ambiguous(entry.err) {
                    self.verdicts.hold(id, peer, entry.err.abs(), self.shared.setup.clock.now());
                    return;
                }
                self.waiting.push_back(Event::Failed { id, status: status(entry.err) });
            }
            Some(Posted::Receive { id }) => {
                tracing::debug!(id, code = entry.err, words, "a receive failed");
                self.waiting.push_back(Event::ReceiveFailed { id, status: status(entry.err) });
            }
            None => {
                tracing::debug!(code = entry.err, words, "libfabric reports an error of a peer's request")
            }
        }
    }

    fn words(&self, queues: &Queues, entry: &sys::fi_cq_err_entry) -> String {
        let mut buf = [0; 256];
        // SAFETY: the numbers are of an error of this queue; the buffer is as long as said.
        unsafe {
            let words = sys::fi_cq_strerror(
                queues.cq.as_ptr(),
                entry.prov_errno,
                entry.err_data,
                buf.as_mut_ptr(),
                buf.len(),
            );
            match words.is_null() {
                true => String::new(),
                false => std::ffi::CStr::from_ptr(words).to_string_lossy().into_owned(),
            }
        }
    }
}
