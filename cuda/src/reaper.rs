//! The thread on which things go back to CUDA.
//!
//! To free memory, the driver waits for the GPU, where a stream may wait for a word that a worker has yet to
//! write. So who drops the last of something does not wait: this thread does.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use multirail_spi::{ErrorKind, Result};

use crate::Device;
use crate::driver::{at_exit, start};

/// How long the end of the process, or an allocation that found no room, waits for what is on its way back:
/// milliseconds, if nothing on the GPU waits for someone who is gone.
const PATIENCE: Duration = Duration::from_secs(1);

type Task = Box<dyn FnOnce() + Send>;

/// The thread's queue; none where it could not be started.
static QUEUE: OnceLock<Option<Sender<Task>>> = OnceLock::new();

thread_local! {
    /// This is the thread.
    static IS_HERE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `task` after those that came before, on a thread that may wait.
fn later(task: impl FnOnce() + Send + 'static) {
    if IS_HERE.get() {
        return task();
    }
    let refused = match QUEUE.get_or_init(open) {
        Some(queue) => queue.send(Box::new(task)).err().map(|refused| refused.0),
        None => Some(Box::new(task) as Task),
    };
    if let Some(task) = refused {
        task();
    }
}

/// Waits until what has been handed over so far is done, for a second at most.
fn settle() {
    let (done, told) = channel();
    if QUEUE.get().is_some() {
        later(move || {
            let _ = done.send(());
        });
        let _ = told.recv_timeout(PATIENCE);
    }
}

/// What `allocate` gives; if there is no room, once what was dropped before has gone back.
pub(crate) fn with_room<T>(mut allocate: impl FnMut() -> Result<T>) -> Result<T> {
    allocate().or_else(|why| match why.kind() {
        ErrorKind::Exhausted => {
            settle();
            allocate()
        }
        _ => Err(why),
    })
}

/// Drops a value on the thread that gives memory back to CUDA, which may wait for a GPU.
pub fn let_go(value: impl Send + 'static) {
    later(move || drop(value));
}

impl Device {
    /// As [`Device::within`], for what is given back when it is dropped, soon and on another thread: nobody is
    /// there to hear an error.
    pub(crate) fn give_back(
        &self,
        operation: &'static str,
        work: impl FnOnce() -> Result<()> + Send + 'static,
    ) {
        let device = self.clone();
        later(move || device.give_back_now(operation, work));
    }

    /// The same at once, where memory of others goes right after it.
    pub(crate) fn give_back_now(&self, operation: &'static str, work: impl FnOnce() -> Result<()>) {
        if let Err(why) = self.within(operation, work) {
            tracing::warn!(%why, "memory is not given back");
        }
    }
}

fn open() -> Option<Sender<Task>> {
    let (queue, tasks) = channel::<Task>();
    let work = move || {
        IS_HERE.set(true);
        // One that panics has said so, and takes none of the others along.
        tasks.into_iter().for_each(|task| drop(catch_unwind(AssertUnwindSafe(task))));
    };
    let started = std::thread::Builder::new().name("multirail-cuda".to_owned()).spawn(work);
    if let Err(why) = &started {
        tracing::warn!(%why, "no thread to give memory back to CUDA: who drops it waits for the GPU");
    }
    // The driver goes away when the process ends, by a handler that was registered before. Where there is none,
    // nothing goes back to it.
    let _ = start();
    at_exit(settle);
    started.is_ok().then_some(queue)
}
