//! Objects of a process that has forked: the child has their memory, and none of their threads.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// The number of forks that lie between this process and the one that has loaded the module.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Called in the child after each fork (`os.register_at_fork`).
#[pyfunction]
#[pyo3(name = "_after_fork_in_child")]
pub fn after_fork_in_child() {
    FORKS.fetch_add(1, Relaxed);
}

/// A value of the library that only the process that made it may use and drop.
///
/// In a child, the threads that the value works with do not exist, and a lock may be held by one of them for ever. So a
/// child gets an error instead of the value, and never drops it.
pub struct ForkSafe<T> {
    /// `None` once the value was taken to be dropped.
    value: Option<T>,
    forks: u32,
}

impl<T> ForkSafe<T> {
    pub fn new(value: T) -> Self {
        Self { value: Some(value), forks: FORKS.load(Relaxed) }
    }

    /// The value, in the process that made it.
    #[inline]
    pub fn get(&self) -> PyResult<&T> {
        match &self.value {
            Some(value) if self.forks == FORKS.load(Relaxed) => Ok(value),
            _ => Err(forked()),
        }
    }
}

impl<T> ForkSafe<T> {
    /// Takes the value to drop it, in the process that made it.
    pub fn take(&mut self) -> Option<T> {
        match self.forks == FORKS.load(Relaxed) {
            true => self.value.take(),
            false => None,
        }
    }
}

impl<T> Drop for ForkSafe<T> {
    fn drop(&mut self) {
        if self.forks != FORKS.load(Relaxed) {
            std::mem::forget(self.value.take());
        }
    }
}

#[cold]
fn forked() -> PyErr {
    PyRuntimeError::new_err(
        "this object was made before a fork, and its threads run in the parent only; open a Fabric in the child, or start \
         processes by the method \"spawn\"",
    )
}
