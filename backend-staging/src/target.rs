//! The target of a connection: it serves the peer's slot requests.
//!
//! One pass over the pages of a slot request reads the place of each page, checks it, and copies the page, if the
//! processor copies. The pages of a group share one access to their region. What the target keeps of each page is
//! whether it failed.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cuda::Reach;
use multirail_spi::staging::SlotRequestKind;
use multirail_spi::{
    ErrorKind, Event, RemoteKey, Status,
    copy::{self, CopyStrategy},
};

use crate::connection::{Connection, EndpointContext, Fence};
use crate::copies::{CopyStart, CopyTag, MemoryLocation};
use crate::page_table::{MAX_PAGES, PageGroup, SKIPPED, table_len};
use crate::region::{PageRange, PeerAccess, RegionName, StagedRegions};
use crate::staging_buffer::{SLOT_COUNT, SLOT_LEN};
use crate::wire::{ImmSequence, NumberedRequest, SlotImm, SlotImmKind, encode_ask_again, encode_response};
use crate::wr_id::{InternalWrId, WrRole};

pub(crate) struct SlotTarget {
    connection: Arc<Connection>,
    /// The sequence number of the last slot request that was taken, for each slot.
    sequences: [u32; SLOT_COUNT],
    slots: Vec<TargetSlot>,
    /// The slots with copies that have not begun, or with something to send again: a bit for each.
    unfinished: u32,
}

/// The state of one slot.
#[derive(Default)]
struct TargetSlot {
    step: TargetStep,
    request: Option<NumberedRequest>,
    /// The sequence number of the slot request whose imm has come, since the last one was taken.
    announced: Option<ImmSequence>,
    /// The number of pages of the request. A request without a page table has one, a `Cancel` none.
    pages: usize,
    /// The pages that have failed, by their numbers. Usually there are none.
    failures: Vec<(usize, ErrorKind)>,
    /// The pages that the target leaves out although others of their group have an imm. Usually there are none.
    skipped: Vec<usize>,
    /// The imms of the pages, by the numbers of the pages: reported once all pages have been copied.
    imms: Vec<(Range<usize>, u32)>,
    /// The rights to access the regions of the pages, until all copies have completed.
    accesses: Vec<PeerAccess>,
    /// The copies of GPUs, in the order of their pages.
    gpu_copies: Vec<GpuCopy>,
    /// The number of copies of GPUs that have begun.
    begun: usize,
    /// The number of copies that are under way.
    copying: usize,
    /// The offset in the slot behind the last page that has bytes to send.
    data_end: u64,
    /// Whether the bytes of a read carry an imm, which stands for the response.
    announces_data: bool,
    /// Words of the response.
    response_words: usize,
    /// Whether the internal work request of the current step has failed, so that the next poll posts it again. The
    /// failure may not be its own: the abort of another work request can fail it, too.
    must_send_again: bool,
}

/// A page that a GPU copies.
struct GpuCopy {
    page: usize,
    /// The first page of its group.
    group: usize,
    /// The first byte in the slot.
    bytes: *mut u8,
    /// The first byte in the region.
    region: *mut u8,
    len: u64,
    /// The ordinal of the GPU, and how the GPU reaches the region.
    gpu: (u32, Reach),
}

// SAFETY: `bytes` and `region` are addresses. The connection keeps the slot, and `TargetSlot::accesses` the region.
unsafe impl Send for GpuCopy {}

/// What a slot is busy with.
#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum TargetStep {
    #[default]
    Idle,
    /// Copying, or waiting for room for more copies: the next poll begins them.
    Copying,
    /// Sending the bytes of a read.
    SendingData,
    SendingResponse,
}

impl SlotTarget {
    pub(crate) fn new(connection: Arc<Connection>) -> Self {
        Self {
            connection,
            sequences: [0; SLOT_COUNT],
            slots: (0..SLOT_COUNT).map(|_| TargetSlot::default()).collect(),
            unfinished: 0,
        }
    }

    /// Takes new slot requests. Begins copies that had no room before, and repeats internal work requests that failed.
    pub(crate) fn advance(&mut self, context: &mut EndpointContext<'_>) {
        if let Some(fence) = self.connection.current_fence()
            && !self.obey(fence, context)
        {
            return;
        }
        if self.connection.remote_buffer().is_none() {
            return;
        }
        let mut due =
            self.connection.buffer.new_requests(&self.sequences) | std::mem::take(&mut self.unfinished);
        while due != 0 {
            let index = due.trailing_zeros() as usize;
            due &= due - 1;
            let slot = &self.slots[index];
            match slot.step {
                TargetStep::Idle => self.poll_request(index, context),
                TargetStep::Copying if slot.begun < slot.gpu_copies.len() => {
                    self.begin_copies(index, context)
                }
                TargetStep::SendingData | TargetStep::SendingResponse if slot.must_send_again => {
                    self.send_again(index, context)
                }
                _ => {}
            }
        }
    }

    /// Acts on a fence. Returns whether the target serves slot requests.
    fn obey(&mut self, fence: Fence, context: &mut EndpointContext<'_>) -> bool {
        match &fence {
            Fence::Open => return true,
            Fence::Asked | Fence::Shut => {
                self.stop(context);
                if self.slots.iter().all(|slot| slot.step == TargetStep::Idle) {
                    self.connection.move_fence(&fence, Fence::Shut);
                }
                return false;
            }
            Fence::Lifted(served) => {
                for (index, sequence) in served.iter().enumerate() {
                    (self.sequences[index], self.slots[index].announced) = (*sequence, None);
                }
            }
        }
        self.connection.move_fence(&fence, Fence::Open);
        true
    }

    /// Notes that a slot request has arrived together with the bytes that it carries. A slot request that was written twice
    /// has two imms, and the device may delay one of them beyond the imm of a later slot request.
    pub(crate) fn on_announced(&mut self, imm: SlotImm) {
        let Some(slot) = self.slots.get_mut(imm.slot) else { return };
        let latest = slot.announced.unwrap_or(ImmSequence::of(self.sequences[imm.slot]));
        if imm.sequence.is_after(latest) {
            slot.announced = Some(imm.sequence);
        }
    }

    /// Stops serving: begins no copy, and sends no bytes and responses. A slot whose copies are under way becomes idle
    /// after them.
    fn stop(&mut self, context: &mut EndpointContext<'_>) {
        context.outbox.retain(|work| {
            let role = InternalWrId::decode(work.id).map(|id| id.role);
            !matches!(role, Some(WrRole::TargetData | WrRole::Response))
        });
        for slot in &mut self.slots {
            if slot.step == TargetStep::Copying {
                let stopped = slot.gpu_copies.drain(slot.begun..);
                slot.failures.extend(stopped.map(|copy| (copy.page, ErrorKind::Io)));
            }
            if slot.step != TargetStep::Copying || slot.copying == 0 {
                slot.accesses.clear();
                (slot.step, slot.must_send_again) = (TargetStep::Idle, false);
            }
        }
    }

    /// Continues with a slot of which a GPU has ended these copies.
    pub(crate) fn on_copied(
        &mut self,
        index: usize,
        copies: Range<usize>,
        result: Result<(), ErrorKind>,
        context: &mut EndpointContext<'_>,
    ) {
        let slot = &mut self.slots[index];
        slot.copying -= 1;
        if let Err(kind) = result {
            slot.failures.extend(slot.gpu_copies[copies].iter().map(|copy| (copy.page, kind)));
        }
        if slot.copying == 0 && slot.begun == slot.gpu_copies.len() {
            self.finish_request(index, context);
        }
    }

    /// Continues with a slot whose bytes are in their regions (write) or in the slot (read), or which has no bytes:
    /// reports the imms, and responds. For a read, the response follows the bytes, or their imm stands for it.
    fn finish_request(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let slot = &mut self.slots[index];
        slot.accesses.clear();
        let Some(NumberedRequest { request, .. }) = slot.request else { return };
        if request.kind == SlotRequestKind::Read && slot.data_end > 0 && slot.failures.len() < slot.pages {
            return self.send_data(index, context);
        }
        if request.kind != SlotRequestKind::Read {
            for (pages, imm) in &slot.imms {
                let has_arrived = |page: &usize| !slot.has_failed(*page) && !slot.skipped.contains(page);
                let imm = Event::Imm { peer: self.connection.peer, imm: *imm };
                let imms = pages.clone().filter(has_arrived).map(|_| imm);
                context.events.extend(imms);
            }
        }
        self.respond(index, context);
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
        // A fence may have stopped the slot since the request was posted.
        let is_current = match id.role {
            WrRole::TargetData => slot.step == TargetStep::SendingData,
            _ => slot.step == TargetStep::SendingResponse,
        };
        if !is_current {
            return;
        }
        if id.role == WrRole::TargetData && slot.announces_data && result.is_err() {
            return self.ask_again(index, context);
        }
        slot.must_send_again = result.is_err();
        self.unfinished |= u32::from(result.is_err()) << index;
        match (id.role, result) {
            (_, Err(_)) => {}
            (WrRole::TargetData, Ok(())) if !slot.announces_data => self.respond(index, context),
            // The next poll takes the next slot request.
            _ => slot.step = TargetStep::Idle,
        }
    }

    /// Takes the slot's request if it is new and all that it carries is there, and begins to serve that request.
    fn poll_request(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let slot = &mut self.slots[index];
        let seen = self.sequences[index];
        let request = self.connection.buffer.request_in(index, seen);
        let Some(numbered) = request.filter(|request| request.sequence != seen) else { return };
        if numbered.carries_bytes && slot.announced != Some(ImmSequence::of(numbered.sequence)) {
            return;
        }
        if !context.copies.take_room(numbered.request.len.min(SLOT_LEN as u64)) {
            return;
        }
        *context.made_progress = true;
        (self.sequences[index], slot.request, slot.announced) = (numbered.sequence, Some(numbered), None);
        (slot.pages, slot.begun, slot.copying, slot.data_end) = (0, 0, 0, 0);
        slot.failures.clear();
        slot.skipped.clear();
        slot.imms.clear();
        slot.accesses.clear();
        slot.gpu_copies.clear();
        match numbered.request.kind {
            SlotRequestKind::Cancel => return self.respond(index, context),
            SlotRequestKind::Imm => {
                *context.needs_flush = true;
                slot.pages = 1;
                slot.imms.extend(numbered.imm.map(|imm| (0..1, imm)));
                return self.finish_request(index, context);
            }
            SlotRequestKind::Write | SlotRequestKind::Read => {}
        }
        self.serve_pages(index, numbered, context);
        self.begin_copies(index, context);
    }

    /// Checks and copies the pages of a slot request. Reads each of them once: the peer may change its table at any
    /// time.
    fn serve_pages(&mut self, index: usize, numbered: NumberedRequest, context: &EndpointContext<'_>) {
        let NumberedRequest { request, imm, pages, .. } = numbered;
        let slot = &mut self.slots[index];
        let buffer = &self.connection.buffer;
        let slot_bytes = buffer.target_slot(index);
        let mut pass = PagePass { kind: request.kind, slot_bytes, place: 0, regions: context.regions, slot };
        if pages == 0 {
            let (key, is_staged) = (request.key, request.offset & RemoteKey::STAGED != 0);
            let group = PageGroup { pages: 1, key, is_staged, len: request.len, imm, is_skipped: false };
            return pass.serve(group, &[AtomicU64::new(request.offset)]);
        }
        let count = usize::from(pages).min(MAX_PAGES);
        let words = numbered.table_words();
        pass.place = table_len(words);
        let mut table = buffer.table_in(index, words);
        while usize::from(pages) <= MAX_PAGES
            && pass.slot.pages < count
            && let Some((group, rest)) = PageGroup::load(table)
        {
            let (offsets, rest) =
                rest.split_at((group.pages as usize).min(count - pass.slot.pages).min(rest.len()));
            table = rest;
            pass.serve(group, offsets);
        }
        pass.refuse(pass.slot.pages..count, ErrorKind::RemoteAccess);
    }

    /// Begins the copies of GPUs between the slot and the regions, as far as there is room.
    fn begin_copies(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let slot = &mut self.slots[index];
        let Some(NumberedRequest { request, .. }) = slot.request else { return };
        slot.step = TargetStep::Copying;
        let (peer, buffer) = (self.connection.peer, &self.connection.buffer);
        while let Some(GpuCopy { group, gpu, .. }) = slot.gpu_copies.get(slot.begun) {
            // The pages of a group are in one region.
            let pages = &slot.gpu_copies[slot.begun..];
            let count = pages.iter().take_while(|page| page.group == *group).count();
            let copies = pages[..count].iter().map(|page| {
                let (to, from) = request.kind.copy_ends(page.bytes, page.region);
                (to, from, page.len)
            });
            let tag = CopyTag::Target { peer, slot: index, copy: slot.begun, count };
            // SAFETY: `accesses` keeps the region, whose range was checked, until the copy has completed; `len` bytes
            // fit the slot, and the buffer stays until no copy is under way. The peer may write to the slot meanwhile:
            // that corrupts only its own bytes.
            match unsafe { context.copies.begin_each(*gpu, Some(buffer), (count, copies), tag) } {
                CopyStart::Complete(result) => {
                    let failed = pages[..count].iter().zip(result.err().into_iter().cycle());
                    slot.failures.extend(failed.map(|(page, kind)| (page.page, kind)));
                }
                CopyStart::UnderWay => slot.copying += 1,
                CopyStart::NoRoom => return self.unfinished |= 1 << index,
            }
            slot.begun += count;
        }
        if slot.copying == 0 {
            self.finish_request(index, context);
        }
    }

    /// Sends the bytes of a read to the same places of the initiator's slot. If all pages are good and the connection uses
    /// imms, the bytes carry one that stands for the response.
    fn send_data(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let Some(remote) = self.connection.remote_buffer() else { return };
        let slot = &mut self.slots[index];
        let end = slot.data_end;
        let start = slot.request.map_or(0, |numbered| table_len(numbered.table_words())).min(end);
        let buffer = &self.connection.buffer;
        let id = InternalWrId { role: WrRole::TargetData, peer: self.connection.peer, slot: index };
        let local = buffer.target_slot(index).wrapping_add(start as usize);
        let to = remote.initiator_slot(index) + start;
        let mut internal = id.write(local, buffer.lkey(), end - start, to, remote.rkey);
        let tag = remote.imms.filter(|_| slot.failures.is_empty());
        slot.announces_data = tag.is_some();
        internal.imm =
            tag.map(|tag| SlotImm::new(SlotImmKind::Data, index, tag, self.sequences[index]).encode());
        context.outbox.push_back(internal);
        slot.step = TargetStep::SendingData;
    }

    fn respond(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let slot = &mut self.slots[index];
        let mut results = [Ok(()); MAX_PAGES];
        for (page, kind) in &slot.failures {
            results[*page] = Err(*kind);
        }
        // Without a failure, one result stands for all.
        let count = if slot.failures.is_empty() { slot.pages.min(1) } else { slot.pages };
        let (words, sent) = encode_response(self.sequences[index], results[..count].iter().copied());
        self.connection.buffer.set_response(index, &words[..sent]);
        slot.response_words = sent;
        self.send_response(index, context);
    }

    /// Asks the initiator to ask again: the bytes of a read and their imm may have arrived or not. They must not be sent
    /// again, because the initiator uses the slot for something else once they have arrived.
    #[cold]
    fn ask_again(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let slot = &mut self.slots[index];
        self.connection.buffer.set_response(index, &[encode_ask_again(self.sequences[index])]);
        slot.response_words = 1;
        self.send_response(index, context);
    }

    fn send_response(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let Some(remote) = self.connection.remote_buffer() else { return };
        let slot = &mut self.slots[index];
        let buffer = &self.connection.buffer;
        let id = InternalWrId { role: WrRole::Response, peer: self.connection.peer, slot: index };
        let (local, len) = (buffer.response_out(index), 8 * slot.response_words as u64);
        let mut internal = id.write(local, buffer.lkey(), len, remote.response(index), remote.rkey);
        internal.imm = remote.wake_imm();
        context.outbox.push_back(internal);
        slot.step = TargetStep::SendingResponse;
    }

    /// Posts the failed internal work request of a slot again.
    fn send_again(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        self.slots[index].must_send_again = false;
        match self.slots[index].step {
            TargetStep::SendingData => self.send_data(index, context),
            _ => self.send_response(index, context),
        }
    }
}

impl TargetSlot {
    fn has_failed(&self, page: usize) -> bool {
        self.failures.iter().any(|(failed, _)| *failed == page)
    }
}

/// One pass over the pages of a slot request.
struct PagePass<'a> {
    kind: SlotRequestKind,
    /// The content of the slot.
    slot_bytes: *mut u8,
    /// The offset in the slot of the next page.
    place: u64,
    regions: &'a StagedRegions,
    slot: &'a mut TargetSlot,
}

impl PagePass<'_> {
    /// Serves the next pages, which are a group and have these offsets in their region: checks each of them, and copies
    /// it or leaves the copy to the region's GPU.
    fn serve(&mut self, group: PageGroup, offsets: &[AtomicU64]) {
        let pages = self.slot.pages..self.slot.pages + offsets.len();
        let (place, end) = (self.place, self.place + group.len * offsets.len() as u64);
        (self.slot.pages, self.place) = (pages.end, end);
        if group.is_skipped {
            return;
        }
        // All pages of an initiator that keeps the protocol fit.
        let range = if end <= SLOT_LEN as u64 { self.range_of(&group) } else { Err(ErrorKind::RemoteAccess) };
        let range = match range {
            Ok(range) => range,
            Err(kind) => return self.refuse(pages, kind),
        };
        let left_out = |slot: &TargetSlot| slot.failures.len() + slot.skipped.len();
        let before = left_out(self.slot);
        self.copy(range, group.len, (pages.start, place), offsets);
        if group.len > 0 && left_out(self.slot) - before < pages.len() {
            self.slot.data_end = end;
        }
        self.slot.imms.extend(group.imm.map(|imm| (pages, imm)));
    }

    /// Where pages of a group may be in their region.
    fn range_of(&mut self, group: &PageGroup) -> Result<PageRange, ErrorKind> {
        let name = RegionName { key: group.key, is_staged: group.is_staged };
        let accesses = &mut self.slot.accesses;
        if accesses.last().is_none_or(|access| access.name() != name) {
            accesses.push(self.regions.begin_access(name, self.kind)?);
        }
        accesses.last().ok_or(ErrorKind::RemoteAccess)?.range_of(group.len)
    }

    /// Copies pages of `len` bytes that are in this range of a region, or leaves the copies to its GPU. The first page
    /// has this number and this place in the slot.
    fn copy(&mut self, range: PageRange, len: u64, (first, place): (usize, u64), offsets: &[AtomicU64]) {
        let TargetSlot { failures, skipped, gpu_copies, .. } = &mut *self.slot;
        // Each offset is read once: the peer may change it at any time.
        let places = offsets.iter().map(|offset| offset.load(Ordering::Relaxed));
        if len == 0 {
            for (page, offset) in (first..).zip(places).filter(|(_, offset)| range.at(*offset).is_none()) {
                leave_out(page, offset, failures, skipped);
            }
            return;
        }
        let slot_bytes = self.slot_bytes.wrapping_add(place as usize);
        let page_of = |bytes: *mut u8| first + (bytes.addr() - slot_bytes.addr()) / len as usize;
        let mut next = slot_bytes;
        let pages = places.filter_map(|offset| {
            let bytes = next;
            next = next.wrapping_add(len as usize);
            let region = range.at(offset);
            if region.is_none() {
                leave_out(page_of(bytes), offset, failures, skipped);
            }
            Some((bytes, region?))
        });
        match range.location {
            MemoryLocation::Gpu(ordinal, reach) => gpu_copies.extend(pages.map(|(bytes, region)| {
                let page = page_of(bytes);
                GpuCopy { page, group: first, bytes, region, len, gpu: (ordinal, reach) }
            })),
            // SAFETY: `accesses` keeps the region, in whose bounds `range` is; the caller has checked that the pages
            // are in the slot. The peer may write to the slot meanwhile: that corrupts only its own bytes.
            MemoryLocation::Host => unsafe {
                let ends = pages.map(|(bytes, region)| self.kind.copy_ends(bytes, region));
                copy::copy_each(CopyStrategy::Plain, ends, len as usize);
            },
        }
    }

    /// Lets pages fail.
    fn refuse(&mut self, pages: Range<usize>, kind: ErrorKind) {
        self.slot.pages = self.slot.pages.max(pages.end);
        self.slot.failures.extend(pages.map(|page| (page, kind)));
    }
}

/// Leaves out a page that the initiator has skipped, or whose offset is out of bounds.
#[cold]
fn leave_out(page: usize, offset: u64, failures: &mut Vec<(usize, ErrorKind)>, skipped: &mut Vec<usize>) {
    match offset {
        SKIPPED => skipped.push(page),
        _ => failures.push((page, ErrorKind::RemoteAccess)),
    }
}
