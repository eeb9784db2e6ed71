//! Lists over many regions: their entries, and the lists of two fabrics of one process.

use transport_core::{Access, LocalList, Region, RemoteList, Result};

use crate::{FabricPair, shuffled};

/// The bytes of an entry.
pub const ENTRY: usize = 4096;

/// The distance of two entries. Between them there is room for another, so that no two are neighbours.
pub const STRIDE: usize = 2 * ENTRY;

/// The lists of both sides: regions with the same number of entries each.
pub struct ListLoad {
    /// The writer's list.
    pub local: LocalList,
    /// The target's list, as the writer addresses it.
    pub remote: RemoteList,
    /// All entries of the local list, in a shuffled order.
    pub from: Vec<u32>,
    /// The entry of the remote list for each entry of `from`, in the region with the same number.
    pub to: Vec<u32>,
    /// The target's regions.
    _targets: Vec<Region>,
}

impl ListLoad {
    /// Registers the regions and makes the lists. `entries` is a multiple of `regions`.
    pub fn new(pair: &FabricPair, regions: u32, entries: u32) -> Result<Self> {
        let per_region = entries / regions;
        let bytes = per_region as usize * STRIDE;
        let (mut local, mut remote, mut targets) = (LocalList::new(), RemoteList::new(), Vec::new());
        for _ in 0..regions {
            let mine = pair.writer.alloc(bytes, Access::LOCAL)?;
            let theirs = pair.target.alloc(bytes, Access::REMOTE_WRITE | Access::REMOTE_READ)?;
            local.push_strided(&mine, 0, ENTRY, per_region, STRIDE)?;
            remote.push_strided(&pair.peer.import(&theirs.descriptor())?, 0, ENTRY, per_region, STRIDE)?;
            targets.push(theirs);
        }
        let (from, to) = scattered(regions, entries);
        Ok(Self { local, remote, from, to, _targets: targets })
    }
}

/// All entries of a list in a shuffled order, and for each the entry of the other list, in the region with the same
/// number. `entries` is a multiple of `regions`.
pub fn scattered(regions: u32, entries: u32) -> (Vec<u32>, Vec<u32>) {
    let per_region = entries / regions;
    let (from, within) = (shuffled(entries, 1), shuffled(per_region, 2));
    let other = |entry: &u32| entry - entry % per_region + within[(entry % per_region) as usize];
    let to = from.iter().map(other).collect();
    (from, to)
}
