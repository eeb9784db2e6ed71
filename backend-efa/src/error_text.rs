//! The text of a failure.

use std::ffi::{CStr, c_void};

use libfabric_sys as sys;
use multirail_spi::{ErrorKind, Status};

use crate::library::library;
use crate::objects::Device;
use crate::queues::Queues;

/// The provider's text for the last failure, with its number.
#[derive(Default)]
pub(crate) struct ErrorText {
    code: i32,
    words: String,
}

impl ErrorText {
    /// Keeps the provider's text for the error `code`.
    pub(crate) fn of(code: i32, words: String) -> Self {
        Self { code: code.abs(), words }
    }

    /// The text of a device's `status`, beyond its kind.
    pub(crate) fn describe(&self, status: Status, device: &Device) -> String {
        let Ok(library) = library() else { return String::new() };
        let why = match status.code {
            0 => String::new(),
            code if code == self.code && !self.words.is_empty() => {
                format!("{} ({code}); the provider says: {}", library.strerror(code), self.words)
            }
            code => format!("{} ({code})", library.strerror(code)),
        };
        match status.kind {
            ErrorKind::DeviceLost if why.is_empty() => device.info.domain_name(),
            ErrorKind::DeviceLost => format!("{}: {why}", device.info.domain_name()),
            _ => why,
        }
    }
}

/// The provider's text for one of its error numbers; `data` is the completion's error data, or null. The call of the event
/// queue would read such a number as an errno (prov/util, `ofi_eq_strerror`).
pub(crate) fn provider(queues: &Queues, number: i32, data: *mut c_void) -> String {
    let mut buf = [0; 256];
    // SAFETY: the number is the provider's; the buffer is as long as said.
    unsafe {
        let words = sys::fi_cq_strerror(queues.cq.as_ptr(), number, data, buf.as_mut_ptr(), buf.len());
        match words.is_null() {
            true => String::new(),
            false => CStr::from_ptr(words).to_string_lossy().into_owned(),
        }
    }
}
