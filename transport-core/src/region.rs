//! Local memory, registered on rails of every transport.

use std::sync::Arc;

use crate::descriptor::Entry;
use crate::engine::memory::RegionInner;
use crate::{Access, Descriptor, Error, ErrorKind, Op, Result};

/// Registered memory. Clones share the region. Dropping the last clone deregisters the memory.
///
/// A region never gives out a `&[u8]`, because a peer may be writing. Copy bytes in and out.
#[derive(Clone)]
pub struct Region(pub(crate) Arc<RegionInner>);

impl Region {
    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.0.len() as usize
    }

    /// Whether there are no bytes; such a region cannot be registered.
    pub fn is_empty(&self) -> bool {
        self.0.len() == 0
    }

    /// What peers may do with the region.
    pub fn access(&self) -> Access {
        self.0.access
    }

    /// The address of the first byte. Peers may change the bytes at any time.
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.start()
    }

    /// Copies `bytes` into the region, from `offset` on.
    pub fn copy_in(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.0.copy_in(offset, bytes)
    }

    /// Copies bytes out of the region, from `offset` on.
    pub fn copy_out(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        self.0.copy_out(offset, into)
    }

    /// The descriptor that a peer needs to reach this region.
    pub fn descriptor(&self) -> Descriptor {
        let inner = &*self.0;
        let owner = inner.owner.upgrade();
        let transports = owner.as_ref().map(|owner| owner.addresses()).unwrap_or_default();
        let mut entries = Vec::new();
        for ((label, domains), rails) in transports.iter().zip(&inner.regions) {
            let registered =
                rails.iter().enumerate().filter_map(|(rail, region)| Some((rail, region.as_ref()?)));
            entries.extend(registered.map(|(rail, region)| Entry {
                transport: label.clone(),
                domain: domains[rail],
                rail: rail as u16,
                key: region.key(),
            }));
        }
        let incarnation = owner.map_or(0, |owner| owner.incarnation());
        Descriptor::new(incarnation, inner.id, inner.len(), inner.access, inner.kind(), entries)
    }

    /// Takes the region back from all peers. The operation resolves once no late byte can land. From then on the memory
    /// belongs to its owner alone.
    ///
    /// From this call on, the owner may use the region only for [`Region::copy_in`] and [`Region::copy_out`]. Every
    /// other use is refused as `Revoked`, also as the local side of a write, read, send or receive. The owner's
    /// operations and receives that are under way on the region are cancelled, and end with `Revoked`. The registration
    /// stays until the device has finished them. If the device has one key for both sides (verbs, libfabric's
    /// hardware providers), peers keep their access until then; otherwise they lose it at once.
    ///
    /// Two things can delay the operation: a peer that was stopped in the middle of a copy, and a request of the owner
    /// that the device does not complete. At its deadline the operation ends with `DeadlineExceeded`, and may be
    /// repeated.
    ///
    /// # Errors
    /// `Closed`. `Busy` if `max_operations` are under way: the region is revoked all the same, and the call may be
    /// repeated to wait for the end of the revocation.
    ///
    /// The operation ends with the device's error if the device does not deregister the memory. Then peers may still
    /// reach the memory. It ends with `Unsupported` if peers that may write are connected over a transport that cannot
    /// say when it has finished the writes it was receiving ([`Revocation::Late`](crate::spi::Revocation::Late):
    /// libfabric's software providers). Then the key is taken back and refused, but late bytes may land.
    pub fn revoke(&self) -> Result<Op> {
        let closed = || Error::new(ErrorKind::Closed, "revoke", "the fabric is closed");
        let owner = self.0.owner.upgrade().ok_or_else(closed)?;
        self.0.refuse_operations();
        owner.revoke(&self.0)
    }
}
