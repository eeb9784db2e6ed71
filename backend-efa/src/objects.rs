//! Owners of libfabric's objects. Dropping an owner closes its object. A struct of several owners has its fields in
//! such an order that an object is closed before those that it depends on.

use std::ffi::c_int;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use libfabric_sys as sys;
use multirail_spi::{Error, ErrorKind, Flushes, Result};

use crate::deregistrations::Deregistrations;
use crate::library::{Info, library};
use crate::signals;
use crate::status::{call_error, card_post_error};
use crate::submit::MAX_BATCH;

/// A C object that begins with libfabric's `fid`.
///
/// # Safety
/// The type begins with a `fid`.
pub(crate) unsafe trait Object {}

// SAFETY: `rdma/fabric.h` and others define them with `struct fid fid;` in front.
unsafe impl Object for sys::fid_fabric {}
// SAFETY: as above.
unsafe impl Object for sys::fid_domain {}
// SAFETY: as above.
unsafe impl Object for sys::fid_av {}
// SAFETY: as above.
unsafe impl Object for sys::fid_cq {}
// SAFETY: as above.
unsafe impl Object for sys::fid_eq {}
// SAFETY: as above.
unsafe impl Object for sys::fid_ep {}
// SAFETY: as above.
unsafe impl Object for sys::fid_mr {}
// SAFETY: as above.
unsafe impl Object for sys::fid_cntr {}

/// An open object of libfabric.
pub(crate) struct Fid<T: Object>(NonNull<T>);

// SAFETY: domains are opened for any thread (`FI_THREAD_SAFE`), and libfabric says the same
// of everything opened on them.
unsafe impl<T: Object> Send for Fid<T> {}
// SAFETY: as above.
unsafe impl<T: Object> Sync for Fid<T> {}

impl<T: Object> Fid<T> {
    /// Wraps the object that `open` opens; `what` names it in the error.
    pub(crate) fn open(
        operation: &'static str,
        what: &str,
        open: impl FnOnce(&mut *mut T) -> c_int,
    ) -> Result<Self> {
        let mut object = null_mut();
        let code = open(&mut object);
        match NonNull::new(object) {
            Some(object) if code == 0 => Ok(Self(object)),
            _ => Err(call_error(operation, what, code)),
        }
    }

    /// Closes the object. After an error it must not be used or closed again: a provider may have freed it
    /// (`efa_mr_close`), or left it open.
    pub(crate) fn close(self, operation: &'static str, what: &str) -> Result<()> {
        // SAFETY: opened by libfabric, and closed once, as `self` is not dropped.
        let code = unsafe { sys::fi_close(std::mem::ManuallyDrop::new(self).fid()) };
        if code == 0 { Ok(()) } else { Err(call_error(operation, what, code)) }
    }

    pub(crate) fn as_ptr(&self) -> *mut T {
        self.0.as_ptr()
    }

    /// The object's `fid`.
    pub(crate) fn fid(&self) -> *mut sys::fid {
        self.0.as_ptr().cast()
    }
}

impl<T: Object> Drop for Fid<T> {
    fn drop(&mut self) {
        // SAFETY: opened by libfabric, closed once; the holders drop the objects that depend on it first.
        let code = unsafe { sys::fi_close(self.fid()) };
        if code != 0 {
            let why = library().map(|library| library.strerror(code)).unwrap_or_default();
            tracing::warn!(code, why, "libfabric does not close {}", std::any::type_name::<T>());
        }
    }
}

/// An open libfabric domain with the objects that it depends on. The fields are closed in order.
pub(crate) struct Device {
    pub(crate) domain: Fid<sys::fid_domain>,
    /// Without an event queue, a provider aborts the process at errors that it can report only there
    /// (prov/util `ofi_eq` users; EFA's `efa_eq_write_error`).
    events: Fid<sys::fid_eq>,
    pub(crate) fabric: Fid<sys::fid_fabric>,
    pub(crate) info: Info,
    pub(crate) flushes: Flushes,
    pub(crate) deregistrations: Deregistrations,
    /// Whether the device registers GPU memory, and reaches it without the provider's copies.
    pub(crate) takes_gpu_memory: AtomicBool,
    /// Whether a peer's write with an imm consumes a posted receive.
    pub(crate) imms_consume_receives: bool,
}

impl Device {
    pub(crate) fn open(info: &Info) -> Result<Arc<Self>> {
        let library = library()?;
        let info = info.copy()?;
        let raw = info.as_ptr();
        // SAFETY: `raw` is a complete copy of what fi_getinfo gave, and lives in the
        // device; attributes are zero where nothing is asked for.
        unsafe {
            let fabric = Fid::open("open", "its fabric", |fabric| {
                signals::keep(|| library.fi_fabric((*raw).fabric_attr, fabric, null_mut()))
            })?;
            let mut attr: sys::fi_eq_attr = std::mem::zeroed();
            attr.wait_obj = sys::FI_WAIT_NONE;
            let events = Fid::open("open", "its event queue", |eq| {
                sys::fi_eq_open(fabric.as_ptr(), &raw mut attr, eq, null_mut())
            })?;
            let domain = Fid::open("open", "its domain", |domain| {
                signals::keep(|| sys::fi_domain(fabric.as_ptr(), raw, domain, null_mut()))
            })?;
            // If imms consume receives, the CPU copies messages (`InternalReceives`), so they cannot go to GPU memory.
            let imms_consume_receives = info.imms_consume_receives();
            let takes_gpu_memory = AtomicBool::new(info.takes_gpu_memory() && !imms_consume_receives);
            let flushes = Flushes::default();
            let deregistrations = Deregistrations::default();
            Ok(Arc::new(Self {
                domain,
                events,
                fabric,
                info,
                flushes,
                deregistrations,
                takes_gpu_memory,
                imms_consume_receives,
            }))
        }
    }

    /// The most writes or reads that the backend posts under one doorbell. libfabric's versions differ in which
    /// requests of a doorbell they keep if they refuse the last one. So more than one is posted only with the version
    /// whose code was read and tested.
    pub(crate) fn max_batch(&self) -> usize {
        let is_tested = library().is_ok_and(|library| library.version() == sys::version(2, 1));
        if is_tested && self.info.is_efa_direct() { MAX_BATCH } else { 1 }
    }

    /// Maps the code of a refused post ([`card_post_error`]).
    pub(crate) fn post_error(&self, code: isize) -> isize {
        if self.info.is_card() { card_post_error(code) } else { code }
    }

    /// Whether a reaper is still closing an endpoint of the device, so that any call of the provider may block.
    pub(crate) fn is_given_up(&self) -> bool {
        self.deregistrations.overdue_endpoints() > 0
    }

    /// The error of calls on a device that is given up.
    pub(crate) fn given_up_error(&self, operation: &'static str, remedy: &str) -> Error {
        let context = format!(
            "{}: libfabric is still closing an endpoint of this device, and blocks everything else: {remedy}",
            self.info.domain_name()
        );
        Error::new(ErrorKind::DeviceLost, operation, context)
    }

    /// Takes the next error from the event queue: the provider's error number.
    pub(crate) fn next_event_error(&self) -> Option<c_int> {
        // SAFETY: zero asks for no error data; the queue is open.
        unsafe {
            let mut entry: sys::fi_eq_err_entry = std::mem::zeroed();
            let read = sys::fi_eq_readerr(self.events.as_ptr(), &raw mut entry, 0);
            (read > 0).then_some(entry.prov_errno)
        }
    }

    /// The event queue, to which endpoints are bound.
    pub(crate) fn events(&self) -> *mut sys::fid {
        self.events.fid()
    }
}
