//! What the error numbers of libfabric and of EFA devices mean to the engine, and their text.

use std::ffi::{CStr, c_int, c_void};

use libfabric_sys as sys;
use multirail_spi::{Error, ErrorKind, Status};

use crate::fabric_endpoint::Queues;
use crate::library::library;
use crate::objects::Device;

/// The kind of an error number (`rdma/fi_errno.h`) of a completion or a call. The sign does not matter.
pub(crate) fn kind(code: c_int) -> ErrorKind {
    match code.unsigned_abs() {
        sys::FI_ECANCELED => ErrorKind::Cancelled,
        sys::FI_EACCES | sys::FI_EKEYREJECTED | sys::FI_EINVAL | sys::FI_EADDRNOTAVAIL | sys::FI_EFAULT => {
            ErrorKind::RemoteAccess
        }
        sys::FI_EMSGSIZE | sys::FI_ETOOSMALL => ErrorKind::TooLarge,
        sys::FI_ETRUNC => ErrorKind::TooLarge,
        sys::FI_ENOTCONN
        | sys::FI_ECONNRESET
        | sys::FI_ECONNABORTED
        | sys::FI_ECONNREFUSED
        | sys::FI_ESHUTDOWN
        | sys::FI_EHOSTDOWN
        | sys::FI_EHOSTUNREACH
        | sys::FI_ENETUNREACH
        | sys::FI_ETIMEDOUT => ErrorKind::PeerDied,
        sys::FI_ENODEV => ErrorKind::DeviceLost,
        _ => ErrorKind::Io,
    }
}

/// The status of a request, a receive or a call that ended with `code`.
pub(crate) fn status(code: c_int) -> Status {
    Status { kind: kind(code), code: code.abs() }
}

/// Whether the `code` of a failed request says only that a connection has ended, and not why.
///
/// This side never cancels requests. Providers with connections (`tcp`, in `xnet_ep_disable`) end requests with
/// `FI_ECANCELED` when the other side closes the connection. The other side does that if it does not have the key of a
/// request, and also when it dies.
pub(crate) fn is_ambiguous(code: c_int) -> bool {
    code.unsigned_abs() == sys::FI_ECANCELED || kind(code) == ErrorKind::PeerDied
}

/// Whether `code` says that nothing answers at the peer's address.
pub(crate) fn is_unreachable(code: c_int) -> bool {
    matches!(
        code.unsigned_abs(),
        sys::FI_ECONNREFUSED
            | sys::FI_EHOSTDOWN
            | sys::FI_EHOSTUNREACH
            | sys::FI_ENETUNREACH
            | sys::FI_ETIMEDOUT
    )
}

/// Maps the status of an EFA card's completion, which libfabric gives as `fi_cq_err_entry.prov_errno` (`efa_errno.h`,
/// `EFA_IO_COMP_STATUSES`), to an error number of libfabric.
///
/// libfabric's own mapping differs between versions: 1.17 maps every status to FI_EIO. Numbers that are no status of a
/// card are the provider's own. All but three of them (4100 and 13 below) keep libfabric's error, `otherwise`.
pub(crate) fn card_error(status: c_int, otherwise: c_int) -> c_int {
    let error = match status {
        // Flushed; internal error of the queue pair. The queue pair does not work any more: this side cancels nothing.
        1 | 2 => sys::FI_ENODEV,
        // The queue pair takes no packet (`FI_EFA_ERR_PKT_POST`): so the provider says just before it reports one of these.
        4100 => sys::FI_ENODEV,
        // Unsupported operation; wrong local key; malformed response of the remote card. These are errors of this
        // program or of a card.
        3 | 5 | 12 => sys::FI_EIO,
        6 | 11 => sys::FI_EMSGSIZE,
        7 => sys::FI_EKEYREJECTED,
        // The peer has reset the connection.
        8 => sys::FI_ECONNRESET,
        // No such address; no such queue pair; no receive posted; the peer stopped responding; the peer does not know
        // this side; the peer never responded. From 1.21 on the provider reports 13 by two numbers of its own
        // (`FI_EFA_ERR_*_RECV_UNRESP`): one for a peer that had answered the handshake, one for a peer that had not.
        4 | 9 | 10 | 13 | 14 | 15 | 4124 | 4126 => sys::FI_EHOSTUNREACH,
        _ => return otherwise,
    };
    error as c_int
}

/// Maps the code of a post that a card has refused. FI_EIO means that the card is lost. Simulated cards report a loss
/// this way; a real card may accept posts after its loss, and report the loss by completions alone.
///
/// 1.17 returns the positive number that `ibv_post_send` has returned (`efa_post_flush`).
pub(crate) fn card_post_error(code: isize) -> isize {
    match code.unsigned_abs() == sys::FI_EIO as usize {
        true => -(sys::FI_ENODEV as isize),
        false => code,
    }
}

/// The error of a call that gave `code`; `what` is the object that the call was about.
pub(crate) fn call_error(operation: &'static str, what: &str, code: c_int) -> Error {
    let text = match library() {
        Ok(library) => library.strerror(code),
        Err(error) => error.to_string(),
    };
    let kind = match code.unsigned_abs() {
        sys::FI_ENOMEM | sys::FI_ENOSPC => ErrorKind::Exhausted,
        sys::FI_EPERM => ErrorKind::Permission,
        sys::FI_EBUSY => ErrorKind::Busy,
        sys::FI_ENOSYS | sys::FI_EOPNOTSUPP => ErrorKind::Unsupported,
        _ => ErrorKind::Io,
    };
    Error::new(kind, operation, format!("libfabric refuses {what}: {text} ({code})"))
}

/// The provider's text for the latest error, with the error's number.
#[derive(Default)]
pub(crate) struct ErrorText {
    code: i32,
    text: String,
}

impl ErrorText {
    /// Keeps the provider's text for the error `code`.
    pub(crate) fn new(code: i32, text: String) -> Self {
        Self { code: code.abs(), text }
    }

    /// The text for a `status` of `device`. It does not repeat the status's kind.
    pub(crate) fn describe(&self, status: Status, device: &Device) -> String {
        let Ok(library) = library() else { return String::new() };
        let why = match status.code {
            0 => String::new(),
            code if code == self.code && !self.text.is_empty() => {
                format!("{} ({code}); the provider says: {}", library.strerror(code), self.text)
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

/// The provider's text for one of its error numbers. `data` is the completion's error data, or null.
///
/// Errors of the event queue get their text here, too: libfabric's call for that queue would read the number as an
/// errno (prov/util, `ofi_eq_strerror`).
pub(crate) fn provider_text(queues: &Queues, number: i32, data: *mut c_void) -> String {
    let mut buf = [0; 256];
    // SAFETY: the number is the provider's; the buffer is as long as said.
    unsafe {
        let text = sys::fi_cq_strerror(queues.cq.as_ptr(), number, data, buf.as_mut_ptr(), buf.len());
        match text.is_null() {
            true => String::new(),
            false => CStr::from_ptr(text).to_string_lossy().into_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_post_means_that_the_card_is_lost() {
        let eio = sys::FI_EIO as isize;
        assert_eq!([eio, -eio].map(card_post_error), [-(sys::FI_ENODEV as isize); 2]);
        assert_eq!(card_post_error(-(sys::FI_EAGAIN as isize)), -(sys::FI_EAGAIN as isize));
    }

    #[test]
    fn statuses_of_cards_have_their_kinds() {
        let of = |status| kind(card_error(status, sys::FI_EIO as c_int));
        assert_eq!([1, 2, 4100].map(of), [ErrorKind::DeviceLost; 3]);
        assert_eq!([3, 5, 12, 4096].map(of), [ErrorKind::Io; 4]);
        assert_eq!([6, 11].map(of), [ErrorKind::TooLarge; 2]);
        assert_eq!(of(7), ErrorKind::RemoteAccess);
        assert_eq!([4, 8, 9, 10, 13, 14, 15, 4124, 4126].map(of), [ErrorKind::PeerDied; 9]);
    }
}
