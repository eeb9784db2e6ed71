//! Regions of peers that this side has imported.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::index::{GroupIndex, TransportIndex};
use crate::spi::{CoalescePolicy, Direct, Paths, PeerSlot, RemoteMemory};
use crate::{Access, Error, ErrorKind, PeerId, Result};

/// A region of a peer that this side has imported over one transport.
pub struct RemoteInner {
    /// The region's owner. The handle of another peer cannot use the region.
    pub peer: PeerId,
    /// The owner's number for this registration.
    pub region: u64,
    pub len: u64,
    pub access: Access,
    /// Whether the region is device memory that no CPU can address.
    pub device_memory: bool,
    /// The transport for operations on the region: the first that both the region and the connection have.
    pub transport: TransportIndex,
    /// The first rail group of `transport`. The peer's link with this number is the transport's first.
    pub first_group: GroupIndex,
    /// The imports over `transport`, one per local rail. `None` if the region is not registered on the rail's remote
    /// rail.
    pub imports: Vec<Option<Arc<dyn RemoteMemory>>>,
    /// The direct path, if the transport has one.
    pub direct_path: Option<DirectPath>,
    /// The paths that bytes take between the region and local host memory, and between the region and a GPU's memory. All
    /// rails are of one transport, and use the same path.
    pub paths: [Paths; 2],
    /// The most bytes of a piece that may be coalesced, on all rails; 0 if none may.
    pub max_coalesced: u64,
    /// Whether small pages are coalesced if the operation states no policy.
    pub coalesce: CoalescePolicy,
    pub revoked: AtomicBool,
}

/// What a request needs to run in the calling thread.
pub struct DirectPath {
    pub direct: Arc<dyn Direct>,
    /// The largest operation for the direct path, in bytes.
    pub max: u64,
    pub slot: PeerSlot,
    /// The import on the first rail, with its key and its base address.
    pub import: Arc<dyn RemoteMemory>,
    pub rkey: u64,
    pub base: u64,
}

impl RemoteInner {
    /// How bytes get to the region, in a few words for people. All rails are of one transport, and use the same path.
    pub fn path(&self) -> &'static str {
        self.imports.iter().flatten().next().map_or("no rail", |import| import.path())
    }

    /// Checks the access right, the revocation and the bounds for `len` bytes from `offset` on.
    #[inline]
    pub fn check(&self, offset: u64, len: u64, need: Access, operation: &'static str) -> Result<()> {
        if !self.access.contains(need) {
            return Err(refused(operation, need));
        }
        if self.revoked.load(Ordering::Acquire) {
            return Err(revoked(operation));
        }
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(outside(operation, offset, len, self.len)),
        }
    }
}

#[cold]
fn refused(operation: &'static str, need: Access) -> Error {
    Error::new(
        ErrorKind::RemoteAccess,
        operation,
        format!("the owner did not register the region with {need:?}"),
    )
}

#[cold]
fn revoked(operation: &'static str) -> Error {
    let why = "the owner took the region back; ask the owner for a new descriptor";
    Error::new(ErrorKind::Revoked, operation, why)
}

#[cold]
fn outside(operation: &'static str, offset: u64, len: u64, region: u64) -> Error {
    Error::new(
        ErrorKind::OutOfBounds,
        operation,
        format!("{len} bytes at {offset} of a remote region of {region}"),
    )
}
