//! What an operation waits for.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Printable;
use crate::op::OpId;

/// One thing that an operation waits for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields have the crate's usual names")]
pub enum WaitReason {
    /// Requests are posted, and the device has not completed them.
    Completion { rail: u32, device: String, requests: u64 },
    /// The device or the peer's is lost, and the peer has not confirmed that nothing arrives any more of what was
    /// posted.
    Fence { rail: u32, device: String, requests: u64 },
    /// The rail's send queue is full.
    SendQueue { rail: u32, device: String, depth: u64 },
    /// The peer's queue is full: the endpoint refuses requests to this peer.
    PeerQueue { rail: u32, device: String },
    /// The peer has posted no receive for a message, or its queue is full.
    PeerReceive { rail: u32, device: String },
    /// Other operations post before this one on the rail; `ahead` is their number.
    Turn { rail: u32, device: String, ahead: u64 },
    /// The receive is posted, and no message has arrived for it.
    Message { rail: u32, device: String },
    /// The device's receive queue is full.
    ReceiveQueue { rail: u32, device: String },
    /// A peer is copying to or from a region that is being revoked.
    PeerCopy,
    /// The device has a request or a receive of this side on a region that is being revoked.
    LocalUse,
    /// The peer's grant is used up.
    Grant { rail: u32, device: String, of: GrantOf },
    /// The rail's send window is full: `bytes` bytes are posted and not acknowledged.
    Window { rail: u32, device: String, bytes: u64 },
    /// The peer has not responded to earlier requests for a long time. Operations to other peers go first.
    PeerResponse { rail: u32, device: String },
    /// All rails of the operation's group are lost: the rail group `transport` carries the rest, as the operation `rest`.
    OtherGroup { transport: String, rest: OpId },
    /// The operation's trigger: the signal has to reach `value`, and was `now`.
    Trigger { value: u32, now: u32 },
}

/// The part of a grant that is used up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields of `Grant`")]
pub enum GrantOf {
    Bytes,
    Imms,
    Messages,
}

impl fmt::Display for WaitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Completion { rail, device, requests } => {
                write!(f, "completion of {requests} posted on rail {rail} ({})", Printable(device))
            }
            Self::Fence { rail, device, requests } => write!(
                f,
                "the peer's answer that none of {requests} requests posted on rail {rail} ({}), which is lost, arrives any more",
                Printable(device)
            ),
            Self::SendQueue { rail, device, depth } => write!(
                f,
                "room in the send queue of rail {rail} ({}), all {depth} entries are in use",
                Printable(device)
            ),
            Self::PeerResponse { rail, device } => {
                write!(
                    f,
                    "a response of the peer to the requests posted on rail {rail} ({})",
                    Printable(device)
                )
            }
            Self::PeerQueue { rail, device } => {
                write!(f, "room in the peer's queue on rail {rail} ({})", Printable(device))
            }
            Self::PeerReceive { rail, device } => write!(
                f,
                "a receive of the peer, or room in its queue, on rail {rail} ({})",
                Printable(device)
            ),
            Self::Turn { rail, device, ahead: 0 } => {
                write!(f, "the next batch on rail {rail} ({})", Printable(device))
            }
            Self::Turn { rail, device, ahead } => {
                write!(f, "its turn behind {ahead} other operations on rail {rail} ({})", Printable(device))
            }
            Self::Message { rail, device } => {
                write!(f, "a message for the receive posted on rail {rail} ({})", Printable(device))
            }
            Self::ReceiveQueue { rail, device } => {
                write!(f, "room for its receive on rail {rail} ({})", Printable(device))
            }
            Self::Trigger { value, now } => write!(f, "its trigger: the signal is {now}, not yet {value}"),
            Self::OtherGroup { transport, rest } => {
                write!(
                    f,
                    "its rest, op {rest} of {}: all rails of its own group are lost",
                    Printable(transport)
                )
            }
            Self::PeerCopy => f.write_str("a peer that is copying to or from the region"),
            Self::LocalUse => f.write_str("requests or receives of this side that use the region"),
            Self::Grant { rail, device, of } => {
                let of = match of {
                    GrantOf::Bytes => "bytes",
                    GrantOf::Imms => "imms",
                    GrantOf::Messages => "messages",
                };
                write!(f, "a grant of more {of} by the peer, on rail {rail} ({})", Printable(device))
            }
            Self::Window { rail, device, bytes } => write!(
                f,
                "room in the send window of rail {rail} ({}), {bytes} bytes are in flight",
                Printable(device)
            ),
        }
    }
}
