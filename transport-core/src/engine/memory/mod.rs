//! The memory of operations: registered memory of this side, and imported regions of peers.

#[allow(unsafe_code, reason = "copies into and out of checked ranges")]
mod region;
mod remote;
mod retained;

pub(crate) use region::{RegionInner, RegionOwner, RegionSetup, revoked};
pub(crate) use remote::{DirectPath, RemoteInner};
pub(crate) use retained::{RetainedByRail, RetainedMemory};
