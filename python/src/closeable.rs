//! What a Python object closes once.

use std::sync::{Mutex, MutexGuard, PoisonError};

use multirail::{Error, ErrorKind};
use pyo3::prelude::*;

use crate::errors::IntoPython;
use crate::fork::ForkSafe;

/// A value that its object closes, by a call or with its last reference: dropping the value may join a thread, so that
/// happens without the GIL. A child that was forked does not drop it.
pub struct Closeable<T: Send>(Mutex<Option<ForkSafe<T>>>);

impl<T: Send> Closeable<T> {
    pub fn new(value: T) -> Self {
        Self(Mutex::new(Some(ForkSafe::new(value))))
    }

    /// A clone of the value, while it is open.
    pub fn get(&self, operation: &'static str) -> PyResult<T>
    where
        T: Clone,
    {
        let closed = || Error::new(ErrorKind::Closed, operation, "it is closed");
        self.lock().as_ref().ok_or_else(closed).into_python()?.get().cloned()
    }

    /// Drops the value. May be called twice.
    pub fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.take()));
    }

    /// The value to drop, unless it is closed already or belongs to the process that this one was forked from.
    fn take(&self) -> Option<T> {
        self.lock().take()?.take()
    }

    fn lock(&self) -> MutexGuard<'_, Option<ForkSafe<T>>> {
        // No holder panics half way through a change, so a poisoned lock holds good data.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Send> Drop for Closeable<T> {
    fn drop(&mut self) {
        if let Some(value) = self.take() {
            Python::attach(|py| py.detach(|| drop(value)));
        }
    }
}
