//! How a session ends, in words for this side and for the peer.

use std::time::Duration;

use crate::errors::{GONE, closed};
use crate::frame::Frame;
use multirail_spi::{Error, ErrorKind};

use crate::host::SessionPeer;

/// An end: what is said here, and what is said to the peer.
pub(crate) struct CloseReason {
    pub error: Error,
    pub final_frame: Option<Frame>,
}

impl CloseReason {
    /// The peer said that it ends, or is gone: nothing to answer.
    pub fn by_peer(error: Error) -> Self {
        Self { error, final_frame: None }
    }

    /// This side ends: in order if `error` is `Closed`, else the peer is told why.
    pub fn by_us(error: Error) -> Self {
        let in_order = error.kind() == ErrorKind::Closed;
        let final_frame = if in_order { Frame::Goodbye } else { Frame::refusal(&error) };
        Self { error, final_frame: Some(final_frame) }
    }

    /// Receiving failed: without a connection there is nobody to tell.
    pub fn unreadable(error: Error) -> Self {
        if error.kind() == ErrorKind::PeerDied { Self::by_peer(error) } else { Self::by_us(error) }
    }

    /// The peer broke the protocol.
    pub fn breach(why: impl Into<String>) -> Self {
        Self::by_us(Error::new(ErrorKind::Protocol, "control", why))
    }

    /// The peer is taken for dead after `span`.
    pub fn dead(what: &str, span: Duration) -> Self {
        let why = format!("{what} {:.1} s", span.as_secs_f64());
        Self::by_us(Error::new(ErrorKind::PeerDied, "control", why))
    }
}

/// Fails the peer if its session ends in no other way: an aborted task, a panic.
pub(crate) struct FailOnDrop<P: SessionPeer>(pub P);

impl<P: SessionPeer> Drop for FailOnDrop<P> {
    fn drop(&mut self) {
        self.0.fail(closed(GONE));
    }
}
