//! The protocol between an initiator and a target's server: one packet per question and per answer, with files.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::guard_page::GuardPage;
use super::process::PtraceHints;
use crate::offer::Token;

/// The version of the protocol. The first packet carries it.
pub(crate) const VERSION: u16 = 4;

/// The questions of an initiator.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Asks for admission. The answer is [`Reply::Welcome`] with the files of the segment and the wakeup handle.
    Hello { version: u16, token: Token },
    /// Asks for the region of a key. The answer has the same `number`.
    Region { number: u64, key: u64 },
    /// Asks for the staging buffer, since the initiator cannot reach a region itself.
    StagingBuffer { number: u64 },
}

/// The answers of a target. Variants keep their positions, so that a peer of another version can read its refusal.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    Welcome,
    /// A region, with its file. `locked` is true if the owner has page-locked it for GPUs.
    Shared {
        number: u64,
        len: u64,
        access: u32,
        locked: bool,
    },
    /// A region without a file, at an address of the target's process.
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
        why: Refusal,
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
}

impl Reply {
    /// The number of the question. A welcome has none.
    pub(crate) fn number(&self) -> Option<u64> {
        match self {
            Self::Welcome => None,
            Self::Shared { number, .. }
            | Self::Foreign { number, .. }
            | Self::Gpu { number, .. }
            | Self::StagingBuffer { number }
            | Self::Refused { number, .. } => Some(*number),
        }
    }
}

/// The reason of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Refusal {
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
    StagingPolicy,
    /// The target has no memory left for what the initiator would map.
    Memory,
}

/// Files in one packet, at most.
const MAX_FILES: usize = 2;
/// Bytes of a packet, at most.
const MAX_PACKET: usize = 192;

/// Sends `message` and `files` as one packet.
pub(crate) fn send(
    socket: impl AsFd,
    message: &impl Serialize,
    files: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> rustix::io::Result<()> {
    let mut packet = [0; MAX_PACKET];
    let packet = postcard::to_slice(message, &mut packet).map_err(|_| Errno::MSGSIZE)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(Errno::MSGSIZE);
    }
    let sent =
        rustix::net::sendmsg(socket, &[IoSlice::new(packet)], &mut control, flags | SendFlags::NOSIGNAL)?;
    if sent == packet.len() { Ok(()) } else { Err(Errno::IO) }
}

/// Receives one packet. The error is `PIPE` if the other end has closed the socket, and `PROTO` for an invalid
/// packet.
pub(crate) fn receive<T: DeserializeOwned>(
    socket: impl AsFd,
    flags: RecvFlags,
) -> rustix::io::Result<(T, Vec<OwnedFd>)> {
    let mut packet = [0; MAX_PACKET];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut slices = [IoSliceMut::new(&mut packet)];
    let got = rustix::net::recvmsg(&socket, &mut slices, &mut control, flags | RecvFlags::CMSG_CLOEXEC)?;
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            files.extend(fds);
        }
    }
    if got.bytes == 0 {
        return Err(Errno::PIPE);
    }
    if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(Errno::PROTO);
    }
    Ok((parse(packet.get(..got.bytes).ok_or(Errno::PROTO)?)?, files))
}

/// Parses the bytes of a packet, which come from another process.
pub(crate) fn parse<T: DeserializeOwned>(packet: &[u8]) -> rustix::io::Result<T> {
    match postcard::take_from_bytes(packet) {
        Ok((message, [])) => Ok(message),
        _ => Err(Errno::PROTO),
    }
}
