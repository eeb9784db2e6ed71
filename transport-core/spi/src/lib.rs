//! What a backend of multirail implements, and the plain values that cross between the engine and a backend.
//!
//! The traits are small, object-safe and polled. Nothing here is `async`, and the hot path costs one virtual call per
//! *batch*. The engine checks a request before it hands the request to a backend; a backend validates only what the
//! engine cannot know (keys, queue depth).
//!
//! In reading order:
//!
//! - [`Backend`] finds devices and opens them. It describes each device by a [`DeviceInfo`], or says by [`Unavailable`]
//!   why there is none.
//! - [`Domain`] is an open device: it registers memory, connects ([`Connector`]) and makes endpoints. Its
//!   [`Capabilities`] are facts and limits that the engine plans by.
//! - [`Endpoint`] posts a [`Batch`] of [`WorkRequest`]s and polls [`Completions`], which are [`Event`]s.
//! - [`Memory`] owns bytes that a device may touch; [`HostBuffer`] is such an owner. [`copy`] copies bytes that others
//!   may write at the same time. [`Flushes`] make bytes visible that a device has written.
//! - [`Clock`] is where time comes from, [`Error`] what every call may return.
//! - [`WakeupPipe`] wakes a thread that sleeps. A [`Signal`] is a word in memory that a GPU or a thread waits for.
//! - [`StagingPolicy`] says when bytes go through staging buffers. [`staging`] is the protocol of the slots of such
//!   buffers.
//!
//! ```
//! use multirail_spi::{Access, HostBuffer, Memory};
//!
//! let buffer = HostBuffer::new(4096)?;
//! assert_eq!((buffer.len(), Access::LOCAL.is_empty()), (4096, true));
//! # Ok::<(), multirail_spi::Error>(())
//! ```
//!
//! # Threads and cleanup
//!
//! One thread at a time owns an [`Endpoint`]. Any thread may call the other objects. Each object keeps the objects
//! alive that it depends on: a domain is closed when its last handle is dropped.

#![deny(unsafe_code)]

mod backend;
#[allow(unsafe_code, reason = "names memory by addresses")]
mod batch;
mod capabilities;
#[allow(
    unsafe_code,
    reason = "asks the system for the time, with fewer instructions than the standard library"
)]
mod clock;
#[allow(unsafe_code, reason = "the only place that copies bytes while others may write them")]
pub mod copy;
#[allow(unsafe_code, reason = "states the contracts of registering and of running requests")]
mod domain;
#[allow(unsafe_code, reason = "states the contracts of posting")]
mod endpoint;
mod error;
#[allow(unsafe_code, reason = "implements `Memory` for its test")]
mod flush;
#[allow(unsafe_code, reason = "owns and maps memory, and states the contract of an owner")]
mod memory;
mod paths;
mod peer_slots;
pub mod staging;
#[doc(hidden)]
pub mod sync;
mod wakeup;
#[allow(unsafe_code, reason = "names memory by addresses")]
mod work_request;

pub use backend::{Backend, CoalescePolicy, DeviceInfo, DomainSetup, Probe, StagingPolicy, Unavailable};
pub use batch::{Batch, Piece, extend_by_pairs};
pub use capabilities::{
    AbortScope, Capabilities, DeliveredCost, DeliveredScope, Operations, Ordering, Progress, Revocation,
};
pub use clock::{Clock, SystemClock, Time, VirtualClock};
pub use domain::{Connector, Direct, Domain, MemoryRegion, RemoteKey, RemoteMemory};
pub use endpoint::{Armed, Endpoint, EndpointConfig, PostResult, TakeMessage};
pub use error::{Error, ErrorKind, Result};
pub use flush::Flushes;
#[cfg(unix)]
pub use memory::DmaBuf;
pub use memory::{Access, Flush, Locality, Memory, MemoryKind};
pub use memory::{HostArenas, HostBuffer, HostRange};
#[cfg(unix)]
pub use memory::{HostSharing, Mapping, SharedRange, page_size};
#[cfg(target_os = "linux")]
pub use memory::{commit_file, populate_range};
pub use paths::Paths;
pub use peer_slots::{ClosedSlots, SlotTable, claim_slot};
pub use wakeup::{Signal, WakeupHandle, WakeupPipe};
pub use work_request::{
    Completions, Event, FenceKind, FenceReply, FenceReport, PeerSlot, ReceiveRequest, Status, WireGrant,
    WorkKind, WorkRequest,
};
