//! Notifications: bytes for a peer's program, alone or after a transfer.
//!
//! Each transport of a fabric that is opened with notifications has a *companion*: a transport of its own, with one
//! endpoint on the same first device and the same worker thread. Only notifications go over it. So they take no imm,
//! and none of the receives that the program posts. The companion is no part of what a fabric shows of its transports.
//!
//! `outgoing.rs`, beside this folder, sends them. A notification is cut into fragments, each one message: a [`Header`] and
//! at most [`PAYLOAD`] bytes. Devices deliver messages in any order, so each fragment has a number, and the receiver puts
//! them in order ([`Assembly`]). The numbers of fragments that failed never arrive: later headers say so
//! ([`SendSequence`]).
//!
//! Memory is bounded on both sides. The sender's [`Outbox`] refuses what it has no room for. At the receiver a message
//! stays in its buffer until the program takes it, and peers are granted only buffers that are free.

mod assembly;
mod header;
mod inbox;
mod notification_bytes;
mod outbox;
mod sequence;
mod stream;

use std::sync::Arc;

use assembly::Assembly;
pub(crate) use assembly::MAX_EARLY;
use header::BLOCK;
pub(crate) use header::{Header, PAYLOAD};
pub(crate) use inbox::{InboxHost, NotificationInbox};
pub(crate) use notification_bytes::NotificationBytes;
pub(crate) use outbox::{HeldBlocks, Outbox};
pub(crate) use sequence::SendSequence;
pub use stream::{NextNotification, Notifications};

use crate::spi::Flushes;
use crate::{Error, ErrorKind, Grant, GrantPolicy, GrantRequest, PeerId, TraceContext};

/// The longest notification, in bytes.
pub(crate) const MAX_LEN: usize = 1 << 20;

/// The least memory for notifications in each direction: the longest one twice, with its headers, rounded up. One peer
/// may take half of it.
pub(crate) const MIN_MEMORY: usize = 4 << 20;

/// The most memory for notifications. All of it is in use from the beginning, so more is a mistake.
pub(crate) const MAX_MEMORY: usize = 16 << 30;

/// Bytes that a peer has delivered by [`Peer::notify`](crate::Peer::notify), or with a transfer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Notification {
    /// The sender.
    pub peer: PeerId,
    /// The bytes of the notification; it may have none.
    pub bytes: Vec<u8>,
    /// The sender's span, if the sender has made the operation a part of a trace:
    /// [`WriteOptions::trace`](crate::WriteOptions::trace).
    pub trace: Option<TraceContext>,
}

/// The state of a fabric that was opened with notifications.
pub(crate) struct Notifier {
    pub inbox: NotificationInbox,
    pub outbox: Arc<Outbox>,
    /// The flushes of all memory that the user has registered.
    pub flushes: Flushes,
}

/// The error of a fabric that was opened without notifications.
#[cold]
pub(crate) fn no_notifications(operation: &'static str) -> Error {
    let why = "this fabric was opened without notifications: see FabricBuilder::notifications";
    Error::new(ErrorKind::Unsupported, operation, why)
}

/// The number of buffers for notifications in `memory` bytes.
pub(crate) fn buffers(memory: usize) -> u32 {
    u32::try_from(memory / BLOCK).unwrap_or(u32::MAX)
}

/// What peers may send over a companion: messages alone, so that each finds a free buffer.
///
/// A peer of which nothing was taken yet gets a 128th of the buffers, but at most a 64th of those that are not granted to
/// others. Later it gets an even share of half the buffers, with shares for at least eight peers, but at most a 16th of
/// those that are not granted to others. Every peer gets one.
pub(crate) struct NotificationGrants;

impl GrantPolicy for NotificationGrants {
    fn grant(&self, request: &GrantRequest<'_>) -> Grant {
        let (half, peers) = (request.capacity / 2, request.peers as u64);
        let messages = match request.taken {
            0 => (half / 64).min(request.free / peers.max(64)),
            _ => (half / peers.max(8)).min(request.free / 16),
        };
        Grant { bytes: u64::MAX, imms: 0, messages: messages.max(1) }
    }
}
