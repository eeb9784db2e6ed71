//! The initiator of a connection: the engine's work requests to one peer for which this process's memory, the peer's,
//! or both are staged. The initiator cuts each work request into parts that fit a *slot*, 64 KiB of a staging buffer
//! (`staging_buffer.rs`). In this file, to *copy* is to
//! copy within a process, by its processor or GPU; to *transfer* is to move bytes by the inner device.
//!
//! The steps of a slot for a write or a send:
//!
//! 1. If this process's memory is staged, the initiator copies the bytes into its slot.
//! 2. The inner device transfers the bytes: to the peer's slot if the peer's memory is staged, otherwise directly to
//!    the peer's memory.
//! 3. If the peer's memory is staged, the initiator sends a slot request, by which the target copies the bytes from its
//!    slot into its region, and waits for the response.
//!
//! The steps of a slot for a read:
//!
//! 1. If the peer's memory is staged, the initiator sends a slot request, by which the target copies the bytes from its
//!    region into its slot and transfers them to the initiator's slot. The initiator waits for the response. If the
//!    peer's memory is not staged, the inner device reads the bytes into the initiator's slot.
//! 2. The initiator copies the bytes from its slot into this process's memory.
//!
//! Then the slot is free again. The bytes are in their destination by then, so a completed work request is delivered.
//! Slots are independent of each other, and finish in any order.

use std::collections::VecDeque;
use std::sync::Arc;

use multirail_spi::staging::{
    SlotContent, SlotRequest, SlotRequestKind, StagedWork, StagedWorkQueue, WorkFailure,
};
use multirail_spi::{ErrorKind, Event, RemoteKey, Status, WorkKind, WorkRequest};

use crate::connection::{Connection, EndpointContext};
use crate::copies::CopyTag;
use crate::region::StagedRegion;
use crate::staging_buffer::{SLOT_COUNT, SLOT_LEN, StagingBuffer};
use crate::wire::{NumberedRequest, decode_response};
use crate::wr_id::{InternalWrId, WrRole, staging_status};

pub(crate) struct SlotInitiator {
    connection: Arc<Connection>,
    /// The work requests that have not ended.
    queue: StagedWorkQueue<WorkEnds>,
    /// The numbers of work requests whose bytes have arrived by several slots, and whose imm needs a slot of its own
    /// now.
    due_imms: VecDeque<u64>,
    slots: Vec<InitiatorSlot>,
    /// The indices of the free slots.
    free: Vec<usize>,
    /// The indices of the slots whose copy could not begin, because there was no room for it.
    waiting_copies: VecDeque<usize>,
}

/// Which of the two ends of a work request are staged.
struct WorkEnds {
    /// This process's region, if it is staged.
    local: Option<Arc<StagedRegion>>,
    /// Whether the peer's region is staged.
    is_remote_staged: bool,
    /// Whether a slot request carries the imm although the peer's region is not staged. The reason: the imm equals
    /// [`WAKE_IMM`](crate::wire::WAKE_IMM), by which slot requests and responses wake the peer's worker, so the peer's
    /// endpoint would drop it. (If the peer's region is staged, a slot request carries the imm anyway.)
    sends_imm_in_slot_request: bool,
}

/// The state of one slot.
#[derive(Clone, Copy)]
struct InitiatorSlot {
    step: InitiatorStep,
    /// The part of a work request that the slot carries.
    content: SlotContent,
    /// The imm that is delivered after the slot's bytes.
    imm: Option<u32>,
    /// The sequence number of the slot's latest slot request.
    sequence: u32,
    /// Whether the RDMA write of the slot request is posted and has not completed.
    is_write_posted: bool,
    /// Whether the RDMA write of the slot request has failed once: the slot request may have arrived nevertheless.
    may_have_arrived: bool,
    /// Whether the slot request has to be written again. The target serves a sequence number only once.
    must_repeat: bool,
}

/// What a slot is busy with.
#[derive(Clone, Copy, PartialEq, Eq)]
enum InitiatorStep {
    Free,
    /// Copying from this process's region into the slot.
    CopyingIn,
    /// The inner device transfers the bytes.
    Transferring,
    /// Waiting for the target's response.
    AwaitingResponse,
    /// Copying from the slot into this process's region.
    CopyingOut,
}

impl SlotInitiator {
    pub(crate) fn new(connection: Arc<Connection>) -> Self {
        let slot = InitiatorSlot {
            step: InitiatorStep::Free,
            content: SlotContent::default(),
            imm: None,
            sequence: 0,
            is_write_posted: false,
            may_have_arrived: false,
            must_repeat: false,
        };
        Self {
            connection,
            queue: StagedWorkQueue::default(),
            due_imms: VecDeque::new(),
            slots: vec![slot; SLOT_COUNT],
            free: (0..SLOT_COUNT).rev().collect(),
            waiting_copies: VecDeque::new(),
        }
    }

    /// Whether there is room for one more work request of this kind. The queue has room for twice [`SLOT_COUNT`] work
    /// requests. The initiator keeps the order of posting, even if the engine would now choose another operation first.
    /// Queued work requests also take up the rail's send window, which requests to other peers need. So a longer queue
    /// would delay others. Sends may wait long for the peer's receives, so at most half of [`SLOT_COUNT`] sends are
    /// queued.
    pub(crate) fn has_room(&self, kind: WorkKind) -> bool {
        let is_send = |work: &&StagedWork<WorkEnds>| work.posted.kind == WorkKind::Send;
        self.queue.len() < 2 * SLOT_COUNT
            && (kind != WorkKind::Send || self.queue.iter().filter(is_send).count() < SLOT_COUNT / 2)
    }

    /// Queues a work request. `local` is this process's region, if that is staged.
    pub(crate) fn push(&mut self, work: &WorkRequest, local: Option<Arc<StagedRegion>>) {
        let is_remote_staged = work.kind != WorkKind::Send && work.remote & RemoteKey::STAGED != 0;
        let collides = self.connection.collides_with_wake_imm(work.kind, work.imm);
        let ends =
            WorkEnds { local, is_remote_staged, sends_imm_in_slot_request: !is_remote_staged && collides };
        // A work request without bytes takes a slot, too.
        let needs_empty_slot = work.imm.is_some() || work.len == 0;
        self.queue.push(work, ends, needs_empty_slot);
    }

    /// Advances all slots, and assigns the free ones.
    pub(crate) fn advance(&mut self, context: &mut EndpointContext<'_>) {
        for _ in 0..self.waiting_copies.len() {
            if let Some(index) = self.waiting_copies.pop_front() {
                self.begin_copy(index, context);
            }
        }
        for index in 0..SLOT_COUNT {
            self.poll_response(index, context);
        }
        self.assign_slots(context);
        self.report_ended(context.events);
    }

    /// Continues with a slot whose copy has completed.
    pub(crate) fn on_copied(
        &mut self,
        index: usize,
        result: Result<(), ErrorKind>,
        context: &mut EndpointContext<'_>,
    ) {
        let is_alive = self.work_of(index).is_some_and(|work| work.failure().is_none());
        match (self.slots[index].step, result) {
            (_, Err(kind)) => self.finish_slot(index, Err(staging_status(kind).into()), context),
            (InitiatorStep::CopyingIn, Ok(())) if is_alive => self.transfer(index, context),
            _ => self.finish_slot(index, Ok(()), context),
        }
    }

    /// Continues with the slot of an internal work request that has completed or failed.
    pub(crate) fn on_completed(
        &mut self,
        id: InternalWrId,
        result: Result<(), Status>,
        is_unconfirmed: bool,
        context: &mut EndpointContext<'_>,
    ) {
        let index = id.slot;
        if index >= self.slots.len() {
            return;
        }
        match (id.role, result) {
            (WrRole::InitiatorData, Ok(())) => self.on_transferred(index, context),
            (WrRole::InitiatorData, Err(status)) => {
                self.finish_slot(index, Err(WorkFailure { status, is_unconfirmed }), context);
            }
            (_, Ok(())) => {
                self.slots[index].is_write_posted = false;
                self.poll_response(index, context);
            }
            (_, Err(status)) => self.on_slot_request_failed(index, WorkFailure { status, is_unconfirmed }),
        }
    }

    /// Continues with a slot whose bytes the inner device has transferred.
    fn on_transferred(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let imm = self.slots[index].imm;
        let Some(work) = self.work_of(index) else { return };
        if work.failure().is_some() {
            return self.finish_slot(index, Ok(()), context);
        }
        match work.posted.kind {
            WorkKind::Write if work.extra.need_slot_request(imm) => self.begin_slot_request(index, context),
            WorkKind::Read => self.copy_out(index, context),
            _ => self.finish_slot(index, Ok(()), context),
        }
    }

    /// Notes that the RDMA write of a slot request has failed: the next poll repeats it. Fails the slot's work request,
    /// unless the connection was only interrupted: then the work request continues.
    ///
    /// The RDMA write may have arrived. The inner backend does not repeat it, because its imm could then be reported
    /// twice. The initiator can repeat it, because the target ignores a slot request that it has served already. If the
    /// peer has died, another event reports that.
    fn on_slot_request_failed(&mut self, index: usize, failure: WorkFailure) {
        let slot = &mut self.slots[index];
        (slot.is_write_posted, slot.may_have_arrived, slot.must_repeat) = (false, true, true);
        let status = failure.status;
        let is_interrupted = failure.is_unconfirmed && status.kind == ErrorKind::Unreachable;
        tracing::debug!(slot = index, status.code, is_interrupted, "staging: a request failed");
        if let Some(work) = self.work_of(index).filter(|_| !is_interrupted) {
            work.fail(failure);
        }
    }

    /// Fails all work requests with `kind`. A work request whose memory this process or the peer may still access ends
    /// once they no longer do.
    pub(crate) fn stop(&mut self, kind: ErrorKind, context: &mut EndpointContext<'_>) {
        self.report_ended(context.events);
        let failure = WorkFailure::from(staging_status(kind));
        self.queue.fail_all(failure);
        self.due_imms.clear();
        // Copies that have not begun, and internal work requests that were not posted, access nothing.
        for index in std::mem::take(&mut self.waiting_copies) {
            self.finish_slot(index, Err(failure), context);
        }
        let (mut removed, mut repeated) = (Vec::new(), Vec::new());
        context.outbox.retain(|work| {
            let Some(id) = InternalWrId::decode(work.id) else { return true };
            match id.role {
                WrRole::TargetData | WrRole::Response => true,
                WrRole::Request if self.slots[id.slot].may_have_arrived => {
                    repeated.push(id.slot);
                    true
                }
                WrRole::InitiatorData | WrRole::Request => {
                    removed.push(id);
                    false
                }
            }
        });
        // These slot requests were posted before, so the target may be serving them. The repeated write stays in the
        // outbox, but as a `Cancel`: the response with this sequence number, to the earlier request or to the `Cancel`,
        // tells when the target no longer accesses its region.
        for index in repeated {
            let slot_request = self.slot_request_of(index);
            self.connection.buffer.set_request(index, slot_request);
        }
        for id in removed {
            self.slots[id.slot].is_write_posted = false;
            self.finish_slot(id.slot, Err(failure), context);
        }
        self.report_ended(context.events);
    }

    /// Fails all work requests with `kind`, and reports them at once. The caller guarantees that nothing accesses their
    /// memory any more.
    pub(crate) fn fail(&mut self, kind: ErrorKind, events: &mut VecDeque<Event>) {
        self.report_ended(events);
        self.queue.fail_all(staging_status(kind).into());
        events.extend(self.queue.remove_all().map(|work| work.event()));
    }

    /// The work request whose bytes the slot carries.
    fn work_of(&mut self, index: usize) -> Option<&mut StagedWork<WorkEnds>> {
        self.queue.get_mut(self.slots[index].content.work)
    }

    /// Assigns the free slots to due imms first, and then to bytes in the order of posting.
    fn assign_slots(&mut self, context: &mut EndpointContext<'_>) {
        while !self.free.is_empty() {
            if let Some(number) = self.due_imms.pop_front() {
                let Some(work) = self.queue.get_mut(Some(number)) else { continue };
                let imm = work.posted.imm;
                if let Some(content) = work.assign_empty() {
                    self.begin_slot(content, imm, context);
                }
                continue;
            }
            let Some(work) = self.queue.next_unassigned() else { return };
            let content = work.assign(SLOT_LEN as u64);
            // If all bytes fit one slot, that slot takes the imm. Otherwise the imm gets a slot of its own once all
            // bytes have arrived (see `finish_slot`).
            let imm = work.posted.imm.filter(|_| content.len == work.posted.len);
            self.begin_slot(content, imm, context);
        }
    }

    /// Takes a free slot for a part of a work request.
    fn begin_slot(&mut self, content: SlotContent, imm: Option<u32>, context: &mut EndpointContext<'_>) {
        let Some(work) = self.queue.get_mut(content.work) else { return };
        let Some(index) = self.free.pop() else { return };
        let copies_in = work.posted.kind != WorkKind::Read && work.extra.local.is_some() && content.len > 0;
        let slot = &mut self.slots[index];
        (slot.content, slot.imm) = (content, imm);
        (slot.may_have_arrived, slot.must_repeat) = (false, false);
        if copies_in {
            slot.step = InitiatorStep::CopyingIn;
            self.begin_copy(index, context);
        } else {
            self.transfer(index, context);
        }
    }

    /// Begins the copy of a slot: from this process's region in step `CopyingIn`, otherwise into it.
    fn begin_copy(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let InitiatorSlot { step, content: SlotContent { offset, len, .. }, .. } = self.slots[index];
        let Some(work) = self.work_of(index) else { return };
        let local = work.posted.local.wrapping_add(offset as usize);
        let region = work.extra.local.as_ref();
        let location =
            region.map_or_else(|| context.gpu_memory.locate(local as u64), |region| region.location);
        let buffer = &self.connection.buffer;
        let (to, from) = if step == InitiatorStep::CopyingIn {
            (buffer.initiator_slot(index), local.cast_const())
        } else {
            (local, buffer.initiator_slot(index).cast_const())
        };
        let tag = CopyTag::Initiator { peer: self.connection.peer, slot: index };
        // SAFETY: by the contract of `post`, the local span is valid until the work request has ended, and a work
        // request does not end while a slot is busy with it; only this copy uses the slot, and the buffer stays until
        // no copy is under way.
        if !unsafe { context.copies.begin(location, Some(buffer), (to, from, len), tag) } {
            self.waiting_copies.push_back(index);
        }
    }

    /// Posts the internal work request that transfers the slot's bytes. Sends the slot request at once if this process
    /// transfers no bytes.
    fn transfer(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        self.slots[index].step = InitiatorStep::Transferring;
        let InitiatorSlot { content: SlotContent { offset, len, .. }, imm, .. } = self.slots[index];
        let Some(StagedWork { posted, extra: ends, .. }) = self.work_of(index) else { return };
        let (posted, is_remote_staged, is_local_staged) =
            (*posted, ends.is_remote_staged, ends.local.is_some());
        let needs_slot_request = ends.need_slot_request(imm);
        if needs_slot_request && (posted.kind == WorkKind::Read || len == 0) {
            return self.begin_slot_request(index, context);
        }
        let buffer = &self.connection.buffer;
        let (mut local, mut lkey) = (buffer.initiator_slot(index), buffer.lkey());
        if !is_local_staged && posted.kind != WorkKind::Read {
            (local, lkey) = (posted.local.wrapping_add(offset as usize), posted.lkey);
        }
        let id = InternalWrId { role: WrRole::InitiatorData, peer: self.connection.peer, slot: index };
        let mut internal = id.write(local, lkey, len, posted.remote.wrapping_add(offset), posted.rkey);
        if is_remote_staged {
            let Some(remote) = self.connection.remote_buffer() else {
                let failure = WorkFailure::from(staging_status(ErrorKind::Unreachable));
                return self.finish_slot(index, Err(failure), context);
            };
            (internal.remote, internal.rkey) = (remote.target_slot(index), remote.rkey);
        } else {
            (internal.kind, internal.imm) = (posted.kind, imm.filter(|_| !needs_slot_request));
        }
        context.outbox.push_back(internal);
    }

    /// Sends the slot request of this slot, with a new sequence number.
    fn begin_slot_request(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let slot = &mut self.slots[index];
        slot.sequence = slot.sequence.wrapping_add(1).max(1);
        slot.step = InitiatorStep::AwaitingResponse;
        self.post_slot_request(index, context);
    }

    fn post_slot_request(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let slot_request = self.slot_request_of(index);
        let Some(remote) = self.connection.remote_buffer() else { return };
        let buffer = &self.connection.buffer;
        buffer.set_request(index, slot_request);
        let id = InternalWrId { role: WrRole::Request, peer: self.connection.peer, slot: index };
        let (local, len) = (buffer.request_out(index), StagingBuffer::REQUEST_LEN);
        let mut internal = id.write(local, buffer.lkey(), len, remote.request(index), remote.rkey);
        internal.imm = remote.wake_imm;
        context.outbox.push_back(internal);
        self.slots[index].is_write_posted = true;
    }

    /// The slot request of a slot: a `Cancel` if its work request has failed.
    fn slot_request_of(&mut self, index: usize) -> NumberedRequest {
        let InitiatorSlot { sequence, imm, content: SlotContent { offset, len, .. }, .. } = self.slots[index];
        let without_region = |kind| SlotRequest { kind, key: 0, offset: 0, len: 0 };
        let Some(work) = self.work_of(index).filter(|work| work.failure().is_none()) else {
            return NumberedRequest { sequence, request: without_region(SlotRequestKind::Cancel), imm: None };
        };
        let request = if work.extra.is_remote_staged {
            let is_read = work.posted.kind == WorkKind::Read;
            let kind = if is_read { SlotRequestKind::Read } else { SlotRequestKind::Write };
            let offset = (work.posted.remote & !RemoteKey::STAGED) + offset;
            SlotRequest { kind, key: work.posted.rkey, offset, len }
        } else {
            without_region(SlotRequestKind::Imm)
        };
        NumberedRequest { sequence, request, imm }
    }

    /// Continues with a slot if the target has responded. Until then the target may access the slot and its own region.
    fn poll_response(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let slot = &mut self.slots[index];
        if slot.step != InitiatorStep::AwaitingResponse || slot.is_write_posted {
            return;
        }
        let Some(result) = decode_response(self.connection.buffer.response_in(index), slot.sequence) else {
            if std::mem::take(&mut slot.must_repeat) {
                self.post_slot_request(index, context);
            }
            return;
        };
        let is_read =
            |work: &mut StagedWork<_>| work.posted.kind == WorkKind::Read && work.failure().is_none();
        let copies_out = self.work_of(index).is_some_and(is_read);
        *context.made_progress = true;
        match result {
            Ok(()) if copies_out => self.copy_out(index, context),
            result => {
                let result = result.map_err(|kind| staging_status(kind).into());
                self.finish_slot(index, result, context);
            }
        }
    }

    /// Copies the bytes of a read from the slot into this process's region.
    fn copy_out(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        self.slots[index].step = InitiatorStep::CopyingOut;
        self.begin_copy(index, context);
    }

    /// Frees a slot, and notes the result in its work request.
    fn finish_slot(
        &mut self,
        index: usize,
        result: Result<(), WorkFailure>,
        context: &mut EndpointContext<'_>,
    ) {
        *context.made_progress = true;
        let slot = &mut self.slots[index];
        slot.step = InitiatorStep::Free;
        let content = std::mem::take(&mut slot.content);
        self.free.push(index);
        let work = self.queue.finish_slot(&content, result);
        self.due_imms.extend(work.and_then(|work| work.due_empty_slot()));
    }

    /// Reports the work requests that have ended, and removes them.
    fn report_ended(&mut self, events: &mut VecDeque<Event>) {
        self.queue.remove_ended(|work| events.push_back(work.event()));
    }
}

impl WorkEnds {
    /// Whether a slot that delivers this imm sends a slot request.
    fn need_slot_request(&self, imm: Option<u32>) -> bool {
        self.is_remote_staged || (self.sends_imm_in_slot_request && imm.is_some())
    }
}
