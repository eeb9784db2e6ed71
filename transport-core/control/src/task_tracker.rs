//! Counts tasks, so that a caller can wait until all tasks of a branch, or all tasks on a caller's runtime, have ended.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

/// Counts the tasks that have not ended.
#[derive(Default)]
pub struct TaskTracker {
    count: Mutex<usize>,
    /// Wakes blocking waiters when a task ends.
    task_ended: Condvar,
    /// Wakes async waiters when a task ends.
    task_ended_async: Notify,
}

impl TaskTracker {
    /// Blocks until no task is left, for at most `limit`.
    pub fn await_none(&self, limit: Duration) {
        let _ = self.task_ended.wait_timeout_while(self.lock(), limit, |count| *count > 0);
    }

    /// Resolves when no task is left.
    pub async fn none(&self) {
        loop {
            // `notified()` sees `notify_waiters` from its creation on, even before its first poll.
            let task_ended = self.task_ended_async.notified();
            if *self.lock() == 0 {
                return;
            }
            task_ended.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, usize> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts as one task until it is dropped. A task that starts another task still holds its own
/// guard, so the count does not drop to zero in between.
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
        self.0.task_ended.notify_all();
        self.0.task_ended_async.notify_waiters();
    }
}
