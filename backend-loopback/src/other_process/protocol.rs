//! The protocol between an initiator and a target's server: what the packets of their socket say.

use rustix::io::Errno;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

#[cfg(target_os = "linux")]
use super::guard_page::GuardPage;
#[cfg(target_os = "linux")]
use super::ptrace_permission::PtraceHints;
use crate::offer::OfferToken;

/// The version of the protocol. The first packet carries it.
pub(crate) const VERSION: u16 = 6;

/// The requests of an initiator to the target's server.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ServerRequest {
    /// Asks for admission. The reply is [`ServerReply::Welcome`] with the files of the segment, the wakeup handle and
    /// the ready set, and on the portable path with one end of the liveness socket.
    Hello { version: u16, token: OfferToken },
    /// Asks for the region of a key. The reply has the same `number`.
    Region { number: u64, key: u64 },
    /// Asks for the staging buffer, since the initiator cannot reach a region itself.
    StagingBuffer { number: u64 },
    /// Says that the files of the welcome have arrived, on the portable path. There is no reply.
    Received,
}

/// The replies of a target's server. Variants keep their positions, so that a peer of another version can read its
/// refusal.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ServerReply {
    Welcome,
    /// A region, with its file, which has `file_len` bytes, and has the region at `offset`. `locked` is true if the
    /// owner has page-locked it for GPUs.
    Shared {
        number: u64,
        len: u64,
        access: u32,
        locked: bool,
        offset: u64,
        file_len: u64,
    },
    /// A region without a file, at an address of the target's process.
    #[cfg(target_os = "linux")]
    Foreign {
        number: u64,
        len: u64,
        access: u32,
        address: u64,
        guard: GuardPage,
        target: PtraceHints,
    },
    /// The staging buffer, with its file.
    StagingBuffer {
        number: u64,
    },
    Refused {
        number: u64,
        why: RefusalReason,
    },
    /// A region of GPU memory, with its file or with CUDA's handle in place of one.
    Gpu {
        number: u64,
        len: u64,
        access: u32,
        gpu: [u8; 16],
        size: u64,
        offset: u64,
        handle: Option<([u8; 32], [u8; 32])>,
    },
    /// A region without a file, of a target on the portable path: only its owner reaches it.
    OwnerOnly {
        number: u64,
        len: u64,
        access: u32,
    },
}

impl ServerReply {
    /// The number of the request. A welcome has none.
    pub(crate) fn number(&self) -> Option<u64> {
        match self {
            Self::Welcome => None,
            #[cfg(target_os = "linux")]
            Self::Foreign { number, .. } => Some(*number),
            Self::Shared { number, .. }
            | Self::Gpu { number, .. }
            | Self::OwnerOnly { number, .. }
            | Self::StagingBuffer { number }
            | Self::Refused { number, .. } => Some(*number),
        }
    }
}

/// The reason of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum RefusalReason {
    /// The token is unknown or was used.
    Token,
    /// The initiator speaks another version of the protocol.
    Version,
    /// No region has had this key.
    Key,
    /// The region was revoked.
    Revoked,
    /// CUDA does not share the region's GPU memory with other processes.
    Gpu,
    /// The target does not allow staging, or has no memory left for it.
    Staging,
    /// The target has no memory left for what the initiator would map.
    Memory,
}

/// Parses the bytes of a packet, which come from another process.
pub(crate) fn parse<T: DeserializeOwned>(packet: &[u8]) -> rustix::io::Result<T> {
    match postcard::take_from_bytes(packet) {
        Ok((message, [])) => Ok(message),
        _ => Err(Errno::PROTO),
    }
}
