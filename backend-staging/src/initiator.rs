//! The initiator of a connection: the engine's work requests to one peer for which this process's memory, the peer's,
//! or both are staged. The initiator cuts large work requests into parts that fit a *slot* of a staging buffer
//! (`staging_buffer.rs`), and packs small ones as *pages* into one slot (`page_table.rs`). In this file, to *copy* is
//! to copy within a process, by its processor or GPU; to *transfer* is to move bytes by the inner device.
//!
//! If the connection uses imms, a slot request *carries* the bytes and the page table of its slot: one RDMA write has all,
//! and its imm tells the target that all have arrived (`wire.rs`). Otherwise, and for bytes that are in no slot of the
//! initiator, the slot request follows once the transfer has completed, because devices do not order RDMA writes.
//!
//! The steps of a slot for a write or a send:
//!
//! 1. If this process's memory is staged, or if the slot has several pages, the initiator copies the bytes into its
//!    slot.
//! 2. The inner device transfers the bytes, with the page table in front of them: to the peer's slot if the peer's
//!    memory is staged, otherwise directly to the peer's memory.
//! 3. If the peer's memory is staged, the initiator sends a slot request, by which the target copies the bytes from its
//!    slot into its regions, and waits for the response.
//!
//! The steps of a slot for a read:
//!
//! 1. If the peer's memory is staged, the initiator sends a slot request, by which the target copies the bytes from its
//!    regions into its slot and transfers them to the initiator's slot. The initiator waits for the response. If the
//!    slot has several pages, the inner device transfers the page table before, or the slot request carries it. The imm of
//!    the bytes stands for the response if all pages are good. If the peer's memory is not staged, the inner device reads
//!    the bytes into the initiator's slot.
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
use crate::copies::{CopyTag, MemoryLocation};
use crate::imports::SlotAddress;
use crate::page_table::{self, MAX_PAGES, Page, PlacedPages, table_len};
use crate::region::StagedRegion;
use crate::staging_buffer::{SLOT_BYTES, SLOT_COUNT, StagingBuffer};
use crate::wire::{ImmSequence, NumberedRequest, Response, SlotImm, SlotImmKind};
use crate::wr_id::{InternalWrId, WrRole, staging_status};

/// The most work requests that wait for slots or are in slots.
const MAX_QUEUED: usize = SLOT_COUNT * MAX_PAGES;
/// The most bytes of work requests that are packed: of larger ones, a slot has few anyway.
const MAX_PACKED: u64 = SLOT_BYTES as u64 / 4;
/// The most bytes of work requests that are coalesced although both devices reach the memory: the requests of larger
/// ones do not limit a device. A p5's card reaches its line with pages of 16 KiB; over tcp, coalesced pages of 64 KiB
/// were slower than direct ones.
pub(crate) const MAX_COALESCED: u64 = 32 << 10;

pub(crate) struct SlotInitiator {
    connection: Arc<Connection>,
    /// The work requests that have not ended.
    queue: StagedWorkQueue<WorkEnds>,
    /// Bytes of the work requests in `queue`.
    queued_bytes: u64,
    /// Whether a work request may have ended since the last report.
    may_have_ended: bool,
    /// Whether the peer has fenced its end since the queue was empty: it responds to nothing of the queue any more.
    is_peer_fenced: bool,
    /// The numbers of work requests whose bytes have arrived by several slots, and whose imm needs a slot of its own
    /// now.
    due_imms: VecDeque<u64>,
    slots: Vec<InitiatorSlot>,
    /// The indices of the free slots.
    free: Vec<usize>,
    /// The indices of the slots some of whose copies could not begin, because there was no room for them.
    waiting_copies: VecDeque<usize>,
}

/// How the bytes of a work request get from and to the regions of both ends.
#[derive(Default)]
struct WorkEnds {
    /// This process's region, if it is staged.
    local: Option<Arc<StagedRegion>>,
    /// The peer's region, if the bytes go through the target's slot: because the region is staged, or because the
    /// request is coalesced.
    through_slot: Option<SlotAddress>,
    /// Whether a slot request has the imm although the peer's region is not staged. The reason: the imm is one of [those
    /// that slots use](crate::wire::is_reserved), so the peer's endpoint would take it for its own. (If the peer's region is staged, a slot request has the imm anyway.)
    sends_imm_in_slot_request: bool,
}

/// The state of one slot.
struct InitiatorSlot {
    step: InitiatorStep,
    /// What the slot carries: a part of a work request, or several whole work requests as pages.
    pages: Vec<SlotPage>,
    /// The imm that is delivered after the bytes of a slot with one page.
    imm: Option<u32>,
    /// The number of pages whose copies have begun, or that need none in the current step.
    begun: usize,
    /// The number of copies that are under way.
    copying: usize,
    /// Whether the bytes are copied into the slot before the transfer.
    is_copied_in: bool,
    /// The sequence number of the slot's latest slot request.
    sequence: u32,
    /// Bytes of the slot that the slot request carries.
    carried: u64,
    /// Whether the bytes of a read have arrived with an imm that stands for the response.
    is_answered: bool,
    /// Whether the RDMA write of the slot request is posted and has not completed.
    is_write_posted: bool,
    /// Whether the RDMA write of the slot request has failed once: the slot request may have arrived nevertheless.
    may_have_arrived: bool,
    /// Whether the slot request has to be written again. The target serves a sequence number only once.
    must_repeat: bool,
}

/// A page of a slot.
#[derive(Clone, Copy)]
struct SlotPage {
    /// The part of a work request.
    content: SlotContent,
    /// The offset of its bytes in the slot.
    slot_offset: u64,
    failure: Option<WorkFailure>,
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
        let slot = || InitiatorSlot {
            step: InitiatorStep::Free,
            pages: Vec::new(),
            imm: None,
            begun: 0,
            copying: 0,
            is_copied_in: false,
            sequence: 0,
            carried: 0,
            is_answered: false,
            is_write_posted: false,
            may_have_arrived: false,
            must_repeat: false,
        };
        Self {
            connection,
            queue: StagedWorkQueue::default(),
            queued_bytes: 0,
            may_have_ended: false,
            is_peer_fenced: false,
            due_imms: VecDeque::new(),
            slots: (0..SLOT_COUNT).map(|_| slot()).collect(),
            free: (0..SLOT_COUNT).rev().collect(),
            waiting_copies: VecDeque::new(),
        }
    }

    /// Whether there is room for one more work request of this kind. The queue has room for twice the bytes of all
    /// slots. The initiator keeps the order of posting, even if the engine would now choose another operation first.
    /// Queued work requests also take up the rail's send window, which requests to other peers need. So a longer queue
    /// would delay others. Sends may wait long for the peer's receives, so at most half of [`SLOT_COUNT`] sends are
    /// queued.
    pub(crate) fn has_room(&self, kind: WorkKind) -> bool {
        let is_send = |work: &&StagedWork<WorkEnds>| work.posted.kind == WorkKind::Send;
        let is_short =
            self.queued_bytes < 2 * (SLOT_COUNT * SLOT_BYTES) as u64 || self.queue.len() < SLOT_COUNT;
        self.queue.len() < MAX_QUEUED
            && is_short
            && (kind != WorkKind::Send || self.queue.iter().filter(is_send).count() < SLOT_COUNT / 2)
    }

    /// Queues a work request. `local` is this process's region, if that is staged. `coalesced` is the peer's region, if
    /// the work request is coalesced.
    pub(crate) fn push(
        &mut self,
        work: &WorkRequest,
        local: Option<Arc<StagedRegion>>,
        coalesced: Option<SlotAddress>,
    ) {
        let is_remote_staged = work.kind != WorkKind::Send && work.remote & RemoteKey::STAGED != 0;
        let staged = SlotAddress { key: work.rkey, base: 0 };
        let through_slot = if is_remote_staged { Some(staged) } else { coalesced };
        let collides = self.connection.has_colliding_imm(work.kind, work.imm);
        let ends =
            WorkEnds { local, through_slot, sends_imm_in_slot_request: through_slot.is_none() && collides };
        // A work request without bytes takes a slot, too.
        let needs_empty_slot = work.imm.is_some() || work.len == 0;
        self.is_peer_fenced &= !self.queue.is_empty();
        self.queued_bytes += work.len;
        self.queue.push(work, ends, needs_empty_slot);
    }

    /// Advances all slots, and assigns the free ones. If `more_may_follow`, pages wait for others that fill their slot:
    /// the engine posts an operation in several batches.
    pub(crate) fn advance(&mut self, more_may_follow: bool, context: &mut EndpointContext<'_>) {
        for _ in 0..self.waiting_copies.len() {
            if let Some(index) = self.waiting_copies.pop_front() {
                self.begin_copies(index, context);
            }
        }
        for index in 0..SLOT_COUNT {
            self.poll_response(index, context);
        }
        self.assign_slots(more_may_follow, context);
        self.report_ended(context.events);
    }

    /// Continues with a slot of which one page has been copied.
    pub(crate) fn on_copied(
        &mut self,
        (index, page): (usize, usize),
        result: Result<(), ErrorKind>,
        context: &mut EndpointContext<'_>,
    ) {
        let slot = &mut self.slots[index];
        slot.copying -= 1;
        if let Err(kind) = result {
            slot.pages[page].failure = Some(staging_status(kind).into());
        }
        self.finish_copies(index, context);
    }

    /// Continues with the slot of a read whose bytes have arrived, unless the imm belongs to an earlier slot request.
    pub(crate) fn on_data_arrived(&mut self, imm: SlotImm, context: &mut EndpointContext<'_>) {
        let Some(slot) = self.slots.get_mut(imm.slot) else { return };
        if slot.step == InitiatorStep::AwaitingResponse && ImmSequence::of(slot.sequence) == imm.sequence {
            slot.is_answered = true;
            self.poll_response(imm.slot, context);
        }
    }

    /// Continues with a slot if all its pages have been copied.
    fn finish_copies(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let slot = &self.slots[index];
        if slot.copying > 0 || slot.begun < slot.pages.len() {
            return;
        }
        if slot.step == InitiatorStep::CopyingIn && self.has_live_page(index) {
            return self.transfer(index, context);
        }
        self.finish_slot(index, Ok(()), context);
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
        if !self.has_live_page(index) {
            return self.finish_slot(index, Ok(()), context);
        }
        if self.slots[index].pages.len() > 1 {
            return self.begin_slot_request(index, 0, context);
        }
        let Some(work) = self.work_of(index, 0) else { return };
        match work.posted.kind {
            WorkKind::Write if work.extra.need_slot_request(imm) => {
                self.begin_slot_request(index, 0, context)
            }
            WorkKind::Read => self.copy_out(index, context),
            _ => self.finish_slot(index, Ok(()), context),
        }
    }

    /// Notes that the RDMA write of a slot request has failed: the next poll repeats it. Fails the slot's work
    /// requests, unless the connection was only interrupted: then they continue.
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
        if is_interrupted {
            return;
        }
        self.may_have_ended = true;
        for page in 0..self.slots[index].pages.len() {
            if let Some(work) = self.work_of(index, page) {
                work.fail(failure);
            }
        }
    }

    /// Fails all work requests with `kind`. A work request whose memory this process or the peer may still access ends
    /// once they no longer do.
    pub(crate) fn stop(&mut self, kind: ErrorKind, context: &mut EndpointContext<'_>) {
        self.report_ended(context.events);
        let failure = WorkFailure::from(staging_status(kind));
        self.queue.fail_all(failure);
        self.due_imms.clear();
        self.may_have_ended = true;
        // Copies that have not begun, and internal work requests that were not posted, access nothing.
        for index in std::mem::take(&mut self.waiting_copies) {
            self.slots[index].begun = self.slots[index].pages.len();
            self.finish_copies(index, context);
        }
        let (mut removed, mut repeated) = (Vec::new(), Vec::new());
        context.outbox.retain(|work| {
            let Some(id) = InternalWrId::decode(work.id) else { return true };
            match id.role {
                WrRole::TargetData | WrRole::Response => true,
                WrRole::Request if self.slots[id.slot].may_have_arrived && !self.is_peer_fenced => {
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

    /// The peer has fenced its end of the connection, so it serves none of the slot requests any more: ends the work
    /// requests, each once the inner device is done with it. Returns whether the inner device is not done with some: it
    /// repeats requests over a broken path until it is told to abort.
    pub(crate) fn on_peer_fenced(&mut self, context: &mut EndpointContext<'_>) -> bool {
        self.is_peer_fenced = !self.queue.is_empty();
        self.stop(ErrorKind::Cancelled, context);
        for index in 0..SLOT_COUNT {
            self.poll_response(index, context);
        }
        self.report_ended(context.events);
        self.slots.iter().any(|slot| slot.is_write_posted || slot.step == InitiatorStep::Transferring)
    }

    /// Fails all work requests with `kind`, and reports them at once. The caller guarantees that nothing accesses their
    /// memory any more.
    pub(crate) fn fail(&mut self, kind: ErrorKind, events: &mut VecDeque<Event>) {
        self.report_ended(events);
        self.queue.fail_all(staging_status(kind).into());
        events.extend(self.queue.remove_all().map(|work| work.event()));
        self.queued_bytes = 0;
    }

    /// The work request of a page.
    fn work_of(&mut self, index: usize, page: usize) -> Option<&mut StagedWork<WorkEnds>> {
        self.queue.get_mut(self.slots[index].pages.get(page)?.content.work)
    }

    /// Whether a page was copied without a failure, and its work request has not failed.
    fn is_live(&mut self, index: usize, page: usize) -> bool {
        let has_failed = self.slots[index].pages.get(page).is_none_or(|page| page.failure.is_some());
        !has_failed && self.work_of(index, page).is_some_and(|work| work.failure().is_none())
    }

    /// Whether a page of the slot [is live](Self::is_live).
    fn has_live_page(&mut self, index: usize) -> bool {
        (0..self.slots[index].pages.len()).any(|page| self.is_live(index, page))
    }

    /// Assigns the free slots to due imms first, and then to bytes in the order of posting. If `more_may_follow`, pages
    /// that do not fill a slot wait.
    fn assign_slots(&mut self, more_may_follow: bool, context: &mut EndpointContext<'_>) {
        while let Some(index) = self.free.last().copied() {
            if let Some(number) = self.due_imms.pop_front() {
                let Some(work) = self.queue.get_mut(Some(number)) else { continue };
                let imm = work.posted.imm;
                if let Some(content) = work.assign_empty() {
                    self.slots[index].pages.push(SlotPage { content, slot_offset: 0, failure: None });
                    self.begin_slot(imm, context);
                }
                continue;
            }
            if self.queue.next_unassigned().is_none() {
                return;
            }
            if more_may_follow && !self.has_full_slot() {
                // The next poll assigns them.
                *context.made_progress = true;
                return;
            }
            let Some(work) = self.queue.next_unassigned() else { return };
            let content = work.assign(SLOT_BYTES as u64);
            // If all bytes fit one slot, that slot takes the imm. Otherwise the imm gets a slot of its own once all
            // bytes have arrived (see `finish_slot`).
            let imm = work.posted.imm.filter(|_| content.len == work.posted.len);
            let kind = work.posted.kind;
            let is_packed = work.can_be_packed();
            self.slots[index].pages.push(SlotPage { content, slot_offset: 0, failure: None });
            if is_packed {
                self.pack_more(index, kind, content.len);
            }
            self.begin_slot(imm, context);
        }
    }

    /// Whether the next work requests fill a slot, or cannot be packed.
    fn has_full_slot(&mut self) -> bool {
        let (mut pages, mut bytes) = (0, 0);
        for work in self.queue.unassigned() {
            (pages, bytes) = (pages + 1, bytes + work.posted.len);
            if !work.can_be_packed() || !page_table::fits(pages + 1, bytes + 1) {
                return true;
            }
        }
        false
    }

    /// Adds pages to a slot whose first page has `bytes` bytes, as long as the next work requests are of the same kind
    /// and fit.
    fn pack_more(&mut self, index: usize, kind: WorkKind, mut bytes: u64) {
        let pages = &mut self.slots[index].pages;
        while let Some(work) = self.queue.next_unassigned() {
            let more = bytes + work.posted.len;
            let is_alike = work.posted.kind == kind && work.can_be_packed();
            if !is_alike || !page_table::fits(pages.len() + 1, more) {
                break;
            }
            bytes = more;
            let content = work.assign(SLOT_BYTES as u64);
            pages.push(SlotPage { content, slot_offset: 0, failure: None });
        }
        if pages.len() > 1 {
            let mut places = PlacedPages::behind_table(pages.len());
            for page in pages {
                // `fits` has made sure that there is a place.
                page.slot_offset = places.place(page.content.len).unwrap_or_default();
            }
        }
    }

    /// Takes the last free slot, which has its pages.
    fn begin_slot(&mut self, imm: Option<u32>, context: &mut EndpointContext<'_>) {
        let Some(index) = self.free.pop() else { return };
        let slot = &mut self.slots[index];
        (slot.imm, slot.begun, slot.copying) = (imm, 0, 0);
        let is_packed = slot.pages.len() > 1;
        let uses_imms = self.connection.uses_imms();
        let Some(work) = self.work_of(index, 0) else { return };
        let is_staged = work.extra.local.is_some() && work.posted.len > 0;
        // The copy of a small page takes less time than a slot request that waits for the page.
        let is_cheap = || {
            let local = work.posted.local as u64;
            uses_imms && work.can_be_packed() && context.gpu_memory.locate(local) == MemoryLocation::Host
        };
        let copies_in = work.posted.kind != WorkKind::Read && (is_packed || is_staged || is_cheap());
        let copies_in = copies_in && self.slots[index].pages.iter().any(|page| page.content.len > 0);
        self.slots[index].is_copied_in = copies_in;
        if copies_in {
            self.slots[index].step = InitiatorStep::CopyingIn;
            self.begin_copies(index, context);
        } else {
            self.transfer(index, context);
        }
    }

    /// Begins the copies of a slot, as far as there is room: from this process's regions in step `CopyingIn`, otherwise
    /// into them.
    fn begin_copies(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        while self.slots[index].begun < self.slots[index].pages.len() {
            let number = self.slots[index].begun;
            if self.is_live(index, number) {
                let Some(has_begun) = self.begin_copy(index, number, context) else { return };
                if !has_begun {
                    return self.waiting_copies.push_back(index);
                }
                self.slots[index].copying += 1;
            }
            self.slots[index].begun += 1;
        }
        self.finish_copies(index, context);
    }

    /// Begins the copy of a page. Returns false if there is no room for it, and `None` if there is no such page.
    fn begin_copy(&mut self, index: usize, number: usize, context: &mut EndpointContext<'_>) -> Option<bool> {
        let step = self.slots[index].step;
        let SlotPage { content, slot_offset, .. } = *self.slots[index].pages.get(number)?;
        let work = self.work_of(index, number)?;
        let local = work.posted.local.wrapping_add(content.offset as usize);
        let region = work.extra.local.as_ref();
        let location =
            region.map_or_else(|| context.gpu_memory.locate(local as u64), |region| region.location);
        let buffer = &self.connection.buffer;
        let bytes = buffer.initiator_slot(index).wrapping_add(slot_offset as usize);
        let (to, from) = match step {
            InitiatorStep::CopyingIn => (bytes, local.cast_const()),
            _ => (local, bytes.cast_const()),
        };
        let tag = CopyTag::Initiator { peer: self.connection.peer, slot: index, page: number };
        // SAFETY: by the contract of `post`, the local span is valid until the work request has ended, and a work
        // request does not end while a slot is busy with it; only this copy uses these bytes of the slot, and the
        // buffer stays until no copy is under way.
        Some(unsafe { context.copies.begin(location, Some(buffer), (to, from, content.len), tag) })
    }

    /// Posts the internal work request that transfers the slot's bytes. Sends the slot request at once if it can carry
    /// the bytes, or if this process transfers none.
    fn transfer(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        self.slots[index].step = InitiatorStep::Transferring;
        if self.slots[index].pages.len() > 1 {
            return self.transfer_pages(index, context);
        }
        let imm = self.slots[index].imm;
        let Some(SlotContent { offset, len, .. }) = self.slots[index].pages.first().map(|page| page.content)
        else {
            return;
        };
        let Some(StagedWork { posted, extra: ends, .. }) = self.work_of(index, 0) else { return };
        let (posted, goes_through_slot, is_local_staged) =
            (*posted, ends.through_slot.is_some(), ends.local.is_some());
        let needs_slot_request = ends.need_slot_request(imm);
        if needs_slot_request && (posted.kind == WorkKind::Read || len == 0) {
            return self.begin_slot_request(index, 0, context);
        }
        let is_copied_in = self.slots[index].is_copied_in;
        if goes_through_slot && is_copied_in && self.connection.uses_imms() {
            return self.begin_slot_request(index, len, context);
        }
        let buffer = &self.connection.buffer;
        let (mut local, mut lkey) = (buffer.initiator_slot(index), buffer.lkey());
        if !is_local_staged && !is_copied_in && posted.kind != WorkKind::Read {
            (local, lkey) = (posted.local.wrapping_add(offset as usize), posted.lkey);
        }
        let id = InternalWrId { role: WrRole::InitiatorData, peer: self.connection.peer, slot: index };
        let mut internal = id.write(local, lkey, len, posted.remote.wrapping_add(offset), posted.rkey);
        if goes_through_slot {
            let Some(remote) = self.connection.remote_buffer() else {
                return self.fail_unreachable(index, context);
            };
            (internal.remote, internal.rkey) = (remote.target_slot(index), remote.rkey);
        } else {
            (internal.kind, internal.imm) = (posted.kind, imm.filter(|_| !needs_slot_request));
        }
        context.outbox.push_back(internal);
    }

    /// Transfers the page table of a slot with several pages, with their bytes if they are written. Sends the slot request
    /// at once if it can carry them.
    fn transfer_pages(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let Some(remote) = self.connection.remote_buffer() else {
            return self.fail_unreachable(index, context);
        };
        let count = self.slots[index].pages.len();
        let (mut end, mut is_read) = (table_len(count), false);
        for number in 0..count {
            let SlotPage { content, slot_offset, .. } = self.slots[index].pages[number];
            let is_skipped = !self.is_live(index, number);
            let Some(work) = self.work_of(index, number) else { continue };
            let WorkRequest { kind, imm, .. } = work.posted;
            let (key, offset) = work.extra.address(work.posted.remote);
            let page = Page { key, offset, len: content.len, imm, is_skipped };
            self.connection.buffer.set_page(index, number, page);
            is_read = kind == WorkKind::Read;
            end = end.max(slot_offset + content.len);
        }
        // A read transfers the table alone.
        let len = if is_read { table_len(count) } else { end };
        if remote.uses_imms {
            return self.begin_slot_request(index, len, context);
        }
        let buffer = &self.connection.buffer;
        let id = InternalWrId { role: WrRole::InitiatorData, peer: self.connection.peer, slot: index };
        let (local, to) = (buffer.initiator_slot(index), remote.target_slot(index));
        context.outbox.push_back(id.write(local, buffer.lkey(), len, to, remote.rkey));
    }

    fn fail_unreachable(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let failure = WorkFailure::from(staging_status(ErrorKind::Unreachable));
        self.finish_slot(index, Err(failure), context);
    }

    /// Sends the slot request of this slot, with a new sequence number. It carries the first `carried` bytes of the slot.
    fn begin_slot_request(&mut self, index: usize, carried: u64, context: &mut EndpointContext<'_>) {
        let slot = &mut self.slots[index];
        slot.sequence = slot.sequence.wrapping_add(1).max(1);
        (slot.carried, slot.is_answered) = (carried, false);
        (slot.may_have_arrived, slot.must_repeat) = (false, false);
        slot.step = InitiatorStep::AwaitingResponse;
        self.post_slot_request(index, context);
    }

    fn post_slot_request(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let slot_request = self.slot_request_of(index);
        let Some(remote) = self.connection.remote_buffer() else { return };
        let buffer = &self.connection.buffer;
        buffer.set_request(index, slot_request);
        let id = InternalWrId { role: WrRole::Request, peer: self.connection.peer, slot: index };
        let (local, sequence) = (buffer.request_out(index), slot_request.sequence);
        let (carried, imm) = match slot_request.carries_bytes {
            true => {
                let imm = SlotImm::new(SlotImmKind::Request, index, sequence);
                (self.slots[index].carried, Some(imm.encode()))
            }
            false => (0, remote.wake_imm()),
        };
        let len = StagingBuffer::REQUEST_LEN + carried;
        let mut internal = id.write(local, buffer.lkey(), len, remote.request(index), remote.rkey);
        internal.imm = imm;
        context.outbox.push_back(internal);
        self.slots[index].is_write_posted = true;
    }

    /// The slot request of a slot: a `Cancel` if all its work requests have failed.
    fn slot_request_of(&mut self, index: usize) -> NumberedRequest {
        let InitiatorSlot { sequence, imm, carried, .. } = self.slots[index];
        let carries_bytes = carried > 0;
        let without_region = |kind| SlotRequest { kind, key: 0, offset: 0, len: 0 };
        let cancel = NumberedRequest {
            sequence,
            request: without_region(SlotRequestKind::Cancel),
            imm: None,
            pages: 0,
            carries_bytes: false,
        };
        let live = (0..self.slots[index].pages.len()).find(|page| self.is_live(index, *page));
        let pages = &self.slots[index].pages;
        let (count, bytes) = (pages.len(), pages.iter().map(|page| page.content.len).sum());
        let Some((page, content)) = live.map(|page| (page, pages[page].content)) else { return cancel };
        let Some(work) = self.work_of(index, page) else { return cancel };
        let is_read = work.posted.kind == WorkKind::Read;
        let kind = if is_read { SlotRequestKind::Read } else { SlotRequestKind::Write };
        if count > 1 {
            let request = SlotRequest { len: bytes, ..without_region(kind) };
            return NumberedRequest { sequence, request, imm: None, pages: count as u16, carries_bytes };
        }
        let request = if work.extra.through_slot.is_some() {
            let (key, offset) = work.extra.address(work.posted.remote + content.offset);
            SlotRequest { kind, key, offset, len: content.len }
        } else {
            without_region(SlotRequestKind::Imm)
        };
        NumberedRequest { sequence, request, imm, pages: 0, carries_bytes }
    }

    /// Continues with a slot if the target has responded. Until then the target may access the slot and its own region.
    fn poll_response(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let slot = &mut self.slots[index];
        if slot.step != InitiatorStep::AwaitingResponse || slot.is_write_posted {
            return;
        }
        let (sequence, count) = (slot.sequence, slot.pages.len());
        if self.is_peer_fenced {
            return self.finish_slot(index, Err(staging_status(ErrorKind::Cancelled).into()), context);
        }
        let response = match slot.is_answered {
            true => Some(Response::Common(Ok(()))),
            false => self.connection.buffer.response_in(index, sequence, count),
        };
        let Some(response) = response else {
            if std::mem::take(&mut slot.must_repeat) {
                self.post_slot_request(index, context);
            }
            return;
        };
        *context.made_progress = true;
        let failure_of = |kind: ErrorKind| WorkFailure::from(staging_status(kind));
        let asks_again = response == Response::AskAgain;
        match response {
            Response::Common(Ok(())) => {}
            Response::Common(Err(kind)) => return self.finish_slot(index, Err(failure_of(kind)), context),
            Response::Mixed(results) => {
                for (page, result) in slot.pages.iter_mut().zip(results) {
                    page.failure = result.err().map(failure_of).or(page.failure);
                }
            }
            Response::AskAgain => {}
        }
        let is_read = self.work_of(index, 0).is_some_and(|work| work.posted.kind == WorkKind::Read);
        if asks_again && self.has_live_page(index) {
            return match is_read {
                true => self.transfer(index, context),
                false => self.finish_slot(index, Err(failure_of(ErrorKind::Protocol)), context),
            };
        }
        match is_read && self.has_live_page(index) {
            true => self.copy_out(index, context),
            false => self.finish_slot(index, Ok(()), context),
        }
    }

    /// Copies the bytes of a read from the slot into this process's regions.
    fn copy_out(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let slot = &mut self.slots[index];
        (slot.step, slot.begun, slot.copying) = (InitiatorStep::CopyingOut, 0, 0);
        self.begin_copies(index, context);
    }

    /// Frees a slot, and notes the result in the work requests of the pages that have not failed before.
    fn finish_slot(
        &mut self,
        index: usize,
        result: Result<(), WorkFailure>,
        context: &mut EndpointContext<'_>,
    ) {
        *context.made_progress = true;
        self.may_have_ended = true;
        let slot = &mut self.slots[index];
        slot.step = InitiatorStep::Free;
        for page in slot.pages.drain(..) {
            let result = page.failure.map_or(result, Err);
            let work = self.queue.finish_slot(&page.content, result);
            self.due_imms.extend(work.and_then(|work| work.due_empty_slot()));
        }
        self.free.push(index);
    }

    /// Reports the work requests that have ended, and removes them.
    fn report_ended(&mut self, events: &mut VecDeque<Event>) {
        if !std::mem::take(&mut self.may_have_ended) {
            return;
        }
        let queued_bytes = &mut self.queued_bytes;
        self.queue.remove_ended(|work| {
            *queued_bytes -= work.posted.len;
            push_joined(events, work.event());
        });
    }
}

/// Appends an event. Joins it to the last one if both report successes with consecutive IDs.
fn push_joined(events: &mut VecDeque<Event>, event: Event) {
    if let (Some(Event::Done { first, count }), Event::Done { first: next, count: more }) =
        (events.back_mut(), event)
        && *first + u64::from(*count) == next
    {
        *count += more;
        return;
    }
    events.push_back(event);
}

impl WorkEnds {
    /// Whether a slot that delivers this imm sends a slot request.
    fn need_slot_request(&self, imm: Option<u32>) -> bool {
        self.through_slot.is_some() || (self.sends_imm_in_slot_request && imm.is_some())
    }

    /// The key and the offset by which a slot request addresses a remote address. The offset in a staged region keeps
    /// the bit [`RemoteKey::STAGED`].
    fn address(&self, remote: u64) -> (u64, u64) {
        self.through_slot.map_or((0, 0), |region| (region.key, remote.wrapping_sub(region.base)))
    }
}

/// What the packing of pages asks of a work request.
trait Packing {
    /// Whether the work request may share a slot with others: all its bytes go through the target's slot, and they are
    /// few.
    fn can_be_packed(&self) -> bool;
}

impl Packing for StagedWork<WorkEnds> {
    fn can_be_packed(&self) -> bool {
        let WorkRequest { kind, len, .. } = self.posted;
        self.extra.through_slot.is_some() && kind != WorkKind::Send && (1..=MAX_PACKED).contains(&len)
    }
}
