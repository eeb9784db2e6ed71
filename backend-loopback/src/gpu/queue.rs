//! The batches of one GPU: one that is open, those under way, and their completion.

use std::sync::Arc;

use cuda::{CopyQueue, Reach};
use multirail_spi::{ErrorKind, PeerSlot, Result, WorkRequest};

use super::pending_imms::PendingImms;
use crate::completions::CompletionQueue;
use crate::imports::Import;
use crate::status::status;

/// For each batch that is under way, up to [`MAX_COUNTED`], the open batch waits until it has this many bytes more.
/// Every launch keeps the link idle for 2.5 µs and takes 3.6 µs of the worker's time, so batches must grow while
/// requests come faster than batches complete.
const BYTES_PER_BATCH: u64 = 16 << 20;
/// The number of batches under way from which on the open batch waits for no more bytes: for 32 MiB at most, which
/// the link carries in 90 µs.
const MAX_COUNTED: u64 = 2;
/// The same number for copies within one GPU. Its memory is five times as fast as the link.
const MAX_COUNTED_WITHIN: u64 = 4;
/// An open batch that is one growing piece waits for this many bytes: the copy engine reached 0.80 of NVLink's
/// bandwidth with pieces of 4 MiB, and 0.92 with 16 MiB.
const BYTES_OF_ONE_PIECE: u64 = 64 << 20;

/// The batches of one GPU of an endpoint.
pub(crate) struct GpuQueue {
    /// The batches under way. Dropped first: its drop waits for them, and they keep leases.
    under_way: CopyQueue<GpuBatch>,
    open: GpuBatch,
    /// Empty batches, for reuse.
    spare: Vec<GpuBatch>,
    /// Requests were added since the last `advance`.
    has_new: bool,
    /// The requests that were added last copy within the GPU.
    within: bool,
    lost: Option<ErrorKind>,
    requests: usize,
}

/// Requests that complete together.
#[derive(Default)]
struct GpuBatch {
    runs: Vec<IdRun>,
    /// The imports that the batch uses. The batch has entered their leases.
    entered: Vec<Arc<Import>>,
}

/// Requests with consecutive ids to one region. A request with an imm is a run of its own.
struct IdRun {
    first: u64,
    count: u32,
    imm: Option<u32>,
    /// The imm must not wait for room.
    aborted: bool,
    /// The index of the import in `entered`.
    import: usize,
}

impl GpuQueue {
    /// Opens a queue on `device`. Its kernels have `blocks` blocks together.
    pub(crate) fn open(device: &cuda::Device, blocks: u32) -> Result<Self> {
        Ok(Self {
            under_way: CopyQueue::new(device, blocks)?,
            open: GpuBatch::default(),
            spare: Vec::new(),
            has_new: false,
            within: false,
            lost: None,
            requests: 0,
        })
    }

    /// CUDA's ordinal of the GPU.
    pub(crate) fn ordinal(&self) -> u32 {
        self.under_way.copier().device().ordinal()
    }

    /// The number of requests that are not completed.
    #[inline]
    pub(crate) fn requests(&self) -> usize {
        self.requests
    }

    /// Returns true if a batch has requests to that peer.
    pub(crate) fn has_requests_to(&self, peer: PeerSlot) -> bool {
        let touches = |batch: &GpuBatch| batch.entered.iter().any(|import| import.target.peer == peer);
        touches(&self.open) || self.under_way.tags().any(touches)
    }

    /// From now on, no imm to that peer waits for room.
    pub(crate) fn abort(&mut self, peer: PeerSlot) {
        for batch in self.under_way.tags_mut().chain([&mut self.open]) {
            for run in &mut batch.runs {
                run.aborted |= batch.entered[run.import].target.peer == peer;
            }
        }
    }

    /// The number of requests that may be added before the next launch.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.under_way.copier().room()
    }

    /// The next requests go between other regions. `within` is true if both are in the GPU's own memory.
    pub(crate) fn change_path(&mut self, within: bool) {
        self.under_way.end_piece();
        self.within = within;
    }

    /// Returns true if the open batch entered the import with that rkey last. The batch then has its lease.
    #[inline]
    pub(crate) fn has_entered_last(&self, rkey: u64) -> bool {
        self.open.entered.last().is_some_and(|last| last.rkey == rkey)
    }

    /// Enters the import's lease for the open batch.
    pub(crate) fn enter(&mut self, import: &Arc<Import>) -> Result<(), ErrorKind> {
        if let Some(kind) = self.lost {
            return Err(kind);
        }
        if !self.has_entered_last(import.rkey) {
            import.enter()?;
            self.open.entered.push(Arc::clone(import));
        }
        Ok(())
    }

    /// Adds a request to the import that was entered last.
    ///
    /// # Safety
    /// As [`CopyQueue::add`], for `(to, from, len)`.
    pub(crate) unsafe fn add(&mut self, request: &WorkRequest, ends: (u64, u64, u64), reach: Reach) {
        // SAFETY: by the caller.
        unsafe { self.add_bytes(std::iter::once(ends), reach) };
        match request.imm {
            None => self.add_ids(request.id, 1),
            imm => self.add_run(request.id, 1, imm),
        }
    }

    /// Adds the bytes of requests. [`add_ids`](Self::add_ids) adds their ids afterwards.
    ///
    /// # Safety
    /// As [`add`](Self::add).
    #[inline]
    pub(crate) unsafe fn add_bytes(&mut self, ends: impl Iterator<Item = (u64, u64, u64)>, reach: Reach) {
        // SAFETY: by the caller.
        unsafe { self.under_way.add(ends, reach) };
    }

    /// Adds the ids of the bytes that were added last: `count` requests from `first` on, to the import that was entered
    /// last.
    #[inline]
    pub(crate) fn add_ids(&mut self, first: u64, count: u32) {
        if count == 0 {
            return;
        }
        let import = self.open.entered.len() - 1;
        if let Some(last) = self.open.runs.last_mut()
            && last.first.wrapping_add(u64::from(last.count)) == first
            && last.import == import
            && last.imm.is_none()
        {
            last.count += count;
            self.requests += count as usize;
            self.has_new = true;
        } else {
            self.add_run(first, count, None);
        }
    }

    fn add_run(&mut self, first: u64, count: u32, imm: Option<u32>) {
        let import = self.open.entered.len() - 1;
        self.open.runs.push(IdRun { first, count, imm, aborted: false, import });
        self.requests += count as usize;
        self.has_new = true;
    }

    /// Launches the open batch if it is large enough.
    #[inline]
    pub(crate) fn launch_if_due(
        &mut self,
        pending_imms: &mut PendingImms,
        completions: &mut CompletionQueue,
    ) {
        let copier = self.under_way.copier();
        let enough = match copier.in_flight() as u64 {
            0 => 1,
            _ if copier.is_growing() => BYTES_OF_ONE_PIECE,
            under_way => {
                BYTES_PER_BATCH * under_way.min(if self.within { MAX_COUNTED_WITHIN } else { MAX_COUNTED })
            }
        };
        if copier.open_bytes() >= enough || copier.room() == 0 {
            self.launch(pending_imms, completions);
        }
    }

    fn launch(&mut self, pending_imms: &mut PendingImms, completions: &mut CompletionQueue) {
        if self.open.runs.is_empty() || !self.under_way.copier().can_launch() {
            return;
        }
        let batch = std::mem::replace(&mut self.open, self.spare.pop().unwrap_or_default());
        if let Err(kind) = self.under_way.launch(batch) {
            self.note_failure(kind);
        }
        self.finish(pending_imms, completions);
    }

    /// Completes the batches that are done. Launches the open batch if nothing was added since the last call.
    #[inline]
    pub(crate) fn advance(&mut self, pending_imms: &mut PendingImms, completions: &mut CompletionQueue) {
        if self.requests == 0 {
            return;
        }
        self.finish(pending_imms, completions);
        if !std::mem::take(&mut self.has_new) {
            self.launch(pending_imms, completions);
        }
    }

    /// Completes the batches that are done, in order.
    fn finish(&mut self, pending_imms: &mut PendingImms, completions: &mut CompletionQueue) {
        while let Some((mut batch, outcome)) = self.under_way.take_completed() {
            if let Err(kind) = outcome {
                self.note_failure(kind);
            }
            self.requests -= batch.complete(outcome, pending_imms, completions);
            batch.leave();
            self.spare.push(batch);
        }
    }

    #[cold]
    fn note_failure(&mut self, kind: ErrorKind) {
        if kind == ErrorKind::DeviceLost {
            self.lost = Some(kind);
        }
    }
}

impl GpuBatch {
    /// Completes the requests, except those with an imm that waits for room. Returns how many requests the batch had.
    fn complete(
        &mut self,
        outcome: Result<(), ErrorKind>,
        pending_imms: &mut PendingImms,
        completions: &mut CompletionQueue,
    ) -> usize {
        let mut requests = 0;
        for run in self.runs.drain(..) {
            requests += run.count as usize;
            match (outcome, run.imm) {
                (Ok(()), None) => completions.done(run.first, run.count),
                (Ok(()), Some(imm)) => {
                    pending_imms.send(
                        &self.entered[run.import].target,
                        run.first,
                        imm,
                        completions,
                        !run.aborted,
                    );
                }
                (Err(kind), _) => {
                    let ids = (0..u64::from(run.count)).map(|at| run.first.wrapping_add(at));
                    ids.for_each(|id| completions.request(id, Err(status(kind))));
                }
            }
        }
        requests
    }

    fn leave(&mut self) {
        self.entered.drain(..).for_each(|import| import.leave());
    }
}

impl Drop for GpuBatch {
    fn drop(&mut self) {
        self.leave();
    }
}
