//! The statuses of failures, and their text.

use multirail_spi::{ErrorKind, Status};

/// A status without an errno.
pub(crate) const fn status(kind: ErrorKind) -> Status {
    Status { kind, code: 0 }
}

/// The meaning of `status` beyond its kind, and what to do next. Empty if the kind says everything.
pub(crate) fn describe(status: Status) -> String {
    let advice = match status.kind {
        #[cfg(target_os = "linux")]
        ErrorKind::Permission => &crate::other_process::ptrace_diagnosis::guess(status.code),
        ErrorKind::RemoteAccess => {
            "the key is unknown, the range lies outside the region, or the region does not allow \
             this access: check the descriptor and the rights it was registered with"
        }
        ErrorKind::Revoked => "the target has revoked the region: ask it for a new descriptor",
        ErrorKind::PeerDied => "the peer's process or connection is gone: connect again",
        ErrorKind::TooLarge => {
            "the message is longer than the receive that it met, or than a message may be: post larger receives"
        }
        ErrorKind::Unreachable => "the peer slot is not connected: complete the connection first",
        ErrorKind::Cancelled => "the request was taken back before it ran",
        ErrorKind::DeviceLost => {
            "the GPU failed (the log says how), or the link model lost its device: open the fabric again"
        }
        ErrorKind::Unsupported => {
            "a GPU cannot reach the host memory at the other end, which is staged, or has no file and is another \
             process's: register a HostBuffer or PinnedBuffer there"
        }
        ErrorKind::Io if status.code == 0 => "the link model failed this request, as it is configured to do",
        _ => "",
    };
    let errno = || std::io::Error::from_raw_os_error(status.code);
    match (advice, status.code) {
        (advice, 0) => advice.to_owned(),
        ("", _) => errno().to_string(),
        (advice, _) => format!("{advice} ({})", errno()),
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
    fn the_text_does_not_repeat_the_kind() {
        let kinds = [ErrorKind::Revoked, ErrorKind::RemoteAccess, ErrorKind::PeerDied, ErrorKind::TooLarge];
        for kind in kinds.into_iter().chain([ErrorKind::Cancelled, ErrorKind::Io, ErrorKind::Busy]) {
            let error = multirail_spi::Error::new(kind, "write", describe(status(kind))).to_string();
            assert_eq!(error.matches(&kind.to_string()).count(), 1, "{error}");
        }
    }
}
