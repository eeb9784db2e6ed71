//! A request with a staged side.

use std::sync::Arc;

use multirail_spi::{Status, WorkRequest};

use crate::region::Entry;

pub(super) struct Request {
    pub(super) work: WorkRequest,
    /// This side's region, where that is staged.
    pub(super) local: Option<Arc<Entry>>,
    /// The peer's is.
    pub(super) is_far: bool,
    /// Its imm goes as an ask: by the card it would be taken for a knock.
    pub(super) is_told: bool,
    /// Bytes that are in a slot, or were.
    pub(super) cut: u64,
    /// Slots that have not ended.
    pub(super) open: usize,
    pub(super) has_imm_left: bool,
    pub(super) failed: Option<End>,
}

/// How a request failed.
#[derive(Clone, Copy)]
pub(super) struct End {
    pub(super) status: Status,
    pub(super) is_doubted: bool,
}

impl Request {
    /// Whether the peer is asked about a slot with such an imm.
    pub(super) fn is_asked(&self, imm: Option<u32>) -> bool {
        self.is_far || (self.is_told && imm.is_some())
    }

    pub(super) fn fail(&mut self, end: End) {
        self.failed.get_or_insert(end);
        self.cut = self.work.len;
        self.has_imm_left = false;
    }

    pub(super) fn is_over(&self) -> bool {
        self.open == 0 && self.cut == self.work.len && !self.has_imm_left
    }
}
