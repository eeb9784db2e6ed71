//! The path of requests between two regions: which GPU copies, and how it reaches both.

use std::collections::HashMap;

use cuda::{Device, Reach};
use multirail_spi::{ErrorKind, MemoryKind, Piece, Result, WorkKind, WorkRequest};

use super::GpuSide;
use crate::imports::{Import, RegionLocation};
use crate::regions::{LocalMemory, Regions};

/// Paths that are remembered at most: pairs of regions between which requests alternate.
const MAX_PATHS: usize = 4096;

/// One end of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequestEnd {
    Gpu { ordinal: u32, start: u64, len: u64 },
    Host(Reach),
}

/// The GPU that copies between two regions, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CopyPath {
    rkey: u64,
    lkey: u64,
    kind: WorkKind,
    /// The index of the GPU's queue.
    pub(super) queue: usize,
    pub(super) reach: Reach,
    /// Both regions are in the memory of the GPU that copies.
    pub(super) within: bool,
    /// Address and length of the peer's region.
    base: u64,
    len: u64,
}

/// Paths that were found, and pairs of regions that have none. A key is never used for another region, so no entry
/// becomes wrong.
#[derive(Default)]
pub(super) struct CopyPaths(HashMap<(u64, u64, bool), Option<CopyPath>>);

impl CopyPaths {
    pub(super) fn find(&self, request: &WorkRequest) -> Option<Option<CopyPath>> {
        self.0.get(&Self::key(request)).copied()
    }

    pub(super) fn keep(&mut self, request: &WorkRequest, path: Option<CopyPath>) {
        if self.0.len() == MAX_PATHS {
            self.0.clear();
        }
        self.0.insert(Self::key(request), path);
    }

    fn key(request: &WorkRequest) -> (u64, u64, bool) {
        (request.rkey, request.lkey, request.kind == WorkKind::Read)
    }
}

impl CopyPath {
    /// Finds the GPU that copies between a request's regions, and the path. The caller sets the path's `queue`. The GPU
    /// is that of the preferred side, or the other side's if the preferred one may not access both regions. Returns
    /// `None` if neither may.
    pub(super) fn find(
        preferred: GpuSide,
        regions: &Regions,
        import: &Import,
        request: &WorkRequest,
    ) -> Result<Option<(u32, Self)>, ErrorKind> {
        let (base, remote) = match import.location {
            RegionLocation::Gpu { base, ordinal } => {
                (base, RequestEnd::Gpu { ordinal, start: base, len: import.len })
            }
            RegionLocation::Mapped(start) => {
                let base = start.as_ptr() as u64;
                (base, RequestEnd::Host(Reach::of_host(base, import.len)))
            }
            // A GPU does not reach foreign and staged memory.
            _ => return Err(ErrorKind::Unsupported),
        };
        let local = match regions.local(request.lkey).ok_or(ErrorKind::InvalidRequest)? {
            LocalMemory { kind: MemoryKind::Cuda { device }, start, memory } => {
                RequestEnd::Gpu { ordinal: device, start, len: memory.len() as u64 }
            }
            LocalMemory { start, memory, .. } => RequestEnd::Host(Reach::of_host(start, memory.len() as u64)),
        };
        let (from, to) = if request.kind == WorkKind::Read { (remote, local) } else { (local, remote) };
        let ends = match preferred {
            GpuSide::Receiver => [(to, from), (from, to)],
            GpuSide::Sender => [(from, to), (to, from)],
        };
        let &WorkRequest { rkey, lkey, kind, .. } = request;
        for (end, other) in ends {
            let RequestEnd::Gpu { ordinal, .. } = end else { continue };
            let Some(reach) = reach(ordinal, [end, other])? else { continue };
            let within = matches!(other, RequestEnd::Gpu { ordinal: its, .. } if its == ordinal);
            let path = Self { rkey, lkey, kind, queue: 0, reach, within, base, len: import.len };
            return Ok(Some((ordinal, path)));
        }
        tracing::error!(
            ?from,
            ?to,
            "loopback: no GPU may access both regions: allow it by cuMemSetAccess or cuMemPoolSetAccess"
        );
        Ok(None)
    }

    /// Returns true if a request takes this path.
    #[inline]
    pub(super) fn is_of(&self, request: &WorkRequest) -> bool {
        (self.rkey, self.lkey, self.kind) == (request.rkey, request.lkey, request.kind)
    }

    /// Returns true if a piece is not empty and lies in the peer's region.
    #[inline(always)]
    pub(super) fn holds(&self, piece: &Piece) -> bool {
        // For an empty piece, `len - 1` wraps around to the largest number, which no region holds.
        piece.remote <= self.len && piece.len.wrapping_sub(1) < self.len - piece.remote
    }

    /// The destination, the source and the length of a piece.
    #[inline(always)]
    pub(super) fn ends(&self, piece: &Piece) -> (u64, u64, u64) {
        let (local, remote) = (piece.local as u64, self.base + piece.remote);
        match self.kind {
            WorkKind::Read => (local, remote, piece.len),
            _ => (remote, local, piece.len),
        }
    }
}

/// How the GPU `ordinal` reaches both ends. `None` if it may not access one of them.
fn reach(ordinal: u32, ends: [RequestEnd; 2]) -> Result<Option<Reach>, ErrorKind> {
    let open = |ordinal| Device::open(ordinal).map_err(|why: multirail_spi::Error| why.kind());
    let device = open(ordinal)?;
    let mut worst = Reach::Kernel;
    for end in ends {
        let reach = match end {
            RequestEnd::Host(reach) => Some(reach),
            RequestEnd::Gpu { ordinal, start, len } => Reach::of_gpu(&device, &open(ordinal)?, start, len),
        };
        match reach {
            Some(Reach::Kernel) => {}
            Some(Reach::Driver) => worst = Reach::Driver,
            None => return Ok(None),
        }
    }
    Ok(Some(worst))
}
