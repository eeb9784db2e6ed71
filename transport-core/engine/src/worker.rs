//! The thread that drives engines. It spins while there is work, and sleeps otherwise.

use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Engine;
use crate::spi::Armed;
use crate::{Error, Result, WakeupHandle, WakeupPipe};

/// How long a worker without work spins before it sleeps. Handing a command to a spinning thread was measured at
/// 0.9 µs, to a sleeping one at 16 µs. 100 µs of spinning covers the gaps of a loop of requests, and costs an idle
/// process almost nothing.
const SPIN: Duration = Duration::from_micros(100);

/// A spinning worker reads the clock once per this many steps.
const STEPS_PER_CLOCK_READ: u32 = 64;

/// A running worker. Dropping it ends the thread.
pub struct Worker {
    thread: Option<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
    wakeup: WakeupHandle,
}

/// The arguments of [`Worker::start`].
pub struct WorkerSetup {
    pub name: String,
    pub engines: Vec<Engine>,
    /// Wakes the worker; all its engines share it.
    pub wakeup: WakeupPipe,
    /// The core that the worker runs on. `None` lets the kernel choose.
    pub core: Option<u32>,
    /// Held during every step, to measure what a lock that workers share costs.
    pub lock: Option<Arc<Mutex<()>>>,
}

/// What the worker's thread owns.
struct WorkerLoop {
    engines: Vec<Engine>,
    wakeup: WakeupPipe,
    lock: Option<Arc<Mutex<()>>>,
    stop: Arc<AtomicBool>,
}

impl Worker {
    pub fn start(setup: WorkerSetup) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let handle = setup.wakeup.handle().try_clone()?;
        let WorkerSetup { name, engines, wakeup, core, lock } = setup;
        let mut worker = WorkerLoop { engines, wakeup, lock, stop: Arc::clone(&stop) };
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || {
                if let Some(core) = core
                    && let Err(error) = bind_to_core(core as usize)
                {
                    tracing::warn!(core, %error, "a worker could not be bound to its core; it runs on any core");
                }
                // A panic is a bug of multirail, or comes from the user's code (a waker, or a memory's `Drop`). In both
                // cases all waiters must get a result.
                let ran = catch_unwind(AssertUnwindSafe(|| worker.run()));
                worker.engines.iter_mut().for_each(Engine::close);
                if let Err(panic) = ran {
                    resume_unwind(panic);
                }
            })
            .map_err(|e| {
                Error::os("open", "start a worker thread; raise the limit of processes (ulimit -u)", e)
            })?;
        Ok(Self { thread: Some(thread), stop, wakeup: handle })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.wakeup.wake();
        let Some(thread) = self.thread.take() else { return };
        // A worker may drop the last handle of its own fabric. It cannot join itself.
        if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
            tracing::error!("a worker thread panicked");
        }
    }
}

impl WorkerLoop {
    fn run(&mut self) {
        while !self.stop.load(Ordering::Acquire) {
            let idle_since = self.spin();
            // If nothing happened during a sleep, the worker sleeps again without spinning first.
            while !self.stop.load(Ordering::Relaxed) {
                self.sleep(idle_since);
                if self.step_all() > 0 {
                    break;
                }
            }
        }
    }

    /// Steps each engine once. Returns the number of events.
    fn step_all(&mut self) -> usize {
        // The lock protects no data, so it does not matter whether it is poisoned.
        let _lock = self.lock.as_ref().map(|lock| lock.lock().unwrap_or_else(PoisonError::into_inner));
        self.engines.iter_mut().map(|engine| engine.step().events).sum()
    }

    /// Steps the engines until no step has had an event for `SPIN`. Returns when the first step without events ended.
    fn spin(&mut self) -> Instant {
        let mut idle_steps = 0_u32;
        let mut idle_since = Instant::now();
        while !self.stop.load(Ordering::Relaxed) {
            if self.step_all() > 0 {
                idle_steps = 0;
                continue;
            }
            std::hint::spin_loop();
            idle_steps += 1;
            if idle_steps == 1 {
                idle_since = Instant::now();
            } else if idle_steps.is_multiple_of(STEPS_PER_CLOCK_READ) && idle_since.elapsed() >= SPIN {
                break;
            }
        }
        idle_since
    }

    /// Sleeps until a command, an event or a deadline. `idle_since` says since when there has been no event.
    fn sleep(&mut self, idle_since: Instant) {
        let handles: Vec<_> = self.engines.iter().map(|engine| Arc::clone(engine.handle())).collect();
        handles.iter().for_each(|handle| handle.parked.store(true, Ordering::Release));
        // Pairs with the fence in `EngineHandle::wake`.
        fence(Ordering::SeqCst);
        let mut fds = Vec::new();
        let mut can_be_woken = true;
        let mut ready =
            handles.iter().any(|handle| handle.has_commands()) || self.stop.load(Ordering::Relaxed);
        for rail in self.engines.iter_mut().flat_map(Engine::rails_mut) {
            match rail.endpoint.arm() {
                Armed::Ready => ready = true,
                // SAFETY: the endpoint keeps its descriptor open while it lives, and it
                // outlives this call: the engine owns it.
                Armed::Fd(fd) => fds.push(unsafe { BorrowedFd::borrow_raw(fd) }),
                Armed::FdOrTimeout(fd) => {
                    can_be_woken = false;
                    // SAFETY: as above.
                    fds.push(unsafe { BorrowedFd::borrow_raw(fd) });
                }
                Armed::Unsupported => can_be_woken = false,
            }
        }
        let mut was_woken = false;
        if !ready {
            self.engines.iter_mut().for_each(Engine::on_park);
            let idle = idle_since.elapsed();
            let limit = self.engines.iter().filter_map(|engine| engine.sleep_limit(can_be_woken, idle)).min();
            was_woken = self.wakeup.sleep(&fds, limit);
        }
        handles.iter().for_each(|handle| handle.parked.store(false, Ordering::Release));
        if was_woken {
            self.wakeup.clear();
        }
    }
}

/// Binds the calling thread to `core`.
#[cfg(target_os = "linux")]
fn bind_to_core(core: usize) -> std::io::Result<()> {
    if core >= rustix::thread::CpuSet::MAX_CPU {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    let mut only = rustix::thread::CpuSet::new();
    only.set(core);
    Ok(rustix::thread::sched_setaffinity(None, &only)?)
}

#[cfg(not(target_os = "linux"))]
fn bind_to_core(_: usize) -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}

#[cfg(all(test, target_os = "linux", not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_keeps_to_its_core() {
        let allowed = rustix::thread::sched_getaffinity(None).unwrap();
        let core = (0..rustix::thread::CpuSet::MAX_CPU).rev().find(|core| allowed.is_set(*core)).unwrap();
        let bound = std::thread::spawn(move || {
            bind_to_core(core).unwrap();
            rustix::thread::sched_getaffinity(None).unwrap()
        });
        let bound = bound.join().unwrap();
        assert_eq!((bound.count(), bound.is_set(core)), (1, true));
        assert!(bind_to_core(usize::MAX).is_err());
    }
}
