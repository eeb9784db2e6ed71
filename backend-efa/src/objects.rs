//! libfabric's objects, closed when dropped, and in the right order by who holds whom.

use std::ffi::c_int;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use libfabric_sys as sys;
use multirail_spi::{Error, ErrorKind, Fences, Result};

use crate::gate::Gate;
use crate::library::{Info, library};
use crate::signals;
use crate::status::refused;
use crate::submit::BATCH;

/// An object with libfabric's `fid` at its head.
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
    /// What `open` opens.
    pub(crate) fn open(
        operation: &'static str,
        what: &str,
        open: impl FnOnce(&mut *mut T) -> c_int,
    ) -> Result<Self> {
        let mut object = null_mut();
        let code = open(&mut object);
        match NonNull::new(object) {
            Some(object) if code == 0 => Ok(Self(object)),
            _ => Err(refused(operation, what, code)),
        }
    }

    /// Closes the object. After an error nobody may use or close it again: providers free what they fail to close
    /// (`efa_mr_close`), or leave it open.
    pub(crate) fn close(self, operation: &'static str, what: &str) -> Result<()> {
        // SAFETY: opened by libfabric, and closed once, as `self` is not dropped.
        let code = unsafe { sys::fi_close(std::mem::ManuallyDrop::new(self).fid()) };
        if code == 0 { Ok(()) } else { Err(refused(operation, what, code)) }
    }

    pub(crate) fn as_ptr(&self) -> *mut T {
        self.0.as_ptr()
    }

    /// Its head.
    pub(crate) fn fid(&self) -> *mut sys::fid {
        self.0.as_ptr().cast()
    }
}

impl<T: Object> Drop for Fid<T> {
    fn drop(&mut self) {
        // SAFETY: opened by libfabric, closed once; who holds it lets go of what lies on it first.
        let code = unsafe { sys::fi_close(self.fid()) };
        if code != 0 {
            let why = library().map(|library| library.strerror(code)).unwrap_or_default();
            tracing::warn!(code, why, "libfabric does not close {}", std::any::type_name::<T>());
        }
    }
}

/// A domain and what it lies on. Fields are closed in order.
pub(crate) struct Device {
    pub(crate) domain: Fid<sys::fid_domain>,
    /// Without one a provider aborts the process on errors that it has no other way to report
    /// (prov/util `ofi_eq` users; EFA's `efa_eq_write_error`).
    events: Fid<sys::fid_eq>,
    pub(crate) fabric: Fid<sys::fid_fabric>,
    pub(crate) info: Info,
    pub(crate) fences: Fences,
    pub(crate) gate: Gate,
    /// It takes memory of GPUs, and reaches it by itself.
    pub(crate) has_gpus: AtomicBool,
    /// Peers' writes with an imm take posted receives.
    pub(crate) imms_take_receives: bool,
}

impl Device {
    pub(crate) fn open(info: &Info) -> Result<Arc<Self>> {
        let library = library()?;
        let info = info.copy()?;
        let raw = info.as_ptr();
        // SAFETY: `raw` is a copy of what fi_getinfo gave, with all its parts, and lives in the
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
            // Messages are copied then, by the processor.
            let imms_take_receives = info.imms_take_receives();
            let has_gpus = AtomicBool::new(info.has_gpus() && !imms_take_receives);
            let fences = Fences::default();
            let gate = Gate::default();
            Ok(Arc::new(Self { domain, events, fabric, info, fences, gate, has_gpus, imms_take_receives }))
        }
    }

    /// Writes that may be posted with one doorbell. Versions differ in what they keep of a batch
    /// whose last write is refused, and by what they tell: only what was read and run is trusted.
    pub(crate) fn batch(&self) -> usize {
        let is_known = library().is_ok_and(|library| library.version() == sys::version(2, 1));
        if is_known && self.info.is_direct() { BATCH } else { 1 }
    }

    /// What the refusal of a post means: of a card EIO says that it is dead. (So do the simulated ones;
    /// a real one may also take what is posted, and only its completions tell.)
    pub(crate) fn refusal(&self, code: isize) -> isize {
        match code == -(sys::FI_EIO as isize) && self.info.card().is_some() {
            true => -(sys::FI_ENODEV as isize),
            false => code,
        }
    }

    /// Whether a reaper still closes an endpoint of the device, so that the provider may hold up all calls.
    pub(crate) fn is_given_up(&self) -> bool {
        self.gate.overdue() > 0
    }

    /// What calls on such a device are refused with.
    pub(crate) fn given_up(&self, operation: &'static str, remedy: &str) -> Error {
        let context = format!(
            "{}: libfabric still closes an endpoint of it, and holds up everything else there: {remedy}",
            self.info.domain_name()
        );
        Error::new(ErrorKind::DeviceLost, operation, context)
    }

    /// The provider's number of the next error that was reported to the event queue.
    pub(crate) fn failure(&self) -> Option<c_int> {
        // SAFETY: zero asks for no error data; the queue is open.
        unsafe {
            let mut entry: sys::fi_eq_err_entry = std::mem::zeroed();
            let read = sys::fi_eq_readerr(self.events.as_ptr(), &raw mut entry, 0);
            (read > 0).then_some(entry.prov_errno)
        }
    }

    /// The event queue that endpoints report to.
    pub(crate) fn events(&self) -> *mut sys::fid {
        self.events.fid()
    }
}
