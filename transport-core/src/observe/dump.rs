//! A snapshot of a fabric: counters, operations, peers, records.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::recording::to_frame;
use crate::engine::RailCounters;
use crate::engine::trace::{OperationDump, PeerName, Record};
use crate::{Result, Time};

/// A snapshot of a fabric. `Display` prints it; [`Dump::to_bytes`] and [`Recording`](super::Recording) write it to
/// files and read it back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Dump {
    /// This host's name.
    pub host: String,
    /// The number of this process.
    pub process: u32,
    /// The incarnation of the fabric: each opening has another number.
    pub incarnation: u64,
    /// The time of the dump, by the fabric's clock.
    pub time: Time,
    /// The rail groups of the transports, in order of preference.
    pub transports: Vec<TransportDump>,
    /// The connected peers.
    pub peers: Vec<PeerDump>,
}

/// One rail group of a transport, which one engine drives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TransportDump {
    /// The transport's label; with several rail groups, followed by `/n` for the n-th group.
    pub label: String,
    /// The backend's name.
    pub backend: String,
    /// Whether the worker answered. Without an answer the dump has counters and records, but no operations.
    pub worker: WorkerState,
    /// The rails, one per device.
    pub rails: Vec<RailDump>,
    /// Submitted operations that the worker has not taken out of its queue.
    pub queued: u64,
    /// Receives that the device holds, those of receive pools included.
    pub receives: u64,
    /// The operations that have not ended, in the order of their op table slots.
    pub operations: Vec<OperationDump>,
    /// The last operations that failed because the connection to their peer ended, as they were at that moment.
    pub recent_failures: Vec<OperationDump>,
    /// The last records, oldest first.
    pub records: Vec<Record>,
}

/// The state of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum WorkerState {
    /// The worker was awake and answered.
    Running,
    /// The worker was asleep and answered.
    Parked,
    /// The worker did not answer: it is inside a backend or inside the user's code (a waker, or a memory's `Drop`).
    Blocked,
    /// The worker has ended.
    Closed,
}

/// One rail of a dump.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RailDump {
    /// The rail's counters.
    pub counters: RailCounters,
    /// Requests that are posted and not acknowledged.
    pub outstanding: u64,
    /// The most requests that may be outstanding.
    pub depth: u64,
    /// Whether the rail's device is lost.
    pub lost: bool,
    /// Whether the rail's device is [taken out of service](crate::Fabric::drain_device).
    #[serde(default)]
    pub retired: bool,
}

/// A connected peer of a dump.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PeerDump {
    /// The peer's name.
    pub name: PeerName,
    /// The time since the last frame on its control connection. `None` for a peer in the same process.
    pub heard: Option<Duration>,
}

impl Dump {
    /// The operations of all transports that have not ended.
    pub fn operations(&self) -> impl Iterator<Item = &OperationDump> {
        self.transports.iter().flat_map(|transport| &transport.operations)
    }

    /// The operations of all transports that are stalled.
    pub fn stalled(&self) -> impl Iterator<Item = &OperationDump> {
        self.operations().filter(|operation| operation.stalled)
    }

    /// The last operations of all transports that failed because the connection to their peer ended.
    pub fn recent_failures(&self) -> impl Iterator<Item = &OperationDump> {
        self.transports.iter().flat_map(|transport| &transport.recent_failures)
    }

    /// The dump as one frame. Append it to [`Recording::header`](super::Recording::header) to make a recording.
    ///
    /// # Errors
    /// `Protocol` if the dump is larger than 4 GiB.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        to_frame(self)
    }
}
