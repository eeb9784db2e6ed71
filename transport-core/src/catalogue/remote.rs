//! The peer's side of a catalogue.

use std::sync::{Arc, OnceLock};

use super::AddressIndex;
use super::local::not_found;
use super::wire::WireCatalogue;
use crate::{Access, Error, ErrorKind, Peer, RemoteRegion, Result};

/// Regions of a peer, to be found by their addresses there: [`Peer::import_catalogue`].
///
/// Each region is imported when it is first found. Where a backend asks the peer's process for each key (loopback), that
/// takes a round trip then; elsewhere it takes no time to speak of.
pub struct RemoteCatalogue {
    peer: Peer,
    regions: WireCatalogue,
    /// The regions that were found, by their number.
    imported: Vec<OnceLock<RemoteRegion>>,
    index: AddressIndex,
}

impl RemoteCatalogue {
    /// Reads a catalogue of `peer`, which is not trusted.
    pub(crate) fn new(peer: &Peer, bytes: &[u8]) -> Result<Self> {
        let regions = WireCatalogue::from_bytes(bytes)?;
        let imported = (0..regions.len()).map(|_| OnceLock::new()).collect();
        Ok(Self { peer: peer.clone(), index: AddressIndex::new(regions.ranges()), regions, imported })
    }

    /// Refuses more bytes than a catalogue may have.
    pub(crate) fn check_size(bytes: usize) -> Result<()> {
        WireCatalogue::check_size(bytes)
    }

    /// The number of regions.
    pub fn len(&self) -> usize {
        self.regions.len()
    }

    /// Whether there are no regions.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The peer whose regions these are.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// The length of region `number`, in bytes, and what this side may do with it. Regions have the numbers in which the
    /// owner gave them.
    pub fn describe(&self, number: usize) -> Option<(usize, Access)> {
        self.regions.describe(number)
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
        if let Some(imported) = self.imported.get(number).and_then(OnceLock::get) {
            return Ok(imported);
        }
        let (Some(slot), Some(descriptor)) = (self.imported.get(number), self.regions.descriptor(number))
        else {
            let why = format!("the catalogue has {} regions, and no number {number}", self.len());
            return Err(Error::new(ErrorKind::NotFound, "region", why));
        };
        let imported = self.peer.import(&descriptor)?;
        // Another thread may have been faster.
        Ok(slot.get_or_init(|| imported))
    }

    /// The numbers of the regions that are imported.
    pub(crate) fn imported_numbers(&self) -> Vec<usize> {
        (0..self.len()).filter(|number| self.imported[*number].get().is_some()).collect()
    }

    /// The number of an imported region, if it is this catalogue's.
    pub(crate) fn number_of(&self, region: &RemoteRegion) -> Option<usize> {
        let is_it = |known: &OnceLock<RemoteRegion>| {
            known.get().is_some_and(|known| Arc::ptr_eq(&known.0, &region.0))
        };
        self.imported.iter().position(is_it)
    }
}
