//! Errors that several modules of the control plane return.

use multirail_spi::{Error, ErrorKind};

use crate::frame::Cause;

/// The message for a fabric whose control thread or runtime ended before the fabric was closed.
pub(crate) const SERVICE_ENDED: &str = "nothing serves this fabric's connections any more: its control thread \
     panicked, or the runtime that it was given was shut down or has no I/O or timers (build it with enable_all)";

/// An error of kind `Closed`: the connection ended in order.
pub(crate) fn closed(why: &str) -> Error {
    Error::new(ErrorKind::Closed, "control", why)
}

/// Converts a `Refuse` frame of the peer to an error.
pub(crate) fn refused(cause: Cause, reason: &str) -> Error {
    let kind = match cause {
        Cause::Protocol => ErrorKind::Protocol,
        Cause::Unreachable => ErrorKind::Unreachable,
        Cause::Failed => ErrorKind::PeerDied,
        Cause::Permission => ErrorKind::Permission,
    };
    Error::new(kind, "control", format!("the peer ended the connection: {reason}"))
}
