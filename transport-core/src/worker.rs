//! The thread that drives an engine: spins while there is work, sleeps otherwise.

use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::engine::Engine;
use crate::spi::Armed;
use crate::{Doorbell, Error, Result};

/// How long a worker looks for work before it sleeps. A hand-over to a spinning
/// thread was measured at 0.9 µs, to a parked one at 16 µs; 100 µs of spinning
/// covers the gaps of a loop of requests and is nothing to an idle process.
const SPIN: Duration = Duration::from_micros(100);

/// Turns between two looks at the clock while spinning.
const TURNS_PER_LOOK: u32 = 64;

/// A running worker. Dropping it ends the thread.
pub(crate) struct Worker {
    thread: Option<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
    wake: Arc<crate::engine::EngineHandle>,
}

impl Worker {
    pub fn start(name: &str, mut engine: Engine, door: Doorbell) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let wake = Arc::clone(engine.handle());
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || {
                // A panic here is a bug, or a user's waker's or memory's; either way
                // no waiter may hang for it.
                let ran = catch_unwind(AssertUnwindSafe(|| run(&mut engine, &door, &stopped)));
                engine.close();
                if let Err(panic) = ran {
                    resume_unwind(panic);
                }
            })
            .map_err(|e| {
                Error::os("open", "start a worker thread; raise the limit of processes (ulimit -u)", e)
            })?;
        Ok(Self { thread: Some(thread), stop, wake })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.wake.bell.ring();
        let Some(thread) = self.thread.take() else { return };
        // The last handle of a fabric may be dropped by its own worker.
        if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
            tracing::error!("a worker thread panicked");
        }
    }
}

fn run(engine: &mut Engine, door: &Doorbell, stop: &AtomicBool) {
    while !stop.load(Ordering::Acquire) {
        spin(engine, stop);
        sleep(engine, door, stop);
    }
}

/// Takes turns until none has done anything for `SPIN`.
fn spin(engine: &mut Engine, stop: &AtomicBool) {
    let mut idle_turns = 0_u32;
    let mut idle_since = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        if engine.step().events > 0 {
            idle_turns = 0;
            continue;
        }
        std::hint::spin_loop();
        idle_turns += 1;
        if idle_turns == 1 {
            idle_since = Instant::now();
        } else if idle_turns.is_multiple_of(TURNS_PER_LOOK) && idle_since.elapsed() >= SPIN {
            return;
        }
    }
}

/// Sleeps until a command, an event or a deadline.
fn sleep(engine: &mut Engine, door: &Doorbell, stop: &AtomicBool) {
    let handle = Arc::clone(engine.handle());
    handle.parked.store(true, Ordering::Release);
    // Pairs with the fence in `EngineHandle::wake`.
    fence(Ordering::SeqCst);
    let mut wakers = Vec::new();
    let mut can_be_woken = true;
    let mut ready = handle.has_commands() || stop.load(Ordering::Relaxed);
    for rail in engine.rails_mut() {
        match rail.endpoint.arm() {
            Armed::Ready => ready = true,
            // SAFETY: the endpoint keeps its descriptor open while it lives, and it
            // outlives this call: the engine owns it.
            Armed::Fd(fd) => wakers.push(unsafe { BorrowedFd::borrow_raw(fd) }),
            Armed::Unsupported => can_be_woken = false,
        }
    }
    if !ready {
        engine.parks();
        let limit = engine.nap(can_be_woken);
        door.sleep(&wakers, limit);
    }
    handle.parked.store(false, Ordering::Release);
    door.clear();
}
