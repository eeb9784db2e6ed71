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
use tokio::time::timeout;

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
            tokio::select! {
                () = task => {}
                _ = closing.wait_for(|state| *state == State::Over) => {}
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
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn tasks_run_elsewhere_and_all_are_gone_after_shutdown() {
        let thread = ControlThread::start().unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let alive = Arc::new(());
        let (kept, spawner) = (Arc::clone(&alive), thread.spawner());
        thread.spawner().spawn(async move {
            tell.send(std::thread::current().name().map(str::to_owned)).unwrap();
            // Even a task that does not watch for the end is ended.
            std::future::pending::<()>().await;
            drop(kept);
        });
        assert_eq!(told.recv().unwrap().as_deref(), Some("multirail-control"));
        spawner.spawn(async { panic!("one task's panic is no other's") });
        let started = Instant::now();
        thread.shutdown();
        thread.shutdown();
        assert!(started.elapsed() < Duration::from_secs(2));
        assert_eq!(Arc::strong_count(&alive), 1);
        let late = Arc::clone(&alive);
        spawner.spawn(async move { drop(late) });
        assert_eq!(Arc::strong_count(&alive), 1);
    }

    #[test]
    fn a_branch_ends_alone_and_its_tasks_get_to_speak() {
        let thread = ControlThread::start().unwrap();
        let branch = thread.branch();
        let (tell, told) = std::sync::mpsc::channel();
        let (spawner, other) = (branch.spawner(), thread.spawner());
        let later = tell.clone();
        branch.spawner().spawn(async move {
            spawner.closing().await;
            // What is started on the way out is awaited too.
            spawner.spawn(async move { later.send("goodbye").unwrap() });
        });
        let stuck = Arc::new(());
        let kept = Arc::clone(&stuck);
        branch.spawner().spawn(async move {
            std::future::pending::<()>().await;
            drop(kept);
        });
        branch.shutdown();
        assert_eq!(told.try_recv(), Ok("goodbye"));
        other.spawn(async move { tell.send("still here").unwrap() });
        assert_eq!(told.recv(), Ok("still here"));
        drop(branch);
        thread.shutdown();
        assert_eq!(Arc::strong_count(&stuck), 1);
    }

    #[test]
    fn may_be_dropped_on_itself_and_its_helpers() {
        for helper in [false, true] {
            let thread = ControlThread::start().unwrap();
            let (tell, told) = std::sync::mpsc::channel();
            thread.spawner().spawn(async move {
                // The thread is moved in only after it started this task.
                let thread: ControlThread = told.recv().unwrap();
                if helper {
                    tokio::task::spawn_blocking(move || drop(thread)).await.unwrap();
                } else {
                    drop(thread);
                }
            });
            let gone = thread.spawner();
            tell.send(thread).unwrap();
            while !gone.tasks.is_closed() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}
