//! What an operation waits for.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One thing an operation cannot go on without.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are the words of the crate")]
pub enum Wait {
    /// Requests are posted and not acknowledged.
    Completion { rail: u32, device: String, requests: u64 },
    /// As many requests are posted as the rail's send queue holds.
    SendQueue { rail: u32, device: String, depth: u64 },
    /// The peer takes no more: its lane is full.
    PeerLane { rail: u32, device: String },
    /// The peer has posted no receive for a message, or its lane is full.
    PeerReceive { rail: u32, device: String },
    /// Others are before it on the rail.
    Turn { rail: u32, device: String, ahead: u64 },
    /// Nobody has sent the message that a receive is for.
    Message { rail: u32, device: String },
    /// The device holds as many receives as it can.
    ReceiveQueue { rail: u32, device: String },
    /// A peer is inside a copy to a region that is revoked.
    Copy,
    /// The device has a request or a receive of this side on a region that is revoked.
    LocalUse,
    /// The peer has granted no more.
    Grant { rail: u32, device: String, of: GrantOf },
    /// What is posted on the rail keeps its line busy.
    Window { rail: u32, device: String, bytes: u64 },
    /// The peer has not answered earlier requests for long; others go before it.
    Answer { rail: u32, device: String },
    /// Its trigger: the word has to reach `value`, and was at `now`.
    Trigger { value: u32, now: u32 },
}

/// What a peer grants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields of `Grant`")]
pub enum GrantOf {
    Bytes,
    Imms,
    Messages,
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Completion { rail, device, requests } => {
                write!(f, "completion of {requests} posted on rail {rail} ({})", super::text::Clean(device))
            }
            Self::SendQueue { rail, device, depth } => write!(
                f,
                "room in the send queue of rail {rail} ({}), all {depth} places are posted",
                super::text::Clean(device)
            ),
            Self::Answer { rail, device } => {
                write!(
                    f,
                    "an answer of the peer to what is posted on rail {rail} ({})",
                    super::text::Clean(device)
                )
            }
            Self::PeerLane { rail, device } => {
                write!(f, "room in the peer's lane on rail {rail} ({})", super::text::Clean(device))
            }
            Self::PeerReceive { rail, device } => write!(
                f,
                "a receive of the peer, or room in its lane, on rail {rail} ({})",
                super::text::Clean(device)
            ),
            Self::Turn { rail, device, ahead: 0 } => {
                write!(f, "the next batch on rail {rail} ({})", super::text::Clean(device))
            }
            Self::Turn { rail, device, ahead } => {
                write!(f, "its turn behind {ahead} others on rail {rail} ({})", super::text::Clean(device))
            }
            Self::Message { rail, device } => {
                write!(f, "a message, its receive is posted on rail {rail} ({})", super::text::Clean(device))
            }
            Self::ReceiveQueue { rail, device } => {
                write!(f, "room for its receive on rail {rail} ({})", super::text::Clean(device))
            }
            Self::Trigger { value, now } => write!(f, "its trigger: the word is at {now}, not at {value}"),
            Self::Copy => f.write_str("a peer inside a copy to the region"),
            Self::LocalUse => f.write_str("requests or receives of this side on the region"),
            Self::Grant { rail, device, of } => {
                let of = match of {
                    GrantOf::Bytes => "bytes",
                    GrantOf::Imms => "imms",
                    GrantOf::Messages => "messages",
                };
                write!(
                    f,
                    "the peer's grant of more {of}, to post on rail {rail} ({})",
                    super::text::Clean(device)
                )
            }
            Self::Window { rail, device, bytes } => write!(
                f,
                "the line of rail {rail} ({}), which {bytes} posted bytes keep busy",
                super::text::Clean(device)
            ),
        }
    }
}
