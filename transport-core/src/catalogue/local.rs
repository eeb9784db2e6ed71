//! The owner's side of a catalogue.

use super::{AddressIndex, wire};
use crate::{Access, Error, ErrorKind, Fabric, Region, Result};

/// Regions of this program, to be found by address. Its bytes tell a peer of all of them at once: one exchange for any
/// number of regions, instead of one descriptor each.
///
/// ```
/// # use multirail_core::{Access, Catalogue, Fabric, Peer, Result};
/// # fn share(fabric: &Fabric, peer: &Peer) -> Result<()> {
/// let layers = (0..80).map(|_| fabric.alloc(64 << 20, Access::all())).collect::<Result<Vec<_>>>()?;
/// let catalogue = Catalogue::new(layers.clone())?;
/// // By any means: here as a region that the peer looks up by name (`Peer::catalogue`).
/// catalogue.publish(fabric, "kv cache")?;
/// // An engine that knows addresses alone finds the region, and the offset in it.
/// let block = layers[3].as_ptr() as u64 + (5 << 20);
/// let (region, offset) = catalogue.find(block, 64 << 10)?;
/// assert_eq!(offset, 5 << 20);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Catalogue {
    regions: Vec<Region>,
    index: AddressIndex,
}

impl Catalogue {
    /// A catalogue of these regions. It keeps them alive.
    ///
    /// # Errors
    /// `InvalidRequest` if they are not all of one fabric.
    pub fn new(regions: impl IntoIterator<Item = Region>) -> Result<Self> {
        let regions: Vec<_> = regions.into_iter().collect();
        let fabric = regions.first().map(|first| first.0.fabric_id);
        if let Some(number) = regions.iter().position(|region| Some(region.0.fabric_id) != fabric) {
            let why = format!(
                "region {number} is of another fabric than the first; make a catalogue for each fabric"
            );
            return Err(Error::new(ErrorKind::InvalidRequest, "Catalogue::new", why));
        }
        let range = |region: &Region| (region.as_ptr() as u64, region.len() as u64);
        Ok(Self { index: AddressIndex::new(regions.iter().map(range)), regions })
    }

    /// The regions, in the order in which they were given.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// The region that holds `len` bytes from `address` on, and the offset of `address` in it: in the host's memory, in
    /// a GPU's, or in any other that is registered. If several regions hold the bytes, the one that begins last.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn find(&self, address: u64, len: usize) -> Result<(&Region, usize)> {
        let found = self.index.find(address, len as u64);
        let found = found.map(|(number, offset)| (&self.regions[number as usize], offset as usize));
        found.ok_or_else(|| not_found(self.regions.len(), address, len))
    }

    /// The catalogue as bytes, for [`Peer::import_catalogue`](crate::Peer::import_catalogue): about 40 bytes per region
    /// on one rail, and 14 more for each further rail. They hold the addresses of the regions in this process.
    pub fn to_bytes(&self) -> Vec<u8> {
        let regions = self.regions.iter().map(|region| (region.as_ptr() as u64, region.descriptor()));
        wire::to_bytes(regions)
    }

    /// Publishes the catalogue's bytes under a name, for [`Peer::catalogue`](crate::Peer::catalogue). Peers find them
    /// until [`Fabric::unpublish`].
    ///
    /// # Errors
    /// Those of [`Fabric::alloc`] and [`Fabric::publish`].
    pub fn publish(&self, fabric: &Fabric, name: &str) -> Result<()> {
        let bytes = self.to_bytes();
        let region = fabric.alloc(bytes.len(), Access::REMOTE_READ)?;
        region.copy_in(0, &bytes)?;
        fabric.publish(name, &region)
    }
}

pub(super) fn not_found(regions: usize, address: u64, len: usize) -> Error {
    let why = format!(
        "none of the {regions} regions of the catalogue holds the {len} bytes from {address:#x} on; register the memory, and make \
         the catalogue with it"
    );
    Error::new(ErrorKind::NotFound, "find", why)
}
