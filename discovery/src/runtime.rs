//! The thread that runs the tasks of all directories of a process.

use std::future::Future;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::ThreadId;
use std::time::Duration;

use multirail::{Error, ErrorKind, Result};
use tokio::runtime::{Builder, Handle};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

/// How long the last user of the thread waits for members that leave.
const LEAVE_LIMIT: Duration = Duration::from_secs(1);

/// A thread with a current-thread runtime of tokio. Dropping the last reference ends it.
pub(crate) struct Runtime {
    handle: Handle,
    /// The number of members that are leaving their directory.
    leaving: watch::Sender<usize>,
    stop: Option<oneshot::Sender<()>>,
    thread: ThreadId,
    ended: Mutex<Receiver<()>>,
}

static SHARED: Mutex<Weak<Runtime>> = Mutex::new(Weak::new());

impl Runtime {
    /// The thread of this process. Starts it if there is none.
    pub fn shared() -> Result<Arc<Self>> {
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(runtime) = shared.upgrade() {
            return Ok(runtime);
        }
        let runtime = Arc::new(Self::start()?);
        *shared = Arc::downgrade(&runtime);
        Ok(runtime)
    }

    fn start() -> Result<Self> {
        let failed = |error: std::io::Error| {
            let why = format!("the thread of the directories does not start: {error}");
            Error::new(ErrorKind::Exhausted, "directory", why)
        };
        let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (handle, leaving) = (runtime.handle().clone(), watch::Sender::new(0));
        let (stop, stopped) = oneshot::channel();
        let (end, ended): (SyncSender<()>, _) = sync_channel(1);
        let mut left = leaving.subscribe();
        let run = move || {
            runtime.block_on(async move {
                let _ = stopped.await;
                let _ = tokio::time::timeout(LEAVE_LIMIT, left.wait_for(|count| *count == 0)).await;
            });
            // A call of a file system may hang.
            runtime.shutdown_background();
            let _ = end.send(());
        };
        let thread = std::thread::Builder::new().name("mr-directory".into()).spawn(run).map_err(failed)?;
        let thread = thread.thread().id();
        Ok(Self { handle, leaving, stop: Some(stop), thread, ended: Mutex::new(ended) })
    }

    /// Runs a task. It must hold no `Arc<Runtime>`.
    pub fn spawn<T: Send + 'static>(&self, task: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
        self.handle.spawn(task)
    }

    /// Runs a request, whatever executor polls the returned future.
    pub fn run<T: Send + 'static, F: Future<Output = Result<T>> + Send + 'static>(
        &self,
        request: F,
    ) -> impl Future<Output = Result<T>> + Send + use<T, F> {
        let task = AbortOnDrop(self.spawn(request));
        async move {
            let mut task = task;
            (&mut task.0).await.unwrap_or_else(|error| {
                Err(Error::new(
                    ErrorKind::Closed,
                    "directory",
                    format!("the request was not finished: {error}"),
                ))
            })
        }
    }

    /// Counts a member that leaves, until the guard is dropped.
    pub fn leaving(&self) -> Leaving {
        self.leaving.send_modify(|count| *count += 1);
        Leaving(self.leaving.clone())
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        drop(self.stop.take());
        // A task that was the last user would wait for itself.
        if *self.leaving.borrow() > 0 && std::thread::current().id() != self.thread {
            // The thread waits as long itself.
            let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
            let _ = ended.recv_timeout(2 * LEAVE_LIMIT);
        }
    }
}

/// A member that leaves.
pub(crate) struct Leaving(watch::Sender<usize>);

impl Drop for Leaving {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

/// A task that ends when its owner is dropped.
pub(crate) struct AbortOnDrop<T>(pub JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}
