//! The memory of operations: registered memory of this side, and imported regions of peers.

#[allow(unsafe_code, reason = "copies into and out of checked ranges")]
mod region;
mod remote;
mod retained;

pub use region::{RegionInner, RegionOwner, RegionSetup, revoked};
pub use remote::{DirectPath, RemoteInner};
pub use retained::{RetainedByRail, RetainedMemory};
