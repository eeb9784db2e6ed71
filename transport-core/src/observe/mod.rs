//! What is seen of a running fabric from outside: records, dumps, stalls, metrics.
//!
//! Nothing here is on the way of a request. In reading order:
//!
//! - `record`: one thing that happened, as a value and as four words.
//! - `recorder`: the flight recorder, a ring of records per engine.
//! - `dump`: a fabric at one moment, with `wait` and, for people, `text`.
//! - `recording`: dumps as bytes, and back from bytes that are not trusted.
//! - `watch`: who learns of operations that make no progress.
//! - `metrics`: counters through the `metrics` facade (a cargo feature).

mod dump;
#[cfg(feature = "metrics")]
mod metrics;
mod record;
mod recorder;
mod recording;
mod text;
mod wait;
mod watch;

pub use dump::{
    Dump, OperationDump, OperationKind, PeerDump, PeerName, RailDump, RailShare, TransportDump, WorkerState,
};
pub use record::{Record, What};
pub(crate) use recorder::Recorder;
pub use recording::{MAX_RECORDING, Recording};
pub use wait::{GrantOf, Wait};
pub(crate) use watch::{StallHook, Watch};
