//! What an operation does, and the memory that must outlive it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::index::TransportIndex;
use crate::plan::{RailRange, Shape};
use crate::region::RegionInner;
use crate::remote::RemoteInner;
use crate::spi::WorkKind;
use crate::{ImmMode, Locality};

/// What an operation does, and the memory that must outlive it.
#[derive(Clone)]
pub(crate) struct Work {
    pub kind: WorkKind,
    pub shape: Shape,
    /// The pieces of the shape that are this engine's; the others are with the engines of
    /// other rail groups.
    pub items: RailRange,
    /// Where there are others: passed once everyone's bytes are delivered.
    pub gate: Option<Arc<Gate>>,
    /// `None` only for an imm without bytes, and for a warm-up.
    pub local: Option<Arc<RegionInner>>,
    /// `None` for sends and for an imm without bytes, and for a warm-up.
    pub remote: Option<Arc<RemoteInner>>,
    pub imm: Option<u32>,
    pub imm_mode: ImmMode,
    pub locality: Locality,
    /// One end is memory that the processor cannot follow the address of: posting moves no bytes.
    pub far: bool,
}

impl Work {
    /// All of `shape`, without memory or imm: what is set beyond that is the caller's.
    pub fn of(kind: WorkKind, shape: Shape) -> Self {
        Self {
            kind,
            items: RailRange::all_of(&shape),
            shape,
            gate: None,
            local: None,
            remote: None,
            imm: None,
            imm_mode: ImmMode::Last,
            locality: Locality::Auto,
            far: false,
        }
    }

    /// Whether the local region, if there is one, is registered on rail `rail` of a transport.
    pub fn is_local_on(&self, transport: TransportIndex, rail: usize) -> bool {
        self.local.as_ref().is_none_or(|region| region.regions[transport][rail].is_some())
    }

    /// Whether the remote region, if there is one, is imported on rail `rail` of its transport.
    pub fn is_remote_on(&self, rail: usize) -> bool {
        self.remote.as_ref().is_none_or(|remote| remote.imports[rail].is_some())
    }

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

    /// Bytes of this engine's pieces.
    pub fn bytes(&self) -> u64 {
        self.shape.bytes_of(self.items.start..self.items.end)
    }
}

/// What the engines of one operation meet at: the last one sends the imm that announces
/// the bytes of all. One that fails never comes, and then nobody sends it.
pub(crate) struct Gate(AtomicU32);

impl Gate {
    /// A gate for `engines` engines.
    pub fn new(engines: u32) -> Self {
        Self(AtomicU32::new(engines))
    }

    /// This engine's bytes are delivered; whether it is the last.
    pub fn pass(&self) -> bool {
        // The imm follows the completions of all the others.
        self.0.fetch_sub(1, Ordering::AcqRel) == 1
    }
}
