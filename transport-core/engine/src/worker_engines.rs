//! The engines of a worker, and the turns that other threads take while it sleeps.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Engine;

/// A number that no other living thread has; not 0.
fn this_thread() -> usize {
    thread_local! {
        static PLACE: u8 = const { 0 };
    }
    PLACE.with(|place| std::ptr::from_ref(place) as usize)
}

/// The engines of a worker. The worker holds them whenever it is awake.
pub(crate) struct WorkerEngines {
    engines: Mutex<Vec<Engine>>,
    /// The thread that has a [`Turn`], by [`this_thread`]; 0 if none has.
    turn_of: AtomicUsize,
}

impl WorkerEngines {
    pub(crate) fn new(engines: Vec<Engine>) -> Arc<Self> {
        let handles: Vec<_> = engines.iter().map(|engine| Arc::clone(engine.handle())).collect();
        let engines = Arc::new(Self { engines: Mutex::new(engines), turn_of: AtomicUsize::new(0) });
        handles.iter().enumerate().for_each(|(at, handle)| handle.drive_by_worker(&engines, at));
        engines
    }

    /// Whether the calling thread has a [`Turn`]: it is in code that an engine calls, such as a subscriber of `tracing`.
    pub(crate) fn is_turn_of_this_thread(&self) -> bool {
        self.turn_of.load(Ordering::Relaxed) == this_thread()
    }

    /// For the worker: waits until no other thread holds the engines. Returns `None` if a thread has panicked in its
    /// turn: that is a bug of multirail, or comes from code that the engine calls.
    pub(crate) fn hold(&self) -> Option<MutexGuard<'_, Vec<Engine>>> {
        self.engines.lock().ok()
    }

    /// For the worker: ends all operations, and drops the engines. Returns true if a thread has panicked in its turn.
    pub(crate) fn close(&self) -> bool {
        let mut engines = self.engines.lock().unwrap_or_else(PoisonError::into_inner);
        engines.iter_mut().for_each(Engine::close);
        engines.clear();
        self.engines.is_poisoned()
    }

    /// The calling thread holds the engines, to use the one at `position`. Returns `None` if the worker is awake, or
    /// has closed its engines, or if another thread has its turn.
    ///
    /// Nothing of what is posted in a turn completes before the worker polls: the caller wakes it after the turn.
    pub(crate) fn take_turn(&self, position: usize) -> Option<Turn<'_>> {
        let engines = self.engines.try_lock().ok().filter(|engines| position < engines.len())?;
        self.turn_of.store(this_thread(), Ordering::Relaxed);
        Some(Turn { engines, position, turn_of: &self.turn_of })
    }
}

/// A thread holds the engines of a worker that sleeps.
pub(crate) struct Turn<'a> {
    engines: MutexGuard<'a, Vec<Engine>>,
    position: usize,
    turn_of: &'a AtomicUsize,
}

impl Turn<'_> {
    /// The engine that the turn is for.
    pub(crate) fn engine(&mut self) -> &mut Engine {
        &mut self.engines[self.position]
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.turn_of.store(0, Ordering::Relaxed);
        // The worker finds that the lock is poisoned, and ends all operations.
        if std::thread::panicking() {
            self.engines.iter().for_each(|engine| engine.handle().wake());
        }
    }
}
