//! Atomics and cells: those of `std`, or those of loom when loom tests the code.

use std::task::Waker;

#[cfg(multirail_loom)]
pub use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicU64, fence},
};

#[cfg(not(multirail_loom))]
pub use std::sync::atomic::{AtomicU64, fence};

/// One task's waker, set by that task and taken by any thread.
#[cfg(not(multirail_loom))]
pub struct WakerCell(atomic_waker::AtomicWaker);

#[cfg(multirail_loom)]
pub struct WakerCell(loom::future::AtomicWaker);

impl Default for WakerCell {
    fn default() -> Self {
        Self::new()
    }
}

impl WakerCell {
    pub fn new() -> Self {
        #[cfg(not(multirail_loom))]
        return Self(atomic_waker::AtomicWaker::new());
        #[cfg(multirail_loom)]
        return Self(loom::future::AtomicWaker::new());
    }

    pub fn register(&self, waker: &Waker) {
        #[cfg(not(multirail_loom))]
        self.0.register(waker);
        #[cfg(multirail_loom)]
        self.0.register_by_ref(waker);
    }

    pub fn wake(&self) {
        self.0.wake();
    }

    pub fn clear(&self) {
        #[cfg(not(multirail_loom))]
        drop(self.0.take());
        #[cfg(multirail_loom)]
        drop(self.0.take_waker());
    }
}

/// `std`'s cell with the interface of loom's.
#[cfg(not(multirail_loom))]
#[derive(Debug)]
pub struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(multirail_loom))]
impl<T> UnsafeCell<T> {
    pub fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    /// Calls `f` with the address. Dereferencing it is the caller's `unsafe`.
    pub fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    /// As `with`, for writing.
    pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}
