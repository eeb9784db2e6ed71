//! The statuses of failures.

use multirail_spi::{ErrorKind, Status};

/// A status without an errno.
pub(crate) const fn status(kind: ErrorKind) -> Status {
    Status { kind, code: 0 }
}

/// The status of a call on another process's memory that failed with that errno.
#[cfg(target_os = "linux")]
pub(crate) fn from_errno(code: i32) -> Status {
    let kind = match code {
        libc::EPERM | libc::EACCES | libc::ENOSYS => ErrorKind::Permission,
        libc::ESRCH => ErrorKind::PeerDied,
        libc::EFAULT => ErrorKind::RemoteAccess,
        libc::ENOMEM => ErrorKind::Exhausted,
        _ => ErrorKind::Io,
    };
    Status { kind, code }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn errno_becomes_a_kind() {
        assert_eq!(from_errno(libc::ESRCH).kind, ErrorKind::PeerDied);
        assert_eq!(from_errno(libc::EPERM).kind, ErrorKind::Permission);
        assert_eq!(from_errno(12345), Status { kind: ErrorKind::Io, code: 12345 });
    }
}
