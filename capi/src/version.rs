//! Versions, and the texts of statuses and errors.

use std::ffi::{CStr, c_char};

use crate::abi::*;
use crate::arguments::OutText;
use crate::failure::last_text;

/// Defines functions that return a value and cannot fail. They run nothing that panics.
macro_rules! plain {
    ($(fn $name:ident($($argument:ident: $kind:ty),*) -> $returned:ty $body:block)*) => {$(
        #[allow(unsafe_code, reason = "a symbol of the C interface; no other crate has its prefix")]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($argument: $kind),*) -> $returned $body
    )*};
}

plain! {
    fn multirail_abi_version() -> u32 {
        ABI_VERSION
    }

    fn multirail_version() -> *const c_char {
        const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => panic!("the version has a NUL inside"),
        };
        VERSION.as_ptr()
    }

    fn mr_status_name(status: mr_status) -> *const c_char {
        name(status).as_ptr()
    }

    fn mr_last_error(buf: OutText, len: usize) -> usize {
        last_text(|text| buf.write_some(len, text))
    }
}

fn name(status: mr_status) -> &'static CStr {
    match status {
        MR_OK => c"MR_OK",
        MR_PENDING => c"MR_PENDING",
        MR_ERROR_INVALID_REQUEST => c"MR_ERROR_INVALID_REQUEST",
        MR_ERROR_OUT_OF_BOUNDS => c"MR_ERROR_OUT_OF_BOUNDS",
        MR_ERROR_LOCAL_ACCESS => c"MR_ERROR_LOCAL_ACCESS",
        MR_ERROR_REMOTE_ACCESS => c"MR_ERROR_REMOTE_ACCESS",
        MR_ERROR_REVOKED => c"MR_ERROR_REVOKED",
        MR_ERROR_TOO_LARGE => c"MR_ERROR_TOO_LARGE",
        MR_ERROR_UNSUPPORTED => c"MR_ERROR_UNSUPPORTED",
        MR_ERROR_BUSY => c"MR_ERROR_BUSY",
        MR_ERROR_EXHAUSTED => c"MR_ERROR_EXHAUSTED",
        MR_ERROR_DEADLINE_EXCEEDED => c"MR_ERROR_DEADLINE_EXCEEDED",
        MR_ERROR_CANCELLED => c"MR_ERROR_CANCELLED",
        MR_ERROR_PEER_DIED => c"MR_ERROR_PEER_DIED",
        MR_ERROR_DEVICE_LOST => c"MR_ERROR_DEVICE_LOST",
        MR_ERROR_CLOSED => c"MR_ERROR_CLOSED",
        MR_ERROR_NOT_FOUND => c"MR_ERROR_NOT_FOUND",
        MR_ERROR_UNREACHABLE => c"MR_ERROR_UNREACHABLE",
        MR_ERROR_VERSION => c"MR_ERROR_VERSION",
        MR_ERROR_PROTOCOL => c"MR_ERROR_PROTOCOL",
        MR_ERROR_PERMISSION => c"MR_ERROR_PERMISSION",
        MR_ERROR_IO => c"MR_ERROR_IO",
        MR_ERROR_HANDLE => c"MR_ERROR_HANDLE",
        MR_ERROR_BUFFER => c"MR_ERROR_BUFFER",
        MR_ERROR_FORKED => c"MR_ERROR_FORKED",
        MR_ERROR_PANIC => c"MR_ERROR_PANIC",
        MR_ERROR_OTHER => c"MR_ERROR_OTHER",
        _ => c"unknown status",
    }
}
