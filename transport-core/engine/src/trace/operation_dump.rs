//! One operation as a dump shows it.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{HumanDuration, Printable, WaitReason};
use crate::ErrorKind;
use crate::op::OpId;

/// What an operation does; each kind is a method of the public API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum OperationKind {
    /// `write`.
    Write,
    /// `write_pages`.
    WritePages,
    /// `write_imm`.
    WriteImm,
    /// `read`.
    Read,
    /// `send`.
    Send,
    /// `recv`.
    Receive,
    /// `revoke`.
    Revoke,
    /// `warm_up`.
    WarmUp,
    /// `read_pages`.
    ReadPages,
    /// `write_list`.
    WriteList,
    /// `read_list`.
    ReadList,
}

/// An operation that has not ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OperationDump {
    /// The operation's id, as [`Op::id`](crate::Op::id) returns it. Ids are unique within one transport.
    pub id: OpId,
    /// The transport's label.
    pub transport: String,
    /// What the operation does.
    pub kind: OperationKind,
    /// The peer, if the operation has one.
    pub peer: Option<PeerName>,
    /// The bytes of the whole operation.
    pub bytes: u64,
    /// The imm, if the operation has one.
    pub imm: Option<u32>,
    /// The time since the operation was submitted.
    pub age: Duration,
    /// The time since a request of the operation was last posted or ended.
    pub idle: Duration,
    /// The time until the deadline. `None` if the operation has no deadline.
    pub left: Option<Duration>,
    /// The error that the operation will end with once none of its requests is posted.
    pub ending: Option<ErrorKind>,
    /// The rails that still carry a part of the operation.
    pub rails: Vec<RailShare>,
    /// What the operation waits for.
    pub waits: Vec<WaitReason>,
    /// Whether the operation made no progress for the fabric's `stall_after`.
    pub stalled: bool,
}

/// The part of an operation that one rail carries.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RailShare {
    /// The rail.
    pub rail: u32,
    /// The rail's device.
    pub device: String,
    /// Requests that are not posted yet.
    pub unposted: u64,
    /// Requests that are posted and not acknowledged.
    pub outstanding: u64,
}

/// The name of a peer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PeerName {
    /// The peer's number in this process.
    pub id: u64,
    /// The peer's host name, as the peer reports it.
    pub host: String,
    /// The incarnation of the peer's fabric: each opening has another number.
    pub incarnation: u64,
    /// The remote address of the control connection. `None` if there is no control connection.
    pub address: Option<String>,
}

impl OperationKind {
    const ALL: [Self; 11] = [
        Self::Write,
        Self::WritePages,
        Self::WriteImm,
        Self::Read,
        Self::Send,
        Self::Receive,
        Self::Revoke,
        Self::WarmUp,
        Self::ReadPages,
        Self::WriteList,
        Self::ReadList,
    ];

    /// The name of the method in the public API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::WritePages => "write_pages",
            Self::WriteImm => "write_imm",
            Self::Read => "read",
            Self::Send => "send",
            Self::Receive => "recv",
            Self::Revoke => "revoke",
            Self::WarmUp => "warm_up",
            Self::ReadPages => "read_pages",
            Self::WriteList => "write_list",
            Self::ReadList => "read_list",
        }
    }

    pub(crate) fn code(self) -> u8 {
        self as u8
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }
}

impl fmt::Display for OperationDump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "op {} {} of {} bytes", self.id, self.kind.name(), self.bytes)?;
        if let Some(imm) = self.imm {
            write!(f, " with imm {imm:#x}")?;
        }
        if let Some(peer) = &self.peer {
            write!(f, " with {peer}")?;
        }
        write!(f, ": {} old, no progress for {}", HumanDuration(self.age), HumanDuration(self.idle))?;
        match self.left {
            Some(left) if left.is_zero() => f.write_str(", deadline passed")?,
            Some(left) => write!(f, ", deadline in {}", HumanDuration(left))?,
            None => {}
        }
        for share in &self.rails {
            let (rail, device) = (share.rail, Printable(&share.device));
            write!(
                f,
                "; rail {rail} ({device}): {} unposted, {} outstanding",
                share.unposted, share.outstanding
            )?;
        }
        for (at, wait) in self.waits.iter().enumerate() {
            write!(f, "{} {wait}", if at == 0 { "; waits for" } else { ", and for" })?;
        }
        match self.ending {
            Some(kind) => write!(f, "; ends with: {kind}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for PeerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "peer {} ({}", self.id, Printable(&self.host))?;
        if let Some(address) = &self.address {
            write!(f, ", {}", Printable(address))?;
        }
        write!(f, ", incarnation {:016x})", self.incarnation)
    }
}
