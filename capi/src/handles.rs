//! The objects of every kind.

use std::sync::RwLock;

use multirail::{LocalList, Peer, PreparedTransfer, Region, RemoteList, RemoteRegion};

use crate::fabric::OpenFabric;
use crate::operation::Operation;
use crate::slab::Slab;

pub static FABRICS: Slab<OpenFabric> = Slab::new(1, "a fabric");
pub static REGIONS: Slab<Region> = Slab::new(2, "a region");
pub static PEERS: Slab<Peer> = Slab::new(3, "a peer");
pub static REMOTES: Slab<RemoteRegion> = Slab::new(4, "a region of a peer");
pub static LOCAL_LISTS: Slab<RwLock<LocalList>> = Slab::new(5, "a local list");
pub static REMOTE_LISTS: Slab<RwLock<RemoteList>> = Slab::new(6, "a remote list");
pub static PREPARED: Slab<PreparedTransfer> = Slab::new(7, "a prepared transfer");
pub static OPERATIONS: Slab<Operation> = Slab::new(8, "an operation");

/// The name of the kind with this number.
pub fn name_of_kind(kind: u64) -> Option<&'static str> {
    let names = [
        FABRICS.name(),
        REGIONS.name(),
        PEERS.name(),
        REMOTES.name(),
        LOCAL_LISTS.name(),
        REMOTE_LISTS.name(),
        PREPARED.name(),
        OPERATIONS.name(),
    ];
    names.get(usize::try_from(kind).ok()?.checked_sub(1)?).copied()
}
