//! Puts deregistrations off while an endpoint of their device is overdue (`reaper.rs`).
//!
//! EFA's provider then holds a lock of the domain (`srx_lock`, 2.1), which calls on its endpoints and address vectors
//! take, and it repeats what was posted. For that it reads the registration, which a descriptor is: once that is closed
//! the process crashes. So the reaper deregisters after the endpoint is closed. Registering goes on: in 2.1 it takes
//! another lock (`efa_mr.c`).

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use libfabric_sys as sys;
use multirail_spi::{Memory, Result};

use crate::objects::Fid;

/// A device's.
#[derive(Default)]
pub(crate) struct Gate(Mutex<State>);

#[derive(Default)]
struct State {
    /// Endpoints that a reaper still closes past the limit.
    overdue: usize,
    left: Vec<Deregistration>,
}

/// A registration that is to be closed, and the memory that must live until then.
pub(crate) struct Deregistration {
    pub(crate) mr: Fid<sys::fid_mr>,
    pub(crate) memory: Arc<dyn Memory>,
    /// Told the result.
    pub(crate) ended: Arc<OnceLock<Result<()>>>,
}

impl Deregistration {
    pub(crate) fn run(self) {
        let Self { mr, memory, ended } = self;
        let closed =
            mr.close("revoke", "to deregister memory, which peers may still reach: close the fabric");
        if let Err(error) = &closed {
            tracing::warn!(%error, "the memory of a region is never freed");
            // The card may write to it for as long as it likes.
            std::mem::forget(memory);
        }
        let _ = ended.set(closed);
    }
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Endpoints that a reaper still closes past the limit.
    pub(crate) fn overdue(&self) -> usize {
        self.lock().overdue
    }

    /// Does a deregistration; where an endpoint is overdue, the reaper does it afterwards.
    pub(crate) fn deregister(&self, deregistration: Deregistration) {
        let mut state = self.lock();
        if state.overdue > 0 {
            return state.left.push(deregistration);
        }
        drop(state);
        deregistration.run();
    }

    /// An endpoint is overdue.
    pub(crate) fn shut(&self) {
        self.lock().overdue += 1;
    }

    /// An overdue endpoint is closed. Does what was left, where no other one is overdue.
    pub(crate) fn open(&self) {
        let mut state = self.lock();
        state.overdue -= 1;
        if state.overdue == 0 {
            let left = std::mem::take(&mut state.left);
            drop(state);
            left.into_iter().for_each(Deregistration::run);
        }
    }
}
