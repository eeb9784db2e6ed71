//! Operations that make no progress, until they are reported to the user.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use crate::index::GroupIndex;
use crate::op::OpId;

/// A stalled operation: the rail group of its engine, and its id there.
pub type Stall = (GroupIndex, OpId);

/// Reports stalled operations to the user.
type Reporter = Box<dyn Fn(&[Stall]) + Send + Sync>;

/// The stalls of a fabric that have not been reported yet. All its engines share one monitor.
pub struct StallMonitor {
    /// An operation is stalled after this long without progress.
    pub stall_after: Duration,
    reporter: OnceLock<Reporter>,
    unreported: Mutex<Vec<Stall>>,
    /// Whether `unreported` may have entries. A caller-driven fabric asks after every step.
    has_unreported: AtomicBool,
}

impl StallMonitor {
    pub fn new(stall_after: Duration) -> Self {
        Self {
            stall_after,
            reporter: OnceLock::new(),
            unreported: Mutex::default(),
            has_unreported: AtomicBool::new(false),
        }
    }

    /// Sets what reports stalls to the user. Only the first call has an effect.
    pub fn set_reporter(&self, reporter: Reporter) {
        let _ = self.reporter.set(reporter);
    }

    /// Adds a stall that an engine has found.
    #[cold]
    pub fn add(&self, group: GroupIndex, op: OpId) {
        self.lock().push((group, op));
        self.has_unreported.store(true, Ordering::Release);
    }

    /// Reports all stalls on a new thread: an engine must not wait for the user's hook.
    #[cold]
    pub fn spawn_report(self: &Arc<Self>) {
        let monitor = Arc::clone(self);
        let spawned = std::thread::Builder::new().name("mr-stall".into()).spawn(move || monitor.report());
        if let Err(error) = spawned {
            tracing::warn!(%error, "operations stall, and the thread that reports them could not be started");
        }
    }

    /// Reports all stalls in the calling thread.
    #[inline(always)]
    pub fn report(&self) {
        if self.has_unreported.load(Ordering::Acquire) {
            self.report_all();
        }
    }

    #[cold]
    fn report_all(&self) {
        // Cleared first: a stall that is added after this sets it again.
        self.has_unreported.store(false, Ordering::Release);
        let stalls = std::mem::take(&mut *self.lock());
        if let Some(reporter) = self.reporter.get()
            && !stalls.is_empty()
        {
            reporter(&stalls);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Stall>> {
        // Each change is one call, so a poisoned lock still guards a valid list.
        self.unreported.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
