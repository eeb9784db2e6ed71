//! A fabric at one moment: counters, windows, operations, peers, records.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Record, Wait};
use crate::engine::RailCounters;
use crate::op::OpId;
use crate::{ErrorKind, Time};

/// A fabric at one moment. `Display` prints it for people, [`Dump::to_bytes`]
/// and [`Recording`](super::Recording) carry it in files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Dump {
    /// This host's name.
    pub host: String,
    /// This process.
    pub process: u32,
    /// The number of this opening of the fabric.
    pub incarnation: u64,
    /// When it was taken, by the fabric's clock.
    pub time: Time,
    /// The rail groups of the transports, in order of preference.
    pub transports: Vec<TransportDump>,
    /// The connected peers.
    pub peers: Vec<PeerDump>,
}

/// One rail group of a transport: what one engine drives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TransportDump {
    /// The transport's label, and `/n` of its n-th group where there are several.
    pub label: String,
    /// Its backend's name.
    pub backend: String,
    /// Whether its worker answered. Without an answer there are counters and
    /// records, but no operations and no windows.
    pub worker: WorkerState,
    /// One per device.
    pub rails: Vec<RailDump>,
    /// Submitted operations that the worker has not taken yet.
    pub queued: u64,
    /// Receives the device holds, those of pools among them.
    pub receives: u64,
    /// Operations under way, by slot of the op table.
    pub operations: Vec<OperationDump>,
    /// The last operations that a peer's end cut short, as they stood then.
    pub casualties: Vec<OperationDump>,
    /// The last records, oldest first.
    pub records: Vec<Record>,
}

/// How a worker was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum WorkerState {
    /// It answered.
    Running,
    /// It slept, and answered.
    Parked,
    /// It did not answer: it is inside a backend, or in a user's waker or memory.
    Blocked,
    /// It has ended.
    Closed,
}

/// One rail.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RailDump {
    /// Its counters.
    pub counters: RailCounters,
    /// Requests posted and not acknowledged.
    pub outstanding: u64,
    /// Requests that may be outstanding.
    pub depth: u64,
    /// Whether its device is lost.
    pub lost: bool,
}

/// What an operation does.
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
}

/// An operation under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OperationDump {
    /// Its id, as [`Op::id`](crate::Op::id) gives it; one transport's ids are its own.
    pub id: OpId,
    /// The transport's label.
    pub transport: String,
    /// What it does.
    pub kind: OperationKind,
    /// With whom.
    pub peer: Option<PeerName>,
    /// Bytes of the whole.
    pub bytes: u64,
    /// Its imm.
    pub imm: Option<u32>,
    /// Since it was submitted.
    pub age: Duration,
    /// Since its last request was posted or ended.
    pub idle: Duration,
    /// Until its deadline; `None` for what has none.
    pub left: Option<Duration>,
    /// Why it will end as failed once nothing of it is posted.
    pub ending: Option<ErrorKind>,
    /// Its share of each rail that it still has something on.
    pub rails: Vec<RailShare>,
    /// What it waits for.
    pub waits: Vec<Wait>,
    /// Whether it made no progress for the fabric's `stall_after`.
    pub stalled: bool,
}

/// An operation's requests on one rail.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RailShare {
    /// The rail.
    pub rail: u32,
    /// Its device.
    pub device: String,
    /// Not posted yet.
    pub unposted: u64,
    /// Posted and not acknowledged.
    pub outstanding: u64,
}

/// Who a peer is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PeerName {
    /// Its number in this process.
    pub id: u64,
    /// Its host, as it says.
    pub host: String,
    /// The number of its opening of its fabric.
    pub incarnation: u64,
    /// Its address, if it was met over a control connection.
    pub address: Option<String>,
}

/// A connected peer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PeerDump {
    /// Who.
    pub name: PeerName,
    /// Since its control connection was last heard; `None` within one process.
    pub heard: Option<Duration>,
}

impl Dump {
    /// Operations under way, over all transports.
    pub fn operations(&self) -> impl Iterator<Item = &OperationDump> {
        self.transports.iter().flat_map(|transport| &transport.operations)
    }

    /// Those that make no progress.
    pub fn stalled(&self) -> impl Iterator<Item = &OperationDump> {
        self.operations().filter(|operation| operation.stalled)
    }

    /// The last operations that a peer's end cut short.
    pub fn casualties(&self) -> impl Iterator<Item = &OperationDump> {
        self.transports.iter().flat_map(|transport| &transport.casualties)
    }
}

impl OperationKind {
    const ALL: [Self; 8] = [
        Self::Write,
        Self::WritePages,
        Self::WriteImm,
        Self::Read,
        Self::Send,
        Self::Receive,
        Self::Revoke,
        Self::WarmUp,
    ];

    /// The API's name.
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
        }
    }

    pub(super) fn code(self) -> u8 {
        self as u8
    }

    pub(super) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }
}
