//! Requests that a GPU carries out: to, from or between memory of GPUs.
//!
//! A request joins the open batch of its GPU, and ends once the batch has landed: its bytes are visible to every
//! GPU and to the host then, and only then its imm goes out. A batch holds the leases of the regions it
//! touches. Batches cannot be called back: whoever takes a region or a peer away waits for those on their way,
//! 128 MiB each at most.
//!
//! `config` is how GPUs are used, `way` who copies between two regions, `lane` one GPU's batches, `late` the
//! imms that wait for room in their peers' lanes, `message` what goes by way of the host, `share` how processes
//! hand memory to each other.

mod config;
mod lane;
mod late;
pub(crate) mod message;
#[cfg(target_os = "linux")]
pub(crate) mod share;
mod way;

use std::sync::atomic::Ordering::Relaxed;

use multirail_spi::{ErrorKind, PeerSlot, Piece, WorkKind, WorkRequest};

use crate::ended::Ended;
use crate::region::Regions;
use crate::remote::Import;
pub(crate) use config::GpuConfig;
pub use config::GpuSide;
use lane::GpuLane;
use late::Late;
use way::{Route, Way, Ways};

/// A bit of local keys: the processor cannot follow the region's addresses.
pub(crate) const FAR: u64 = 1 << 31;

/// Bytes that are copied at once, in the calling thread: the copy takes little longer than its 7 µs for one
/// byte (H200), and handing it to the worker would cost as much again.
pub(crate) const AT_ONCE: u64 = 64 << 10;

/// Copies a small request's bytes in the calling thread; `None` if it is to be posted.
///
/// # Safety
/// `request.len` bytes are valid at its local end and at `remote`, in `import`; one of them is a GPU's.
#[cold]
#[inline(never)]
pub(crate) unsafe fn copy_now(
    request: &WorkRequest,
    import: &Import,
    remote: u64,
) -> Option<Result<(), ErrorKind>> {
    if request.len > AT_ONCE {
        return None;
    }
    let local = request.local as u64;
    let (to, from) = if request.kind == WorkKind::Read { (local, remote) } else { (remote, local) };
    // By the GPU that has the bytes: its copy takes 7 µs, and that of the other one 10.
    let owner = cuda::Device::of_address;
    let device = owner(from).or_else(|| owner(to))?;
    // Asking takes a microsecond, and keys are used once.
    let asked = &import.reached[usize::from(request.kind == WorkKind::Read)];
    if asked.load(Relaxed) != request.lkey {
        for end in [from, to] {
            if let Some(owner) = owner(end) {
                // Else whoever it is posted to finds another way, or says that there is none.
                cuda::Reach::of_gpu(&device, &owner, end, request.len)?;
            }
        }
        asked.store(request.lkey, Relaxed);
    }
    // SAFETY: by the caller.
    let copied = unsafe { device.copy(to, from, request.len) };
    Some(copied.map_err(|why| {
        tracing::error!(%why, gpu = device.ordinal(), "loopback: a GPU's copy failed");
        why.kind()
    }))
}

/// An endpoint's GPUs; none until a request needs one.
pub(crate) struct Gpus {
    config: GpuConfig,
    lanes: Vec<GpuLane>,
    late: Late,
    /// Of the last request that was taken, which had been checked for its kind against its import.
    last: Option<Way>,
    ways: Ways,
}

impl Gpus {
    pub(crate) fn new(config: GpuConfig) -> Self {
        Self { config, lanes: Vec::new(), late: Late::default(), last: None, ways: Ways::default() }
    }

    /// Takes a request: `false` if there is no room now.
    ///
    /// # Safety
    /// It was checked against its import, whose lease is held; the local span is valid by the contract of `post`.
    #[cold]
    pub(crate) unsafe fn push(
        &mut self,
        regions: &Regions,
        import: &std::sync::Arc<Import>,
        request: &WorkRequest,
    ) -> Result<bool, ErrorKind> {
        let way = self.way(regions, import, request)?;
        let has_imm = request.imm.is_some() && request.kind == WorkKind::Write;
        if has_imm && (!crate::lane::has_room(import.target.layout()) || self.late.has(import.target.peer)) {
            return Ok(false);
        }
        let lane = &mut self.lanes[way.lane];
        if lane.room() == 0 {
            return Ok(false);
        }
        lane.begin(import)?;
        if self.last != Some(way) {
            lane.turn_to(way.within);
        }
        let piece = Piece { local: request.local, remote: request.remote, len: request.len };
        // SAFETY: by the caller, and the batch holds the import's lease.
        unsafe { lane.add(request, way.ends(&piece), way.reach) };
        self.last = Some(way);
        Ok(true)
    }

    /// Takes as many of `pieces` as go the way of the last request, and says how many: none if the template's do not.
    ///
    /// # Safety
    /// The template names an import of its peer's; the local spans are valid by the contract of `post`.
    // A function of its own has registers for all that its loop needs.
    #[inline(never)]
    pub(crate) unsafe fn follow(&mut self, template: &WorkRequest, first: u64, pieces: &[Piece]) -> usize {
        let Some(way) = self.last else { return 0 };
        let lane = &mut self.lanes[way.lane];
        if !way.is_of(template) || template.imm.is_some() || !lane.is_begun(template.rkey) {
            return 0;
        }
        let room = lane.room().min(pieces.len());
        let taken = pieces[..room].iter().take_while(|piece| way.holds(piece)).count();
        // SAFETY: the way is that of a request of this kind between these regions, whose rights were checked; the
        // region has these pieces, and the open batch its lease; the rest by the caller.
        unsafe { lane.add_next(pieces[..taken].iter().map(|piece| way.ends(piece)), way.reach) };
        lane.follow(first, taken as u32);
        taken
    }

    /// The way between the request's regions, as the last request went, as one before did, or anew.
    fn way(&mut self, regions: &Regions, import: &Import, request: &WorkRequest) -> Result<Way, ErrorKind> {
        if let Some(way) = self.last.filter(|way| way.is_of(request)) {
            return Ok(way);
        }
        if let Some(way) = self.ways.find(request) {
            return way.ok_or(ErrorKind::Unsupported);
        }
        let way = match Route::find(self.config.side, regions, import, request)? {
            Some(route) => {
                let lane = self.lane(route.ordinal)?;
                Some(route.by(lane))
            }
            None => None,
        };
        self.ways.keep(request, way);
        way.ok_or(ErrorKind::Unsupported)
    }

    /// The place of a GPU's lane, which is opened at its first use.
    fn lane(&mut self, ordinal: u32) -> Result<usize, ErrorKind> {
        if let Some(at) = self.lanes.iter().position(|lane| lane.ordinal() == ordinal) {
            return Ok(at);
        }
        let open =
            |device: cuda::Device| GpuLane::open(&device, self.config.blocks_of_group(device.processors()));
        let opened = cuda::Device::open(ordinal).and_then(open);
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
        self.lanes.iter().map(GpuLane::requests).sum::<usize>() + self.late.requests()
    }

    /// Whether a GPU has nothing to do for us.
    pub(crate) fn is_idle(&self) -> bool {
        self.lanes.iter().all(|lane| lane.requests() == 0)
    }

    /// The peers that have no room for an imm.
    pub(crate) fn starved(&self) -> impl Iterator<Item = PeerSlot> {
        self.late.starved()
    }

    /// Has all that is posted to a peer end without it: what waits now, the rest when its bytes have landed.
    pub(crate) fn abort(&mut self, peer: PeerSlot, ended: &mut Ended) {
        self.lanes.iter_mut().for_each(|lane| lane.abort(peer));
        self.late.stop(peer, ErrorKind::Cancelled, ended);
    }

    /// Ends what waits for a peer and no GPU is at work for.
    pub(crate) fn stop(&mut self, peer: PeerSlot, kind: ErrorKind, ended: &mut Ended) {
        self.late.stop(peer, kind, ended);
    }

    /// The same for all peers.
    pub(crate) fn stop_all(&mut self, kind: ErrorKind, ended: &mut Ended) {
        self.late.stop_all(kind, ended);
    }

    /// Whether a GPU is at work on requests to a peer.
    pub(crate) fn serves(&self, peer: PeerSlot) -> bool {
        self.lanes.iter().any(|lane| lane.serves(peer))
    }

    /// After a batch was posted: starts what is worth it.
    #[inline]
    pub(crate) fn posted(&mut self, ended: &mut Ended) {
        for lane in &mut self.lanes {
            lane.launch_if_due(&mut self.late, ended);
        }
    }

    /// Files what has landed, and starts what nothing more joins.
    #[inline]
    pub(crate) fn advance(&mut self, ended: &mut Ended) {
        self.late.advance(ended);
        for lane in &mut self.lanes {
            lane.advance(&mut self.late, ended);
        }
    }
}
