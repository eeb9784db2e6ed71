//! Requests that a GPU carries out: to, from or between memory of GPUs.
//!
//! A request joins the open batch of its GPU, and ends once the batch has landed: its bytes are visible to every
//! GPU and to the host then, and only then its imm goes out. A batch holds the leases of the regions it
//! touches. Batches cannot be called back: whoever takes a region or a peer away waits for those on their way,
//! 128 MiB each at most.
//!
//! `lane` is one GPU's batches, `message` what goes by way of the host, `share` how processes hand memory to each
//! other.

mod lane;
pub(crate) mod message;
#[cfg(target_os = "linux")]
pub(crate) mod share;

use transport_core::spi::{Piece, WorkKind, WorkRequest};
use transport_core::{ErrorKind, MemoryKind, Result};

use crate::attached::Attached;
use crate::ended::Ended;
use crate::region::{Local, Regions};
use crate::remote::{Import, Place};
use lane::GpuLane;

/// A bit of local keys: the processor cannot follow the region's addresses.
pub(crate) const FAR: u64 = 1 << 31;

/// Which GPU copies what goes from one to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum GpuSide {
    /// The one that receives: the faster of the two over NVLink. Where it is another process's, this process
    /// takes some 500 MiB of its memory for a context there, and its copies and that process's kernels take
    /// turns.
    #[default]
    Receiver,
    /// The one that has the bytes.
    Sender,
}

impl std::str::FromStr for GpuSide {
    type Err = transport_core::Error;

    /// `receiver` or nothing, `sender`.
    fn from_str(text: &str) -> Result<Self> {
        match text.trim() {
            "" | "receiver" => Ok(Self::Receiver),
            "sender" => Ok(Self::Sender),
            other => {
                let context = format!("{other:?} does not say which GPU copies: give receiver or sender");
                Err(transport_core::Error::new(ErrorKind::InvalidRequest, "configure loopback", context))
            }
        }
    }
}

/// How GPUs are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GpuConfig {
    /// Blocks of all kernels that run at once for a domain.
    pub(crate) blocks: u32,
    pub(crate) side: GpuSide,
}

/// Bytes that are copied at once, in the calling thread: the copy takes little longer than its 7 µs for one
/// byte (H200), and handing it to the worker would cost as much again.
pub(crate) const AT_ONCE: u64 = 64 << 10;

/// Copies a small request's bytes in the calling thread; `None` if it is to be posted.
///
/// # Safety
/// `request.len` bytes are valid at its local end and at `remote`; one of them is a GPU's.
#[cold]
#[inline(never)]
pub(crate) unsafe fn copy_now(request: &WorkRequest, remote: u64) -> Option<Result<(), ErrorKind>> {
    if request.len > AT_ONCE {
        return None;
    }
    let local = request.local as u64;
    let (to, from) = if request.kind == WorkKind::Read { (local, remote) } else { (remote, local) };
    // By the GPU that has the bytes: its copy takes 7 µs, and that of the other one 10.
    let device = cuda::Device::of_address(from).or_else(|| cuda::Device::of_address(to))?;
    // SAFETY: by the caller.
    let copied = unsafe { device.copy(to, from, request.len) };
    Some(copied.map_err(|why| {
        tracing::error!(%why, gpu = device.ordinal(), "loopback: a GPU's copy failed");
        why.kind()
    }))
}

/// One end of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Gpu(u32),
    Host(cuda::Reach),
}

/// The way of requests between two regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Way {
    rkey: u64,
    lkey: u64,
    kind: WorkKind,
    lane: usize,
    reach: cuda::Reach,
    /// Both regions are the lane's GPU's.
    within: bool,
    /// Address and length of the peer's region.
    base: u64,
    len: u64,
}

impl Way {
    /// Whether a request goes that way.
    #[inline]
    fn is_of(&self, request: &WorkRequest) -> bool {
        (self.rkey, self.lkey, self.kind) == (request.rkey, request.lkey, request.kind)
    }
}

/// An endpoint's GPUs; none until a request needs one.
pub(crate) struct Gpus {
    config: GpuConfig,
    lanes: Vec<GpuLane>,
    last: Option<Way>,
}

impl Gpus {
    pub(crate) fn new(config: GpuConfig) -> Self {
        Self { config, lanes: Vec::new(), last: None }
    }

    /// Takes a request that was checked against its import, whose lease is held: `false` if there is no room
    /// now.
    #[cold]
    pub(crate) fn push(
        &mut self,
        regions: &Regions,
        import: &std::sync::Arc<Import>,
        request: &WorkRequest,
    ) -> Result<bool, ErrorKind> {
        let way = self.way(regions, import, request)?;
        let lane = &mut self.lanes[way.lane];
        if lane.room() == 0 {
            return Ok(false);
        }
        lane.begin(import)?;
        if self.last != Some(way) {
            lane.turn_to(way.within);
        }
        let piece = Piece { local: request.local, remote: request.remote, len: request.len };
        // SAFETY: the import was checked for the range, and the batch holds its lease; the local span is valid
        // by the contract of `post`.
        unsafe { lane.add(request, ends(&way, &piece), way.reach) };
        self.last = Some(way);
        Ok(true)
    }

    /// Takes as many of `pieces` as follow the last request without another look-up, and says how many.
    #[inline]
    pub(crate) fn follow(
        &mut self,
        import: &Import,
        template: &WorkRequest,
        first: u64,
        pieces: &[Piece],
    ) -> usize {
        let Some(way) = self.last else { return 0 };
        let lane = &mut self.lanes[way.lane];
        let follows = way.is_of(template) && import.rkey == way.rkey && template.imm.is_none();
        if !follows || !lane.is_begun(import) {
            return 0;
        }
        let holds =
            |piece: &Piece| piece.len > 0 && piece.remote <= way.len && piece.len <= way.len - piece.remote;
        let room = lane.room().min(pieces.len());
        let mut taken = 0;
        let following = pieces[..room].iter().take_while(|piece| holds(piece)).inspect(|_| taken += 1);
        // SAFETY: as in `push`.
        unsafe { lane.add_next(following.map(|piece| ends(&way, piece)), way.reach) };
        lane.follow(first, taken as u32);
        taken
    }

    /// The way between the request's regions, as the last request went or anew.
    fn way(&mut self, regions: &Regions, import: &Import, request: &WorkRequest) -> Result<Way, ErrorKind> {
        if let Some(way) = self.last.filter(|way| way.is_of(request)) {
            return Ok(way);
        }
        let (base, there) = match import.place {
            Place::Gpu { base, ordinal } => (base, Side::Gpu(ordinal)),
            Place::Here(start) => {
                let base = start.as_ptr() as u64;
                (base, Side::Host(cuda::host_reach(base)))
            }
            // Neither the kernel's way to another process's memory nor a stage ends on a GPU.
            _ => return Err(ErrorKind::Unsupported),
        };
        let here = match regions.local(request.lkey).ok_or(ErrorKind::InvalidRequest)? {
            Local { kind: MemoryKind::Cuda { device }, .. } => Side::Gpu(device),
            Local { start, .. } => Side::Host(cuda::host_reach(start)),
        };
        let (from, to) = if request.kind == WorkKind::Read { (there, here) } else { (here, there) };
        let (first, second) = match self.config.side {
            GpuSide::Receiver => (to, from),
            GpuSide::Sender => (from, to),
        };
        let (ordinal, other) = match (first, second) {
            (Side::Gpu(ordinal), other) | (other, Side::Gpu(ordinal)) => (ordinal, other),
            _ => return Err(ErrorKind::InvalidRequest),
        };
        let lane = self.lane(ordinal)?;
        let reach = match other {
            Side::Host(reach) => reach,
            Side::Gpu(other) => self.lanes[lane].reach(other)?,
        };
        let within = other == Side::Gpu(ordinal);
        let &WorkRequest { rkey, lkey, kind, .. } = request;
        Ok(Way { rkey, lkey, kind, lane, reach, within, base, len: import.len })
    }

    /// The place of a GPU's lane, which is opened at its first use.
    fn lane(&mut self, ordinal: u32) -> Result<usize, ErrorKind> {
        if let Some(at) = self.lanes.iter().position(|lane| lane.ordinal() == ordinal) {
            return Ok(at);
        }
        let opened =
            cuda::Device::open(ordinal).and_then(|device| GpuLane::open(&device, self.config.blocks));
        let lane = opened.map_err(|why| {
            tracing::warn!(%why, gpu = ordinal, "loopback: no copies on this GPU");
            why.kind()
        })?;
        self.lanes.push(lane);
        Ok(self.lanes.len() - 1)
    }

    /// Requests that were taken and have not ended.
    #[inline]
    pub(crate) fn requests(&self) -> usize {
        self.lanes.iter().map(GpuLane::requests).sum()
    }

    /// Whether requests to a peer are among them.
    pub(crate) fn serves(&self, peer: transport_core::spi::PeerSlot) -> bool {
        self.lanes.iter().any(|lane| lane.serves(peer))
    }

    /// After a batch was posted: starts what is worth it.
    #[inline]
    pub(crate) fn posted(&mut self, ended: &mut Ended) {
        for lane in &mut self.lanes {
            lane.launch_if_due(ended);
        }
    }

    /// Files what has landed, and starts what nothing more joins.
    #[inline]
    pub(crate) fn advance(&mut self, peers: &mut [Option<Attached>], ended: &mut Ended) {
        for lane in &mut self.lanes {
            if let Some(peer) = lane.advance(ended)
                && let Some(Some(peer)) = peers.get_mut(peer.0 as usize)
            {
                peer.starved = Some(WorkKind::Write);
            }
        }
    }
}

/// Where a piece goes, where it comes from, and its bytes.
#[inline(always)]
fn ends(way: &Way, piece: &Piece) -> (u64, u64, u64) {
    let (local, remote) = (piece.local as u64, way.base + piece.remote);
    match way.kind {
        WorkKind::Read => (local, remote, piece.len),
        _ => (remote, local, piece.len),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_the_environment() {
        assert_eq!("".parse::<GpuSide>().unwrap(), GpuSide::Receiver);
        assert_eq!(" sender ".parse::<GpuSide>().unwrap(), GpuSide::Sender);
        let refused = "both".parse::<GpuSide>().unwrap_err();
        assert!(refused.context().contains("receiver or sender"), "{refused}");
    }
}
