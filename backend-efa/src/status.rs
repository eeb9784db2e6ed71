//! What libfabric's error numbers mean to the engine.

use std::ffi::c_int;

use libfabric_sys as sys;
use multirail_spi::{Error, ErrorKind, Status};

use crate::library::library;

/// The kind of a completion's or a call's error number (`rdma/fi_errno.h`); the sign does
/// not matter.
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

/// The status of a receive, or of a call, that ended with `code`.
pub(crate) fn status(code: c_int) -> Status {
    Status { kind: kind(code), code: code.abs() }
}

/// Whether a request that ended with `code` says no more than that a connection is gone.
///
/// Requests are never cancelled from this side. Providers over connections (`tcp`, in
/// `xnet_ep_disable`) end them so when the other side closed the connection: that is how it
/// answers a key that it does not have, and what happens when it dies.
pub(crate) fn is_ambiguous(code: c_int) -> bool {
    code.unsigned_abs() == sys::FI_ECANCELED || kind(code) == ErrorKind::PeerDied
}

/// Whether `code` says that nobody is where the peer's address points.
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

/// The error of a call on `what` that gave `code`.
pub(crate) fn refused(operation: &'static str, what: &str, code: c_int) -> Error {
    let words = match library() {
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
    Error::new(kind, operation, format!("libfabric refuses {what}: {words} ({code})"))
}
