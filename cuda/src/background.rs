//! The background thread that frees memory.
//!
//! Before the driver frees memory it waits for the GPU, and a stream of that GPU may be waiting for a word that a
//! worker has yet to write. If the worker freed memory itself, both would wait forever. So this thread frees it
//! instead.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use multirail_spi::{ErrorKind, Result};

use crate::driver::{at_exit, start};

/// How long the process's exit, or an allocation without room, waits for memory that is being freed. Freeing takes
/// milliseconds, unless a stream of the GPU waits for a thread that has ended.
const WAIT_LIMIT: Duration = Duration::from_secs(1);

type BackgroundTask = Box<dyn FnOnce() + Send>;

/// The queue of the thread; `None` if the thread could not be started.
static QUEUE: OnceLock<Option<Sender<BackgroundTask>>> = OnceLock::new();

thread_local! {
    /// Whether the current thread is the background thread.
    static IS_BACKGROUND: Cell<bool> = const { Cell::new(false) };
}

/// Drops a value on the background thread, because its destructor may wait for a GPU.
pub fn drop_in_background(value: impl Send + 'static) {
    run_later(move || drop(value));
}

/// Runs `task` on the background thread, after all earlier tasks. Without such a thread it runs at once.
pub(crate) fn run_later(task: impl FnOnce() + Send + 'static) {
    if IS_BACKGROUND.get() {
        return task();
    }
    let refused = match QUEUE.get_or_init(open) {
        Some(queue) => queue.send(Box::new(task)).err().map(|refused| refused.0),
        None => Some(Box::new(task) as BackgroundTask),
    };
    if let Some(task) = refused {
        task();
    }
}

/// Calls `allocate`. If there is no room, waits until memory that was dropped before is freed, and calls it once more.
pub(crate) fn with_room<T>(mut allocate: impl FnMut() -> Result<T>) -> Result<T> {
    allocate().or_else(|why| match why.kind() {
        ErrorKind::Exhausted => {
            wait_for_queue();
            allocate()
        }
        _ => Err(why),
    })
}

/// Waits until all queued tasks are done, at most for [`WAIT_LIMIT`].
fn wait_for_queue() {
    let (sender, done) = channel();
    if QUEUE.get().is_some() {
        run_later(move || {
            let _ = sender.send(());
        });
        let _ = done.recv_timeout(WAIT_LIMIT);
    }
}

fn open() -> Option<Sender<BackgroundTask>> {
    let (queue, tasks) = channel::<BackgroundTask>();
    let work = move || {
        IS_BACKGROUND.set(true);
        // A task that panics has printed its message, and must not keep the later tasks from running.
        tasks.into_iter().for_each(|task| drop(catch_unwind(AssertUnwindSafe(task))));
    };
    let started = std::thread::Builder::new().name("multirail-cuda".to_owned()).spawn(work);
    if let Err(why) = &started {
        tracing::warn!(%why, "there is no thread to free CUDA memory: a thread that drops memory waits for the GPU");
    }
    // At the exit of the process the driver unloads by a handler that it registers when it starts. Handlers run in
    // reverse order, so this one is registered after the driver has started. Without a driver nothing is freed.
    let _ = start();
    at_exit(wait_for_queue);
    started.is_ok().then_some(queue)
}
