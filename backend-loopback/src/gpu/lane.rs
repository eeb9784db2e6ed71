//! Requests to one GPU: batches that are gathered, on their way, and landed.

use std::collections::VecDeque;
use std::sync::Arc;

use cuda::{BatchCopier, Reach};
use multirail_spi::{ErrorKind, PeerSlot, Result, WorkRequest};

use super::late::Late;
use crate::ended::Ended;
use crate::remote::Import;
use crate::status::status;

/// A batch waits for so many bytes for each that is on its way, up to [`MANY`]: every launch keeps the line idle for
/// 2.5 µs and takes 3.6 µs of the worker's time, so that batches grow while they come faster than they land.
const WORTHWHILE: u64 = 16 << 20;
/// Batches on their way beyond which they do not grow: to 32 MiB, which the line carries in 90 µs.
const MANY: u64 = 2;
/// The same within one GPU, whose memory is five times as fast.
const MANY_WITHIN: u64 = 4;
/// What one piece waits for that may still grow: the copy engine reached 0.80 of what NVLink carries with pieces
/// of 4 MiB, 0.92 with 16 MiB.
const WORTHWHILE_WHOLE: u64 = 64 << 20;

/// One GPU of an endpoint.
pub(crate) struct GpuLane {
    /// Dropped first: it waits for what is on its way, and the batches hold leases.
    mover: BatchCopier,
    open: Batch,
    flying: VecDeque<Batch>,
    /// Batches that have landed, for reuse.
    spare: Vec<Batch>,
    /// Something was added since the last look.
    fresh: bool,
    /// What was added last stays within the GPU.
    within: bool,
    lost: Option<ErrorKind>,
    requests: usize,
}

/// What ends together.
#[derive(Default)]
struct Batch {
    spans: Vec<Span>,
    /// The regions it touches, whose leases it has taken.
    entered: Vec<Arc<Import>>,
    /// Why it was not launched.
    refused: Option<ErrorKind>,
}

/// Requests with consecutive ids to one region; with an imm, one.
struct Span {
    first: u64,
    count: u32,
    imm: Option<u32>,
    /// Its imm does not wait for room.
    aborted: bool,
    /// The place of its region in `entered`.
    import: usize,
}

impl GpuLane {
    /// A lane on `device`, whose kernels have `blocks` blocks together.
    pub(crate) fn open(device: &cuda::Device, blocks: u32) -> Result<Self> {
        Ok(Self {
            mover: BatchCopier::new(device, blocks)?,
            open: Batch::default(),
            flying: VecDeque::new(),
            spare: Vec::new(),
            fresh: false,
            within: false,
            lost: None,
            requests: 0,
        })
    }

    /// Its GPU, as CUDA counts.
    pub(crate) fn ordinal(&self) -> u32 {
        self.mover.device().ordinal()
    }

    /// Requests that have not ended.
    #[inline]
    pub(crate) fn requests(&self) -> usize {
        self.requests
    }

    /// Whether requests to that peer are among them.
    pub(crate) fn serves(&self, peer: PeerSlot) -> bool {
        let touches = |batch: &Batch| batch.entered.iter().any(|import| import.target.peer == peer);
        touches(&self.open) || self.flying.iter().any(touches)
    }

    /// Has no imm to that peer wait for room.
    pub(crate) fn abort(&mut self, peer: PeerSlot) {
        for batch in self.flying.iter_mut().chain([&mut self.open]) {
            for span in &mut batch.spans {
                span.aborted |= batch.entered[span.import].target.peer == peer;
            }
        }
    }

    /// Requests that may be added before the next launch.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.mover.room()
    }

    /// What comes next goes between other regions, within the GPU or not.
    pub(crate) fn turn_to(&mut self, within: bool) {
        self.mover.end_piece();
        self.within = within;
    }

    /// Whether the open batch has taken the lease of the import of that name, and requests to it came last.
    #[inline]
    pub(crate) fn is_begun(&self, rkey: u64) -> bool {
        self.open.entered.last().is_some_and(|last| last.rkey == rkey)
    }

    /// Takes the import's lease for the open batch.
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

    /// Adds a request to the last import that was begun.
    ///
    /// # Safety
    /// As [`BatchCopier::add`], for `(to, from, len)`.
    pub(crate) unsafe fn add(&mut self, request: &WorkRequest, ends: (u64, u64, u64), reach: Reach) {
        // SAFETY: by the caller.
        unsafe { self.add_next(std::iter::once(ends), reach) };
        match request.imm {
            None => self.follow(request.id, 1),
            imm => self.span(request.id, 1, imm),
        }
    }

    /// Adds the bytes of requests that [`follow`](Self::follow) will name.
    ///
    /// # Safety
    /// As [`add`](Self::add).
    #[inline]
    pub(crate) unsafe fn add_next(&mut self, ends: impl Iterator<Item = (u64, u64, u64)>, reach: Reach) {
        // SAFETY: by the caller.
        unsafe { self.mover.add(ends, reach) };
    }

    /// The bytes added last belong to `count` requests from `first` on, to the import begun last.
    #[inline]
    pub(crate) fn follow(&mut self, first: u64, count: u32) {
        if count == 0 {
            return;
        }
        let import = self.open.entered.len() - 1;
        if let Some(last) = self.open.spans.last_mut()
            && last.first.wrapping_add(u64::from(last.count)) == first
            && last.import == import
            && last.imm.is_none()
        {
            last.count += count;
            self.requests += count as usize;
            self.fresh = true;
        } else {
            self.span(first, count, None);
        }
    }

    fn span(&mut self, first: u64, count: u32, imm: Option<u32>) {
        let import = self.open.entered.len() - 1;
        self.open.spans.push(Span { first, count, imm, aborted: false, import });
        self.requests += count as usize;
        self.fresh = true;
    }

    /// Starts the open batch, if that is worthwhile by now.
    #[inline]
    pub(crate) fn launch_if_due(&mut self, late: &mut Late, ended: &mut Ended) {
        let worthwhile = match self.mover.in_flight() as u64 {
            0 => 1,
            _ if self.mover.is_growing() => WORTHWHILE_WHOLE,
            flying => WORTHWHILE * flying.min(if self.within { MANY_WITHIN } else { MANY }),
        };
        if self.mover.open_bytes() >= worthwhile || self.room() == 0 {
            self.launch(late, ended);
        }
    }

    fn launch(&mut self, late: &mut Late, ended: &mut Ended) {
        if self.open.spans.is_empty() || !self.mover.can_launch() {
            return;
        }
        let mut batch = std::mem::replace(&mut self.open, self.spare.pop().unwrap_or_default());
        match self.mover.launch() {
            Ok(()) => {}
            // Those before it are on their way, and end first.
            Err(why) => batch.refused = Some(self.lose(&why)),
        }
        self.flying.push_back(batch);
        self.finish(late, ended);
    }

    /// Files what has landed, and starts what nothing joined since the last look.
    #[inline]
    pub(crate) fn advance(&mut self, late: &mut Late, ended: &mut Ended) {
        if self.requests == 0 {
            return;
        }
        self.finish(late, ended);
        if !std::mem::take(&mut self.fresh) {
            self.launch(late, ended);
        }
    }

    /// Files the ends of what has landed.
    fn finish(&mut self, late: &mut Late, ended: &mut Ended) {
        while let Some(batch) = self.flying.front() {
            // What was refused has nothing on its way, whose end could be asked for.
            let outcome = match batch.refused {
                Some(kind) => Err(kind),
                None => match self.mover.take_completed() {
                    None => return,
                    Some(Ok(())) => Ok(()),
                    Some(Err(why)) => Err(self.lose(&why)),
                },
            };
            if let Some(mut batch) = self.flying.pop_front() {
                self.requests -= batch.tell(outcome, late, ended);
                batch.leave();
                self.spare.push(batch);
            }
        }
    }

    #[cold]
    fn lose(&mut self, why: &multirail_spi::Error) -> ErrorKind {
        tracing::error!(%why, gpu = self.ordinal(), "loopback: a GPU's copies failed");
        if why.kind() == ErrorKind::DeviceLost {
            self.lost = Some(ErrorKind::DeviceLost);
        }
        why.kind()
    }
}

impl Batch {
    /// Ends its requests, save those whose imms come late. How many it had.
    fn tell(&mut self, outcome: Result<(), ErrorKind>, late: &mut Late, ended: &mut Ended) -> usize {
        let mut requests = 0;
        for span in self.spans.drain(..) {
            requests += span.count as usize;
            match (outcome, span.imm) {
                (Ok(()), None) => ended.done(span.first, span.count),
                (Ok(()), Some(imm)) => {
                    late.send(&self.entered[span.import].target, span.first, imm, ended, !span.aborted);
                }
                (Err(kind), _) => {
                    let ids = (0..u64::from(span.count)).map(|at| span.first.wrapping_add(at));
                    ids.for_each(|id| ended.request(id, Err(status(kind))));
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
