//! Work in a GPU's context.

use cudarc::driver::sys;
use transport_core::Result;

use crate::driver::check;

/// Runs `work` in a context that is retained.
pub(crate) fn within<T>(
    context: sys::CUcontext,
    operation: &'static str,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    // SAFETY: the context is retained while its device lives, and everything here belongs to a device.
    check(operation, "its context", unsafe { sys::cuCtxPushCurrent_v2(context) })?;
    let done = work();
    let mut popped = std::ptr::null_mut();
    // SAFETY: pushed above.
    let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
    done
}
