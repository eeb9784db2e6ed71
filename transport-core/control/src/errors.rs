//! The errors that several parts of the control plane end with.

use multirail_spi::{Error, ErrorKind};

use crate::frame::Cause;

/// What served connections has ended before the fabric did.
pub(crate) const GONE: &str = "nothing serves this fabric's connections any more: what did panicked, or it was given a runtime that was \
     shut down, or has no I/O or timers (build it with enable_all)";

/// An orderly end.
pub(crate) fn closed(why: &str) -> Error {
    Error::new(ErrorKind::Closed, "control", why)
}

/// The peer's refusal as our error.
pub(crate) fn refused(cause: Cause, reason: &str) -> Error {
    let kind = match cause {
        Cause::Protocol => ErrorKind::Protocol,
        Cause::Unreachable => ErrorKind::Unreachable,
        Cause::Failed => ErrorKind::PeerDied,
        Cause::Permission => ErrorKind::Permission,
    };
    Error::new(kind, "control", format!("the peer ended the connection: {reason}"))
}
