//! Counts tasks, so that the end of a branch can be awaited, or of all there are on a caller's runtime.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

/// The tasks that have not ended.
#[derive(Default)]
pub struct TaskTracker {
    count: Mutex<usize>,
    none: Condvar,
    /// The same for who does not block.
    told: Notify,
}

impl TaskTracker {
    /// Waits until there are none, for at most `limit`.
    pub fn await_none(&self, limit: Duration) {
        let _ = self.none.wait_timeout_while(self.lock(), limit, |count| *count > 0);
    }

    /// Resolves when there are none.
    pub async fn none(&self) {
        loop {
            // Counts what is told from here on, before it is polled.
            let told = self.told.notified();
            if *self.lock() == 0 {
                return;
            }
            told.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, usize> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One of them, until it is dropped. A task that starts another holds its own
/// meanwhile, so the count is not zero in between.
pub(crate) struct TaskGuard(Arc<TaskTracker>);

impl TaskGuard {
    pub fn new(tasks: &Arc<TaskTracker>) -> Self {
        *tasks.lock() += 1;
        Self(Arc::clone(tasks))
    }
}

impl Drop for TaskGuard {
    fn drop(&mut self) {
        *self.0.lock() -= 1;
        self.0.none.notify_all();
        self.0.told.notify_waiters();
    }
}
