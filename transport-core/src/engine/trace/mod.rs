//! What an engine tells about itself.
//!
//! In reading order: [`Record`] (one event), [`FlightRecorder`] (a ring of records), [`OperationDump`] and
//! [`WaitReason`] (one operation), [`Snapshot`] (an engine at one moment), [`StallMonitor`] (operations without
//! progress).

mod flight_recorder;
mod operation_dump;
mod record;
mod snapshot;
mod stall_monitor;
mod text;
mod wait_reason;

pub(crate) use flight_recorder::FlightRecorder;
pub use operation_dump::{OperationDump, OperationKind, PeerName, RailShare};
pub(crate) use record::peer_number;
pub use record::{Record, TraceEvent};
pub(super) use snapshot::RecentFailures;
pub(crate) use snapshot::Snapshot;
pub(crate) use stall_monitor::{Stall, StallMonitor};
pub(crate) use text::{HumanDuration, Printable};
pub use wait_reason::{GrantOf, WaitReason};
