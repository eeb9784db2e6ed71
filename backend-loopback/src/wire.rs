//! What initiator and target say over their socket: a packet each way, files along.

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

use crate::guard::GuardPage;
use crate::offer::Token;

/// Version of this conversation; the first packet carries it.
pub(crate) const VERSION: u16 = 4;

/// What an initiator asks.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Let me in. Answered by [`Reply::Welcome`] with the segment and the bell.
    Hello { version: u16, token: Token },
    /// What is this key? `number` comes back with the answer.
    Region { number: u64, key: u64 },
    /// I cannot reach your memory myself: give me a bounce segment.
    Stage { number: u64 },
}

/// What a target answers. Variants keep their numbers, so that a peer of another version reads its refusal.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    Welcome,
    /// A region, with its file; whether its owner has page-locked it for GPUs.
    Shared {
        number: u64,
        len: u64,
        access: u32,
        locked: bool,
    },
    /// A region without a file, at an address of the target.
    Foreign {
        number: u64,
        len: u64,
        access: u32,
        address: u64,
        guard: GuardPage,
        target: Hints,
    },
    /// The bounce segment's file.
    Stage {
        number: u64,
    },
    Refused {
        number: u64,
        why: Refusal,
    },
    /// A region on a GPU, with its file or the bytes that stand for one.
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
    /// The question it answers; a welcome answers none.
    pub(crate) fn number(&self) -> Option<u64> {
        match self {
            Self::Welcome => None,
            Self::Shared { number, .. }
            | Self::Foreign { number, .. }
            | Self::Gpu { number, .. }
            | Self::Stage { number }
            | Self::Refused { number, .. } => Some(*number),
        }
    }
}

/// Why a target refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Refusal {
    /// The token is unknown or was used.
    Token,
    /// Another version of this conversation.
    Version,
    /// No region ever had this key.
    Key,
    /// The region was taken back.
    Revoked,
    /// The region is of GPU memory that CUDA does not share.
    Gpu,
    /// This process does not stage, or has no memory left to.
    Stage,
    /// There is no memory for what the peer would map.
    Memory,
}

/// What a target knows of itself that decides who may reach into its memory. Words
/// for an error message: nothing is decided by them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hints {
    /// errno of its own PR_SET_PTRACER; 0 if that went well.
    pub(crate) permitted: i32,
    /// Whether PR_GET_DUMPABLE says 1.
    pub(crate) dumpable: bool,
    /// Inode of its user namespace.
    pub(crate) users: u64,
}

/// Files in one packet, at most.
const FILES: usize = 2;
/// Bytes of a packet, at most.
const LONGEST: usize = 192;

/// Sends `message` and `files` as one packet.
pub(crate) fn send(
    socket: impl AsFd,
    message: &impl Serialize,
    files: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> rustix::io::Result<()> {
    let mut packet = [0; LONGEST];
    let packet = postcard::to_slice(message, &mut packet).map_err(|_| Errno::MSGSIZE)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(Errno::MSGSIZE);
    }
    let sent =
        rustix::net::sendmsg(socket, &[IoSlice::new(packet)], &mut control, flags | SendFlags::NOSIGNAL)?;
    if sent == packet.len() { Ok(()) } else { Err(Errno::IO) }
}

/// Receives one packet; an end of the conversation is `PIPE`, nonsense is `PROTO`.
pub(crate) fn receive<T: DeserializeOwned>(
    socket: impl AsFd,
    flags: RecvFlags,
) -> rustix::io::Result<(T, Vec<OwnedFd>)> {
    let mut packet = [0; LONGEST];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
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

/// Parses a packet's bytes, which are not trusted.
pub(crate) fn parse<T: DeserializeOwned>(packet: &[u8]) -> rustix::io::Result<T> {
    match postcard::take_from_bytes(packet) {
        Ok((message, [])) => Ok(message),
        _ => Err(Errno::PROTO),
    }
}
