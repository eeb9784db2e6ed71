//! The target of a connection: it serves the peer's slot requests.

use std::sync::Arc;

use multirail_spi::staging::{SlotRequest, SlotRequestKind};
use multirail_spi::{ErrorKind, Event, Status};

use crate::connection::{Connection, EndpointContext, Fence};
use crate::copies::CopyTag;
use crate::page_table::{MAX_PAGES, Page, PlacedPages, table_len};
use crate::region::PeerAccess;
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
    /// The pages of the request. A request without a page table has one.
    pages: Vec<TargetPage>,
    /// The number of pages whose copies have begun, or that need none.
    begun: usize,
    /// The number of copies that are under way.
    copying: usize,
    /// Whether the bytes of a read carry an imm, which stands for the response.
    announces_data: bool,
    /// Words of the response.
    response_words: usize,
    /// Whether the internal work request of the current step has failed, so that the next poll posts it again. The
    /// failure may not be its own: the abort of another work request can fail it, too.
    must_send_again: bool,
}

/// A page of a slot request.
struct TargetPage {
    page: Page,
    /// The offset of its bytes in the slot.
    slot_offset: u64,
    /// The right to access the region, from the check of the page until its copy has completed.
    access: Option<PeerAccess>,
    result: Result<(), ErrorKind>,
}

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
                TargetStep::Copying if slot.begun < slot.pages.len() => self.begin_copies(index, context),
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
                for page in &mut slot.pages[slot.begun..] {
                    (page.access, page.result) = (None, Err(ErrorKind::Io));
                }
                slot.begun = slot.pages.len();
            }
            if slot.step != TargetStep::Copying || slot.copying == 0 {
                (slot.step, slot.must_send_again) = (TargetStep::Idle, false);
            }
        }
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
        let page = &mut slot.pages[page];
        (page.access, page.result) = (None, result);
        if slot.copying == 0 && slot.begun == slot.pages.len() {
            self.finish_request(index, context);
        }
    }

    /// Continues with a slot whose bytes are in their regions (write) or in the slot (read), or which has no bytes:
    /// reports the imms, and responds. For a read, the response follows the bytes, or their imm stands for it.
    fn finish_request(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let slot = &self.slots[index];
        let Some(NumberedRequest { request, .. }) = slot.request else { return };
        let has_data = slot.pages.iter().any(|page| page.result.is_ok() && page.page.len > 0);
        if request.kind == SlotRequestKind::Read && has_data {
            return self.send_data(index, context);
        }
        if matches!(request.kind, SlotRequestKind::Write | SlotRequestKind::Imm) {
            let arrived = slot.pages.iter().filter(|page| page.result.is_ok() && !page.page.is_skipped);
            let imms = arrived.filter_map(|page| page.page.imm);
            context.events.extend(imms.map(|imm| Event::Imm { peer: self.connection.peer, imm }));
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
        *context.made_progress = true;
        (slot.sequence, slot.request, slot.begun) = (numbered.sequence, Some(numbered), 0);
        slot.announced = None;
        slot.pages.clear();
        match numbered.request.kind {
            SlotRequestKind::Cancel => return self.respond(index, context),
            SlotRequestKind::Imm => {
                *context.needs_flush = true;
                let page = Page { imm: numbered.imm, ..Page::default() };
                slot.pages.push(TargetPage { page, slot_offset: 0, access: None, result: Ok(()) });
                slot.begun = 1;
                return self.finish_request(index, context);
            }
            SlotRequestKind::Write | SlotRequestKind::Read => {}
        }
        self.take_pages(index, numbered);
        self.check_pages(index, numbered.request.kind, context);
        self.begin_copies(index, context);
    }

    /// Reads the pages of a slot request, once: the peer may change its table at any time.
    fn take_pages(&mut self, index: usize, numbered: NumberedRequest) {
        let NumberedRequest { request, imm, pages, .. } = numbered;
        let slot = &mut self.slots[index];
        if pages == 0 {
            let page =
                Page { key: request.key, offset: request.offset, len: request.len, imm, is_skipped: false };
            let result = if page.len <= SLOT_LEN as u64 { Ok(()) } else { Err(ErrorKind::RemoteAccess) };
            return slot.pages.push(TargetPage { page, slot_offset: 0, access: None, result });
        }
        let count = usize::from(pages).min(MAX_PAGES);
        let mut places = PlacedPages::behind_table(count);
        for number in 0..count {
            let page = self.connection.buffer.page(index, number);
            let place = places.place(page.len).filter(|_| usize::from(pages) <= MAX_PAGES);
            let (slot_offset, result) =
                place.map_or((0, Err(ErrorKind::RemoteAccess)), |place| (place, Ok(())));
            slot.pages.push(TargetPage { page, slot_offset, access: None, result });
        }
    }

    /// Asks the regions for access to each page.
    fn check_pages(&mut self, index: usize, kind: SlotRequestKind, context: &mut EndpointContext<'_>) {
        let regions = context.regions.lookup();
        for page in self.slots[index].pages.iter_mut().filter(|page| page.result.is_ok()) {
            let Page { key, offset, len, is_skipped, .. } = page.page;
            if is_skipped {
                continue;
            }
            match regions.begin_access(&SlotRequest { kind, key, offset, len }) {
                Ok(access) => page.access = Some(access).filter(|_| len > 0),
                Err(kind) => page.result = Err(kind),
            }
        }
    }

    /// Begins the copies between the slot and the regions, as far as there is room.
    fn begin_copies(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let slot = &mut self.slots[index];
        let Some(NumberedRequest { request, .. }) = slot.request else { return };
        slot.step = TargetStep::Copying;
        let (peer, buffer) = (self.connection.peer, &self.connection.buffer);
        while let Some(TargetPage { page, slot_offset, access, .. }) = slot.pages.get(slot.begun) {
            if let Some(access) = access {
                let bytes = buffer.target_slot(index).wrapping_add(*slot_offset as usize);
                let (to, from) = request.copy_ends(bytes, access.start);
                let tag = CopyTag::Target { peer, slot: index, page: slot.begun };
                // SAFETY: `access` keeps the region, whose range was checked, until the copy has completed; `len` bytes
                // fit the slot, and the buffer stays until no copy is under way. The peer may write to the slot
                // meanwhile: that corrupts only its own bytes.
                if !unsafe {
                    context.copies.begin(access.location(), Some(buffer), (to, from, page.len), tag)
                } {
                    return;
                }
                slot.copying += 1;
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
        let read = slot.pages.iter().filter(|page| page.result.is_ok());
        let end = read.map(|page| page.slot_offset + page.page.len).max().unwrap_or_default();
        let has_table = slot.request.is_some_and(|numbered| numbered.pages > 0);
        let start = if has_table { table_len(slot.pages.len()).min(end) } else { 0 };
        let buffer = &self.connection.buffer;
        let id = InternalWrId { role: WrRole::TargetData, peer: self.connection.peer, slot: index };
        let local = buffer.target_slot(index).wrapping_add(start as usize);
        let to = remote.initiator_slot(index) + start;
        let mut internal = id.write(local, buffer.lkey(), end - start, to, remote.rkey);
        slot.announces_data = remote.uses_imms && slot.pages.iter().all(|page| page.result.is_ok());
        if slot.announces_data {
            internal.imm = Some(SlotImm::new(SlotImmKind::Data, index, slot.sequence).encode());
        }
        context.outbox.push_back(internal);
        slot.step = TargetStep::SendingData;
    }

    fn respond(&mut self, index: usize, context: &mut EndpointContext<'_>) {
        let slot = &mut self.slots[index];
        let (words, sent) = encode_response(slot.sequence, slot.pages.iter().map(|page| page.result));
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
