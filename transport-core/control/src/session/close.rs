//! The close reason of a session: the error for this side and the final frame for the peer.

use std::time::Duration;

use multirail_spi::{Error, ErrorKind};

use crate::frame::Frame;
use crate::host::SessionPeer;
use crate::runtime::{SERVICE_ENDED, closed};

/// Why a session ends.
pub(crate) struct CloseReason {
    /// The error that operations of this side get.
    pub error: Error,
    /// The last frame to the peer; `None` if the peer needs none.
    pub final_frame: Option<Frame>,
}

impl CloseReason {
    /// The peer ended the session, or its connection broke: no final frame is needed.
    pub fn by_peer(error: Error) -> Self {
        Self { error, final_frame: None }
    }

    /// This side ends the session. The final frame is `Goodbye` if `error` is `Closed`, otherwise a `Refuse` with the
    /// reason.
    pub fn by_us(error: Error) -> Self {
        let in_order = error.kind() == ErrorKind::Closed;
        let final_frame = if in_order { Frame::Goodbye } else { Frame::refusal(&error) };
        Self { error, final_frame: Some(final_frame) }
    }

    /// Receiving failed with `error`. If the connection broke, the peer gets no final frame.
    pub fn receive_failed(error: Error) -> Self {
        if error.kind() == ErrorKind::PeerDied { Self::by_peer(error) } else { Self::by_us(error) }
    }

    /// The peer violated the protocol.
    pub fn protocol_violation(why: impl Into<String>) -> Self {
        Self::by_us(Error::new(ErrorKind::Protocol, "control", why))
    }

    /// This side takes the peer for dead after `span`.
    pub fn peer_dead(what: &str, span: Duration) -> Self {
        let why = format!("{what} {:.1} s", span.as_secs_f64());
        Self::by_us(Error::new(ErrorKind::PeerDied, "control", why))
    }
}

/// Fails the peer when the session's task is aborted or panics. After a normal end of the session this has no effect.
pub(crate) struct FailOnDrop<P: SessionPeer>(pub P);

impl<P: SessionPeer> Drop for FailOnDrop<P> {
    fn drop(&mut self) {
        self.0.fail(closed(SERVICE_ENDED));
    }
}
