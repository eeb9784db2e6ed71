//! The driver's library: whether it is there, and what its statuses mean.

use std::ffi::CStr;
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUresult};
use multirail_spi::{Error, ErrorKind, Result};

/// The oldest driver whose calls this crate was written for: CUDA 12.2. An older one may lack some of
/// them, and `cudarc` panics at what is missing.
const OLDEST: i32 = 12020;

static STARTED: OnceLock<std::result::Result<(), (ErrorKind, String)>> = OnceLock::new();

/// Loads and starts the driver, once.
pub(crate) fn start() -> Result<()> {
    let started = STARTED.get_or_init(|| load().map_err(|why| (why.kind(), why.context().to_owned())));
    started.clone().map_err(|(kind, why)| Error::new(kind, "use CUDA", why))
}

fn load() -> Result<()> {
    let unsupported = |why: &str| Err(Error::new(ErrorKind::Unsupported, "use CUDA", why));
    // SAFETY: it opens the library, whose initialisers we trust as every program with CUDA does.
    if !unsafe { sys::is_culib_present() } {
        return unsupported(
            "libcuda.so.1 cannot be opened: install NVIDIA's driver, or run the container with its runtime \
             (--gpus all)",
        );
    }
    let mut version = 0;
    // SAFETY: the library is there, and writes one number.
    check("use CUDA", "the driver's version", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
    if version < OLDEST {
        return unsupported(&format!(
            "the driver is of CUDA {}.{}: install one of CUDA {}.{} or later",
            version / 1000,
            version % 1000 / 10,
            OLDEST / 1000,
            OLDEST % 1000 / 10
        ));
    }
    // SAFETY: the first call, with the only flags there are.
    check("use CUDA", "to start", unsafe { sys::cuInit(0) })
}

/// Has `work` done when the process ends, before the driver goes, which has to be [`start`]ed.
pub(crate) fn at_exit(work: fn()) {
    static WORK: OnceLock<fn()> = OnceLock::new();
    extern "C" fn run() {
        WORK.get().into_iter().for_each(|work| work());
    }
    unsafe extern "C" {
        safe fn atexit(handler: extern "C" fn()) -> std::ffi::c_int;
    }
    if WORK.set(work).is_ok() && atexit(run) != 0 {
        tracing::warn!("the end of the process does not wait for memory that goes back to CUDA");
    }
}

/// An error where `status` is one; `what` is what the driver was asked for.
pub(crate) fn check(operation: &'static str, what: &str, status: CUresult) -> Result<()> {
    match status {
        CUresult::CUDA_SUCCESS => Ok(()),
        status => Err(refused(operation, what, status)),
    }
}

#[cold]
fn refused(operation: &'static str, what: &str, status: CUresult) -> Error {
    let mut words = std::ptr::null();
    // SAFETY: it writes the address of a constant string, or null.
    let known = unsafe { sys::cuGetErrorString(status, &raw mut words) };
    let words = match known == CUresult::CUDA_SUCCESS && !words.is_null() {
        // SAFETY: as above.
        true => unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned(),
        false => format!("{status:?}"),
    };
    Error::new(kind(status), operation, format!("CUDA refuses {what}: {words} ({})", status as u32))
}

/// What a status of the driver is to us (CUDA driver API, `CUresult`).
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
        // After these the context is of no use any more.
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
