//! The engines of a worker, and the turns that other threads take while it sleeps.

use std::cell::Cell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Engine;

thread_local! {
    static IS_IN_TURN: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread has a [`Turn`]: it is in code of the user that an engine calls, such as a `Drop`.
pub(crate) fn is_in_turn() -> bool {
    IS_IN_TURN.get()
}

/// The engines of a worker. The worker holds them whenever it is awake.
pub(crate) struct WorkerEngines(Mutex<Vec<Engine>>);

impl WorkerEngines {
    pub(crate) fn new(engines: Vec<Engine>) -> Arc<Self> {
        let handles: Vec<_> = engines.iter().map(|engine| Arc::clone(engine.handle())).collect();
        let engines = Arc::new(Self(Mutex::new(engines)));
        handles.iter().enumerate().for_each(|(at, handle)| handle.drive_by_worker(&engines, at));
        engines
    }

    /// For the worker: waits until no other thread holds the engines. Returns `None` if a thread has panicked in its
    /// turn: that is a bug of multirail, or comes from the user's code.
    pub(crate) fn hold(&self) -> Option<MutexGuard<'_, Vec<Engine>>> {
        self.0.lock().ok()
    }

    /// For the worker: ends all operations, and drops the engines.
    pub(crate) fn close(&self) {
        let mut engines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        engines.iter_mut().for_each(Engine::close);
        engines.clear();
    }

    /// The calling thread holds the engines, to use the one at `position`. Returns `None` if the worker is awake, or has
    /// closed its engines, or if another thread has its turn.
    ///
    /// Nothing of what is posted in a turn completes before the worker polls: the caller wakes it after the turn.
    pub(crate) fn take_turn(&self, position: usize) -> Option<Turn<'_>> {
        let engines = self.0.try_lock().ok().filter(|engines| position < engines.len())?;
        IS_IN_TURN.set(true);
        Some(Turn { engines, position })
    }
}

/// A thread holds the engines of a worker that sleeps.
pub(crate) struct Turn<'a> {
    engines: MutexGuard<'a, Vec<Engine>>,
    position: usize,
}

impl Turn<'_> {
    /// The engine that the turn is for.
    pub(crate) fn engine(&mut self) -> &mut Engine {
        &mut self.engines[self.position]
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        IS_IN_TURN.set(false);
        // The worker finds that the lock is poisoned, and ends all operations.
        if std::thread::panicking() {
            self.engines.iter().for_each(|engine| engine.handle().wake());
        }
    }
}
