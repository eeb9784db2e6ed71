//! The driver's library: loads it, maps its statuses to errors, and runs calls in a GPU's context.

use std::ffi::CStr;
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUresult};
use multirail_spi::{Error, ErrorKind, Result};

/// The oldest driver that has all calls of this crate: CUDA 12.2. `cudarc` panics if a call is missing.
const OLDEST: i32 = 12020;

static STARTED: OnceLock<std::result::Result<(), (ErrorKind, String)>> = OnceLock::new();

/// Loads and starts the driver. Later calls return the result of the first one.
pub(crate) fn start() -> Result<()> {
    let started = STARTED.get_or_init(|| load().map_err(|why| (why.kind(), why.context().to_owned())));
    started.clone().map_err(|(kind, why)| Error::new(kind, "use CUDA", why))
}

fn load() -> Result<()> {
    let unsupported = |why: &str| Err(Error::new(ErrorKind::Unsupported, "use CUDA", why));
    // SAFETY: it opens the library. Every program that uses CUDA trusts its initialisers.
    if !unsafe { sys::is_culib_present() } {
        return unsupported(
            "libcuda.so.1 cannot be opened: install NVIDIA's driver, or start the container with NVIDIA's runtime \
             (--gpus all)",
        );
    }
    let mut version = 0;
    // SAFETY: the library is loaded, and writes one number.
    check("use CUDA", "the driver's version", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
    if version < OLDEST {
        return unsupported(&format!(
            "the driver supports CUDA {}.{}: install a driver for CUDA {}.{} or later",
            version / 1000,
            version % 1000 / 10,
            OLDEST / 1000,
            OLDEST % 1000 / 10
        ));
    }
    // SAFETY: the first call, with the only flags that exist.
    check("use CUDA", "to start", unsafe { sys::cuInit(0) })
}

/// Runs `work` in a GPU's context, whatever the thread's own context is, and whether or not a graph is being captured.
pub(crate) fn in_context<T>(
    context: sys::CUcontext,
    operation: &'static str,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    // SAFETY: the context is retained while its device lives, and every caller keeps a device.
    check(operation, "its context", unsafe { sys::cuCtxPushCurrent_v2(context) })?;
    // While another thread captures a graph, most calls of this thread would fail and invalidate the capture, unless
    // this thread is in relaxed mode (CUDA driver API, `cuThreadExchangeStreamCaptureMode`). Relaxed mode is allowed,
    // because these calls do not touch the streams of the capture.
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: it writes the previous mode, which is restored below.
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

/// Runs `work` when the process exits, before the driver unloads. The driver has to be [`start`]ed.
pub(crate) fn at_exit(work: fn()) {
    static WORK: OnceLock<fn()> = OnceLock::new();
    extern "C" fn run() {
        WORK.get().into_iter().for_each(|work| work());
    }
    unsafe extern "C" {
        safe fn atexit(handler: extern "C" fn()) -> std::ffi::c_int;
    }
    if WORK.set(work).is_ok() && atexit(run) != 0 {
        tracing::warn!("the exit of the process will not wait until CUDA memory is freed");
    }
}

/// Maps a status to a result. `what` names what the driver was asked for, for the error message.
pub(crate) fn check(operation: &'static str, what: &str, status: CUresult) -> Result<()> {
    match status {
        CUresult::CUDA_SUCCESS => Ok(()),
        status => Err(refused(operation, what, status)),
    }
}

#[cold]
fn refused(operation: &'static str, what: &str, status: CUresult) -> Error {
    let mut text = std::ptr::null();
    // SAFETY: it writes the address of a constant string, or null.
    let known = unsafe { sys::cuGetErrorString(status, &raw mut text) };
    let text = match known == CUresult::CUDA_SUCCESS && !text.is_null() {
        // SAFETY: as above.
        true => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        false => format!("{status:?}"),
    };
    Error::new(kind(status), operation, format!("CUDA refuses {what}: {text} ({})", status as u32))
}

/// The kind of error that a status means (CUDA driver API, `CUresult`).
fn kind(status: CUresult) -> ErrorKind {
    match status {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => ErrorKind::Exhausted,
        CUresult::CUDA_ERROR_INVALID_VALUE | CUresult::CUDA_ERROR_INVALID_HANDLE => ErrorKind::InvalidRequest,
        CUresult::CUDA_ERROR_NO_DEVICE | CUresult::CUDA_ERROR_INVALID_DEVICE => ErrorKind::NotFound,
        CUresult::CUDA_ERROR_NOT_SUPPORTED
        | CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
        | CUresult::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE
        | CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
        | CUresult::CUDA_ERROR_STUB_LIBRARY => ErrorKind::Unsupported,
        CUresult::CUDA_ERROR_NOT_PERMITTED => ErrorKind::Permission,
        // After these errors the context cannot be used any more.
        CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
        | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
        | CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
        | CUresult::CUDA_ERROR_LAUNCH_FAILED
        | CUresult::CUDA_ERROR_ASSERT
        | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
        | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
        | CUresult::CUDA_ERROR_INVALID_PC
        | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
        | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
        | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
        | CUresult::CUDA_ERROR_DEINITIALIZED
        | CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE => ErrorKind::DeviceLost,
        _ => ErrorKind::Io,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_have_kinds() {
        assert_eq!(kind(CUresult::CUDA_ERROR_OUT_OF_MEMORY), ErrorKind::Exhausted);
        assert_eq!(kind(CUresult::CUDA_ERROR_ECC_UNCORRECTABLE), ErrorKind::DeviceLost);
        assert_eq!(kind(CUresult::CUDA_ERROR_UNKNOWN), ErrorKind::Io);
        assert!(check("test", "nothing", CUresult::CUDA_SUCCESS).is_ok());
    }
}
