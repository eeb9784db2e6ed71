//! What an operation does, and the memory that must outlive it.

use std::sync::Arc;

use crate::plan::Shape;
use crate::region::RegionInner;
use crate::remote::RemoteInner;
use crate::spi::WorkKind;
use crate::{ImmMode, Locality};

/// What an operation does, and the memory that must outlive it.
#[derive(Clone)]
pub(crate) struct Work {
    pub kind: WorkKind,
    pub shape: Shape,
    /// `None` only for an imm without bytes, and for a warm-up.
    pub local: Option<Arc<RegionInner>>,
    /// `None` for sends, for an imm without bytes, and for a warm-up.
    pub remote: Option<Arc<RemoteInner>>,
    pub imm: Option<u32>,
    pub imm_mode: ImmMode,
    pub locality: Locality,
}

impl Work {
    /// Whether it is one request that is not split over rails: an imm alone, or a message.
    pub fn is_whole(&self) -> bool {
        self.shape.is_empty() || self.kind == WorkKind::Send
    }

    /// The imm that goes with every piece (`PerWr`), or with the only one there is.
    #[inline]
    pub fn imm_of_pieces(&self) -> Option<u32> {
        let alone = self.shape.items() == 1;
        match self.imm_mode {
            ImmMode::Last if !alone => None,
            _ => self.imm,
        }
    }

    /// Whether a request of its own delivers the imm once all bytes are there.
    pub fn imm_comes_last(&self) -> bool {
        self.imm.is_some() && self.imm_of_pieces().is_none()
    }
}
