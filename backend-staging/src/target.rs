//! The target of a connection: it serves the peer's slot requests.

use std::sync::Arc;

use multirail_spi::staging::SlotRequestKind;
use multirail_spi::{ErrorKind, Event, Status};

use crate::connection::{Connection, EndpointContext};
use crate::copies::CopyTag;
use crate::region::PeerAccess;
use crate::staging_buffer::{SLOT_COUNT, SLOT_LEN, StagingBuffer};
use crate::wire::{NumberedRequest, encode_response};
use crate::wr_id::{InternalWrId, WrRole};

pub(crate) struct SlotTarget {
    connection: Arc<Connection>,
    slots: Vec<TargetSlot>,
}

/// The state of one slot.
#[derive(Default)]
struct TargetSlot {
    step: TargetStep,
    /// The sequence number of the last slot request that was taken.
    sequence: u32,
    request: Option<NumberedRequest>,
    /// The right to access the region, from the check of the slot request until the copy has completed.
    access: Option<PeerAccess>,
    /// Whether the internal work request of the current step has failed, so that the next poll posts it again. The
    /// failure may not be its own: the abort of another work request can fail it, too.
    must_send_again: bool,
}

/// What a slot is busy with.
#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum TargetStep {
    #[default]
    Idle,
    /// There was no room for the copy: it is begun again at the next poll.
    WaitingToCopy,
    Copying,
    /// Sending the bytes of a read.
    SendingData,
    SendingResponse,
}

impl SlotTarget {
    pub(crate) fn new(connection: Arc<Connection>) -> Self {
        Self { connection, slots: (0..SLOT_COUNT).map(|_| TargetSlot::default()).collect() }
    }

    /// Takes new slot requests. Retries copies that had no room, and internal work requests that failed.
    pub(crate) fn advance(&mut self, context: &mut EndpointContext<'_>) {
        if self.connection.remote_buffer().is_none() {
            return;
        }
        for index in 0..SLOT_COUNT {
            match self.slots[index].step {
                TargetStep::Idle => self.poll_request(index, context),
                TargetStep::WaitingToCopy => self.begin_copy(index, context),
                TargetStep::SendingData | TargetStep::SendingResponse
                    if self.slots[index].must_send_again =>
                {
                    self.send_again(index, context)
                }
                _ => {}
            }
        }
    }

    /// Continues with a slot whose copy has completed.
    pub(crate) fn on_copied(
        &mut self,
        index: usize,
        result: Result<(), ErrorKind>,
        context: &mut EndpointContext<'_>,
    ) {
        self.slots[index].access = None;
        self.finish_request(index, result, context);
    }

    /// Continues with a slot whose bytes are in their region (write) or in the slot (read), or which has no bytes:
    /// reports the imm, and responds. For a read, the response follows the bytes.
    fn finish_request(
        &mut self,
        index: usize,
        result: Result<(), ErrorKind>,
        context: &mut EndpointContext<'_>,
    ) {
        let Some(NumberedRequest { request, imm, .. }) = self.slots[index].request else { return };
        match (request.kind, result) {
            (SlotRequestKind::Read, Ok(())) if request.len > 0 => self.send_data(index, request.len, context),
            (kind, result) => {
                if let (SlotRequestKind::Write | SlotRequestKind::Imm, Ok(()), Some(imm)) =
                    (kind, result, imm)
                {
                    context.events.push_back(Event::Imm { peer: self.connection.peer, imm });
                }
                self.respond(index, result, context);
            }
        }
    }

    /// Continues with the slot of an internal work request that has completed or failed.
    pub(crate) fn on_completed(
        &mut self,
        id: InternalWrId,
        result: Result<(), Status>,
        context: &mut EndpointContext<'_>,
    ) {
        let index = id.slot;
        let Some(slot) = self.slots.get_mut(index) else { return };
        slot.must_send_again = result.is_err();
        match (id.role, result) {
            (_, Err(_)) => {}
            (WrRole::TargetData, Ok(())) => self.respond(index, Ok(()), context),
            _ => {
                slot.step = TargetStep::Idle;
                self.poll_request(index, context);
            }
        }
    }

    /// Takes the slot's request if it is new, and begins to serve that request.
    fn poll_request(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let Some(numbered) = self.connection.buffer.request_in(index) else { return };
        let slot = &mut self.slots[index];
        if numbered.sequence == slot.sequence {
            return;
        }
        *context.made_progress = true;
        (slot.sequence, slot.request) = (numbered.sequence, Some(numbered));
        let request = numbered.request;
        match request.kind {
            SlotRequestKind::Cancel => return self.respond(index, Ok(()), context),
            SlotRequestKind::Imm => {
                *context.needs_flush = true;
                return self.finish_request(index, Ok(()), context);
            }
            SlotRequestKind::Write | SlotRequestKind::Read => {}
        }
        if request.len > SLOT_LEN as u64 {
            return self.respond(index, Err(ErrorKind::RemoteAccess), context);
        }
        match context.regions.begin_access(&request) {
            Err(kind) => self.respond(index, Err(kind), context),
            Ok(_) if request.len == 0 => self.finish_request(index, Ok(()), context),
            Ok(access) => {
                self.slots[index].access = Some(access);
                self.begin_copy(index, context);
            }
        }
    }

    /// Begins the copy between the slot and the region.
    fn begin_copy(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let slot = &mut self.slots[index];
        let (Some(numbered), Some(access)) = (slot.request, &slot.access) else { return };
        let request = numbered.request;
        let (to, from) = request.copy_ends(self.connection.buffer.target_slot(index), access.start);
        let ends = (to, from, request.len);
        let (tag, buffer) =
            (CopyTag::Target { peer: self.connection.peer, slot: index }, &self.connection.buffer);
        // SAFETY: `access` keeps the region, whose range was checked, until the copy has completed; `len` bytes fit the
        // slot, and the buffer stays until no copy is under way. The peer may write to the slot meanwhile: that
        // corrupts only its own bytes.
        let has_begun = unsafe { context.copies.begin(access.location(), Some(buffer), ends, tag) };
        slot.step = if has_begun { TargetStep::Copying } else { TargetStep::WaitingToCopy };
    }

    /// Sends the `len` bytes of a read to the initiator's slot.
    fn send_data(&mut self, index: usize, len: u64, context: &mut EndpointContext<'_>) {
        let Some(remote) = self.connection.remote_buffer() else { return };
        let buffer = &self.connection.buffer;
        let id = InternalWrId { role: WrRole::TargetData, peer: self.connection.peer, slot: index };
        let (local, to) = (buffer.target_slot(index), remote.initiator_slot(index));
        context.outbox.push_back(id.write(local, buffer.lkey(), len, to, remote.rkey));
        self.slots[index].step = TargetStep::SendingData;
    }

    fn respond(&mut self, index: usize, result: Result<(), ErrorKind>, context: &mut EndpointContext<'_>) {
        let response = encode_response(self.slots[index].sequence, result);
        self.connection.buffer.set_response(index, response);
        self.send_response(index, context);
    }

    fn send_response(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let Some(remote) = self.connection.remote_buffer() else { return };
        let buffer = &self.connection.buffer;
        let id = InternalWrId { role: WrRole::Response, peer: self.connection.peer, slot: index };
        let (local, len) = (buffer.response_out(index), StagingBuffer::RESPONSE_LEN);
        let mut internal = id.write(local, buffer.lkey(), len, remote.response(index), remote.rkey);
        internal.imm = remote.wake_imm;
        context.outbox.push_back(internal);
        self.slots[index].step = TargetStep::SendingResponse;
    }

    /// Posts the failed internal work request of a slot again.
    fn send_again(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let slot = &mut self.slots[index];
        slot.must_send_again = false;
        match (slot.step, slot.request) {
            (TargetStep::SendingData, Some(numbered)) => self.send_data(index, numbered.request.len, context),
            _ => self.send_response(index, context),
        }
    }
}
