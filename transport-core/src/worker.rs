//! The thread that drives engines: spins while there is work, sleeps otherwise.

mod pin;
mod seat;

use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::engine::Engine;
use crate::spi::Armed;
use crate::{Error, Result, WakeupHandle, WakeupPipe};
pub(crate) use seat::Seat;

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
    wakeup: WakeupHandle,
    /// Given back when the thread has ended.
    _seat: Option<Seat>,
}

/// What a worker is started with.
pub(crate) struct WorkerSetup {
    pub name: String,
    pub engines: Vec<Engine>,
    /// Rings for all of them.
    pub door: WakeupPipe,
    /// The CPU that it keeps to.
    pub seat: Option<Seat>,
    /// Taken for every turn where workers share their state.
    pub lock: Option<Arc<Mutex<()>>>,
}

/// The engines of one thread.
struct Crew {
    engines: Vec<Engine>,
    door: WakeupPipe,
    lock: Option<Arc<Mutex<()>>>,
    stop: Arc<AtomicBool>,
}

impl Worker {
    pub fn start(setup: WorkerSetup) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let wakeup = setup.door.handle().try_clone()?;
        let WorkerSetup { name, engines, door, seat, lock } = setup;
        let core = seat.as_ref().map(Seat::cpu);
        let mut crew = Crew { engines, door, lock, stop: Arc::clone(&stop) };
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || {
                if let Some(core) = core
                    && let Err(error) = pin::bind(core as usize)
                {
                    tracing::warn!(core, %error, "a worker could not be bound to its core; it runs anywhere");
                }
                // A panic here is a bug, or a user's waker's or memory's; either way
                // no waiter may hang for it.
                let ran = catch_unwind(AssertUnwindSafe(|| crew.run()));
                crew.engines.iter_mut().for_each(Engine::close);
                if let Err(panic) = ran {
                    resume_unwind(panic);
                }
            })
            .map_err(|e| {
                Error::os("open", "start a worker thread; raise the limit of processes (ulimit -u)", e)
            })?;
        Ok(Self { thread: Some(thread), stop, wakeup, _seat: seat })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.wakeup.wake();
        let Some(thread) = self.thread.take() else { return };
        // The last handle of a fabric may be dropped by its own worker.
        if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
            tracing::error!("a worker thread panicked");
        }
    }
}

impl Crew {
    fn run(&mut self) {
        while !self.stop.load(Ordering::Acquire) {
            let idle_since = self.spin();
            // A sleep that nothing came of is followed by the next one.
            while !self.stop.load(Ordering::Relaxed) {
                self.sleep(idle_since);
                if self.turn() > 0 {
                    break;
                }
            }
        }
    }

    /// One turn of every engine; how much happened.
    fn turn(&mut self) -> usize {
        // Its holders guard nothing by it: poison carries no news.
        let _lock = self.lock.as_ref().map(|lock| lock.lock().unwrap_or_else(PoisonError::into_inner));
        self.engines.iter_mut().map(|engine| engine.step().events).sum()
    }

    /// Takes turns until none has done anything for `SPIN`; since when.
    fn spin(&mut self) -> Instant {
        let mut idle_turns = 0_u32;
        let mut idle_since = Instant::now();
        while !self.stop.load(Ordering::Relaxed) {
            if self.turn() > 0 {
                idle_turns = 0;
                continue;
            }
            std::hint::spin_loop();
            idle_turns += 1;
            if idle_turns == 1 {
                idle_since = Instant::now();
            } else if idle_turns.is_multiple_of(TURNS_PER_LOOK) && idle_since.elapsed() >= SPIN {
                break;
            }
        }
        idle_since
    }

    /// Sleeps until a command, an event or a deadline.
    fn sleep(&mut self, idle_since: Instant) {
        let handles: Vec<_> = self.engines.iter().map(|engine| Arc::clone(engine.handle())).collect();
        handles.iter().for_each(|handle| handle.parked.store(true, Ordering::Release));
        // Pairs with the fence in `EngineHandle::wake`.
        fence(Ordering::SeqCst);
        let mut wakers = Vec::new();
        let mut can_be_woken = true;
        let mut ready =
            handles.iter().any(|handle| handle.has_commands()) || self.stop.load(Ordering::Relaxed);
        for rail in self.engines.iter_mut().flat_map(Engine::rails_mut) {
            match rail.endpoint.arm() {
                Armed::Ready => ready = true,
                // SAFETY: the endpoint keeps its descriptor open while it lives, and it
                // outlives this call: the engine owns it.
                Armed::Fd(fd) => wakers.push(unsafe { BorrowedFd::borrow_raw(fd) }),
                Armed::FdOrNap(fd) => {
                    can_be_woken = false;
                    // SAFETY: as above.
                    wakers.push(unsafe { BorrowedFd::borrow_raw(fd) });
                }
                Armed::Unsupported => can_be_woken = false,
            }
        }
        let mut was_rung = false;
        if !ready {
            self.engines.iter_mut().for_each(Engine::parks);
            let idle = idle_since.elapsed();
            let limit = self.engines.iter().filter_map(|engine| engine.nap(can_be_woken, idle)).min();
            was_rung = self.door.sleep(&wakers, limit);
        }
        handles.iter().for_each(|handle| handle.parked.store(false, Ordering::Release));
        if was_rung {
            self.door.clear();
        }
    }
}
