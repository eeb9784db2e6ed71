//! Lists of entries in regions.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use super::entries::{Entries, Entry};
use crate::{Access, Error, ErrorKind, Region, RemoteRegion, Result};

/// Entries in local regions, for [`Peer::write_list`](crate::Peer::write_list) and
/// [`Peer::read_list`](crate::Peer::read_list). One list serves any number of transfers and peers.
pub type LocalList = RegionList<Region>;

/// Entries in regions of one peer: the other side of a [`LocalList`]. Access rights are checked when the list is used,
/// because a region may allow reads only.
pub type RemoteList = RegionList<RemoteRegion>;

/// Entries in regions: [`LocalList`] or [`RemoteList`]. Each entry is checked once, when it is added. A list keeps its
/// regions alive.
///
/// Entries at equal distances take no memory of their own, also if they are added one by one.
#[derive(Clone)]
pub struct RegionList<R> {
    regions: Vec<R>,
    /// The numbers of the regions, by the regions' addresses in this process's memory.
    numbers: HashMap<usize, u32>,
    entries: Entries,
}

/// A region that a list can have.
pub(super) trait ListedRegion: Clone {
    /// The name of [`RegionList::push`] in errors.
    const PUSH: &'static str;

    /// A number that no other region has while this one lives.
    fn number(&self) -> usize;

    /// Checks a range of the region.
    fn check(&self, offset: u64, len: u64) -> Result<()>;

    /// Checks whether the region may be in a list with `other`.
    fn check_joins(&self, other: &Self) -> Result<()>;
}

impl ListedRegion for Region {
    const PUSH: &'static str = "LocalList::push";

    fn number(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    fn check(&self, offset: u64, len: u64) -> Result<()> {
        self.0.check(offset as usize..offset.saturating_add(len) as usize, Self::PUSH).map(drop)
    }

    fn check_joins(&self, other: &Self) -> Result<()> {
        if self.0.fabric_id == other.0.fabric_id {
            return Ok(());
        }
        let why =
            "the region belongs to another fabric than the list's first region; make a list for each fabric";
        Err(Error::new(ErrorKind::InvalidRequest, Self::PUSH, why))
    }
}

impl ListedRegion for RemoteRegion {
    const PUSH: &'static str = "RemoteList::push";

    fn number(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    fn check(&self, offset: u64, len: u64) -> Result<()> {
        self.0.check(offset, len, Access::LOCAL, Self::PUSH)
    }

    fn check_joins(&self, other: &Self) -> Result<()> {
        if self.0.peer == other.0.peer {
            return Ok(());
        }
        let why =
            "the region belongs to another peer than the list's first region; make a list for each peer";
        Err(Error::new(ErrorKind::InvalidRequest, Self::PUSH, why))
    }
}

#[expect(private_bounds, reason = "a list has regions of this crate only")]
impl<R: ListedRegion> RegionList<R> {
    /// A list without entries.
    pub fn new() -> Self {
        Self { regions: Vec::new(), numbers: HashMap::new(), entries: Entries::default() }
    }

    /// Appends an entry of `len` bytes, `offset` bytes into `region`.
    ///
    /// # Errors
    /// `OutOfBounds`, `Revoked`; `InvalidRequest` if the entry has no bytes, or if the region belongs to another fabric
    /// or peer than the list's other regions; `TooLarge` for entry number 2^32 - 1.
    pub fn push(&mut self, region: &R, offset: usize, len: usize) -> Result<()> {
        self.push_strided(region, offset, len, 1, 0)
    }

    /// Appends `count` entries of `len` bytes. The first lies `offset` bytes into `region`, and each further one lies
    /// `stride` bytes behind the one before.
    ///
    /// # Errors
    /// Those of [`RegionList::push`].
    pub fn push_strided(
        &mut self,
        region: &R,
        offset: usize,
        len: usize,
        count: u32,
        stride: usize,
    ) -> Result<()> {
        if len == 0 {
            let why = "the entry has no bytes; leave it out of the list";
            return Err(Error::new(ErrorKind::InvalidRequest, R::PUSH, why));
        }
        if count == 0 {
            return Ok(());
        }
        let (offset, len, stride) = (offset as u64, len as u64, stride as u64);
        let span = u64::from(count - 1).checked_mul(stride).and_then(|last| last.checked_add(len));
        region.check(offset, span.unwrap_or(u64::MAX))?;
        self.regions.first().map_or(Ok(()), |first| region.check_joins(first))?;
        let entry = Entry { region: self.number_of(region), offset, len };
        self.entries.push(entry, count, stride, R::PUSH)
    }

    /// The number of entries.
    pub fn len(&self) -> usize {
        self.entries.len() as usize
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A list with the same entries in other regions: `regions` has one for each of this list's, in their order.
    ///
    /// # Errors
    /// `InvalidRequest` if there are more regions or fewer; those of [`RegionList::push`].
    pub(crate) fn in_regions(&self, regions: Vec<R>) -> Result<Self> {
        if regions.len() != self.regions.len() {
            let why = format!("{} regions for a list of {} regions", regions.len(), self.regions.len());
            return Err(Error::new(ErrorKind::InvalidRequest, R::PUSH, why));
        }
        regions.iter().try_for_each(|region| region.check_joins(&regions[0]))?;
        for Entry { region, offset, len } in self.entries.spans() {
            regions[region as usize].check(offset, len)?;
        }
        let numbers = (0..).zip(&regions).map(|(number, region)| (region.number(), number)).collect();
        Ok(Self { regions, numbers, entries: self.entries.clone() })
    }

    /// The number of a region in the list. Adds a region that the list does not have.
    fn number_of(&mut self, region: &R) -> u32 {
        let next = self.regions.len() as u32;
        let number = *self.numbers.entry(region.number()).or_insert(next);
        if number == next {
            self.regions.push(region.clone());
        }
        number
    }

    /// The regions, in the order in which entries first named them.
    pub(crate) fn regions(&self) -> &[R] {
        &self.regions
    }

    pub(super) fn entries(&self) -> &Entries {
        &self.entries
    }
}

impl<R: ListedRegion> Default for RegionList<R> {
    fn default() -> Self {
        Self::new()
    }
}

impl<R> fmt::Debug for RegionList<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (regions, entries) = (self.regions.len(), self.entries.len());
        f.debug_struct("RegionList").field("regions", &regions).field("entries", &entries).finish()
    }
}
