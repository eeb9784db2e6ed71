//! The initiator of a connection: the engine's work requests to one peer for which this process's memory, the peer's,
//! or both are staged. The initiator cuts large work requests into parts that fit a *slot* of a staging buffer
//! (`staging_buffer.rs`), and packs small ones as *pages* into one slot (`page_table.rs`). In this file, to *copy* is
//! to copy within a process, by its processor or GPU; to *transfer* is to move bytes by the inner device.
//!
//! The pages of one posted run stay together: an entry of the queue holds the run (`run_queue.rs`), and a *segment* of
//! a slot names those of its pages that the slot carries (`initiator_slot.rs`). So the work for each page is a few
//! numbers, in loops over a segment; everything else is done once for each segment.
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
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use multirail_spi::staging::{SlotRequest, SlotRequestKind, StagedWork, WorkFailure};
use multirail_spi::{
    ErrorKind, Event, Piece, RemoteKey, Status, WorkKind, WorkRequest,
    copy::{self, CopyStrategy},
};

use crate::connection::{Connection, EndpointContext};
use crate::copies::{CopyStart, CopyTag, MemoryLocation};
use crate::imports::SlotAddress;
use crate::initiator_slot::{InitiatorSlot, InitiatorStep};
use crate::page_table::{self, GROUP_WORDS, PageGroup, SKIPPED, SlotLimit, table_len};
use crate::region::StagedRegion;
use crate::run_queue::{RunQueue, Segment, StagedRun, WorkEnds};
use crate::staging_buffer::{SLOT_COUNT, StagingBuffer};
use crate::wire::{ImmSequence, NumberedRequest, Response, SlotImm, SlotImmKind};
use crate::wr_id::{InternalWrId, WrRole, staging_status};

/// The most bytes of work requests that are packed: of larger ones, a slot has few anyway.
const MAX_PACKED: u64 = SlotLimit::HOST.bytes / 4;
/// The most bytes of work requests that are coalesced although both devices reach the memory: the requests of larger
/// ones do not limit a device. A p5's card reaches its line with pages of 16 KiB; over tcp, coalesced pages of 64 KiB
/// were slower than direct ones.
pub(crate) const MAX_COALESCED: u64 = 32 << 10;

/// The most polls in which pages wait for others: four batches of 64 pages, the engine's default, fill a slot.
const MAX_HELD: u8 = 4;

pub(crate) struct SlotInitiator {
    connection: Arc<Connection>,
    queue: RunQueue,
    /// The slots that may wait for a response: a bit for each.
    awaiting: u32,
    /// Whether the peer has fenced its end since the queue was empty: it responds to nothing of the queue any more.
    is_peer_fenced: bool,
    /// Whether pages were queued since the last poll, and the number of polls in which the last ones have waited for
    /// others.
    has_new_pages: bool,
    held_polls: u8,
    /// The numbers of work requests whose bytes have arrived by several slots, and whose imm needs a slot of its own
    /// now.
    due_imms: VecDeque<u64>,
    slots: Vec<InitiatorSlot>,
    /// The indices of the free slots.
    free: Vec<usize>,
    /// The indices of the slots some of whose copies could not begin, because there was no room for them.
    waiting_copies: VecDeque<usize>,
}

impl SlotInitiator {
    pub(crate) fn new(connection: Arc<Connection>) -> Self {
        Self {
            connection,
            queue: RunQueue::default(),
            awaiting: 0,
            is_peer_fenced: false,
            has_new_pages: false,
            held_polls: 0,
            due_imms: VecDeque::new(),
            slots: (0..SLOT_COUNT).map(|_| InitiatorSlot::default()).collect(),
            free: (0..SLOT_COUNT).rev().collect(),
            waiting_copies: VecDeque::new(),
        }
    }

    /// Queues pieces of a run, as far as there is room, and returns how many. `run` has the ID of the first piece.
    /// `local` is this process's region, if that is staged. `coalesced` is the peer's region, if pieces of at most
    /// [`MAX_COALESCED`] bytes are coalesced.
    pub(crate) fn push(
        &mut self,
        run: &WorkRequest,
        pieces: &[Piece],
        local: Option<&Arc<StagedRegion>>,
        coalesced: Option<SlotAddress>,
    ) -> usize {
        let is_remote_staged = run.kind != WorkKind::Send && pieces[0].remote & RemoteKey::STAGED != 0;
        let staged = SlotAddress { key: run.rkey, base: 0 };
        let (through_slot, max_through_slot, max_packed) = match (is_remote_staged, coalesced) {
            (true, _) => (Some(staged), u64::MAX, MAX_PACKED),
            (false, Some(region)) => (Some(region), MAX_COALESCED, MAX_COALESCED),
            (false, None) => (None, 0, 0),
        };
        let max_packed = if run.kind == WorkKind::Send { 0 } else { max_packed };
        let mut taken = 0;
        while taken < pieces.len() {
            let rest = &pieces[taken..];
            let run = WorkRequest { id: run.id + taken as u64, ..*run };
            let alike = page_table::alike(rest, max_packed);
            let pushed = match alike {
                0 if self.queue.has_room(run.kind) => {
                    let through_slot = through_slot.filter(|_| rest[0].len <= max_through_slot);
                    let ends = self.ends(&run, local, through_slot);
                    self.is_peer_fenced &= !self.queue.is_empty();
                    self.queue.push(&run.with_piece(0, &rest[0]), ends);
                    1
                }
                0 => 0,
                _ => self.push_pages(&run, &rest[..alike], local, through_slot),
            };
            taken += pushed;
            if pushed < alike.max(1) {
                break;
            }
        }
        taken
    }

    /// Queues pieces of a run that share slots, as far as there is room, and returns how many. All have the same number
    /// of bytes. `run` has the ID of the first piece.
    pub(crate) fn push_pages(
        &mut self,
        run: &WorkRequest,
        pieces: &[Piece],
        local: Option<&Arc<StagedRegion>>,
        through_slot: Option<SlotAddress>,
    ) -> usize {
        let ends = self.ends(run, local, through_slot);
        self.is_peer_fenced &= !self.queue.is_empty();
        self.has_new_pages = true;
        self.queue.push_pages(run, pieces, ends)
    }

    fn ends(
        &self,
        run: &WorkRequest,
        local: Option<&Arc<StagedRegion>>,
        through_slot: Option<SlotAddress>,
    ) -> WorkEnds {
        let sends_imm_in_slot_request =
            through_slot.is_none() && self.connection.has_colliding_imm(run.kind, run.imm);
        WorkEnds { local: local.cloned(), through_slot, sends_imm_in_slot_request }
    }

    /// Advances all slots, and assigns the free ones: in a post, only those that pages fill. The engine posts an
    /// operation in several batches, so the pages that are left wait for others.
    pub(crate) fn advance(&mut self, is_post: bool, context: &mut EndpointContext<'_>) {
        for _ in 0..self.waiting_copies.len() {
            if let Some(index) = self.waiting_copies.pop_front() {
                self.begin_copies(index, context);
            }
        }
        let mut awaiting = std::mem::take(&mut self.awaiting);
        while awaiting != 0 {
            let index = awaiting.trailing_zeros() as usize;
            awaiting &= awaiting - 1;
            self.poll_response(index, context);
            if self.slots[index].step == InitiatorStep::AwaitingResponse {
                self.awaiting |= 1 << index;
            }
        }
        let more_may_follow = is_post || self.holds_pages();
        self.assign_slots(more_may_follow, context);
        self.queue.report_ended(context.events);
    }

    /// Whether a poll lets pages that do not fill a slot wait for the next batch of the engine: if there has been a
    /// batch since the last poll, and if other slots keep the peer busy meanwhile.
    fn holds_pages(&mut self) -> bool {
        let has_new = std::mem::take(&mut self.has_new_pages);
        let is_idle = self.free.len() == SLOT_COUNT;
        self.held_polls =
            if has_new && !is_idle && self.held_polls < MAX_HELD { self.held_polls + 1 } else { 0 };
        self.held_polls > 0
    }

    /// Continues with a slot of which a GPU has copied these pages.
    pub(crate) fn on_copied(
        &mut self,
        index: usize,
        pages: Range<usize>,
        result: Result<(), ErrorKind>,
        context: &mut EndpointContext<'_>,
    ) {
        let slot = &mut self.slots[index];
        slot.copying -= 1;
        if let Err(kind) = result {
            pages.for_each(|page| slot.fail_page(page, staging_status(kind).into()));
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
        if slot.copying > 0 || slot.begun < slot.pages {
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
        if self.slots[index].has_table() {
            return self.begin_slot_request(index, 0, context);
        }
        let Some(work) = self.first_work(index) else { return };
        match work.posted.kind {
            WorkKind::Write if work.extra.ends.need_slot_request(imm) => {
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
        for segment in &mut slot.segments {
            self.queue.fail(segment, failure);
        }
    }

    /// Fails all work requests with `kind`. A work request whose memory this process or the peer may still access ends
    /// once they no longer do.
    pub(crate) fn stop(&mut self, kind: ErrorKind, context: &mut EndpointContext<'_>) {
        self.queue.report_ended(context.events);
        let failure = WorkFailure::from(staging_status(kind));
        self.queue.fail_all(failure);
        self.due_imms.clear();
        // Copies that have not begun, and internal work requests that were not posted, access nothing.
        for index in std::mem::take(&mut self.waiting_copies) {
            self.slots[index].begun = self.slots[index].pages;
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
        self.queue.report_ended(context.events);
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
        self.queue.report_ended(context.events);
        self.slots.iter().any(|slot| slot.is_write_posted || slot.step == InitiatorStep::Transferring)
    }

    /// Fails all work requests with `kind`, and reports them at once. The caller guarantees that nothing accesses their
    /// memory any more.
    pub(crate) fn fail(&mut self, kind: ErrorKind, events: &mut VecDeque<Event>) {
        self.queue.report_ended(events);
        let failure = staging_status(kind).into();
        self.queue.fail_all(failure);
        for slot in &mut self.slots {
            // The entry reports the end of a work request that is no page.
            for segment in slot.segments.drain(..) {
                self.queue.finish(&segment, &[], Err(failure), events);
            }
        }
        self.queue.remove_all(events);
    }

    /// The entry of the queue to which the slot's first page belongs.
    fn first_work(&mut self, index: usize) -> Option<&mut StagedWork<StagedRun>> {
        self.queue.of(self.slots[index].segments.first()?)
    }

    /// The entry of the queue to which the slot's first page belongs, and the segment of that page.
    fn first_work_and_segment(&mut self, index: usize) -> Option<(&mut StagedWork<StagedRun>, &Segment)> {
        let Self { slots, queue, .. } = self;
        let segment = slots[index].segments.first()?;
        Some((queue.of(segment)?, segment))
    }

    /// Whether a page of the slot has not failed.
    fn has_live_page(&mut self, index: usize) -> bool {
        let Self { slots, queue, .. } = self;
        match slots[index].page_failures.is_empty() {
            true => slots[index].segments.iter().any(|segment| queue.is_live(segment)),
            false => self.live_page(index).is_some(),
        }
    }

    /// The slot's first page that has not failed: its segment, and its number in the slot.
    fn live_page(&mut self, index: usize) -> Option<(Segment, usize)> {
        let Self { slots, queue, .. } = self;
        let (slot, mut next) = (&slots[index], 0);
        for segment in &slot.segments {
            let mut pages = next..next + segment.pieces.len();
            next = pages.end;
            if queue.is_live(segment)
                && let Some(page) = pages.find(|page| !slot.has_failed(*page))
            {
                return Some((segment.clone(), page));
            }
        }
        None
    }

    /// Assigns the free slots to due imms first, and then to bytes in the order of posting. If `more_may_follow`, pages
    /// that do not fill a slot wait.
    fn assign_slots(&mut self, more_may_follow: bool, context: &mut EndpointContext<'_>) {
        while let Some(index) = self.free.last().copied() {
            if let Some(number) = self.due_imms.pop_front() {
                let Some(work) = self.queue.numbered(number) else { continue };
                let imm = work.posted.imm;
                if let Some(content) = work.assign_empty() {
                    self.slots[index].segments.push(Segment::whole(content));
                    self.begin_slot(1, imm, context);
                }
                continue;
            }
            let Some(work) = self.queue.next_unassigned() else { return };
            let limit = SlotLimit::of(match &work.extra.ends.local {
                Some(region) => region.location,
                None => context.gpu_memory.locate(work.posted.local as u64),
            });
            if more_may_follow && !self.queue.has_full_slot(limit) {
                // The next poll assigns them.
                *context.made_progress = true;
                return;
            }
            let Some(work) = self.queue.next_unassigned() else { return };
            if work.extra.is_pages() {
                let WorkRequest { kind, imm, .. } = work.posted;
                let pages = self.queue.assign_pages(kind, limit, &mut self.slots[index].segments);
                self.begin_slot(pages, imm, context);
                continue;
            }
            let content = work.assign(limit.bytes);
            // If all bytes fit one slot, that slot takes the imm. Otherwise the imm gets a slot of its own once all
            // bytes have arrived (see `finish_slot`).
            let imm = work.posted.imm.filter(|_| content.len == work.posted.len);
            self.slots[index].segments.push(Segment::whole(content));
            self.begin_slot(1, imm, context);
        }
    }

    /// Takes the last free slot, which has its segments. These are so many pages.
    fn begin_slot(&mut self, pages: usize, imm: Option<u32>, context: &mut EndpointContext<'_>) {
        let Some(index) = self.free.pop() else { return };
        self.held_polls = 0;
        let slot = &mut self.slots[index];
        (slot.pages, slot.imm, slot.begun, slot.copying) = (pages, imm, 0, 0);
        let uses_imms = self.connection.uses_imms();
        let has_bytes = slot.segments.iter().any(|segment| segment.content.len > 0);
        let Some((work, segment)) = self.first_work_and_segment(index) else { return };
        let is_staged = work.extra.ends.local.is_some() && work.posted.len > 0;
        // The copy of a small page takes less time than a slot request that waits for the page.
        let is_cheap = || {
            let local = work.extra.pages(&work.posted, segment, &mut None)[0].local;
            uses_imms
                && work.extra.is_pages()
                && context.gpu_memory.locate(local as u64) == MemoryLocation::Host
        };
        let copies_in = work.posted.kind != WorkKind::Read && (pages > 1 || is_staged || is_cheap());
        let copies_in = copies_in && has_bytes;
        self.slots[index].is_copied_in = copies_in;
        if copies_in {
            self.slots[index].step = InitiatorStep::CopyingIn;
            self.begin_copies(index, context);
        } else {
            self.transfer(index, context);
        }
    }

    /// Copies the pages of a slot, as far as there is room: from this process's regions in step `CopyingIn`, otherwise
    /// into them. The processor's copies complete at once.
    fn begin_copies(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        match self.copy_pages(index, context) {
            true => self.finish_copies(index, context),
            false => self.waiting_copies.push_back(index),
        }
    }

    /// Begins the copies of a slot. Returns false if there is no room for some of them.
    fn copy_pages(&mut self, index: usize, context: &mut EndpointContext<'_>) -> bool {
        let Self { slots, queue, connection, .. } = self;
        let slot = &mut slots[index];
        let (peer, buffer) = (connection.peer, &connection.buffer);
        let is_copied_in = slot.step == InitiatorStep::CopyingIn;
        let ends = |slot: *mut u8, local: *mut u8| match is_copied_in {
            true => (slot, local.cast_const()),
            false => (local, slot.cast_const()),
        };
        let mut bytes = buffer.initiator_slot(index).wrapping_add(slot.first_offset() as usize);
        let mut next = 0;
        for at in 0..slot.segments.len() {
            let segment = &slot.segments[at];
            let (pages, mut place) = (next..next + segment.pieces.len(), bytes);
            next = pages.end;
            bytes = bytes.wrapping_add(segment.content.len as usize);
            if slot.begun >= pages.end {
                continue;
            }
            let work = queue.of(segment).filter(|work| segment.failure.or(work.failure()).is_none());
            let Some(work) = work else {
                slot.begun = pages.end;
                continue;
            };
            let mut whole = None;
            let pieces = work.extra.pages(&work.posted, segment, &mut whole);
            // The pieces of a run are in one region.
            let location = match &work.extra.ends.local {
                Some(region) => region.location,
                None => context.gpu_memory.locate(pieces[0].local as u64),
            };
            if slot.page_failures.is_empty() && slot.begun == pages.start {
                let len = pieces[0].len;
                let copies = pieces.iter().map(|piece| {
                    let at = place;
                    place = place.wrapping_add(len as usize);
                    ends(at, piece.local)
                });
                let started = match location {
                    MemoryLocation::Host if !context.copies.take_room(segment.content.len) => {
                        CopyStart::NoRoom
                    }
                    MemoryLocation::Host => {
                        // SAFETY: as below.
                        unsafe { copy::copy_each(CopyStrategy::Plain, copies, len as usize) };
                        CopyStart::Complete(Ok(()))
                    }
                    MemoryLocation::Gpu(ordinal, reach) => {
                        let (page, count) = (pages.start, pieces.len());
                        let tag = CopyTag::Initiator { peer, slot: index, page, count };
                        let copies = (count, copies.map(|(to, from)| (to, from, len)));
                        // SAFETY: as below.
                        unsafe { context.copies.begin_each((ordinal, reach), Some(buffer), copies, tag) }
                    }
                };
                if !slot.note_started(started, pages) {
                    return false;
                }
                continue;
            }
            for (page, piece) in pages.zip(pieces) {
                let at = place;
                place = place.wrapping_add(piece.len as usize);
                if page < slot.begun || slot.has_failed(page) {
                    slot.begun = slot.begun.max(page + 1);
                    continue;
                }
                let (to, from) = ends(at, piece.local);
                let tag = CopyTag::Initiator { peer, slot: index, page, count: 1 };
                // SAFETY: by the contract of `post`, the local span is valid until the work request has ended, and a
                // work request does not end while a slot is busy with it; only this copy uses these bytes of the slot,
                // and the buffer stays until no copy is under way.
                let started =
                    unsafe { context.copies.begin(location, Some(buffer), (to, from, piece.len), tag) };
                if !slot.note_started(started, page..page + 1) {
                    return false;
                }
            }
        }
        true
    }

    /// Posts the internal work request that transfers the slot's bytes. Sends the slot request at once if it can carry
    /// the bytes, or if this process transfers none.
    fn transfer(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        self.slots[index].step = InitiatorStep::Transferring;
        if self.slots[index].has_table() {
            return self.transfer_pages(index, context);
        }
        let imm = self.slots[index].imm;
        let Some((work, segment)) = self.first_work_and_segment(index) else { return };
        let (posted, ends) = (work.posted, &work.extra.ends);
        let Piece { local: from, remote, len } = work.extra.pages(&posted, segment, &mut None)[0];
        let (goes_through_slot, is_local_staged) = (ends.through_slot.is_some(), ends.local.is_some());
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
            (local, lkey) = (from, posted.lkey);
        }
        let id = InternalWrId { role: WrRole::InitiatorData, peer: self.connection.peer, slot: index };
        let mut internal = id.write(local, lkey, len, remote, posted.rkey);
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
        let Self { slots, queue, connection, .. } = self;
        let slot = &slots[index];
        let words = slot.table_words();
        let (mut table, mut next) = (connection.buffer.table_out(index, words), 0);
        let mut is_read = false;
        for segment in &slot.segments {
            let pages = next..next + segment.pieces.len();
            next = pages.end;
            let (group, rest) = table.split_at(segment.table_words());
            table = rest;
            let Some(work) = queue.of(segment) else { continue };
            let WorkRequest { kind, imm, .. } = work.posted;
            is_read = kind == WorkKind::Read;
            let is_skipped = segment.failure.or(work.failure()).is_some();
            let SlotAddress { key, base } = work.extra.ends.address();
            let mut whole = None;
            let pieces = work.extra.pages(&work.posted, segment, &mut whole);
            let Piece { remote, len, .. } = pieces[0];
            let is_staged = remote.wrapping_sub(base) & RemoteKey::STAGED != 0;
            let count = pieces.len() as u32;
            PageGroup { pages: count, key, is_staged, len, imm, is_skipped }.store(group);
            let offsets = &group[GROUP_WORDS..];
            for (offset, piece) in offsets.iter().zip(pieces) {
                offset.store(piece.remote.wrapping_sub(base), Ordering::Relaxed);
            }
            for (page, _) in slot.page_failures.iter().filter(|(page, _)| pages.contains(page)) {
                offsets[page - pages.start].store(SKIPPED, Ordering::Relaxed);
            }
        }
        // A read transfers the table alone.
        let len = table_len(words) + if is_read { 0 } else { slot.bytes() };
        if remote.imms.is_some() {
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
        self.awaiting |= 1 << index;
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
                let imm = |tag| SlotImm::new(SlotImmKind::Request, index, tag, sequence).encode();
                (self.slots[index].carried, remote.imms.map(imm))
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
        let (count, bytes) = (self.slots[index].pages, self.slots[index].bytes());
        let Some((segment, _)) = self.live_page(index) else { return cancel };
        let Some(work) = self.queue.of(&segment) else { return cancel };
        let is_read = work.posted.kind == WorkKind::Read;
        let kind = if is_read { SlotRequestKind::Read } else { SlotRequestKind::Write };
        if count > 1 {
            let offset = self.slots[index].table_words() as u64;
            let request = SlotRequest { offset, len: bytes, ..without_region(kind) };
            return NumberedRequest { sequence, request, imm: None, pages: count as u16, carries_bytes };
        }
        let request = if work.extra.ends.through_slot.is_some() {
            let SlotAddress { key, base } = work.extra.ends.address();
            let piece = work.extra.pages(&work.posted, &segment, &mut None)[0];
            SlotRequest { kind, key, offset: piece.remote.wrapping_sub(base), len: piece.len }
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
        let (sequence, count) = (slot.sequence, slot.pages);
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
                for (page, result) in results.into_iter().enumerate() {
                    if let Err(kind) = result {
                        slot.fail_page(page, failure_of(kind));
                    }
                }
            }
            Response::AskAgain => {}
        }
        let is_read = self.first_work(index).is_some_and(|work| work.posted.kind == WorkKind::Read);
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
        let Self { slots, queue, due_imms, .. } = self;
        let slot = &mut slots[index];
        slot.step = InitiatorStep::Free;
        let mut next = 0;
        for segment in slot.segments.drain(..) {
            let pages = next..next + segment.pieces.len();
            next = pages.end;
            let failures = slot.page_failures.iter().filter(|(page, _)| pages.contains(page));
            let failures: Vec<_> = failures.map(|(page, why)| (page - pages.start, *why)).collect();
            due_imms.extend(queue.finish(&segment, &failures, result, context.events));
        }
        slot.page_failures.clear();
        self.free.push(index);
    }
}
