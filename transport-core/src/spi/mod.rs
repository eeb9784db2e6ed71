//! What a backend implements: small, object-safe, polled traits.
//!
//! [`Backend`] finds devices, [`Domain`] registers memory and connects,
//! [`Endpoint`] posts and polls. Nothing here is `async`, and the hot path
//! costs one virtual call per *batch*. A backend validates what only it can
//! know (keys, queue depth); everything else was checked by the engine before.

mod backend;
mod batch;
mod capabilities;
mod domain;
mod endpoint;
mod fences;
mod work;

#[cfg(unix)]
pub use crate::mapping::Mapping;
#[cfg(target_os = "linux")]
pub use crate::mapping::commit_file;
pub use backend::{Backend, DeviceInfo, DomainSetup, Probe, Unavailable};
pub use batch::{Batch, Piece};
pub use capabilities::{
    AbortScope, Capabilities, DeliveredCost, DeliveredScope, Operations, Ordering, Progress, Revocation,
};
pub use domain::{Connector, Direct, Domain, KeyMaterial, MemoryRegion, RemoteMemory};
pub use endpoint::{Armed, Endpoint, EndpointConfig, PostResult};
pub use fences::Fences;
pub use work::{Completions, Event, PeerSlot, ReceiveRequest, Status, WorkKind, WorkRequest};
