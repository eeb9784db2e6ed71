//! A slot of the initiator: what it carries, and the step that it is busy with.

use std::ops::Range;

use multirail_spi::staging::WorkFailure;

use crate::copies::CopyStart;
use crate::page_table::table_len;
use crate::run_queue::Segment;
use crate::wr_id::staging_status;

/// The state of one slot.
#[derive(Default)]
pub(crate) struct InitiatorSlot {
    pub step: InitiatorStep,
    /// What the slot carries: some bytes of a work request, or pages of one or several runs.
    pub segments: Vec<Segment>,
    /// The number of pages of all segments.
    pub pages: usize,
    /// The failures of single pages, by their number in the slot. Usually there are none.
    pub page_failures: Vec<(usize, WorkFailure)>,
    /// The imm that is delivered after the bytes of a slot with one page.
    pub imm: Option<u32>,
    /// The number of pages whose copies have begun, or that need none in the current step.
    pub begun: usize,
    /// The number of copies that are under way.
    pub copying: usize,
    /// Whether the bytes are copied into the slot before the transfer.
    pub is_copied_in: bool,
    /// The sequence number of the slot's latest slot request.
    pub sequence: u32,
    /// Bytes of the slot that the slot request carries.
    pub carried: u64,
    /// Whether the bytes of a read have arrived with an imm that stands for the response.
    pub is_answered: bool,
    /// Whether the RDMA write of the slot request is posted and has not completed.
    pub is_write_posted: bool,
    /// Whether the RDMA write of the slot request has failed once: the slot request may have arrived nevertheless.
    pub may_have_arrived: bool,
    /// Whether the slot request has to be written again. The target serves a sequence number only once.
    pub must_repeat: bool,
}

/// What a slot is busy with.
#[derive(Default, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InitiatorStep {
    #[default]
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

impl InitiatorSlot {
    /// Notes that copies of these pages have begun. Returns false if there was no room for them.
    pub(crate) fn note_started(&mut self, started: CopyStart, pages: Range<usize>) -> bool {
        self.begun = pages.end;
        match started {
            CopyStart::Complete(Ok(())) => {}
            CopyStart::Complete(Err(kind)) => {
                let failed = WorkFailure::from(staging_status(kind));
                self.page_failures.extend(pages.map(|page| (page, failed)));
            }
            CopyStart::UnderWay => self.copying += 1,
            CopyStart::NoRoom => {
                self.begun = pages.start;
                return false;
            }
        }
        true
    }

    /// Whether the slot has a page table.
    #[inline]
    pub(crate) fn has_table(&self) -> bool {
        self.pages > 1
    }

    /// The offset in the slot of the first page.
    #[inline]
    pub(crate) fn first_offset(&self) -> u64 {
        if self.has_table() { table_len(self.table_words()) } else { 0 }
    }

    /// Words of the page table.
    pub(crate) fn table_words(&self) -> usize {
        self.segments.iter().map(Segment::table_words).sum()
    }

    /// Bytes of all pages.
    pub(crate) fn bytes(&self) -> u64 {
        self.segments.iter().map(|segment| segment.content.len).sum()
    }

    /// Notes the failure of a page. The first one counts.
    pub(crate) fn fail_page(&mut self, page: usize, failure: WorkFailure) {
        if !self.has_failed(page) {
            self.page_failures.push((page, failure));
        }
    }

    /// Whether a page has a failure of its own.
    #[inline]
    pub(crate) fn has_failed(&self, page: usize) -> bool {
        self.page_failures.iter().any(|(failed, _)| *failed == page)
    }
}
