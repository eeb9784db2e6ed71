//! Timers of futures that wait for no operation, such as a barrier. A timer takes no slot of the op table.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use super::waker_set::{TakenWakers, WakerSet};
use super::{Control, EngineHandle};
use crate::Time;

/// The wakers of all timers, by the time at which each is due. The engine checks them as it checks the deadlines of
/// operations.
#[derive(Default)]
pub struct Timers(Mutex<WakerSet<Time>>);

impl Timers {
    /// Removes the wakers that are due at `now`. Also returns when the next one is due.
    pub(super) fn take_due(&self, now: Time) -> (TakenWakers, Time) {
        let mut wakers = self.lock();
        let due = wakers.take_range(Time::ZERO..=now);
        (due, wakers.first_key().unwrap_or(Time::NEVER))
    }

    fn lock(&self) -> MutexGuard<'_, WakerSet<Time>> {
        // No change of the set panics half way, so a poisoned lock still guards a valid set.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One future's timer. Dropping it removes its waker.
pub struct Timer {
    engine: Arc<EngineHandle>,
    at: Time,
    id: Option<u64>,
}

impl Timer {
    /// A timer that is due at `at`, by the clock of `engine`.
    pub fn new(engine: Arc<EngineHandle>, at: Time) -> Self {
        Self { engine, at, id: None }
    }

    pub fn at(&self) -> Time {
        self.at
    }

    pub fn engine(&self) -> &Arc<EngineHandle> {
        &self.engine
    }

    /// Wakes `waker` once when the timer is due. Replaces the waker of an earlier call.
    pub fn set(&mut self, waker: &Waker) {
        let first = self.id.is_none();
        let old = self.engine.timers.lock().register(&mut self.id, self.at, waker);
        drop(old);
        if first {
            self.engine.control(Control::Timer { at: self.at });
        }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        if self.id.is_some() {
            let old = self.engine.timers.lock().unregister(&mut self.id, self.at);
            drop(old);
        }
    }
}
