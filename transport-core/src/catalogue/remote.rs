//! The peer's side of a catalogue.

use std::sync::OnceLock;

use super::local::not_found;
use super::{AddressIndex, wire};
use crate::{Access, Descriptor, Peer, RemoteRegion, Result};

/// Regions of a peer, to be found by their addresses there: [`Peer::import_catalogue`].
///
/// Each region is imported when it is first found. Where a backend asks the peer's process for each key (loopback), that
/// takes a round trip then; elsewhere it takes no time to speak of.
pub struct RemoteCatalogue {
    peer: Peer,
    regions: Vec<CataloguedRegion>,
    index: AddressIndex,
}

struct CataloguedRegion {
    descriptor: Descriptor,
    imported: OnceLock<RemoteRegion>,
}

impl RemoteCatalogue {
    /// Reads a catalogue of `peer`, which is not trusted.
    pub(crate) fn new(peer: &Peer, bytes: &[u8]) -> Result<Self> {
        let entries = wire::from_bytes(bytes)?;
        let range = |(address, descriptor): &(u64, Descriptor)| (*address, descriptor.len());
        let index = AddressIndex::new(entries.iter().map(range));
        let region = |(_, descriptor)| CataloguedRegion { descriptor, imported: OnceLock::new() };
        Ok(Self { peer: peer.clone(), regions: entries.into_iter().map(region).collect(), index })
    }

    /// The number of regions.
    pub fn len(&self) -> usize {
        self.regions.len()
    }

    /// Whether there are no regions.
    pub fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// The peer whose regions these are.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// The length of region `number`, in bytes, and what this side may do with it. Regions have the numbers in which the
    /// owner gave them.
    pub fn describe(&self, number: usize) -> Option<(usize, Access)> {
        let Descriptor { len, .. } = self.regions.get(number)?.descriptor;
        Some((len as usize, self.regions[number].descriptor.access()))
    }

    /// The region that holds `len` bytes from `address` on, in the peer's process, and the offset of `address` in it. If
    /// several regions hold the bytes, the one that begins last.
    ///
    /// # Errors
    /// `NotFound`; those of [`Peer::import`], when the region is imported.
    pub fn find(&self, address: u64, len: usize) -> Result<(&RemoteRegion, usize)> {
        let found = self.index.find(address, len as u64);
        let (number, offset) = found.ok_or_else(|| not_found(self.regions.len(), address, len))?;
        Ok((self.region(number as usize)?, offset as usize))
    }

    /// Region `number`, imported.
    ///
    /// # Errors
    /// `NotFound` if there are not so many; those of [`Peer::import`].
    pub fn region(&self, number: usize) -> Result<&RemoteRegion> {
        let Some(region) = self.regions.get(number) else {
            let why = format!("the catalogue has {} regions, and no number {number}", self.regions.len());
            return Err(crate::Error::new(crate::ErrorKind::NotFound, "region", why));
        };
        if let Some(imported) = region.imported.get() {
            return Ok(imported);
        }
        let imported = self.peer.import(&region.descriptor)?;
        // Another thread may have been faster.
        Ok(region.imported.get_or_init(|| imported))
    }
}
