//! The way of requests between two regions: which GPU copies, and how it reaches both.

use std::collections::HashMap;

use cuda::{Device, Reach};
use multirail_spi::{ErrorKind, MemoryKind, Piece, Result, WorkKind, WorkRequest};

use super::GpuSide;
use crate::region::{Local, Regions};
use crate::remote::{Import, Place};

/// Ways that are remembered: pairs of regions between which requests alternate.
const MOST: usize = 4096;

/// One end of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Gpu { ordinal: u32, start: u64, len: u64 },
    Host(Reach),
}

/// Who copies between two regions.
pub(super) struct Route {
    /// The GPU that does.
    pub(super) ordinal: u32,
    way: Way,
}

/// The same, with the GPU's lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Way {
    rkey: u64,
    lkey: u64,
    kind: WorkKind,
    pub(super) lane: usize,
    pub(super) reach: Reach,
    /// Both regions are the lane's GPU's.
    pub(super) within: bool,
    /// Address and length of the peer's region.
    base: u64,
    len: u64,
}

/// Ways that were found, and where there is none. Keys are used once, so that nothing goes out of date.
#[derive(Default)]
pub(super) struct Ways(HashMap<(u64, u64, bool), Option<Way>>);

impl Ways {
    pub(super) fn find(&self, request: &WorkRequest) -> Option<Option<Way>> {
        self.0.get(&Self::key(request)).copied()
    }

    pub(super) fn keep(&mut self, request: &WorkRequest, way: Option<Way>) {
        if self.0.len() == MOST {
            self.0.clear();
        }
        self.0.insert(Self::key(request), way);
    }

    fn key(request: &WorkRequest) -> (u64, u64, bool) {
        (request.rkey, request.lkey, request.kind == WorkKind::Read)
    }
}

impl Route {
    /// Finds who copies between a request's regions: the GPU of the side that is preferred, or the other's
    /// where that one has no leave to use both. `None` where neither has.
    pub(super) fn find(
        preferred: GpuSide,
        regions: &Regions,
        import: &Import,
        request: &WorkRequest,
    ) -> Result<Option<Self>, ErrorKind> {
        let (base, there) = match import.place {
            Place::Gpu { base, ordinal } => (base, Side::Gpu { ordinal, start: base, len: import.len }),
            Place::Here(start) => {
                let base = start.as_ptr() as u64;
                (base, Side::Host(Reach::of_host(base, import.len)))
            }
            // Neither the kernel's way to another process's memory nor a stage ends on a GPU.
            _ => return Err(ErrorKind::Unsupported),
        };
        let here = match regions.local(request.lkey).ok_or(ErrorKind::InvalidRequest)? {
            Local { kind: MemoryKind::Cuda { device }, start, memory } => {
                Side::Gpu { ordinal: device, start, len: memory.len() as u64 }
            }
            Local { start, memory, .. } => Side::Host(Reach::of_host(start, memory.len() as u64)),
        };
        let (from, to) = if request.kind == WorkKind::Read { (there, here) } else { (here, there) };
        let sides = match preferred {
            GpuSide::Receiver => [(to, from), (from, to)],
            GpuSide::Sender => [(from, to), (to, from)],
        };
        let &WorkRequest { rkey, lkey, kind, .. } = request;
        for (side, other) in sides {
            let Side::Gpu { ordinal, .. } = side else { continue };
            let Some(reach) = reach(ordinal, [side, other])? else { continue };
            let within = matches!(other, Side::Gpu { ordinal: its, .. } if its == ordinal);
            let way = Way { rkey, lkey, kind, lane: 0, reach, within, base, len: import.len };
            return Ok(Some(Self { ordinal, way }));
        }
        tracing::error!(
            ?from,
            ?to,
            "loopback: no GPU has leave to use both regions: give it by cuMemSetAccess or cuMemPoolSetAccess"
        );
        Ok(None)
    }

    /// The way by that lane.
    pub(super) fn by(self, lane: usize) -> Way {
        Way { lane, ..self.way }
    }
}

/// How the GPU `ordinal` reaches both ends; `None` where it has no leave.
fn reach(ordinal: u32, ends: [Side; 2]) -> Result<Option<Reach>, ErrorKind> {
    let open = |ordinal| Device::open(ordinal).map_err(|why: multirail_spi::Error| why.kind());
    let device = open(ordinal)?;
    let mut worst = Reach::Kernel;
    for end in ends {
        let reach = match end {
            Side::Host(reach) => Some(reach),
            Side::Gpu { ordinal, start, len } => Reach::of_gpu(&device, &open(ordinal)?, start, len),
        };
        match reach {
            Some(Reach::Kernel) => {}
            Some(Reach::Driver) => worst = Reach::Driver,
            None => return Ok(None),
        }
    }
    Ok(Some(worst))
}

impl Way {
    /// Whether a request goes that way.
    #[inline]
    pub(super) fn is_of(&self, request: &WorkRequest) -> bool {
        (self.rkey, self.lkey, self.kind) == (request.rkey, request.lkey, request.kind)
    }

    /// Whether the peer's region has a piece that is not empty.
    #[inline(always)]
    pub(super) fn holds(&self, piece: &Piece) -> bool {
        // `len - 1` of an empty piece is the largest number, and fits nowhere.
        piece.remote <= self.len && piece.len.wrapping_sub(1) < self.len - piece.remote
    }

    /// Where a piece goes, where it comes from, and its bytes.
    #[inline(always)]
    pub(super) fn ends(&self, piece: &Piece) -> (u64, u64, u64) {
        let (local, remote) = (piece.local as u64, self.base + piece.remote);
        match self.kind {
            WorkKind::Read => (local, remote, piece.len),
            _ => (remote, local, piece.len),
        }
    }
}
