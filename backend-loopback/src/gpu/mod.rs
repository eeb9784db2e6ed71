//! Requests that a GPU carries out: to, from or between memory of GPUs.
//!
//! A request joins the open batch of its GPU, and completes with the batch. Then its bytes are visible to every GPU
//! and to the host, and its imm is sent. A batch keeps the leases of the regions that it uses. Batches
//! cannot be cancelled: a revoke or a disconnect waits for the batches that are under way, 128 MiB each at most.
//!
//! `config` says how GPUs are used, `copy_path` which GPU copies between two regions, `queue` has the batches of one
//! GPU, and `pending_imms` the imms that wait for room in a peer's message ring. Messages from and into GPU memory
//! are copied through host memory.

mod config;
mod copy_path;
mod pending_imms;
mod queue;

use std::sync::atomic::Ordering::Relaxed;

use multirail_spi::{ErrorKind, PeerSlot, Piece, ReceiveRequest, WorkKind, WorkRequest};

use crate::completions::CompletionQueue;
use crate::imports::Import;
use crate::outbound::Outbound;
use crate::regions::Regions;
use crate::segment::message_ring::{self, MAX_MESSAGE};
pub(crate) use config::GpuConfig;
pub use config::GpuSide;
use copy_path::{CopyPath, CopyPaths};
use pending_imms::PendingImms;
use queue::GpuQueue;

/// The most bytes that the calling thread has a GPU copy at once. Such a copy takes little longer than the 7 µs of a
/// copy of one byte (H200), and handing the request to the worker would take as long again.
pub(crate) const MAX_COPY_IN_CALLER: u64 = 64 << 10;

/// Copies the bytes of a small request in the calling thread. Returns `None` if the request must be posted.
///
/// # Safety
/// `request.len` bytes are valid at its local end and at `remote`, in `import`; at least one end is in GPU memory.
#[cold]
#[inline(never)]
pub(crate) unsafe fn copy_now(
    request: &WorkRequest,
    import: &Import,
    remote: u64,
) -> Option<Result<(), ErrorKind>> {
    if request.len > MAX_COPY_IN_CALLER {
        return None;
    }
    let local = request.local as u64;
    let (to, from) = if request.kind == WorkKind::Read { (local, remote) } else { (remote, local) };
    // The GPU that has the bytes is preferred: it copies in 7 µs, the other one in 10.
    let owner = cuda::Device::of_address;
    let device = owner(from).or_else(|| owner(to))?;
    // A query of CUDA takes a microsecond. A region's key is never used for another region, so the answer stays true.
    let reached = &import.gpu_reaches[usize::from(request.kind == WorkKind::Read)];
    if reached.load(Relaxed) != request.lkey {
        for end in [from, to] {
            if let Some(owner) = owner(end) {
                // If this GPU does not reach both ends, the worker finds another GPU, or reports that there is none.
                cuda::Reach::of_gpu(&device, &owner, end, request.len)?;
            }
        }
        reached.store(request.lkey, Relaxed);
    }
    // SAFETY: by the caller.
    let copied = unsafe { device.copy(to, from, request.len) };
    Some(copied.map_err(|why| {
        tracing::error!(%why, gpu = device.ordinal(), "loopback: a GPU's copy failed");
        why.kind()
    }))
}

/// The GPUs of an endpoint. A GPU is opened by the first request that needs it.
pub(crate) struct Gpus {
    config: GpuConfig,
    queues: Vec<GpuQueue>,
    pending_imms: PendingImms,
    /// The path of the last request. The import allows requests of its kind.
    last: Option<CopyPath>,
    paths: CopyPaths,
}

impl Gpus {
    pub(crate) fn new(config: GpuConfig) -> Self {
        Self {
            config,
            queues: Vec::new(),
            pending_imms: PendingImms::default(),
            last: None,
            paths: CopyPaths::default(),
        }
    }

    /// Adds a request. Returns false if there is no room now.
    ///
    /// # Safety
    /// The request was checked against its import, whose lease is held; the local span is valid by the contract of
    /// `post`.
    #[cold]
    pub(crate) unsafe fn push(
        &mut self,
        regions: &Regions,
        import: &std::sync::Arc<Import>,
        request: &WorkRequest,
    ) -> Result<bool, ErrorKind> {
        let path = self.path(regions, import, request)?;
        let has_imm = request.imm.is_some() && request.kind == WorkKind::Write;
        if has_imm
            && (!message_ring::has_room(import.target.layout()) || self.pending_imms.has(import.target.peer))
        {
            return Ok(false);
        }
        let queue = &mut self.queues[path.queue];
        if queue.room() == 0 {
            return Ok(false);
        }
        queue.enter(import)?;
        if self.last != Some(path) {
            queue.change_path(path.within);
        }
        let piece = Piece { local: request.local, remote: request.remote, len: request.len };
        // SAFETY: by the caller, and the batch holds the import's lease.
        unsafe { queue.add(request, path.ends(&piece), path.reach) };
        self.last = Some(path);
        Ok(true)
    }

    /// Adds as many of `pieces` as take the path of the last request, and returns how many. Returns 0 if the template
    /// has another path.
    ///
    /// # Safety
    /// The template names an import of its own peer; the local spans are valid by the contract of `post`.
    // Not inlined, so that the loop has all of its values in registers.
    #[inline(never)]
    pub(crate) unsafe fn push_pieces(
        &mut self,
        template: &WorkRequest,
        first: u64,
        pieces: &[Piece],
    ) -> usize {
        let Some(path) = self.last else { return 0 };
        let queue = &mut self.queues[path.queue];
        if !path.is_of(template) || template.imm.is_some() || !queue.has_entered_last(template.rkey) {
            return 0;
        }
        let room = queue.room().min(pieces.len());
        let taken = pieces[..room].iter().take_while(|piece| path.holds(piece)).count();
        // SAFETY: the path is that of a request of this kind between these regions, whose rights were checked; the
        // region has these pieces, and the open batch its lease; the rest by the caller.
        unsafe { queue.add_bytes(pieces[..taken].iter().map(|piece| path.ends(piece)), path.reach) };
        queue.add_ids(first, taken as u32);
        taken
    }

    /// The path between the request's regions: that of the last request, one that is remembered, or a new one.
    fn path(
        &mut self,
        regions: &Regions,
        import: &Import,
        request: &WorkRequest,
    ) -> Result<CopyPath, ErrorKind> {
        if let Some(path) = self.last.filter(|path| path.is_of(request)) {
            return Ok(path);
        }
        if let Some(path) = self.paths.find(request) {
            return path.ok_or(ErrorKind::Unsupported);
        }
        let path = match CopyPath::find(self.config.side, regions, import, request)? {
            Some((ordinal, mut path)) => {
                path.queue = self.queue(ordinal)?;
                Some(path)
            }
            None => None,
        };
        self.paths.keep(request, path);
        path.ok_or(ErrorKind::Unsupported)
    }

    /// The index of the queue of a GPU. The first use opens it.
    fn queue(&mut self, ordinal: u32) -> Result<usize, ErrorKind> {
        if let Some(at) = self.queues.iter().position(|queue| queue.ordinal() == ordinal) {
            return Ok(at);
        }
        let open =
            |device: cuda::Device| GpuQueue::open(&device, self.config.blocks_of_group(device.processors()));
        let opened = cuda::Device::open(ordinal).and_then(open);
        let queue = opened.map_err(|why| {
            tracing::warn!(%why, gpu = ordinal, "loopback: this GPU cannot be opened for copies");
            why.kind()
        })?;
        self.queues.push(queue);
        Ok(self.queues.len() - 1)
    }

    /// The number of requests that were added and are not completed.
    #[inline]
    pub(crate) fn requests(&self) -> usize {
        self.queues.iter().map(GpuQueue::requests).sum::<usize>() + self.pending_imms.requests()
    }

    /// Returns true if no GPU has a request of this endpoint.
    pub(crate) fn is_idle(&self) -> bool {
        self.queues.iter().all(|queue| queue.requests() == 0)
    }

    /// The peers for which imms wait, because their message rings have no room.
    pub(crate) fn blocked_peers(&self) -> impl Iterator<Item = PeerSlot> {
        self.pending_imms.blocked_peers()
    }

    /// From now on, no request to a peer waits for the peer. Requests with an imm that waits for room fail now.
    /// Requests in batches complete with their batches, and fail then if there is no room for their imms.
    pub(crate) fn abort(&mut self, peer: PeerSlot, completions: &mut CompletionQueue) {
        self.queues.iter_mut().for_each(|queue| queue.abort(peer));
        self.pending_imms.stop(peer, ErrorKind::Cancelled, completions);
    }

    /// Fails the requests to a peer that have an imm that waits for room. Requests that a GPU has are not affected.
    pub(crate) fn stop(&mut self, peer: PeerSlot, kind: ErrorKind, completions: &mut CompletionQueue) {
        self.pending_imms.stop(peer, kind, completions);
    }

    /// Does the same as [`Gpus::stop`] for all peers.
    pub(crate) fn stop_all(&mut self, kind: ErrorKind, completions: &mut CompletionQueue) {
        self.pending_imms.stop_all(kind, completions);
    }

    /// Returns true if a GPU has requests to a peer.
    pub(crate) fn has_requests_to(&self, peer: PeerSlot) -> bool {
        self.queues.iter().any(|queue| queue.has_requests_to(peer))
    }

    /// Launches the open batches that are large enough. The endpoint calls this after each post.
    #[inline]
    pub(crate) fn after_post(&mut self, completions: &mut CompletionQueue) {
        for queue in &mut self.queues {
            queue.launch_if_due(&mut self.pending_imms, completions);
        }
    }

    /// Completes the batches that are done, and launches the open batches to which nothing was added since the last
    /// call.
    #[inline]
    pub(crate) fn advance(&mut self, completions: &mut CompletionQueue) {
        self.pending_imms.advance(completions);
        for queue in &mut self.queues {
            queue.advance(&mut self.pending_imms, completions);
        }
    }
}

/// Sends a message from GPU memory: copies its bytes to host memory first. Returns `None` if the peer's message ring is
/// full.
#[cold]
pub(crate) fn send_message(
    regions: &Regions,
    outbound: &Outbound,
    request: &WorkRequest,
) -> Option<Result<(), ErrorKind>> {
    if request.len > MAX_MESSAGE as u64 {
        return Some(Err(ErrorKind::TooLarge));
    }
    let mut bytes = vec![0; request.len as usize];
    let Some(local) = regions.local(request.lkey) else { return Some(Err(ErrorKind::InvalidRequest)) };
    let at = (request.local as u64).wrapping_sub(local.start) as usize;
    match local.memory.load(at, &mut bytes) {
        Some(Ok(())) => {}
        Some(Err(why)) => return Some(Err(why.kind())),
        None => return Some(Err(ErrorKind::InvalidRequest)),
    }
    let request = WorkRequest { local: bytes.as_mut_ptr(), ..*request };
    // SAFETY: `bytes` has `len` bytes, and is this function's.
    unsafe { outbound.send(&request) }
}

/// Copies a message into the GPU memory of a receive.
#[cold]
pub(crate) fn store_message(
    regions: &Regions,
    receive: &ReceiveRequest,
    bytes: &[u8],
) -> Result<(), ErrorKind> {
    let local = regions.local(receive.lkey).ok_or(ErrorKind::InvalidRequest)?;
    let at = (receive.local as u64).wrapping_sub(local.start) as usize;
    let stored = local.memory.store(at, bytes).ok_or(ErrorKind::InvalidRequest)?;
    stored.map_err(|why| why.kind())
}
