//! Work in a GPU's context, whatever the thread's own, and whether or not a graph is being captured.

use cudarc::driver::sys;
use multirail_spi::Result;

use crate::driver::check;

/// Runs `work` in a context that is retained.
pub(crate) fn within<T>(
    context: sys::CUcontext,
    operation: &'static str,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    // SAFETY: the context is retained while its device lives, and everything here belongs to a device.
    check(operation, "its context", unsafe { sys::cuCtxPushCurrent_v2(context) })?;
    // While another thread captures a graph, calls like ours would fail and spoil it, were this thread not
    // exempt (CUDA driver API, `cuThreadExchangeStreamCaptureMode`): they touch none of its streams.
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: it writes the mode before, which is given back below.
    let relaxed =
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) } == sys::CUresult::CUDA_SUCCESS;
    let done = work();
    if relaxed {
        // SAFETY: as above.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
    }
    let mut popped = std::ptr::null_mut();
    // SAFETY: pushed above.
    let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
    done
}
