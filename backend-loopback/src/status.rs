//! One place where failures become statuses, and statuses become words.

use multirail_spi::{ErrorKind, Status};

/// A status without a code of the operating system.
pub(crate) const fn status(kind: ErrorKind) -> Status {
    Status { kind, code: 0 }
}

/// What the kernel's refusal to touch another process's memory means.
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

/// What `status` means beyond its kind, and what to do next.
pub(crate) fn describe(status: Status) -> String {
    let advice = match status.kind {
        #[cfg(target_os = "linux")]
        ErrorKind::Permission => &crate::refusal::guess(status.code),
        ErrorKind::RemoteAccess => {
            "the key is unknown, the range lies outside the region, or the region does not allow \
             this access: check the descriptor and the rights it was registered with"
        }
        ErrorKind::Revoked => "the target took the region back: ask it for a new descriptor",
        ErrorKind::PeerDied => "the peer's process or connection is gone: connect again",
        ErrorKind::TooLarge => {
            "longer than the receive it met, or than a message may be: post larger receives"
        }
        ErrorKind::Unreachable => "the peer slot is not connected: complete the connection first",
        ErrorKind::Cancelled => "taken back before it ran",
        ErrorKind::DeviceLost => {
            "the GPU failed, as the log says, or the link model lost its device: open the fabric again"
        }
        ErrorKind::Unsupported => {
            "a GPU does not reach the host memory at the other end, a peer process's without a file or a staged \
             one: register a HostBuffer or PinnedBuffer there"
        }
        ErrorKind::Io if status.code == 0 => "the link model failed this request, as it was told to",
        _ => "",
    };
    let system = || std::io::Error::from_raw_os_error(status.code);
    match (advice, status.code) {
        (advice, 0) => advice.to_owned(),
        ("", _) => system().to_string(),
        (advice, _) => format!("{advice} ({})", system()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_the_setting() {
        #[cfg(target_os = "linux")]
        assert!(describe(status(ErrorKind::Permission)).contains("PR_SET_PTRACER"));
        assert!(describe(Status { kind: ErrorKind::Io, code: 5 }).contains("os error 5"));
        assert_eq!(describe(status(ErrorKind::Version)), "");
    }

    #[test]
    fn the_kind_is_not_said_again() {
        let kinds = [ErrorKind::Revoked, ErrorKind::RemoteAccess, ErrorKind::PeerDied, ErrorKind::TooLarge];
        for kind in kinds.into_iter().chain([ErrorKind::Cancelled, ErrorKind::Io, ErrorKind::Busy]) {
            let error = multirail_spi::Error::new(kind, "write", describe(status(kind))).to_string();
            assert_eq!(error.matches(&kind.to_string()).count(), 1, "{error}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn errno_becomes_a_kind() {
        assert_eq!(from_errno(libc::ESRCH).kind, ErrorKind::PeerDied);
        assert_eq!(from_errno(libc::EPERM).kind, ErrorKind::Permission);
        assert_eq!(from_errno(12345), Status { kind: ErrorKind::Io, code: 12345 });
    }
}
