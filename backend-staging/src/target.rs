//! The target of a connection: it serves the peer's slot requests.
//!
//! One pass over the pages of a slot request decodes each page, checks it, and copies it, if the processor copies. A run of
//! pages with the same key shares one access to the region. What the target keeps of each page is whether it failed.

use std::sync::Arc;

use multirail_spi::staging::SlotRequestKind;
use multirail_spi::{
    ErrorKind, Event, Status,
    copy::{self, CopyStrategy},
};

use crate::connection::{Connection, EndpointContext, Fence};
use crate::copies::{CopyStart, CopyTag, MemoryLocation};
use crate::page_table::{MAX_PAGES, Page, PlacedPages, table_len};
use crate::region::{PeerAccess, RegionName};
use crate::staging_buffer::{SLOT_COUNT, SLOT_LEN};
use crate::wire::{ImmSequence, NumberedRequest, SlotImm, SlotImmKind, encode_ask_again, encode_response};
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
    /// The sequence number of the slot request whose imm has come, since the last one was taken.
    announced: Option<ImmSequence>,
    /// The number of pages of the request. A request without a page table has one, a `Cancel` none.
    pages: usize,
    /// The pages that have failed, by their numbers. Usually there are none.
    failures: Vec<(usize, ErrorKind)>,
    /// The imms of the pages, by their numbers: reported once all pages have been copied.
    imms: Vec<(usize, u32)>,
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
    /// The first byte in the slot.
    bytes: *mut u8,
    /// The first byte in the region.
    region: *mut u8,
    len: u64,
    /// The right to access the region, until all copies have completed.
    access: Arc<PeerAccess>,
}

// SAFETY: `bytes` and `region` are addresses. The connection keeps the slot, and `access` the region.
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
        Self { connection, slots: (0..SLOT_COUNT).map(|_| TargetSlot::default()).collect() }
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
        for index in 0..SLOT_COUNT {
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
                for (slot, sequence) in self.slots.iter_mut().zip(served) {
                    (slot.sequence, slot.announced) = (*sequence, None);
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
        let latest = slot.announced.unwrap_or(ImmSequence::of(slot.sequence));
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
                slot.gpu_copies.clear();
                (slot.step, slot.must_send_again) = (TargetStep::Idle, false);
            }
        }
    }

    /// Continues with a slot of which a GPU has copied one page.
    pub(crate) fn on_copied(
        &mut self,
        (index, page): (usize, usize),
        result: Result<(), ErrorKind>,
        context: &mut EndpointContext<'_>,
    ) {
        let slot = &mut self.slots[index];
        slot.copying -= 1;
        slot.failures.extend(result.err().map(|kind| (page, kind)));
        if slot.copying == 0 && slot.begun == slot.gpu_copies.len() {
            self.finish_request(index, context);
        }
    }

    /// Continues with a slot whose bytes are in their regions (write) or in the slot (read), or which has no bytes:
    /// reports the imms, and responds. For a read, the response follows the bytes, or their imm stands for it.
    fn finish_request(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let slot = &mut self.slots[index];
        slot.gpu_copies.clear();
        let Some(NumberedRequest { request, .. }) = slot.request else { return };
        if request.kind == SlotRequestKind::Read && slot.data_end > 0 && slot.failures.len() < slot.pages {
            return self.send_data(index, context);
        }
        for (page, imm) in slot.imms.drain(..) {
            if request.kind != SlotRequestKind::Read
                && !slot.failures.iter().any(|(failed, _)| *failed == page)
            {
                context.events.push_back(Event::Imm { peer: self.connection.peer, imm });
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
        let request = self.connection.buffer.request_in(index, slot.sequence);
        let Some(numbered) = request.filter(|request| request.sequence != slot.sequence) else { return };
        if numbered.carries_bytes && slot.announced != Some(ImmSequence::of(numbered.sequence)) {
            return;
        }
        if !context.copies.take_room(numbered.request.len.min(SLOT_LEN as u64)) {
            return;
        }
        *context.made_progress = true;
        (slot.sequence, slot.request, slot.announced) = (numbered.sequence, Some(numbered), None);
        (slot.pages, slot.begun, slot.copying, slot.data_end) = (0, 0, 0, 0);
        slot.failures.clear();
        slot.imms.clear();
        slot.gpu_copies.clear();
        match numbered.request.kind {
            SlotRequestKind::Cancel => return self.respond(index, context),
            SlotRequestKind::Imm => {
                *context.needs_flush = true;
                slot.pages = 1;
                slot.imms.extend(numbered.imm.map(|imm| (0, imm)));
                return self.finish_request(index, context);
            }
            SlotRequestKind::Write | SlotRequestKind::Read => {}
        }
        self.serve_pages(index, numbered, context);
        self.begin_copies(index, context);
    }

    /// Checks and copies the pages of a slot request. Reads each of them once: the peer may change its table at any time.
    fn serve_pages(&mut self, index: usize, numbered: NumberedRequest, context: &EndpointContext<'_>) {
        let NumberedRequest { request, imm, pages, .. } = numbered;
        let slot = &mut self.slots[index];
        let buffer = &self.connection.buffer;
        let mut pass = PagePass { kind: request.kind, bytes: buffer.target_slot(index), region: None, slot };
        if pages == 0 {
            let page =
                Page { key: request.key, offset: request.offset, len: request.len, imm, is_skipped: false };
            return pass.serve(page, PlacedPages::without_table().place(page.len), context);
        }
        let count = usize::from(pages).min(MAX_PAGES);
        let mut places = PlacedPages::behind_table(count);
        for entry in buffer.table_in(index, count) {
            let page = Page::load(entry);
            let place = places.place(page.len).filter(|_| usize::from(pages) <= MAX_PAGES);
            pass.serve(page, place, context);
        }
    }

    /// Begins the copies of GPUs between the slot and the regions, as far as there is room.
    fn begin_copies(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let slot = &mut self.slots[index];
        let Some(NumberedRequest { request, .. }) = slot.request else { return };
        slot.step = TargetStep::Copying;
        let (peer, buffer) = (self.connection.peer, &self.connection.buffer);
        while let Some(GpuCopy { page, bytes, region, len, access }) = slot.gpu_copies.get(slot.begun) {
            let (to, from) = request.copy_ends(*bytes, *region);
            let tag = CopyTag::Target { peer, slot: index, page: *page };
            // SAFETY: `access` keeps the region, whose range was checked, until the copy has completed; `len` bytes fit the
            // slot, and the buffer stays until no copy is under way. The peer may write to the slot meanwhile: that
            // corrupts only its own bytes.
            match unsafe { context.copies.begin(access.location(), Some(buffer), (to, from, *len), tag) } {
                CopyStart::Complete(result) => slot.failures.extend(result.err().map(|kind| (*page, kind))),
                CopyStart::UnderWay => slot.copying += 1,
                CopyStart::NoRoom => return,
            }
            slot.begun += 1;
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
        let has_table = slot.request.is_some_and(|numbered| numbered.pages > 0);
        let start = if has_table { table_len(slot.pages).min(end) } else { 0 };
        let buffer = &self.connection.buffer;
        let id = InternalWrId { role: WrRole::TargetData, peer: self.connection.peer, slot: index };
        let local = buffer.target_slot(index).wrapping_add(start as usize);
        let to = remote.initiator_slot(index) + start;
        let mut internal = id.write(local, buffer.lkey(), end - start, to, remote.rkey);
        slot.announces_data = remote.uses_imms && slot.failures.is_empty();
        if slot.announces_data {
            internal.imm = Some(SlotImm::new(SlotImmKind::Data, index, slot.sequence).encode());
        }
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
        let (words, sent) = encode_response(slot.sequence, results[..count].iter().copied());
        self.connection.buffer.set_response(index, &words[..sent]);
        slot.response_words = sent;
        self.send_response(index, context);
    }

    /// Asks the initiator to ask again: the bytes of a read and their imm may have arrived or not. They must not be sent
    /// again, because the initiator uses the slot for something else once they have arrived.
    #[cold]
    fn ask_again(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let slot = &mut self.slots[index];
        self.connection.buffer.set_response(index, &[encode_ask_again(slot.sequence)]);
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

/// One pass over the pages of a slot request.
struct PagePass<'a> {
    kind: SlotRequestKind,
    /// The content of the slot.
    bytes: *mut u8,
    /// The region of the last page, and the right to access it.
    region: Option<(RegionName, Result<Arc<PeerAccess>, ErrorKind>)>,
    slot: &'a mut TargetSlot,
}

impl PagePass<'_> {
    /// Checks the next page, which has this place in the slot. Copies it, or leaves the copy to the region's GPU.
    #[inline]
    fn serve(&mut self, page: Page, place: Option<u64>, context: &EndpointContext<'_>) {
        let number = self.slot.pages;
        self.slot.pages += 1;
        if page.is_skipped {
            return;
        }
        if let Err(kind) = self.copy(number, page, place, context) {
            return self.slot.failures.push((number, kind));
        }
        if let Some(imm) = page.imm {
            self.slot.imms.push((number, imm));
        }
    }

    #[inline]
    fn copy(
        &mut self,
        number: usize,
        page: Page,
        place: Option<u64>,
        context: &EndpointContext<'_>,
    ) -> Result<(), ErrorKind> {
        let place = place.ok_or(ErrorKind::RemoteAccess)?;
        let (name, offset) = RegionName::of(page.key, page.offset);
        if self.region.as_ref().is_none_or(|(known, _)| *known != name) {
            self.region = Some((name, context.regions.begin_access(name, self.kind).map(Arc::new)));
        }
        let Some((_, access)) = &self.region else { return Err(ErrorKind::RemoteAccess) };
        let access = access.as_ref().map_err(|kind| *kind)?;
        let region = access.at(offset, page.len)?;
        if page.len == 0 {
            return Ok(());
        }
        let bytes = self.bytes.wrapping_add(place as usize);
        self.slot.data_end = place + page.len;
        if access.location() == MemoryLocation::Host {
            let (to, from) = match self.kind {
                SlotRequestKind::Read => (bytes, region.cast_const()),
                _ => (region, bytes.cast_const()),
            };
            // SAFETY: `access` keeps the region, whose range was checked; `len` bytes fit the slot. The peer may write to
            // the slot meanwhile: that corrupts only its own bytes.
            unsafe { copy::copy(CopyStrategy::Plain, to, from, page.len as usize) };
        } else {
            let access = Arc::clone(access);
            self.slot.gpu_copies.push(GpuCopy { page: number, bytes, region, len: page.len, access });
        }
        Ok(())
    }
}
