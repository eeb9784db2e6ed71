//! What an engine tells about itself.
//!
//! In reading order: [`Record`] (one event), [`FlightRecorder`] (a ring of records), [`OperationDump`] and
//! [`WaitReason`] (one operation), [`StallMonitor`] (operations without progress).

mod flight_recorder;
mod operation_dump;
mod record;
mod stall_monitor;
mod text;
mod wait_reason;

pub use flight_recorder::FlightRecorder;
pub use operation_dump::{OperationDump, OperationKind, PeerName, RailShare};
pub use record::peer_number;
pub use record::{Record, TraceEvent};
pub use stall_monitor::{Stall, StallMonitor};
pub use text::{HumanDuration, Printable};
pub use wait_reason::{GrantOf, WaitReason};
