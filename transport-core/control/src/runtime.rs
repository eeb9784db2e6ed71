//! Where the whole control plane runs: a thread of the fabric's own, or the caller's runtime.

use std::cell::Cell;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::runtime::{self, Builder, Handle, Runtime, RuntimeFlavor};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinError, JoinSet, spawn_blocking};
use tokio::time::{sleep, timeout};

use crate::errors::{GONE, closed};
use crate::framed_channel::CLOSE_LIMIT;
use crate::task_tracker::{TaskGuard, TaskTracker};
use multirail_spi::{Error, Result};

/// How long bringing up links may still block a helper thread at shutdown. A name
/// server that hangs is left behind after it.
const BLOCKING_LIMIT: Duration = Duration::from_secs(3);

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

thread_local! {
    /// The control thread this thread is or helps; 0 for all others.
    static BELONGS_TO: Cell<u64> = const { Cell::new(0) };
}

/// Owns the thread `multirail-control`, or what stands for it on a caller's runtime, or a branch of
/// either. Dropping it shuts it down.
pub struct ControlThread {
    runs_on: RunsOn,
    spawner: Spawner,
    closing: watch::Sender<State>,
    end: Mutex<Option<Running>>,
}

/// Where its tasks run. Who is there cannot wait for their end.
#[derive(Clone, Copy)]
enum RunsOn {
    /// On the thread of that number.
    Thread(u64),
    Runtime(runtime::Id),
}

impl RunsOn {
    /// Whether the caller's thread is, or helps, what runs the tasks.
    fn is_here(self) -> bool {
        match self {
            Self::Thread(id) => BELONGS_TO.get() == id,
            Self::Runtime(id) => Handle::try_current().is_ok_and(|here| here.id() == id),
        }
    }
}

/// What is awaited at the end.
enum Running {
    Thread(JoinHandle<()>),
    Tasks(Arc<TaskTracker>),
}

/// How far the end has come.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    Open,
    /// TaskTracker say goodbye.
    Closing,
    /// TaskTracker of a branch are dropped where they are.
    Over,
}

/// Starts tasks on a control thread, from any thread.
///
/// It holds no part of the runtime: no descriptor outlives the thread through it.
#[derive(Clone)]
pub struct Spawner {
    tasks: mpsc::UnboundedSender<Task>,
    closing: watch::Receiver<State>,
    branch: Option<Arc<TaskTracker>>,
    /// Neither the fabric nor the caller's runtime has another thread, and gets none for a helper.
    is_single: bool,
}

impl ControlThread {
    /// Starts the thread; none if there is a `runtime` for it. If the fabric is `caller_driven`, and that
    /// runtime has one thread, there will be no helpers either.
    pub fn start(runtime: Option<&Handle>, caller_driven: bool) -> Result<Self> {
        let (tasks, queue) = mpsc::unbounded_channel();
        let (closing, closed) = watch::channel(State::Open);
        let has_one = |runtime: &Handle| runtime.runtime_flavor() == RuntimeFlavor::CurrentThread;
        let is_single = caller_driven && runtime.is_some_and(has_one);
        let spawner = Spawner { tasks, closing: closed.clone(), branch: None, is_single };
        let (runs_on, end) = match runtime {
            Some(runtime) => {
                let all = Arc::new(TaskTracker::default());
                let held = TaskGuard::new(&all);
                runtime.spawn(async move {
                    let _held = held;
                    serve(queue, closed).await;
                });
                (RunsOn::Runtime(runtime.id()), Running::Tasks(all))
            }
            None => own_thread(queue, closed)?,
        };
        Ok(Self { runs_on, spawner, closing, end: Mutex::new(Some(end)) })
    }

    /// A part of this thread that ends by itself: its tasks end before the rest's.
    /// Whoever ends the thread ends its branches first.
    pub fn branch(&self) -> Self {
        let (closing, closed) = watch::channel(State::Open);
        let tasks = Arc::new(TaskTracker::default());
        let branch = Some(Arc::clone(&tasks));
        let spawner = Spawner { closing: closed, branch, ..self.spawner.clone() };
        Self { runs_on: self.runs_on, spawner, closing, end: Mutex::new(Some(Running::Tasks(tasks))) }
    }

    /// Something to start tasks with.
    pub fn spawner(&self) -> Spawner {
        self.spawner.clone()
    }

    /// The tasks whose end a [`shutdown`](Self::shutdown) in their runs_on does not await.
    pub fn tasks(&self) -> Option<Arc<TaskTracker>> {
        match &*self.end.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(Running::Tasks(tasks)) => Some(Arc::clone(tasks)),
            _ => None,
        }
    }

    /// Has all sessions say goodbye, and nothing begin any more.
    pub fn begin_shutdown(&self) {
        self.closing.send_replace(State::Closing);
    }

    /// Ends all sessions, saying goodbye, then all tasks and the thread. Blocks
    /// until they are gone, usually for some milliseconds.
    ///
    /// Called on the control thread itself (the last handle of a fabric may be
    /// dropped anywhere) it cannot wait: the thread then ends by itself right after.
    pub fn shutdown(&self) {
        self.begin_shutdown();
        if self.runs_on.is_here() {
            return;
        }
        // TaskGuard while joining, so that a second caller waits as well.
        let mut end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        match end.take() {
            Some(Running::Thread(thread)) => join(thread),
            Some(Running::Tasks(tasks)) => {
                tasks.await_none(3 * CLOSE_LIMIT);
                self.closing.send_replace(State::Over);
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
    /// Starts a task; after shutdown the task is dropped instead.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let Some(held) = self.branch.as_ref().map(TaskGuard::new) else {
            let _ = self.tasks.send(Box::pin(task));
            return;
        };
        let mut closing = self.closing.clone();
        let _ = self.tasks.send(Box::pin(async move {
            let _held = held;
            let over = async {
                // Ended on the control thread itself, which cannot wait, a branch says
                // nothing more: its tasks get as long as elsewhere.
                if closing.wait_for(|state| *state == State::Over).await.is_err() {
                    sleep(3 * CLOSE_LIMIT).await;
                }
            };
            tokio::select! {
                // What is started last gets a turn too, enough to speak.
                biased;
                () = task => {}
                () = over => {}
            }
        }));
    }

    /// Runs what may block, on a helper thread: meanwhile other sessions go on.
    pub async fn blocking<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
        let ended = || closed("a backend panicked, or this fabric was closed");
        if self.is_single {
            // What was half done is dropped, as the panic of a helper drops it.
            return catch_unwind(AssertUnwindSafe(work)).map_err(|_| ended());
        }
        spawn_blocking(work).await.map_err(|e| ended().with_source(e))
    }

    /// Why nothing is done here any more.
    pub fn ended(&self) -> Error {
        closed(match *self.closing.borrow() {
            State::Open => GONE,
            _ => "this fabric was closed",
        })
    }

    /// Ends when the thread is being shut down.
    pub async fn closing(&self) {
        let _ = self.closing.clone().wait_for(|state| *state >= State::Closing).await;
    }
}

/// A thread for them alone.
fn own_thread(
    queue: mpsc::UnboundedReceiver<Task>,
    closing: watch::Receiver<State>,
) -> Result<(RunsOn, Running)> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let refuse = |e| Error::os("open", "cannot start the control thread: see `ulimit -n` and `ulimit -u`", e);
    let runtime = Builder::new_current_thread()
        .enable_all()
        .thread_name("multirail-control-blocking")
        .on_thread_start(move || BELONGS_TO.set(id))
        .build()
        .map_err(refuse)?;
    let body = move || {
        BELONGS_TO.set(id);
        live(runtime, serve(queue, closing));
    };
    let thread = std::thread::Builder::new().name("multirail-control".into()).spawn(body).map_err(refuse)?;
    Ok((RunsOn::Thread(id), Running::Thread(thread)))
}

/// That thread's life.
fn live(runtime: Runtime, tasks: impl Future<Output = ()>) {
    runtime.block_on(tasks);
    runtime.shutdown_timeout(BLOCKING_LIMIT);
}

/// Runs what comes through the queue, until the end.
async fn serve(mut queue: mpsc::UnboundedReceiver<Task>, mut closing: watch::Receiver<State>) {
    let mut running = JoinSet::new();
    loop {
        tokio::select! {
            _ = closing.wait_for(|state| *state >= State::Closing) => break,
            Some(task) = queue.recv() => { running.spawn(task); }
            Some(ended) = running.join_next() => report(ended),
        }
    }
    // All tasks watch `closing`, and may still start one to say goodbye. A
    // session takes two farewells: to speak, and to listen.
    let ended = async {
        loop {
            tokio::select! {
                biased;
                Some(task) = queue.recv() => { running.spawn(task); }
                ended = running.join_next() => match ended {
                    Some(ended) => report(ended),
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

fn report(ended: Result<(), JoinError>) {
    if let Err(error) = ended.as_ref()
        && error.is_panic()
    {
        tracing::error!(%error, "a control task panicked");
    }
}

#[cfg(test)]
mod tests;
