//! The thread that drives engines. It spins while there is work, and sleeps otherwise.

use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Engine;
use super::adaptive_spin::AdaptiveSpin;
use super::worker_engines::WorkerEngines;
use crate::spi::Armed;
use crate::{Error, Result, WakeupHandle, WakeupPipe};

/// The longest time for which a worker without work spins before it sleeps. Handing a command to a spinning thread was
/// measured at 0.9 µs, to a sleeping one at 16 µs. 100 µs of spinning covers the gaps of a loop of requests, and costs
/// an idle process almost nothing.
const SPIN: Duration = Duration::from_micros(100);

/// A spinning worker reads the clock once per this many steps.
const STEPS_PER_CLOCK_READ: u32 = 64;

/// A running worker. Dropping it ends the thread.
pub struct Worker {
    thread: Option<JoinHandle<()>>,
    engines: Arc<WorkerEngines>,
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

/// What the worker's thread uses.
struct WorkerLoop {
    engines: Arc<WorkerEngines>,
    wakeup: WakeupPipe,
    lock: Option<Arc<Mutex<()>>>,
    stop: Arc<AtomicBool>,
}

impl Worker {
    pub fn start(setup: WorkerSetup) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let handle = setup.wakeup.handle().try_clone()?;
        let WorkerSetup { name, engines, wakeup, core, lock } = setup;
        let engines = WorkerEngines::new(engines);
        let worker = WorkerLoop { engines: Arc::clone(&engines), wakeup, lock, stop: Arc::clone(&stop) };
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
                if worker.engines.close() {
                    tracing::error!("a thread has panicked while it posted an operation: the worker ends all operations");
                }
                if let Err(panic) = ran {
                    resume_unwind(panic);
                }
            })
            .map_err(|e| {
                Error::os("open", "start a worker thread; raise the limit of processes (ulimit -u)", e)
            })?;
        Ok(Self { thread: Some(thread), engines, stop, wakeup: handle })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.wakeup.wake();
        let Some(thread) = self.thread.take() else { return };
        // A worker may drop the last handle of its own fabric. It cannot join itself. Neither can a thread that holds
        // the engines, because the worker needs them to end.
        let is_own = thread.thread().id() == std::thread::current().id();
        let may_join = !is_own && !self.engines.is_turn_of_this_thread();
        if may_join && thread.join().is_err() {
            tracing::error!("a worker thread panicked");
        }
    }
}

impl WorkerLoop {
    fn run(&self) {
        let Some(mut engines) = self.engines.hold() else { return };
        let mut spin = AdaptiveSpin::new(SPIN);
        while !self.stop.load(Ordering::Acquire) {
            let idle_since = self.spin(&mut engines, spin.limit());
            // If nothing happened during a sleep, the worker sleeps again without spinning first.
            while !self.stop.load(Ordering::Relaxed) {
                let Some(held_again) = self.sleep(engines, idle_since) else { return };
                engines = held_again;
                if self.step_all(&mut engines) > 0 {
                    spin.note(idle_since.elapsed());
                    break;
                }
            }
        }
    }

    /// Steps each engine once. Returns the number of events.
    fn step_all(&self, engines: &mut [Engine]) -> usize {
        // The lock protects no data, so it does not matter whether it is poisoned.
        let _lock = self.lock.as_ref().map(|lock| lock.lock().unwrap_or_else(PoisonError::into_inner));
        engines.iter_mut().map(|engine| engine.step().events).sum()
    }

    /// Steps the engines until no step has had an event for `limit`. Returns when the first step without events ended.
    fn spin(&self, engines: &mut [Engine], limit: Duration) -> Instant {
        let mut idle_steps = 0_u32;
        let mut idle_since = Instant::now();
        while !self.stop.load(Ordering::Relaxed) {
            if self.step_all(engines) > 0 {
                idle_steps = 0;
                continue;
            }
            std::hint::spin_loop();
            idle_steps += 1;
            if idle_steps == 1 {
                idle_since = Instant::now();
            } else if idle_steps.is_multiple_of(STEPS_PER_CLOCK_READ) && idle_since.elapsed() >= limit {
                break;
            }
        }
        idle_since
    }

    /// Sleeps until a command, an event or a deadline. `idle_since` says since when there has been no event. Meanwhile
    /// other threads may hold the engines. Returns `None` if one of them has panicked then.
    fn sleep<'a>(
        &'a self,
        mut engines: MutexGuard<'a, Vec<Engine>>,
        idle_since: Instant,
    ) -> Option<MutexGuard<'a, Vec<Engine>>> {
        let handles: Vec<_> = engines.iter().map(|engine| Arc::clone(engine.handle())).collect();
        handles.iter().for_each(|handle| handle.parked.store(true, Ordering::Release));
        // Pairs with the fence in `EngineHandle::wake`.
        fence(Ordering::SeqCst);
        let mut fds = Vec::new();
        let mut can_be_woken = true;
        let mut ready =
            handles.iter().any(|handle| handle.has_commands()) || self.stop.load(Ordering::Relaxed);
        for rail in engines.iter_mut().flat_map(Engine::rails_mut) {
            match rail.endpoint.arm() {
                Armed::Ready => ready = true,
                // SAFETY: the endpoint keeps its descriptor open until the next poll (the rule of `Endpoint::arm`), and
                // only this thread polls it and drops its engine.
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
        let mut held = None;
        if ready {
            held = Some(engines);
        } else {
            engines.iter_mut().for_each(Engine::on_park);
            let idle = idle_since.elapsed();
            let limit = engines.iter().filter_map(|engine| engine.sleep_limit(can_be_woken, idle)).min();
            drop(engines);
            was_woken = self.wakeup.sleep(&fds, limit);
        }
        handles.iter().for_each(|handle| handle.parked.store(false, Ordering::Release));
        if was_woken {
            self.wakeup.clear();
        }
        held.or_else(|| self.engines.hold())
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
