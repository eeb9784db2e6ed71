//! The fabric's own thread, where the whole control plane runs.

use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{sleep, timeout};

use super::branch::{Held, Tasks};
use super::wire::FAREWELL;
use crate::{Error, Result};

/// How long bringing up links may still block a helper thread at shutdown. A name
/// server that hangs is left behind after it.
const BLOCKING_LIMIT: Duration = Duration::from_secs(3);

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

thread_local! {
    /// The control thread this thread is or helps; 0 for all others.
    static BELONGS_TO: Cell<u64> = const { Cell::new(0) };
}

/// Owns the thread `multirail-control`, or a branch of one. Dropping it shuts it down.
pub(crate) struct ControlThread {
    id: u64,
    spawner: Spawner,
    closing: watch::Sender<State>,
    end: Mutex<Option<End>>,
}

/// What is awaited at the end.
enum End {
    Thread(JoinHandle<()>),
    Branch(Arc<Tasks>),
}

/// How far the end has come.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    Open,
    /// Tasks say goodbye.
    Closing,
    /// Tasks of a branch are dropped where they are.
    Over,
}

/// Starts tasks on a control thread, from any thread.
///
/// It holds no part of the runtime: no descriptor outlives the thread through it.
#[derive(Clone)]
pub(crate) struct Spawner {
    tasks: mpsc::UnboundedSender<Task>,
    closing: watch::Receiver<State>,
    branch: Option<Arc<Tasks>>,
}

impl ControlThread {
    /// Starts the thread.
    pub fn start() -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let refuse =
            |e| Error::os("open", "cannot start the control thread: see `ulimit -n` and `ulimit -u`", e);
        let runtime = Builder::new_current_thread()
            .enable_all()
            .thread_name("multirail-control-blocking")
            .on_thread_start(move || BELONGS_TO.set(id))
            .build()
            .map_err(refuse)?;
        let (tasks, queue) = mpsc::unbounded_channel();
        let (closing, closed) = watch::channel(State::Open);
        let spawner = Spawner { tasks, closing: closed.clone(), branch: None };
        let body = move || {
            BELONGS_TO.set(id);
            serve(runtime, queue, closed);
        };
        let thread =
            std::thread::Builder::new().name("multirail-control".into()).spawn(body).map_err(refuse)?;
        Ok(Self { id, spawner, closing, end: Mutex::new(Some(End::Thread(thread))) })
    }

    /// A part of this thread that ends by itself: its tasks end before the rest's.
    /// Whoever ends the thread ends its branches first.
    pub fn branch(&self) -> Self {
        let (closing, closed) = watch::channel(State::Open);
        let tasks = Arc::new(Tasks::default());
        let branch = Some(Arc::clone(&tasks));
        let spawner = Spawner { tasks: self.spawner.tasks.clone(), closing: closed, branch };
        Self { id: self.id, spawner, closing, end: Mutex::new(Some(End::Branch(tasks))) }
    }

    /// Something to start tasks with.
    pub fn spawner(&self) -> Spawner {
        self.spawner.clone()
    }

    /// Ends all sessions, saying goodbye, then all tasks and the thread. Blocks
    /// until they are gone, usually for some milliseconds.
    ///
    /// Called on the control thread itself (the last handle of a fabric may be
    /// dropped anywhere) it cannot wait: the thread then ends by itself right after.
    pub fn shutdown(&self) {
        self.closing.send_replace(State::Closing);
        if BELONGS_TO.get() == self.id {
            return;
        }
        // Held while joining, so that a second caller waits as well.
        let mut end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        match end.take() {
            Some(End::Thread(thread)) => join(thread),
            Some(End::Branch(tasks)) => {
                tasks.await_none(3 * FAREWELL);
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
        let Some(held) = self.branch.as_ref().map(Held::new) else {
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
                    sleep(3 * FAREWELL).await;
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

    /// Ends when the thread is being shut down.
    pub async fn closing(&self) {
        let _ = self.closing.clone().wait_for(|state| *state >= State::Closing).await;
    }
}

/// The thread's life.
fn serve(runtime: Runtime, mut queue: mpsc::UnboundedReceiver<Task>, mut closing: watch::Receiver<State>) {
    runtime.block_on(async {
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
        let _ = timeout(3 * FAREWELL, ended).await;
        drop(queue);
        running.shutdown().await;
    });
    runtime.shutdown_timeout(BLOCKING_LIMIT);
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
#[path = "tests/thread.rs"]
mod tests;
