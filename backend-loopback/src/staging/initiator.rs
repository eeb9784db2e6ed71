//! The initiator's end of staging: the staged work requests to one peer. Each slot carries a part of one of them.
//!
//! A work request is done when the target has responded to its last slot: its bytes are delivered then. After that the
//! initiator sends the imm.

use std::collections::VecDeque;
use std::sync::Arc;

use multirail_spi::staging::{SlotContent, SlotRequest, SlotRequestKind, StagedWorkQueue, WorkFailure};
use multirail_spi::{
    ErrorKind, WorkKind, WorkRequest,
    copy::{self, CopyStrategy},
};

use crate::completions::CompletionQueue;
use crate::outbound::{Outbound, StagingCursor};
use crate::segment::lease_table::RegionKey;
use crate::segment::message_ring;
use crate::segment::staging_buffer::{SLOT_LEN, SLOTS, SlotStatus};
use crate::status::status;

/// The staged work requests to one peer, in order.
pub(super) struct StagingInitiator {
    target: Arc<Outbound>,
    cursor: StagingCursor,
    /// The contents of the slots in `tail..head`.
    slots: VecDeque<SlotContent>,
    /// The work requests that are not completed, each with the key of its region.
    queue: StagedWorkQueue<RegionKey>,
}

impl StagingInitiator {
    /// Continues at the position in the staging buffer where the last endpoint stopped.
    pub(super) fn new(target: Arc<Outbound>) -> Self {
        let cursor = *target.staging_cursor.lock().expect("staging cursor");
        let slots = (cursor.tail..cursor.head).map(|_| SlotContent::default()).collect();
        Self { target, cursor, slots, queue: StagedWorkQueue::default() }
    }

    /// Adds a work request that was checked against its import.
    pub(super) fn push(&mut self, request: &WorkRequest, key: RegionKey) {
        // The imm takes no slot: it goes through the message ring.
        self.queue.push(request, key, false);
    }

    /// The number of work requests that are not completed.
    pub(super) fn requests(&self) -> usize {
        self.queue.len()
    }

    /// Reads responses, completes work requests and fills slots. Returns the kind of a work request for which the
    /// peer's message ring has no room.
    pub(super) fn advance(&mut self, completions: &mut CompletionQueue) -> Option<WorkKind> {
        if self.queue.is_empty() {
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

    /// Fails all work requests with `kind`: at once, or when the target is done with the slots that it has taken.
    pub(super) fn stop(&mut self, kind: ErrorKind, completions: &mut CompletionQueue) {
        self.read_responses();
        self.take_back_slots();
        self.queue.fail_all(status(kind).into());
        self.complete(completions);
    }

    /// Fails all work requests with `kind` at once.
    pub(super) fn fail(&mut self, kind: ErrorKind, completions: &mut CompletionQueue) {
        self.take_back_slots();
        for work in self.queue.remove_all() {
            let failure = work.failure().unwrap_or_else(|| status(kind).into());
            completions.request(work.posted.id, Err(failure.status));
        }
    }

    /// Asks the target for a wakeup at its next response. Returns false if there is something to do already.
    pub(super) fn arm(&self) -> bool {
        if self.queue.is_empty() {
            return true;
        }
        let buffer = self.target.staging_buffer().filter(|_| self.target.is_alive());
        // With no slot in use, the work requests wait for room in the message ring, which has a flag of its own.
        buffer.is_some_and(|buffer| self.slots.is_empty() || buffer.arm(self.cursor.tail))
    }

    /// Reads the target's responses, and frees their slots.
    fn read_responses(&mut self) {
        let Some(buffer) = self.target.staging_buffer() else { return };
        while let Some(content) = self.slots.front() {
            let outcome = match buffer.status(self.cursor.tail) {
                SlotStatus::Pending => return,
                SlotStatus::Done(outcome) => outcome,
                SlotStatus::Invalid => return self.disconnect(),
            };
            let result = outcome.map_err(|kind| WorkFailure::from(status(kind)));
            if let Some(work) = self.queue.finish_slot(content, result)
                && work.posted.kind == WorkKind::Read
                && work.failure().is_none()
            {
                let to = work.posted.local.wrapping_add(content.offset as usize);
                let from = buffer.bytes(self.cursor.tail);
                // SAFETY: the work request has not ended, so its local span is valid by the contract of `post`;
                // `fill_slots` bounded the part by span and slot.
                unsafe { copy::copy(CopyStrategy::Plain, to, from, content.len as usize) };
            }
            buffer.release(self.cursor.tail);
            self.cursor.tail += 1;
            self.slots.pop_front();
        }
    }

    /// Completes work requests, in order. Returns the kind of a work request for which the peer's message ring has no
    /// room.
    fn complete(&mut self, completions: &mut CompletionQueue) -> Option<WorkKind> {
        while let Some(work) = self.queue.first_ended() {
            let (posted, failure) = (&work.posted, work.failure());
            if let (Some(imm), WorkKind::Write, None) = (posted.imm, posted.kind, failure)
                && !self.target.send_imm(imm)
            {
                return Some(WorkKind::Write);
            }
            completions.request(posted.id, failure.map_or(Ok(()), |failure| Err(failure.status)));
            self.queue.remove_first();
        }
        None
    }

    /// Fills free slots and wakes the target.
    fn fill_slots(&mut self) {
        let Some(buffer) = self.target.staging_buffer() else { return };
        let before = self.cursor.head;
        while self.slots.len() < SLOTS
            && let Some(work) = self.queue.next_unassigned()
        {
            if !buffer.is_free(self.cursor.head) {
                return self.disconnect();
            }
            let content = work.assign(SLOT_LEN as u64);
            let (posted, key) = (&work.posted, work.extra.to_wire());
            let kind = match posted.kind {
                WorkKind::Read => SlotRequestKind::Read,
                _ => SlotRequestKind::Write,
            };
            if kind == SlotRequestKind::Write {
                let from = posted.local.wrapping_add(content.offset as usize);
                let to = buffer.bytes(self.cursor.head);
                // SAFETY: the local span is valid by the contract of `post`, `len` is within it and a slot; a free slot
                // belongs to this side, and the buffer stays mapped with `target`.
                unsafe { copy::copy(CopyStrategy::Plain, to, from, content.len as usize) };
            }
            let offset = posted.remote + content.offset;
            buffer.post(self.cursor.head, &SlotRequest { kind, key, offset, len: content.len });
            self.slots.push_back(content);
            self.cursor.head += 1;
        }
        if self.cursor.head != before {
            message_ring::wake_if_armed(self.target.layout(), || self.target.mark_ready());
        }
    }

    /// Takes back the slots that the target has not taken, from the last one on. The target takes slots from the first
    /// one on, so the slots that it has taken stay consecutive.
    fn take_back_slots(&mut self) {
        let Some(buffer) = self.target.staging_buffer() else { return };
        while let Some(content) = self.slots.back()
            && buffer.take_back(self.cursor.head - 1)
        {
            self.queue.finish_slot(content, Ok(()));
            self.cursor.head -= 1;
            self.slots.pop_back();
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
