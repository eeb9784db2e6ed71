//! The batches of one GPU: one that is open, those under way, and their completion.

use std::collections::VecDeque;
use std::sync::Arc;

use cuda::{BatchCopier, Reach};
use multirail_spi::{ErrorKind, PeerSlot, Result, WorkRequest};

use super::pending_imms::PendingImms;
use crate::completions::CompletionQueue;
use crate::imports::Import;
use crate::status::status;

/// For each batch that is under way, up to [`MAX_COUNTED`], the open batch waits until it has this many bytes more.
/// Every launch keeps the link idle for 2.5 µs and takes 3.6 µs of the worker's time, so that batches must grow while
/// requests come faster than batches complete.
const BYTES_PER_BATCH: u64 = 16 << 20;
/// The number of batches under way from which on the open batch waits for no more bytes: for 32 MiB at most, which
/// the link carries in 90 µs.
const MAX_COUNTED: u64 = 2;
/// The same number for copies within one GPU, whose memory is five times as fast as the link.
const MAX_COUNTED_WITHIN: u64 = 4;
/// An open batch that is one growing piece waits for this many bytes: the copy engine reached 0.80 of NVLink's
/// bandwidth with pieces of 4 MiB, and 0.92 with 16 MiB.
const BYTES_OF_ONE_PIECE: u64 = 64 << 20;

/// The batches of one GPU of an endpoint.
pub(crate) struct GpuQueue {
    /// Dropped first: its drop waits for the batches under way, which keep leases.
    copier: BatchCopier,
    open: Batch,
    under_way: VecDeque<Batch>,
    /// Empty batches, for reuse.
    spare: Vec<Batch>,
    /// Requests were added since the last `advance`.
    has_new: bool,
    /// The requests that were added last copy within the GPU.
    within: bool,
    lost: Option<ErrorKind>,
    requests: usize,
}

/// Requests that complete together.
#[derive(Default)]
struct Batch {
    runs: Vec<IdRun>,
    /// The imports that the batch touches, whose leases it has entered.
    entered: Vec<Arc<Import>>,
    /// The reason why the batch could not be launched.
    refused: Option<ErrorKind>,
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
    /// Opens a queue on `device`, whose kernels have `blocks` blocks together.
    pub(crate) fn open(device: &cuda::Device, blocks: u32) -> Result<Self> {
        Ok(Self {
            copier: BatchCopier::new(device, blocks)?,
            open: Batch::default(),
            under_way: VecDeque::new(),
            spare: Vec::new(),
            has_new: false,
            within: false,
            lost: None,
            requests: 0,
        })
    }

    /// CUDA's ordinal of the GPU.
    pub(crate) fn ordinal(&self) -> u32 {
        self.copier.device().ordinal()
    }

    /// The number of requests that are not completed.
    #[inline]
    pub(crate) fn requests(&self) -> usize {
        self.requests
    }

    /// Returns true if a batch has requests to that peer.
    pub(crate) fn has_requests_to(&self, peer: PeerSlot) -> bool {
        let touches = |batch: &Batch| batch.entered.iter().any(|import| import.target.peer == peer);
        touches(&self.open) || self.under_way.iter().any(touches)
    }

    /// Lets no imm to that peer wait for room.
    pub(crate) fn abort(&mut self, peer: PeerSlot) {
        for batch in self.under_way.iter_mut().chain([&mut self.open]) {
            for run in &mut batch.runs {
                run.aborted |= batch.entered[run.import].target.peer == peer;
            }
        }
    }

    /// The number of requests that may be added before the next launch.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.copier.room()
    }

    /// The next requests go between other regions. `within` is true if both are in the GPU's own memory.
    pub(crate) fn change_path(&mut self, within: bool) {
        self.copier.end_piece();
        self.within = within;
    }

    /// Returns true if the import with that rkey was begun last for the open batch. The batch then has its lease.
    #[inline]
    pub(crate) fn is_begun(&self, rkey: u64) -> bool {
        self.open.entered.last().is_some_and(|last| last.rkey == rkey)
    }

    /// Enters the import's lease for the open batch.
    pub(crate) fn begin(&mut self, import: &Arc<Import>) -> Result<(), ErrorKind> {
        if let Some(kind) = self.lost {
            return Err(kind);
        }
        if !self.is_begun(import.rkey) {
            import.enter()?;
            self.open.entered.push(Arc::clone(import));
        }
        Ok(())
    }

    /// Adds a request to the import that was begun last.
    ///
    /// # Safety
    /// As [`BatchCopier::add`], for `(to, from, len)`.
    pub(crate) unsafe fn add(&mut self, request: &WorkRequest, ends: (u64, u64, u64), reach: Reach) {
        // SAFETY: by the caller.
        unsafe { self.add_bytes(std::iter::once(ends), reach) };
        match request.imm {
            None => self.add_ids(request.id, 1),
            imm => self.add_run(request.id, 1, imm),
        }
    }

    /// Adds the bytes of requests whose ids [`add_ids`](Self::add_ids) adds afterwards.
    ///
    /// # Safety
    /// As [`add`](Self::add).
    #[inline]
    pub(crate) unsafe fn add_bytes(&mut self, ends: impl Iterator<Item = (u64, u64, u64)>, reach: Reach) {
        // SAFETY: by the caller.
        unsafe { self.copier.add(ends, reach) };
    }

    /// Adds the ids of the bytes that were added last: `count` requests from `first` on, to the import that was begun
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
        let enough = match self.copier.in_flight() as u64 {
            0 => 1,
            _ if self.copier.is_growing() => BYTES_OF_ONE_PIECE,
            under_way => {
                BYTES_PER_BATCH * under_way.min(if self.within { MAX_COUNTED_WITHIN } else { MAX_COUNTED })
            }
        };
        if self.copier.open_bytes() >= enough || self.room() == 0 {
            self.launch(pending_imms, completions);
        }
    }

    fn launch(&mut self, pending_imms: &mut PendingImms, completions: &mut CompletionQueue) {
        if self.open.runs.is_empty() || !self.copier.can_launch() {
            return;
        }
        let mut batch = std::mem::replace(&mut self.open, self.spare.pop().unwrap_or_default());
        match self.copier.launch() {
            Ok(()) => {}
            // The batches before it are under way, and complete first.
            Err(why) => batch.refused = Some(self.record_failure(&why)),
        }
        self.under_way.push_back(batch);
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
        while let Some(batch) = self.under_way.front() {
            // CUDA knows nothing of a batch whose launch it refused.
            let outcome = match batch.refused {
                Some(kind) => Err(kind),
                None => match self.copier.take_completed() {
                    None => return,
                    Some(Ok(())) => Ok(()),
                    Some(Err(why)) => Err(self.record_failure(&why)),
                },
            };
            if let Some(mut batch) = self.under_way.pop_front() {
                self.requests -= batch.complete(outcome, pending_imms, completions);
                batch.leave();
                self.spare.push(batch);
            }
        }
    }

    #[cold]
    fn record_failure(&mut self, why: &multirail_spi::Error) -> ErrorKind {
        tracing::error!(%why, gpu = self.ordinal(), "loopback: a GPU's copies failed");
        if why.kind() == ErrorKind::DeviceLost {
            self.lost = Some(ErrorKind::DeviceLost);
        }
        why.kind()
    }
}

impl Batch {
    /// Completes the requests, save those whose imms wait for room. Returns how many requests the batch had.
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
        self.refused = None;
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        self.leave();
    }
}
