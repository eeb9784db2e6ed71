//! The kernel's symbols, of which there are none here.
//!
//! libfabric's provider verbs, which is loaded beside the one for EFA, reads all of them in every
//! process, to find out whether GPUs and cards know each other (`vrb_set_peer_mem_support`): that
//! takes longer than everything else that a process with one card does to begin.

use std::ffi::{CStr, c_char};
use std::mem::transmute;
use std::sync::OnceLock;

use crate::device::refuse;

const SYMBOLS: &CStr = c"/proc/kallsyms";

type FopenFn = unsafe extern "C" fn(*const c_char, *const c_char) -> *mut libc::FILE;

/// `fopen(3)`, for which there are no kernel's symbols.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fopen(path: *const c_char, mode: *const c_char) -> *mut libc::FILE {
    // SAFETY: by the caller, a string.
    if unsafe { CStr::from_ptr(path) } == SYMBOLS {
        return refuse(libc::ENOENT);
    }
    match next() {
        // SAFETY: by the caller.
        Some(open) => unsafe { open(path, mode) },
        None => refuse(libc::ENOSYS),
    }
}

/// The C library's.
fn next() -> Option<FopenFn> {
    static NEXT: OnceLock<Option<FopenFn>> = OnceLock::new();
    // SAFETY: the name is a string; what is behind it in the C library has this type, and a null
    // pointer is `None`.
    *NEXT.get_or_init(|| unsafe { transmute(libc::dlsym(libc::RTLD_NEXT, c"fopen".as_ptr())) })
}
