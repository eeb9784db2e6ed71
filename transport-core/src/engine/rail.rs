//! One rail: an endpoint, its window of posted work, its batch, its counters.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use crossbeam_utils::CachePadded;

use super::posted::{Posted, Run};
use super::rotation::Rotation;
use super::unanswered::Blocked;
use super::window::Window;
use crate::Result;
use crate::retained::{RetainedByRail, RetainedMemory};
use crate::spi::{Batch, Domain, Endpoint, EndpointConfig, Revocation, Status};

pub(crate) struct Rail {
    pub endpoint: Box<dyn Endpoint>,
    pub domain: Arc<dyn Domain>,
    pub posted: Posted,
    pub rotation: Rotation,
    pub batch: Batch,
    /// Most requests in it.
    pub most: usize,
    /// The batch by turns.
    pub runs: Vec<Run>,
    /// Set once the device is lost: nothing is posted any more.
    pub lost: Option<Status>,
    /// The last look found no credit; recorded once.
    pub full: bool,
    /// The last batch was not taken at all; recorded once.
    pub pressed: bool,
    /// Batches in a row of which nothing was taken.
    pub passed: usize,
    /// Bytes per batch; a device that moves them by itself is not held up by many.
    pub batch_bytes: u64,
    pub depth: usize,
    /// Bytes that may be posted and not acknowledged.
    pub window: Window,
    /// When the last look found no room, that was so.
    pub blocked: Option<Blocked>,
    /// Memory that the endpoint may still touch: dropped after it.
    _retained: Option<RetainedByRail>,
}

impl Rail {
    /// `most` requests per doorbell, as far as the send queue holds so many.
    pub fn open(domain: Arc<dyn Domain>, most: usize, retained: &Arc<RetainedMemory>) -> Result<Self> {
        let is_late = domain.capabilities().revocation == Revocation::Late;
        let share = || RetainedByRail { memory: Arc::clone(retained), domain: Arc::clone(&domain) };
        let retained = is_late.then(share);
        let endpoint = domain.endpoint(EndpointConfig::default())?;
        let depth = domain.capabilities().send_depth.max(1) as usize;
        let most = most.min(depth);
        let batch_bytes = domain.capabilities().batch_bytes;
        let window = Window::of(domain.capabilities());
        Ok(Self {
            endpoint,
            domain,
            posted: Posted::default(),
            rotation: Rotation::default(),
            batch: Batch::with_capacity(most),
            runs: Vec::with_capacity(most),
            most,
            lost: None,
            full: false,
            pressed: false,
            passed: 0,
            batch_bytes,
            depth,
            window,
            blocked: None,
            _retained: retained,
        })
    }

    /// Requests that may be posted now.
    pub fn credits(&self) -> usize {
        if self.lost.is_some() { 0 } else { self.depth.saturating_sub(self.posted.held()) }
    }

    /// Whether a request of so many bytes has to wait for earlier ones.
    pub fn is_window_full(&self, bytes: u64) -> bool {
        self.window.room(self.posted.charged(), self.posted.oldest_charge(), self.window.charge(bytes)) == 0
    }
}

/// Counters of one rail, written by its worker (and `direct` by submitters).
#[derive(Debug, Default)]
pub(crate) struct RailCounts {
    worker: CachePadded<WorkerCounts>,
    direct: CachePadded<DirectCounts>,
}

#[derive(Debug, Default)]
struct WorkerCounts {
    posts: AtomicU64,
    doorbells: AtomicU64,
    bytes: AtomicU64,
    completions: AtomicU64,
    errors: AtomicU64,
    queue_full: AtomicU64,
    retries: AtomicU64,
    grant_waits: AtomicU64,
    /// Its device is.
    lost: AtomicBool,
}

#[derive(Debug, Default)]
struct DirectCounts {
    requests: AtomicU64,
    bytes: AtomicU64,
}

/// A reading of one rail's counters, since the fabric was opened.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct RailCounters {
    /// The transport's label.
    pub transport: String,
    /// The backend's name.
    pub backend: String,
    /// The rail's position in its transport.
    pub rail: u32,
    /// The device's name.
    pub device: String,
    /// Work requests posted.
    pub posts: u64,
    /// Batches posted.
    pub doorbells: u64,
    /// Payload bytes posted.
    pub bytes: u64,
    /// Successful completions.
    pub completions: u64,
    /// Failed completions and refused posts.
    pub errors: u64,
    /// Times a batch was not taken whole.
    pub queue_full: u64,
    /// Requests that were not taken then, and are posted again.
    pub retries: u64,
    /// Times an operation was put aside until its peer grants more.
    pub grant_waits: u64,
    /// Requests that ran in the submitting thread.
    pub direct: u64,
    /// Bytes of those.
    pub direct_bytes: u64,
}

impl RailCounts {
    /// A batch that was taken whole.
    pub fn batch(&self, requests: u64, bytes: u64) {
        add(&self.worker.posts, requests);
        add(&self.worker.doorbells, 1);
        add(&self.worker.bytes, bytes);
    }

    /// A batch of which `left` requests are to be posted again.
    #[cold]
    pub fn cut_short(&self, left: u64) {
        add(&self.worker.queue_full, 1);
        add(&self.worker.retries, left);
    }

    #[cold]
    pub fn waits_for_grant(&self) {
        add(&self.worker.grant_waits, 1);
    }

    pub fn completed(&self, ok: u64, failed: u64) {
        add(&self.worker.completions, ok);
        add(&self.worker.errors, failed);
    }

    /// Requests that have ended.
    pub fn ended(&self) -> u64 {
        self.worker.completions.load(Relaxed) + self.worker.errors.load(Relaxed)
    }

    /// Any thread submits, so this one needs a locked add.
    #[inline]
    pub fn direct(&self, requests: u64, bytes: u64) {
        self.direct.requests.fetch_add(requests, Relaxed);
        self.direct.bytes.fetch_add(bytes, Relaxed);
    }

    /// Its device is lost.
    #[cold]
    pub fn lose(&self) {
        self.worker.lost.store(true, Relaxed);
    }

    pub fn is_lost(&self) -> bool {
        self.worker.lost.load(Relaxed)
    }

    pub fn read(&self, transport: &str, backend: &str, rail: u32, device: &str) -> RailCounters {
        let (worker, direct) = (&self.worker, &self.direct);
        RailCounters {
            transport: transport.into(),
            backend: backend.into(),
            rail,
            device: device.into(),
            posts: worker.posts.load(Relaxed),
            doorbells: worker.doorbells.load(Relaxed),
            bytes: worker.bytes.load(Relaxed),
            completions: worker.completions.load(Relaxed),
            errors: worker.errors.load(Relaxed),
            queue_full: worker.queue_full.load(Relaxed),
            retries: worker.retries.load(Relaxed),
            grant_waits: worker.grant_waits.load(Relaxed),
            direct: direct.requests.load(Relaxed),
            direct_bytes: direct.bytes.load(Relaxed),
        }
    }
}

/// Only the worker writes its counters, so a plain load and store loses nothing.
fn add(counter: &AtomicU64, more: u64) {
    counter.store(counter.load(Relaxed) + more, Relaxed);
}
