//! The initiator's end of staging: requests to one peer, one slot's bytes at a time.
//!
//! A request is done when the target has responded to its last slot, so that `Delivered` holds. Its imm goes out
//! after that.

use std::collections::VecDeque;
use std::sync::Arc;

use multirail_spi::{
    ErrorKind, WorkKind, WorkRequest,
    copy::{self, CopyStrategy},
};

use crate::completions::CompletionQueue;
use crate::outbound::{Outbound, StagingCursor};
use crate::segment::lease_table::RegionKey;
use crate::segment::message_ring;
use crate::segment::staging_buffer::{SLOT_BYTES, SLOTS, SlotRequest, SlotStatus};
use crate::status::status;

/// The staged requests to one peer, in order.
pub(super) struct StagingInitiator {
    target: Arc<Outbound>,
    cursor: StagingCursor,
    /// The contents of the slots in `tail..head`.
    slots: VecDeque<SlotContent>,
    requests: VecDeque<StagedRequest>,
    /// The number of the first of `requests`.
    first: u64,
    /// The number of `requests`, from the first on, that have no bytes left to post.
    posted: usize,
}

/// What the initiator put into a slot.
struct SlotContent {
    /// The number of the request. `None` if the request has failed meanwhile.
    request: Option<u64>,
    /// The offset of the slot's bytes in the request.
    offset: u64,
    len: usize,
}

struct StagedRequest {
    request: WorkRequest,
    key: RegionKey,
    /// Bytes that were put into slots.
    posted: u64,
    /// Slots to which the target has not responded.
    pending: u32,
    failed: Option<ErrorKind>,
}

impl StagedRequest {
    fn fail(&mut self, kind: ErrorKind) {
        self.failed.get_or_insert(kind);
        self.posted = self.request.len;
    }
}

impl StagingInitiator {
    /// Continues at the position in the staging buffer where the last endpoint stopped.
    pub(super) fn new(target: Arc<Outbound>) -> Self {
        let cursor = *target.staging_cursor.lock().expect("staging cursor");
        let unknown = || SlotContent { request: None, offset: 0, len: 0 };
        let slots = (cursor.tail..cursor.head).map(|_| unknown()).collect();
        Self { target, cursor, slots, requests: VecDeque::new(), first: 0, posted: 0 }
    }

    /// Adds a request that was checked against its import.
    pub(super) fn push(&mut self, request: &WorkRequest, key: RegionKey) {
        self.requests.push_back(StagedRequest {
            request: *request,
            key,
            posted: 0,
            pending: 0,
            failed: None,
        });
    }

    /// The number of requests that are not completed.
    pub(super) fn requests(&self) -> usize {
        self.requests.len()
    }

    /// Reads responses, completes requests and fills slots. Returns the kind of a request for which the peer's
    /// message ring has no room.
    pub(super) fn advance(&mut self, completions: &mut CompletionQueue) -> Option<WorkKind> {
        if self.requests.is_empty() {
            return None;
        }
        self.read_responses();
        if !self.target.is_alive() {
            self.fail(ErrorKind::PeerDied, completions);
            return None;
        }
        let blocked = self.complete(completions);
        self.fill_slots();
        blocked
    }

    /// Fails all requests with `kind`: those whose slots the target has taken when it is done, the others at once.
    pub(super) fn stop(&mut self, kind: ErrorKind, completions: &mut CompletionQueue) {
        self.read_responses();
        self.take_back_slots();
        self.requests.iter_mut().for_each(|request| request.fail(kind));
        self.posted = self.requests.len();
        self.complete(completions);
    }

    /// Fails all requests with `kind` at once.
    pub(super) fn fail(&mut self, kind: ErrorKind, completions: &mut CompletionQueue) {
        self.take_back_slots();
        self.slots.iter_mut().for_each(|slot| slot.request = None);
        for entry in self.requests.drain(..) {
            completions.request(entry.request.id, Err(status(entry.failed.unwrap_or(kind))));
            self.first += 1;
        }
        self.posted = 0;
    }

    /// Asks the target for a wakeup at its next response. Returns false if there is something to do already.
    pub(super) fn arm(&self) -> bool {
        if self.requests.is_empty() {
            return true;
        }
        let buffer = self.target.staging_buffer().filter(|_| self.target.is_alive());
        // With no slot in use, the requests wait for room in the message ring, which has a flag of its own.
        buffer.is_some_and(|buffer| self.slots.is_empty() || buffer.arm(self.cursor.tail))
    }

    /// Reads the target's responses, and frees their slots.
    fn read_responses(&mut self) {
        let Some(buffer) = self.target.staging_buffer() else { return };
        while let Some(slot) = self.slots.front() {
            let outcome = match buffer.status(self.cursor.tail) {
                SlotStatus::Pending => return,
                SlotStatus::Done(outcome) => outcome,
                SlotStatus::Invalid => return self.disconnect(),
            };
            let index = slot.request.and_then(|number| number.checked_sub(self.first));
            if let Some(entry) = index.and_then(|index| self.requests.get_mut(index as usize)) {
                entry.pending -= 1;
                match outcome {
                    Ok(()) if entry.request.kind == WorkKind::Read && entry.failed.is_none() => {
                        let to = entry.request.local.wrapping_add(slot.offset as usize);
                        // SAFETY: the request has not ended, so its local span is valid by the
                        // contract of `post`; `fill_slots` bounded the part by span and slot.
                        unsafe {
                            copy::copy(CopyStrategy::Plain, to, buffer.bytes(self.cursor.tail), slot.len)
                        };
                    }
                    Ok(()) => {}
                    Err(kind) => entry.fail(kind),
                }
            }
            buffer.release(self.cursor.tail);
            self.cursor.tail += 1;
            self.slots.pop_front();
        }
    }

    /// Completes requests, in order. Returns the kind of a request for which the peer's message ring has no room.
    fn complete(&mut self, completions: &mut CompletionQueue) -> Option<WorkKind> {
        while let Some(entry) = self.requests.front() {
            let request = &entry.request;
            if entry.pending > 0 || entry.posted < request.len {
                return None;
            }
            if let (Some(imm), WorkKind::Write, None) = (request.imm, request.kind, entry.failed)
                && !self.target.send_imm(imm)
            {
                return Some(WorkKind::Write);
            }
            completions.request(request.id, entry.failed.map_or(Ok(()), |kind| Err(status(kind))));
            self.requests.pop_front();
            self.first += 1;
            self.posted = self.posted.saturating_sub(1);
        }
        None
    }

    /// Fills free slots and wakes the target.
    fn fill_slots(&mut self) {
        let Some(buffer) = self.target.staging_buffer() else { return };
        let before = self.cursor.head;
        while let Some(entry) = self.requests.get_mut(self.posted) {
            let request = &entry.request;
            let len = (request.len - entry.posted).min(SLOT_BYTES as u64) as usize;
            if len == 0 {
                self.posted += 1;
                continue;
            }
            if self.slots.len() == SLOTS {
                break;
            }
            if !buffer.is_free(self.cursor.head) {
                return self.disconnect();
            }
            if request.kind == WorkKind::Write {
                let from = request.local.wrapping_add(entry.posted as usize);
                // SAFETY: the local span is valid by the contract of `post`, `len` is within
                // it and a slot; a free slot is ours, and the buffer stays mapped with `target`.
                unsafe { copy::copy(CopyStrategy::Plain, buffer.bytes(self.cursor.head), from, len) };
            }
            let remote = request.remote + entry.posted;
            buffer.post(self.cursor.head, &SlotRequest { kind: request.kind, key: entry.key, remote, len });
            let number = self.first + self.posted as u64;
            self.slots.push_back(SlotContent { request: Some(number), offset: entry.posted, len });
            self.cursor.head += 1;
            entry.posted += len as u64;
            entry.pending += 1;
        }
        if self.cursor.head != before {
            message_ring::wake_if_armed(self.target.layout(), || self.target.wake());
        }
    }

    /// Takes back the slots that the target has not taken. Starts with the last one, since the target takes slots
    /// from the first one on: the slots that it has taken stay consecutive.
    fn take_back_slots(&mut self) {
        let Some(buffer) = self.target.staging_buffer() else { return };
        while !self.slots.is_empty() && buffer.take_back(self.cursor.head - 1) {
            self.cursor.head -= 1;
            let number = self.slots.pop_back().and_then(|slot| slot.request);
            let index = number.and_then(|number| number.checked_sub(self.first));
            if let Some(entry) = index.and_then(|index| self.requests.get_mut(index as usize)) {
                entry.pending -= 1;
            }
        }
    }

    /// Ends the connection to a peer that wrote an invalid value into the staging buffer.
    #[cold]
    fn disconnect(&self) {
        tracing::warn!(
            peer = self.target.peer.0,
            "loopback: a peer wrote an invalid value into its staging buffer; it is disconnected"
        );
        self.target.close();
    }
}

impl Drop for StagingInitiator {
    fn drop(&mut self) {
        self.take_back_slots();
        *self.target.staging_cursor.lock().expect("staging cursor") = self.cursor;
    }
}
