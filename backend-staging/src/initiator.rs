//! The initiator of a connection: the engine's work requests to one peer for which this process's memory, the peer's,
//! or both are staged. It cuts them into pieces of one slot each.
//!
//! The steps of a slot depend on which side is staged:
//!
//! - For a write or a send from staged memory, the bytes are copied into the slot first.
//! - The inner device then moves the bytes: for a write to the peer's slot if the peer's memory is staged, else
//!   directly to the peer's memory. For a read of memory that is not staged, it reads them into the slot.
//! - If the peer's memory is staged, a request asks the target to copy (write) or to send the bytes (read), and the
//!   slot waits for the response.
//! - The bytes of a read are copied out of the slot last.
//!
//! Then the slot is free again. The bytes are in their destination by then, so a completed work request is delivered.
//! Slots are independent of each other, and finish in any order.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use multirail_spi::{ErrorKind, Event, RemoteKey, Status, WorkKind, WorkRequest};

use crate::connection::Connection;
use crate::context::{Context, CopyTag};
use crate::region::StagedRegion;
use crate::staging_buffer::{SLOT_COUNT, SLOT_LEN, StagingBuffer};
use crate::wire::{RequestKind, SlotRequest, decode_response};
use crate::wr_id::{InternalWrId, WrRole, staging_status};

pub(crate) struct Initiator {
    connection: Arc<Connection>,
    /// The work requests that have not ended, by number, in the order of posting.
    wrs: BTreeMap<u64, StagedWr>,
    /// The number of the next work request.
    next_wr: u64,
    /// From this number on, work requests may have bytes that no slot has taken yet.
    first_unassigned: u64,
    /// The numbers of work requests whose bytes have arrived by several slots, and whose imm needs a slot of its own
    /// now.
    due_imms: VecDeque<u64>,
    slots: Vec<InitiatorSlot>,
    /// The indices of the free slots.
    free: Vec<usize>,
    /// The indices of the slots whose copy could not begin, because there was no room for it.
    waiting_copies: VecDeque<usize>,
}

/// A work request of the engine.
struct StagedWr {
    work: WorkRequest,
    /// This process's region, if it is staged.
    local: Option<Arc<StagedRegion>>,
    /// Whether the peer's region is staged.
    is_remote_staged: bool,
    /// Whether the imm is sent in a [`SlotRequest`], because the peer would mistake it for the wake imm.
    sends_imm_in_request: bool,
    /// The number of bytes that have been assigned to slots.
    assigned: u64,
    /// The number of slots that are busy with this work request.
    open_slots: usize,
    /// Whether the imm still needs a slot. Without an imm it is true until the first slot is assigned, because a work
    /// request without bytes and imm needs a slot, too.
    is_imm_unassigned: bool,
    failure: Option<Failure>,
}

/// Why a work request failed.
#[derive(Clone, Copy)]
struct Failure {
    status: Status,
    /// Whether the peer may have died: then the engine asks the peer ([`Event::FailedUnconfirmed`]).
    is_unconfirmed: bool,
}

/// The state of one slot.
struct InitiatorSlot {
    step: InitiatorStep,
    /// The number of the work request; `None` once that has ended.
    wr: Option<u64>,
    /// The slot's bytes: their offset in the work request, and their number.
    offset: u64,
    len: u64,
    /// The imm that is delivered after the slot's bytes.
    imm: Option<u32>,
    /// The sequence number of the slot's latest request to the target.
    sequence: u32,
    /// Whether the RDMA write of the request is posted and has not completed.
    is_request_posted: bool,
    /// Whether the RDMA write of the request has failed once: the target may or may not have received the request.
    is_request_in_doubt: bool,
    /// Whether the request has to be posted again. The target serves only the first one with a sequence number.
    is_repeat_due: bool,
}

/// What a slot is busy with.
#[derive(Clone, Copy, PartialEq, Eq)]
enum InitiatorStep {
    Free,
    /// Copying from this process's region into the slot.
    CopyingIn,
    /// The inner device moves the bytes.
    Transferring,
    /// Waiting for the target's response.
    AwaitingResponse,
    /// Copying from the slot into this process's region.
    CopyingOut,
}

impl Initiator {
    pub(crate) fn new(connection: Arc<Connection>) -> Self {
        let slot = |_| InitiatorSlot {
            step: InitiatorStep::Free,
            wr: None,
            offset: 0,
            len: 0,
            imm: None,
            sequence: 0,
            is_request_posted: false,
            is_request_in_doubt: false,
            is_repeat_due: false,
        };
        Self {
            connection,
            wrs: BTreeMap::new(),
            next_wr: 0,
            first_unassigned: 0,
            due_imms: VecDeque::new(),
            slots: (0..SLOT_COUNT).map(slot).collect(),
            free: (0..SLOT_COUNT).rev().collect(),
            waiting_copies: VecDeque::new(),
        }
    }

    /// Whether there is room for one more work request of this kind: for twice as many as there are slots. A longer
    /// queue would delay operations that the engine prefers later, and those for other peers. Sends may wait long for
    /// the peer's receives, so they leave half of the slots to other kinds.
    pub(crate) fn has_room(&self, kind: WorkKind) -> bool {
        let is_send = |wr: &&StagedWr| wr.work.kind == WorkKind::Send;
        self.wrs.len() < 2 * SLOT_COUNT
            && (kind != WorkKind::Send || self.wrs.values().filter(is_send).count() < SLOT_COUNT / 2)
    }

    /// Queues a work request. `local` is this process's region, if that is staged.
    pub(crate) fn push(&mut self, work: &WorkRequest, local: Option<Arc<StagedRegion>>) {
        let is_remote_staged = work.kind != WorkKind::Send && work.remote & RemoteKey::STAGED != 0;
        let looks_like_wake_imm = self.connection.looks_like_wake_imm(work.kind, work.imm);
        let wr = StagedWr {
            work: *work,
            local,
            is_remote_staged,
            sends_imm_in_request: !is_remote_staged && looks_like_wake_imm,
            assigned: 0,
            open_slots: 0,
            is_imm_unassigned: true,
            failure: None,
        };
        self.wrs.insert(self.next_wr, wr);
        self.next_wr += 1;
    }

    /// Advances all slots, and assigns the free ones.
    pub(crate) fn advance(&mut self, context: &mut Context<'_>) {
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
        context: &mut Context<'_>,
    ) {
        let number = self.slots[index].wr;
        let is_alive = self.wr(number).is_some_and(|wr| wr.failure.is_none());
        match (self.slots[index].step, result) {
            (_, Err(kind)) => self.finish_slot(index, Err(Failure::new(staging_status(kind))), context),
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
        context: &mut Context<'_>,
    ) {
        let index = id.slot;
        let Some(slot) = self.slots.get(index) else { return };
        let (number, imm) = (slot.wr, slot.imm);
        match (id.role, result) {
            (WrRole::InitiatorData, Ok(())) => {
                let Some(wr) = self.wr(number) else { return };
                match (wr.work.kind, wr.needs_request(imm), wr.failure.is_some()) {
                    (_, _, true) => self.finish_slot(index, Ok(()), context),
                    (WorkKind::Write, true, _) => self.begin_request(index, context),
                    (WorkKind::Read, ..) => self.copy_out(index, context),
                    _ => self.finish_slot(index, Ok(()), context),
                }
            }
            (WrRole::InitiatorData, Err(status)) => {
                self.finish_slot(index, Err(Failure { status, is_unconfirmed }), context);
            }
            (_, Ok(())) => {
                self.slots[index].is_request_posted = false;
                self.poll_response(index, context);
            }
            (_, Err(status)) => {
                let slot = &mut self.slots[index];
                (slot.is_request_posted, slot.is_request_in_doubt, slot.is_repeat_due) = (false, true, true);
                // The write may have arrived, so the inner backend does not repeat it: its imm could be reported twice.
                // The initiator can repeat it, because the target ignores a request that it has served. If the
                // connection was only interrupted, the work request continues. If the peer has died, another event
                // reports that.
                let is_interrupted = is_unconfirmed && status.kind == ErrorKind::Unreachable;
                tracing::debug!(slot = index, status.code, is_interrupted, "staging: a request failed");
                if let Some(wr) = self.wr(number).filter(|_| !is_interrupted) {
                    wr.fail(Failure { status, is_unconfirmed });
                }
            }
        }
    }

    /// Fails all work requests with `kind`. A work request whose memory this process or the peer may still access ends
    /// once they no longer do.
    pub(crate) fn stop(&mut self, kind: ErrorKind, context: &mut Context<'_>) {
        self.report_ended(context.events);
        let failure = Failure::new(staging_status(kind));
        self.wrs.values_mut().for_each(|wr| wr.fail(failure));
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
                WrRole::Request if self.slots[id.slot].is_request_in_doubt => {
                    repeated.push(id.slot);
                    true
                }
                WrRole::InitiatorData | WrRole::Request => {
                    removed.push(id);
                    false
                }
            }
        });
        // These requests were posted before, so the target may be serving them. Their repetition stays in the outbox,
        // as a `Cancel` request: the response to it tells when the target no longer accesses its region.
        for index in repeated {
            let request = self.request_of(index);
            self.connection.buffer.set_request(index, request);
        }
        for id in removed {
            self.slots[id.slot].is_request_posted = false;
            self.finish_slot(id.slot, Err(failure), context);
        }
        self.report_ended(context.events);
    }

    /// Fails all work requests with `kind`, and reports them at once. The caller guarantees that nothing accesses their
    /// memory any more.
    pub(crate) fn fail(&mut self, kind: ErrorKind, events: &mut VecDeque<Event>) {
        self.report_ended(events);
        let failure = Failure::new(staging_status(kind));
        for wr in self.wrs.values_mut() {
            wr.fail(failure);
            wr.open_slots = 0;
        }
        self.report_ended(events);
    }

    fn wr(&mut self, number: Option<u64>) -> Option<&mut StagedWr> {
        self.wrs.get_mut(&number?)
    }

    /// Assigns the free slots to due imms first, and then to bytes in the order of posting.
    fn assign_slots(&mut self, context: &mut Context<'_>) {
        while !self.free.is_empty() {
            if let Some(number) = self.due_imms.pop_front() {
                let imm = self.wr(Some(number)).and_then(|wr| {
                    let is_unassigned = std::mem::take(&mut wr.is_imm_unassigned);
                    wr.work.imm.filter(|_| is_unassigned)
                });
                if imm.is_some() {
                    self.begin_slot(number, 0, 0, imm, context);
                }
                continue;
            }
            let Some((&number, wr)) = self.wrs.range_mut(self.first_unassigned..).next() else { return };
            let (offset, len) = (wr.assigned, (wr.work.len - wr.assigned).min(SLOT_LEN as u64));
            if wr.failure.is_some() || (len == 0 && (offset > 0 || !wr.is_imm_unassigned)) {
                self.first_unassigned = number + 1;
                continue;
            }
            // If all bytes fit one slot, that slot takes the imm. Otherwise the imm gets a slot of its own once all
            // bytes have arrived (see `finish_slot`).
            let is_whole = len == wr.work.len;
            let imm = wr.work.imm.filter(|_| is_whole);
            if is_whole || wr.work.imm.is_none() {
                wr.is_imm_unassigned = false;
            }
            wr.assigned += len;
            self.begin_slot(number, offset, len, imm, context);
        }
    }

    /// Takes a free slot for a piece of a work request.
    fn begin_slot(
        &mut self,
        number: u64,
        offset: u64,
        len: u64,
        imm: Option<u32>,
        context: &mut Context<'_>,
    ) {
        let Some(index) = self.free.pop() else { return };
        let Some(wr) = self.wr(Some(number)) else { return self.free.push(index) };
        wr.open_slots += 1;
        let copies_in = wr.work.kind != WorkKind::Read && wr.local.is_some() && len > 0;
        let slot = &mut self.slots[index];
        (slot.wr, slot.offset, slot.len, slot.imm) = (Some(number), offset, len, imm);
        (slot.is_request_in_doubt, slot.is_repeat_due) = (false, false);
        if copies_in {
            slot.step = InitiatorStep::CopyingIn;
            self.begin_copy(index, context);
        } else {
            self.transfer(index, context);
        }
    }

    /// Begins the copy of a slot: from this process's region in step `CopyingIn`, else into it.
    fn begin_copy(&mut self, index: usize, context: &mut Context<'_>) {
        let (step, number, offset, len) = {
            let slot = &self.slots[index];
            (slot.step, slot.wr, slot.offset, slot.len)
        };
        let Some(wr) = self.wr(number) else { return };
        let local = wr.work.local.wrapping_add(offset as usize);
        let location = wr
            .local
            .as_ref()
            .map_or_else(|| context.gpu_memory.locate(local as u64), |region| region.location);
        let buffer = &self.connection.buffer;
        let (to, from) = if step == InitiatorStep::CopyingIn {
            (buffer.initiator_slot(index), local.cast_const())
        } else {
            (local, buffer.initiator_slot(index).cast_const())
        };
        let tag = CopyTag::Initiator { peer: self.connection.peer, slot: index };
        // SAFETY: the local span is valid until the work request has ended, by the contract of `post`, and it has not
        // while the slot is open; only this copy uses the slot, and the buffer stays until no copy is under way.
        if !unsafe { context.copies.begin(location, Some(buffer), (to, from, len), tag) } {
            self.waiting_copies.push_back(index);
        }
    }

    /// Posts the work request that moves the slot's bytes, or begins the request at once if the initiator moves none.
    fn transfer(&mut self, index: usize, context: &mut Context<'_>) {
        let (number, offset, len, imm) = {
            let slot = &mut self.slots[index];
            slot.step = InitiatorStep::Transferring;
            (slot.wr, slot.offset, slot.len, slot.imm)
        };
        let Some(wr) = self.wr(number) else { return };
        let (work, is_remote_staged, is_local_staged) = (wr.work, wr.is_remote_staged, wr.local.is_some());
        let needs_request = wr.needs_request(imm);
        if needs_request && (work.kind == WorkKind::Read || len == 0) {
            return self.begin_request(index, context);
        }
        let buffer = &self.connection.buffer;
        let (mut local, mut lkey) = (buffer.initiator_slot(index), buffer.lkey());
        if !is_local_staged && work.kind != WorkKind::Read {
            (local, lkey) = (work.local.wrapping_add(offset as usize), work.lkey);
        }
        let id = InternalWrId { role: WrRole::InitiatorData, peer: self.connection.peer, slot: index };
        let mut internal = id.write(local, lkey, len, work.remote.wrapping_add(offset), work.rkey);
        if is_remote_staged {
            let Some(remote) = self.connection.remote_buffer() else {
                let failure = Failure::new(staging_status(ErrorKind::Unreachable));
                return self.finish_slot(index, Err(failure), context);
            };
            (internal.remote, internal.rkey) = (remote.target_slot(index), remote.rkey);
        } else {
            (internal.kind, internal.imm) = (work.kind, imm.filter(|_| !needs_request));
        }
        context.outbox.push_back(internal);
    }

    /// Sends the target a request for this slot, with a new sequence number.
    fn begin_request(&mut self, index: usize, context: &mut Context<'_>) {
        let slot = &mut self.slots[index];
        slot.sequence = slot.sequence.wrapping_add(1).max(1);
        slot.step = InitiatorStep::AwaitingResponse;
        self.post_request(index, context);
    }

    fn post_request(&mut self, index: usize, context: &mut Context<'_>) {
        let request = self.request_of(index);
        let Some(remote) = self.connection.remote_buffer() else { return };
        let buffer = &self.connection.buffer;
        buffer.set_request(index, request);
        let id = InternalWrId { role: WrRole::Request, peer: self.connection.peer, slot: index };
        let (local, len) = (buffer.request_out(index), StagingBuffer::REQUEST_LEN);
        let mut internal = id.write(local, buffer.lkey(), len, remote.request(index), remote.rkey);
        internal.imm = remote.wake_imm;
        context.outbox.push_back(internal);
        self.slots[index].is_request_posted = true;
    }

    /// The request for a slot: a `Cancel` if its work request has failed.
    fn request_of(&mut self, index: usize) -> SlotRequest {
        let slot = &self.slots[index];
        let (number, sequence, imm, offset, len) = (slot.wr, slot.sequence, slot.imm, slot.offset, slot.len);
        let cancel =
            SlotRequest { sequence, kind: RequestKind::Cancel, key: 0, offset: 0, len: 0, imm: None };
        let Some(wr) = self.wr(number).filter(|wr| wr.failure.is_none()) else {
            return cancel;
        };
        if !wr.is_remote_staged {
            return SlotRequest { kind: RequestKind::Imm, imm, ..cancel };
        }
        let work = wr.work;
        let kind = if work.kind == WorkKind::Read { RequestKind::Read } else { RequestKind::Write };
        let offset = (work.remote & !RemoteKey::STAGED) + offset;
        SlotRequest { sequence, kind, key: work.rkey, offset, len, imm }
    }

    /// Continues with a slot if the target has responded. Until then the target may access the slot and its own region.
    fn poll_response(&mut self, index: usize, context: &mut Context<'_>) {
        let slot = &mut self.slots[index];
        if slot.step != InitiatorStep::AwaitingResponse || slot.is_request_posted {
            return;
        }
        let Some(result) = decode_response(self.connection.buffer.response_in(index), slot.sequence) else {
            if std::mem::take(&mut slot.is_repeat_due) {
                self.post_request(index, context);
            }
            return;
        };
        let number = slot.wr;
        let is_read = |wr: &mut StagedWr| wr.work.kind == WorkKind::Read && wr.failure.is_none();
        let copies_out = self.wr(number).is_some_and(is_read);
        *context.made_progress = true;
        match result {
            Ok(()) if copies_out => self.copy_out(index, context),
            result => {
                let result = result.map_err(|kind| Failure::new(staging_status(kind)));
                self.finish_slot(index, result, context);
            }
        }
    }

    /// Copies the bytes of a read from the slot into this process's region.
    fn copy_out(&mut self, index: usize, context: &mut Context<'_>) {
        self.slots[index].step = InitiatorStep::CopyingOut;
        self.begin_copy(index, context);
    }

    /// Frees a slot, and notes the result in its work request.
    fn finish_slot(&mut self, index: usize, result: Result<(), Failure>, context: &mut Context<'_>) {
        *context.made_progress = true;
        let slot = &mut self.slots[index];
        slot.step = InitiatorStep::Free;
        let number = slot.wr.take();
        self.free.push(index);
        let Some(wr) = self.wr(number) else { return };
        wr.open_slots -= 1;
        if let Err(failure) = result {
            wr.fail(failure);
        }
        if wr.open_slots == 0 && wr.assigned == wr.work.len && wr.is_imm_unassigned {
            self.due_imms.extend(number);
        }
    }

    /// Reports the work requests that have ended, and removes them.
    fn report_ended(&mut self, events: &mut VecDeque<Event>) {
        let peer = self.connection.peer;
        self.wrs.retain(|_, wr| {
            if !wr.has_ended() {
                return true;
            }
            let id = wr.work.id;
            events.push_back(match wr.failure {
                None => Event::Done { first: id, count: 1 },
                Some(Failure { status, is_unconfirmed: false }) => Event::Failed { id, status },
                Some(Failure { status, is_unconfirmed: true }) => {
                    Event::FailedUnconfirmed { id, peer, status }
                }
            });
            false
        });
    }
}

impl StagedWr {
    /// Whether a slot that delivers this imm sends a [`SlotRequest`].
    fn needs_request(&self, imm: Option<u32>) -> bool {
        self.is_remote_staged || (self.sends_imm_in_request && imm.is_some())
    }

    /// Notes the first failure. No further slots are assigned.
    fn fail(&mut self, failure: Failure) {
        self.failure.get_or_insert(failure);
        self.assigned = self.work.len;
        self.is_imm_unassigned = false;
    }

    fn has_ended(&self) -> bool {
        self.open_slots == 0 && self.assigned == self.work.len && !self.is_imm_unassigned
    }
}

impl Failure {
    /// A failure after which the engine need not ask whether the peer is alive.
    fn new(status: Status) -> Self {
        Self { status, is_unconfirmed: false }
    }
}
