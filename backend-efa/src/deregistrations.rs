//! Delays deregistrations while an endpoint of their device is *overdue*: a reaper (`reaper.rs`) has not closed it
//! within the limit.
//!
//! While EFA's provider closes an endpoint, it repeats the posted requests. It holds a lock of the domain meanwhile
//! (`srx_lock`, 2.1), which calls on the domain's endpoints and address vectors take as well. To repeat a request, the
//! provider reads the registration that the request's descriptor points to. If that registration is closed, the process
//! crashes. So the reaper deregisters after it has closed the endpoint. Registering needs no delay: in 2.1 it takes
//! another lock (`efa_mr.c`).

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use libfabric_sys as sys;
use multirail_spi::{Memory, Result};

use crate::objects::Fid;

/// The deregistrations of a device.
#[derive(Default)]
pub(crate) struct Deregistrations(Mutex<State>);

#[derive(Default)]
struct State {
    /// The number of endpoints that reapers have not closed within the limit.
    overdue: usize,
    delayed: Vec<Deregistration>,
}

/// A registration that is to be closed, and the memory that must live until then.
pub(crate) struct Deregistration {
    pub(crate) mr: Fid<sys::fid_mr>,
    pub(crate) memory: Arc<dyn Memory>,
    /// Set once the registration is closed, or could not be closed.
    pub(crate) result: Arc<OnceLock<Result<()>>>,
}

impl Deregistration {
    pub(crate) fn run(self) {
        let Self { mr, memory, result } = self;
        let closed =
            mr.close("revoke", "to deregister memory, which peers may still reach: close the fabric");
        if let Err(error) = &closed {
            tracing::warn!(%error, "the memory of a region is never freed");
            // The card may write to it at any time.
            std::mem::forget(memory);
        }
        let _ = result.set(closed);
    }
}

impl Deregistrations {
    /// The number of endpoints that reapers have not closed within the limit.
    pub(crate) fn overdue_endpoints(&self) -> usize {
        self.lock().overdue
    }

    /// Runs a deregistration now, or once no endpoint is overdue any more.
    pub(crate) fn run_or_delay(&self, deregistration: Deregistration) {
        let mut state = self.lock();
        if state.overdue > 0 {
            return state.delayed.push(deregistration);
        }
        drop(state);
        deregistration.run();
    }

    /// Notes that an endpoint is overdue.
    pub(crate) fn hold(&self) {
        self.lock().overdue += 1;
    }

    /// Notes that an overdue endpoint is closed. Runs the delayed deregistrations if it was the last one.
    pub(crate) fn release(&self) {
        let mut state = self.lock();
        state.overdue -= 1;
        if state.overdue == 0 {
            let delayed = std::mem::take(&mut state.delayed);
            drop(state);
            delayed.into_iter().for_each(Deregistration::run);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
