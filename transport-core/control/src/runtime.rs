//! Runs the control plane's tasks, on a thread of the fabric's own or on the caller's runtime.

use std::cell::Cell;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use multirail_spi::{Error, ErrorKind, Result};
use tokio::runtime::{self, Builder, Handle, Runtime, RuntimeFlavor};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::{JoinError, JoinSet, spawn_blocking};
use tokio::time::{sleep, timeout};

use crate::framed_channel::CLOSE_LIMIT;

/// The message for a fabric whose control thread or runtime ended before the fabric was closed.
pub(crate) const SERVICE_ENDED: &str = "nothing serves this fabric's connections any more: its control thread \
     panicked, or the runtime that it was given was shut down or has no I/O or timers (build it with enable_all)";
/// How long shutdown waits for helper threads that still block, for example while they bring up links. After this
/// time, shutdown leaves such a thread behind; a hanging name server can cause that.
const BLOCKING_LIMIT: Duration = Duration::from_secs(3);

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

thread_local! {
    /// The id of the control thread that this thread is, or is a helper of; 0 for all other threads.
    static CONTROL_THREAD_ID: Cell<u64> = const { Cell::new(0) };
}

/// Owns the thread `multirail-control`, or the control tasks on a caller's runtime, or a branch of
/// either. Dropping it shuts its tasks down.
pub struct ControlThread {
    runs_on: RunsOn,
    spawner: Spawner,
    closing: watch::Sender<ShutdownStage>,
    running: Mutex<Option<Running>>,
}

/// Where the tasks of a [`ControlThread`] run. Code that runs there cannot wait for their end.
#[derive(Clone, Copy)]
enum RunsOn {
    /// On the control thread with this id.
    Thread(u64),
    Runtime(runtime::Id),
}

impl RunsOn {
    /// Whether the caller runs on the control thread, on one of its helpers, or on this runtime.
    fn includes_caller(self) -> bool {
        match self {
            Self::Thread(id) => CONTROL_THREAD_ID.get() == id,
            Self::Runtime(id) => Handle::try_current().is_ok_and(|here| here.id() == id),
        }
    }
}

/// The thread or the tasks that shutdown waits for.
enum Running {
    Thread(JoinHandle<()>),
    Tasks(Arc<TaskTracker>),
}

/// The stages of a shutdown.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum ShutdownStage {
    Open,
    /// Tasks send their last frames and end.
    Closing,
    /// The tasks of a branch that have not ended are dropped.
    Aborted,
}

/// Starts tasks on a control thread, from any thread.
///
/// A spawner holds no part of the runtime, so it keeps no descriptor open after the thread has ended.
#[derive(Clone)]
pub struct Spawner {
    tasks: mpsc::UnboundedSender<Task>,
    closing: watch::Receiver<ShutdownStage>,
    branch: Option<Arc<TaskTracker>>,
    /// The fabric and the caller's runtime have one thread only, so blocking work runs on that thread, without a
    /// helper.
    is_single: bool,
}

impl ControlThread {
    /// Starts the thread, or uses `runtime` instead of a thread if there is one. If the fabric is `caller_driven` and
    /// `runtime` has one thread, blocking work gets no helper threads either.
    pub fn start(runtime: Option<&Handle>, caller_driven: bool) -> Result<Self> {
        let (tasks, queue) = mpsc::unbounded_channel();
        let (closing, closed) = watch::channel(ShutdownStage::Open);
        let has_one_thread = |runtime: &Handle| runtime.runtime_flavor() == RuntimeFlavor::CurrentThread;
        let is_single = caller_driven && runtime.is_some_and(has_one_thread);
        let spawner = Spawner { tasks, closing: closed.clone(), branch: None, is_single };
        let (runs_on, running) = match runtime {
            Some(runtime) => {
                let all = Arc::new(TaskTracker::default());
                let guard = TaskGuard::new(&all);
                runtime.spawn(async move {
                    let _guard = guard;
                    serve(queue, closed).await;
                });
                (RunsOn::Runtime(runtime.id()), Running::Tasks(all))
            }
            None => own_thread(queue, closed)?,
        };
        Ok(Self { runs_on, spawner, closing, running: Mutex::new(Some(running)) })
    }

    /// Creates a branch: tasks of this thread that can be shut down without the others. The
    /// caller must shut down all branches before the thread itself.
    pub fn branch(&self) -> Self {
        let (closing, closed) = watch::channel(ShutdownStage::Open);
        let tasks = Arc::new(TaskTracker::default());
        let branch = Some(Arc::clone(&tasks));
        let spawner = Spawner { closing: closed, branch, ..self.spawner.clone() };
        Self { runs_on: self.runs_on, spawner, closing, running: Mutex::new(Some(Running::Tasks(tasks))) }
    }

    /// A spawner that starts tasks here.
    pub fn spawner(&self) -> Spawner {
        self.spawner.clone()
    }

    /// The tasks of a branch or of a caller's runtime. A [`shutdown`](Self::shutdown) that is called on their own
    /// thread or runtime does not wait for them.
    pub fn tasks(&self) -> Option<Arc<TaskTracker>> {
        match &*self.running.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(Running::Tasks(tasks)) => Some(Arc::clone(tasks)),
            _ => None,
        }
    }

    /// Makes all sessions send `Goodbye`, and cancels connects and accepts.
    pub fn begin_shutdown(&self) {
        self.closing.send_replace(ShutdownStage::Closing);
    }

    /// Ends all sessions with a `Goodbye`, then all tasks and the thread. Blocks
    /// until they have ended, usually for some milliseconds.
    ///
    /// On the control thread itself this cannot wait, and returns at once: the thread then ends
    /// soon after. This happens when the last handle of a fabric is dropped on that thread.
    pub fn shutdown(&self) {
        self.begin_shutdown();
        if self.runs_on.includes_caller() {
            return;
        }
        // The lock is held while joining, so that a second caller waits as well.
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        match running.take() {
            Some(Running::Thread(thread)) => join(thread),
            Some(Running::Tasks(tasks)) => {
                tasks.await_none(3 * CLOSE_LIMIT);
                self.closing.send_replace(ShutdownStage::Aborted);
            }
            None => {}
        }
    }
}

impl Drop for ControlThread {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl Spawner {
    /// Starts a task. After shutdown, drops the task instead.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let Some(guard) = self.branch.as_ref().map(TaskGuard::new) else {
            let _ = self.tasks.send(Box::pin(task));
            return;
        };
        let mut closing = self.closing.clone();
        let _ = self.tasks.send(Box::pin(async move {
            let _guard = guard;
            let aborted = async {
                // A branch that is dropped on the control thread itself cannot wait, and never sets
                // `Aborted`. Its tasks get the same time as in any other shutdown.
                if closing.wait_for(|state| *state == ShutdownStage::Aborted).await.is_err() {
                    sleep(3 * CLOSE_LIMIT).await;
                }
            };
            tokio::select! {
                // The task is polled first, so that even a task started last can send a frame.
                biased;
                () = task => {}
                () = aborted => {}
            }
        }));
    }

    /// Runs `work`, which may block, on a helper thread, so that other sessions go on meanwhile.
    pub async fn blocking<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
        let ended = || closed("a backend panicked, or this fabric was closed");
        if self.is_single {
            // Unwinding drops the captured state, as it does when a helper thread panics.
            return catch_unwind(AssertUnwindSafe(work)).map_err(|_| ended());
        }
        spawn_blocking(work).await.map_err(|e| ended().with_source(e))
    }

    /// The error for work that the thread no longer runs.
    pub fn ended(&self) -> Error {
        closed(match *self.closing.borrow() {
            ShutdownStage::Open => SERVICE_ENDED,
            _ => "this fabric was closed",
        })
    }

    /// Resolves when the thread or branch begins to shut down.
    pub async fn closing(&self) {
        let _ = self.closing.clone().wait_for(|state| *state >= ShutdownStage::Closing).await;
    }
}

/// Starts a control thread that runs the tasks of `queue`.
fn own_thread(
    queue: mpsc::UnboundedReceiver<Task>,
    closing: watch::Receiver<ShutdownStage>,
) -> Result<(RunsOn, Running)> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let refuse = |e| Error::os("open", "cannot start the control thread: see `ulimit -n` and `ulimit -u`", e);
    let runtime = Builder::new_current_thread()
        .enable_all()
        .thread_name("multirail-control-blocking")
        .on_thread_start(move || CONTROL_THREAD_ID.set(id))
        .build()
        .map_err(refuse)?;
    let body = move || {
        CONTROL_THREAD_ID.set(id);
        run_until_shutdown(runtime, serve(queue, closing));
    };
    let thread = std::thread::Builder::new().name("multirail-control".into()).spawn(body).map_err(refuse)?;
    Ok((RunsOn::Thread(id), Running::Thread(thread)))
}

/// Runs `tasks` on the control thread's runtime, then shuts the runtime down.
fn run_until_shutdown(runtime: Runtime, tasks: impl Future<Output = ()>) {
    runtime.block_on(tasks);
    runtime.shutdown_timeout(BLOCKING_LIMIT);
}

/// Runs the tasks that arrive on `queue`, until shutdown.
async fn serve(mut queue: mpsc::UnboundedReceiver<Task>, mut closing: watch::Receiver<ShutdownStage>) {
    let mut running = JoinSet::new();
    loop {
        tokio::select! {
            _ = closing.wait_for(|state| *state >= ShutdownStage::Closing) => break,
            Some(task) = queue.recv() => { running.spawn(task); }
            Some(ended) = running.join_next() => log_panic(ended),
        }
    }
    // All tasks watch `closing`, and may still start a task that sends a final frame. A session
    // needs up to two times `CLOSE_LIMIT`: one to send its final frame, one to read until the peer closes.
    let ended = async {
        loop {
            tokio::select! {
                biased;
                Some(task) = queue.recv() => { running.spawn(task); }
                ended = running.join_next() => match ended {
                    Some(ended) => log_panic(ended),
                    None => break,
                },
            }
        }
    };
    let _ = timeout(3 * CLOSE_LIMIT, ended).await;
    drop(queue);
    running.shutdown().await;
}

fn join(thread: JoinHandle<()>) {
    if thread.join().is_err() {
        tracing::error!("the control thread panicked");
    }
}

fn log_panic(ended: Result<(), JoinError>) {
    if let Err(error) = ended.as_ref()
        && error.is_panic()
    {
        tracing::error!(%error, "a control task panicked");
    }
}

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

/// An error of kind `Closed`: the connection ended in order.
pub(crate) fn closed(why: &str) -> Error {
    Error::new(ErrorKind::Closed, "control", why)
}

#[cfg(test)]
mod tests;
