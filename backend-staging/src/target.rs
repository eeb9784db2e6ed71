//! The target of a connection: it serves the peer's requests, slot by slot.

use std::sync::Arc;

use multirail_spi::{Access, ErrorKind, Event, Status};

use crate::connection::Connection;
use crate::context::{Context, CopyTag};
use crate::region::PeerAccess;
use crate::staging_buffer::{SLOT_COUNT, SLOT_LEN, StagingBuffer};
use crate::wire::{RequestKind, SlotRequest, encode_response};
use crate::wr_id::{InternalWrId, WrRole};

pub(crate) struct Target {
    connection: Arc<Connection>,
    slots: Vec<TargetSlot>,
}

/// The state of one slot.
#[derive(Default)]
struct TargetSlot {
    step: TargetStep,
    /// The sequence number of the last request that was taken.
    sequence: u32,
    request: Option<SlotRequest>,
    /// The right to access the region, from the check of the request until the copy has completed.
    access: Option<PeerAccess>,
    /// Whether the internal work request of the current step has failed. The next poll posts it again: it may have
    /// failed only because another work request was aborted.
    has_failed: bool,
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

impl Target {
    pub(crate) fn new(connection: Arc<Connection>) -> Self {
        Self { connection, slots: (0..SLOT_COUNT).map(|_| TargetSlot::default()).collect() }
    }

    /// Takes new requests. Retries copies that had no room, and internal work requests that failed.
    pub(crate) fn advance(&mut self, context: &mut Context<'_>) {
        if self.connection.remote_buffer().is_none() {
            return;
        }
        for index in 0..SLOT_COUNT {
            match self.slots[index].step {
                TargetStep::Idle => self.poll_request(index, context),
                TargetStep::WaitingToCopy => self.begin_copy(index, context),
                TargetStep::SendingData | TargetStep::SendingResponse if self.slots[index].has_failed => {
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
        context: &mut Context<'_>,
    ) {
        let slot = &mut self.slots[index];
        slot.access = None;
        let Some(request) = slot.request else { return };
        match (request.kind, result) {
            (RequestKind::Read, Ok(())) if request.len > 0 => self.send_data(index, request, context),
            (kind, result) => {
                if let (RequestKind::Write | RequestKind::Imm, Ok(()), Some(imm)) =
                    (kind, result, request.imm)
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
        context: &mut Context<'_>,
    ) {
        let index = id.slot;
        let Some(slot) = self.slots.get_mut(index) else { return };
        slot.has_failed = result.is_err();
        match (id.role, result) {
            (_, Err(_)) => {}
            (WrRole::TargetData, Ok(())) => self.respond(index, Ok(()), context),
            _ => {
                slot.step = TargetStep::Idle;
                self.poll_request(index, context);
            }
        }
    }

    /// Takes the slot's request if it is new, and begins to serve it.
    fn poll_request(&mut self, index: usize, context: &mut Context<'_>) {
        let Some(request) = self.connection.buffer.request_in(index) else { return };
        let slot = &mut self.slots[index];
        if request.sequence == slot.sequence {
            return;
        }
        *context.made_progress = true;
        (slot.sequence, slot.request) = (request.sequence, Some(request));
        let need = match request.kind {
            RequestKind::Cancel => return self.respond(index, Ok(()), context),
            RequestKind::Imm => {
                *context.needs_flush = true;
                return self.on_copied(index, Ok(()), context);
            }
            RequestKind::Write => Access::REMOTE_WRITE,
            RequestKind::Read => Access::REMOTE_READ,
        };
        if request.len > SLOT_LEN as u64 {
            return self.respond(index, Err(ErrorKind::RemoteAccess), context);
        }
        match context.regions.begin_access(request.key, need, request.offset, request.len) {
            Err(kind) => self.respond(index, Err(kind), context),
            Ok(_) if request.len == 0 => self.on_copied(index, Ok(()), context),
            Ok(access) => {
                self.slots[index].access = Some(access);
                self.begin_copy(index, context);
            }
        }
    }

    /// Begins the copy between the slot and the region.
    fn begin_copy(&mut self, index: usize, context: &mut Context<'_>) {
        let slot = &mut self.slots[index];
        let (Some(request), Some(access)) = (slot.request, &slot.access) else { return };
        let bytes = self.connection.buffer.target_slot(index);
        let ends = match request.kind {
            RequestKind::Read => (bytes, access.start.cast_const(), request.len),
            _ => (access.start, bytes.cast_const(), request.len),
        };
        let (tag, buffer) =
            (CopyTag::Target { peer: self.connection.peer, slot: index }, &self.connection.buffer);
        // SAFETY: `access` keeps the region, whose range was checked, until the copy has completed; `len` bytes fit the
        // slot, and the buffer stays until no copy is under way. The peer may write to the slot meanwhile: that
        // corrupts only its own bytes.
        let has_begun = unsafe { context.copies.begin(access.location(), Some(buffer), ends, tag) };
        slot.step = if has_begun { TargetStep::Copying } else { TargetStep::WaitingToCopy };
    }

    /// Sends the bytes of a read to the initiator's slot.
    fn send_data(&mut self, index: usize, request: SlotRequest, context: &mut Context<'_>) {
        let Some(remote) = self.connection.remote_buffer() else { return };
        let buffer = &self.connection.buffer;
        let id = InternalWrId { role: WrRole::TargetData, peer: self.connection.peer, slot: index };
        let (local, to) = (buffer.target_slot(index), remote.initiator_slot(index));
        context.outbox.push_back(id.write(local, buffer.lkey(), request.len, to, remote.rkey));
        self.slots[index].step = TargetStep::SendingData;
    }

    fn respond(&mut self, index: usize, result: Result<(), ErrorKind>, context: &mut Context<'_>) {
        let response = encode_response(self.slots[index].sequence, result);
        self.connection.buffer.set_response(index, response);
        self.send_response(index, context);
    }

    fn send_response(&mut self, index: usize, context: &mut Context<'_>) {
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
    fn send_again(&mut self, index: usize, context: &mut Context<'_>) {
        let slot = &mut self.slots[index];
        slot.has_failed = false;
        match (slot.step, slot.request) {
            (TargetStep::SendingData, Some(request)) => self.send_data(index, request, context),
            _ => self.send_response(index, context),
        }
    }
}
