//! The counters of one rail.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use crossbeam_utils::CachePadded;

use crate::single_writer::add;

/// The counters of one rail, as the engine keeps them. The thread that drives the engine writes all of them, except
/// those of direct requests: the submitting threads write these.
#[derive(Debug, Default)]
pub struct RailCounts {
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
    /// The requests that are posted and have not ended.
    outstanding: AtomicU64,
    queue_full: AtomicU64,
    retries: AtomicU64,
    grant_waits: AtomicU64,
    taken_over: AtomicU64,
    replayed: AtomicU64,
    replayed_bytes: AtomicU64,
    paths_broken: AtomicU64,
    paths_mended: AtomicU64,
    /// Whether the rail's device is lost.
    lost: AtomicBool,
    /// Whether the user has taken the rail out of service.
    retired: AtomicBool,
}

#[derive(Debug, Default)]
struct DirectCounts {
    requests: AtomicU64,
    bytes: AtomicU64,
}

/// A snapshot of one rail's counters. They count since the fabric was opened.
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
    /// Batches that the endpoint accepted only in part, or not at all.
    pub queue_full: u64,
    /// Requests that the endpoint did not accept; the engine posts them again.
    pub retries: u64,
    /// Times an operation was paused until its peer grants more.
    pub grant_waits: u64,
    /// Work requests that another rail should have posted: it was far behind, or out of service.
    #[serde(default)]
    pub taken_over: u64,
    /// Work requests that were posted on the rail before its device or the peer's was lost, and that other rails posted
    /// again: the peer had confirmed that none of them can arrive any more.
    #[serde(default)]
    pub replayed: u64,
    /// Payload bytes of these requests.
    #[serde(default)]
    pub replayed_bytes: u64,
    /// How often the path to a peer over this rail broke: its device was lost, the peer's, or the path between them.
    #[serde(default)]
    pub paths_broken: u64,
    /// How often such a path was used again.
    #[serde(default)]
    pub paths_mended: u64,
    /// Requests that ran in the submitting thread.
    pub direct: u64,
    /// Bytes of the requests that ran in the submitting thread.
    pub direct_bytes: u64,
}

impl RailCounts {
    /// Counts a batch: the requests and bytes that the endpoint accepted.
    pub fn batch(&self, requests: u64, bytes: u64) {
        add(&self.worker.posts, requests);
        add(&self.worker.doorbells, 1);
        add(&self.worker.bytes, bytes);
        add(&self.worker.outstanding, requests);
    }

    /// Counts a batch of which the engine has to post `retries` requests again.
    #[cold]
    pub fn backpressure(&self, retries: u64) {
        add(&self.worker.queue_full, 1);
        add(&self.worker.retries, retries);
    }

    /// Counts an operation that pauses until its peer grants more.
    #[cold]
    pub fn grant_wait(&self) {
        add(&self.worker.grant_waits, 1);
    }

    /// Counts pieces that the rail has taken over from others.
    #[cold]
    pub fn taken_over(&self, pieces: u32) {
        add(&self.worker.taken_over, pieces.into());
    }

    /// Counts requests of the rail that others post again.
    #[cold]
    pub fn replayed(&self, requests: u32, bytes: u64) {
        add(&self.worker.replayed, requests.into());
        add(&self.worker.replayed_bytes, bytes);
    }

    /// Counts a path to a peer that is broken, or one that is used again.
    #[cold]
    pub fn path_changed(&self, is_mended: bool) {
        add(if is_mended { &self.worker.paths_mended } else { &self.worker.paths_broken }, 1);
    }

    /// Counts completions.
    pub fn completed(&self, ok: u64, failed: u64) {
        add(&self.worker.completions, ok);
        add(&self.worker.errors, failed);
        let outstanding = &self.worker.outstanding;
        outstanding.store(outstanding.load(Relaxed).saturating_sub(ok + failed), Relaxed);
    }

    /// Corrects the number of requests that are posted and have not ended.
    #[cold]
    pub fn set_outstanding(&self, requests: usize) {
        self.worker.outstanding.store(requests as u64, Relaxed);
    }

    /// The requests that are posted and have not ended. 0 once the device is lost.
    pub fn outstanding(&self) -> u64 {
        if self.is_lost() { 0 } else { self.worker.outstanding.load(Relaxed) }
    }

    /// The requests that have ended, successfully or not.
    pub fn ended(&self) -> u64 {
        self.worker.completions.load(Relaxed) + self.worker.errors.load(Relaxed)
    }

    /// Counts requests that ran in the submitting thread. Any thread calls this, so the additions are atomic.
    #[inline]
    pub fn direct(&self, requests: u64, bytes: u64) {
        self.direct.requests.fetch_add(requests, Relaxed);
        self.direct.bytes.fetch_add(bytes, Relaxed);
    }

    /// Notes that the rail's device is lost.
    #[cold]
    pub fn set_lost(&self) {
        self.worker.lost.store(true, Relaxed);
    }

    pub fn is_lost(&self) -> bool {
        self.worker.lost.load(Relaxed)
    }

    /// Notes whether the user has taken the rail out of service.
    #[cold]
    pub fn set_retired(&self, is_retired: bool) {
        self.worker.retired.store(is_retired, Relaxed);
    }

    pub fn is_retired(&self) -> bool {
        self.worker.retired.load(Relaxed)
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
            taken_over: worker.taken_over.load(Relaxed),
            replayed: worker.replayed.load(Relaxed),
            replayed_bytes: worker.replayed_bytes.load(Relaxed),
            paths_broken: worker.paths_broken.load(Relaxed),
            paths_mended: worker.paths_mended.load(Relaxed),
            direct: direct.requests.load(Relaxed),
            direct_bytes: direct.bytes.load(Relaxed),
        }
    }
}
