//! Waits with a deadline that take no slot of the op table.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use super::{Control, EngineHandle};
use crate::Time;
use crate::watchers::{Due, Watchers};

/// Who is to be woken when; the engine looks as it looks at other deadlines.
#[derive(Default)]
pub(crate) struct Alarms(Mutex<Watchers<Time>>);

impl Alarms {
    /// Takes out whoever is due at `now`, and says when the next is.
    pub(super) fn due(&self, now: Time) -> (Due, Time) {
        let mut watchers = self.lock();
        let due = watchers.due(Time::ZERO..=now);
        (due, watchers.first().unwrap_or(Time::NEVER))
    }

    fn lock(&self) -> MutexGuard<'_, Watchers<Time>> {
        // Nothing in here panics half way through a change.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One wait's alarm. It leaves nothing behind when it is dropped.
pub(crate) struct Alarm {
    engine: Arc<EngineHandle>,
    at: Time,
    id: Option<u64>,
}

impl Alarm {
    /// To ring at `at`, by that engine's clock.
    pub fn new(engine: Arc<EngineHandle>, at: Time) -> Self {
        Self { engine, at, id: None }
    }

    pub fn at(&self) -> Time {
        self.at
    }

    pub fn engine(&self) -> &Arc<EngineHandle> {
        &self.engine
    }

    /// Has `waker` woken at the time, once.
    pub fn set(&mut self, waker: &Waker) {
        let first = self.id.is_none();
        let old = self.engine.alarms.lock().watch(&mut self.id, self.at, waker);
        drop(old);
        if first {
            self.engine.control(Control::Alarm { at: self.at });
        }
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if self.id.is_some() {
            let old = self.engine.alarms.lock().forget(&mut self.id, self.at);
            drop(old);
        }
    }
}
