//! What a running fabric reports: records, dumps, stalls, metrics.
//!
//! None of this code runs as part of a request. In reading order:
//!
//! - [`Record`], [`TraceEvent`]: one event in an engine. Each engine's flight recorder keeps the last ones.
//! - [`Dump`]: a snapshot of a fabric: its counters, its peers, its operations ([`OperationDump`]) and what each of
//!   them waits for ([`WaitReason`]).
//! - [`Recording`]: dumps as bytes, and a parser for bytes that are not trusted.
//! - [`FabricBuilder::on_stall`](crate::FabricBuilder::on_stall): called when operations make no progress.
//! - `Fabric::publish_metrics` (cargo feature `metrics`): counters through the `metrics` facade.

mod dump;
mod recording;
mod text;

pub use crate::engine::trace::{
    GrantOf, OperationDump, OperationKind, PeerName, RailShare, Record, TraceEvent, WaitReason,
};
pub use dump::{Dump, PeerDump, RailDump, TransportDump, WorkerState};
pub use recording::{MAX_RECORDING, Recording};
