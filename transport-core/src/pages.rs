//! Lists of pages inside a region.

use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use crate::engine::plan::PageLayout;
use crate::{Error, ErrorKind, Result};

/// A list of pages of a region: page `i` of an operation lies at `offset + indices[i] * stride` bytes.
///
/// Clones share the list, so one list serves many operations. A function that takes pages accepts a `&Pages`, or a
/// range, an array, a slice or a `Vec` of `u32`. Collect an iterator into `Pages`:
///
/// ```
/// # use multirail_core::{Pages, Peer, Region, RemoteRegion, Result};
/// # fn hand_over(peer: &Peer, cache: &Region, theirs: &RemoteRegion) -> Result<()> {
/// const PAGE: usize = 64 << 10;
/// peer.write_pages(cache, 8..16, theirs, [3, 1, 4, 15, 9, 2, 6, 5], PAGE)?.detach();
/// let even: Pages = (0..100).filter(|page| page % 2 == 0).collect();
/// peer.write_pages(cache, &even, theirs, 0..50, PAGE)?.detach();
/// // Blocks of two pages each, behind a header.
/// let blocks = Pages::from(vec![7, 0]).stride(2 * PAGE).offset(4096);
/// peer.write_pages(cache, &blocks, theirs, &blocks, 2 * PAGE)?.detach();
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Pages {
    indices: Arc<[u32]>,
    max_index: u32,
    /// The indices that are one more than the index before.
    neighbours: usize,
    stride: Option<u64>,
    offset: u64,
}

impl Pages {
    /// The pages with these indices, in this order. By default they lie one page size apart.
    ///
    /// ```
    /// # use multirail_core::Pages;
    /// assert_eq!(Pages::new([7, 1, 3]).len(), 3);
    /// assert_eq!(Pages::new(10..20).len(), 10);
    /// assert_eq!(Pages::new(&vec![1, 2][..]).len(), 2);
    /// ```
    pub fn new(indices: impl Into<Self>) -> Self {
        indices.into()
    }

    /// Sets the bytes from one index to the next. The default is the operation's page size.
    pub fn stride(mut self, bytes: usize) -> Self {
        self.stride = Some(bytes as u64);
        self
    }

    /// Sets the bytes from the region's start to index 0. The default is 0.
    pub fn offset(mut self, bytes: usize) -> Self {
        self.offset = bytes as u64;
        self
    }

    /// The number of pages.
    pub fn len(&self) -> usize {
        self.indices.len()
    }

    /// Whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.indices.is_empty()
    }

    /// Checks that every page lies in a region of `region` bytes. The largest index decides.
    pub(crate) fn check(&self, page: u64, region: u64, side: &str, operation: &'static str) -> Result<()> {
        let stride = self.stride.unwrap_or(page);
        let end = u64::from(self.max_index)
            .checked_mul(stride)
            .and_then(|at| at.checked_add(self.offset))
            .and_then(|at| at.checked_add(page));
        match end {
            Some(end) if end <= region => Ok(()),
            _ => Err(Error::new(
                ErrorKind::OutOfBounds,
                operation,
                format!(
                    "{side} page {} (offset {}, stride {stride}, page {page}) ends beyond the region of {region} bytes",
                    self.max_index, self.offset
                ),
            )),
        }
    }

    /// Whether so many pages of `page` bytes follow the page before them on both sides that they should share work
    /// requests: at least one in eight. For fewer, the list of requests would cost more than it saves.
    pub(crate) fn share_requests(&self, other: &Self, page: u64) -> bool {
        let enough = (self.len() / 8).max(1);
        let is_dense = |pages: &Self| pages.stride.is_none_or(|stride| stride == page);
        // Shuffled lists end here: their neighbours were counted when the lists were made.
        if self.neighbours.min(other.neighbours) < enough || !is_dense(self) || !is_dense(other) {
            return false;
        }
        let pairs = self.indices.windows(2).zip(other.indices.windows(2));
        let both =
            |mine: &[u32], other: &[u32]| is_neighbour(mine[0], mine[1]) && is_neighbour(other[0], other[1]);
        pairs.filter(|(mine, other)| both(mine, other)).count() >= enough
    }

    /// The layout of pages of `page` bytes.
    pub(crate) fn layout(self, page: u64) -> PageLayout {
        PageLayout::new(self.indices, self.stride.unwrap_or(page), self.offset)
    }
}

/// Whether the second index is one more than the first.
fn is_neighbour(one: u32, next: u32) -> bool {
    (one.wrapping_add(1) == next) & (next != 0)
}

impl From<Arc<[u32]>> for Pages {
    fn from(indices: Arc<[u32]>) -> Self {
        let max_index = indices.iter().copied().max().unwrap_or(0);
        // Without a branch, so that the compiler compares many at a time.
        let pairs = indices.iter().zip(indices.get(1..).unwrap_or_default());
        let neighbours = pairs.map(|(one, next)| usize::from(is_neighbour(*one, *next))).sum();
        Self { indices, max_index, neighbours, stride: None, offset: 0 }
    }
}

impl FromIterator<u32> for Pages {
    fn from_iter<I: IntoIterator<Item = u32>>(indices: I) -> Self {
        Self::from(indices.into_iter().collect::<Arc<[u32]>>())
    }
}

/// The same list, shared.
impl From<&Self> for Pages {
    fn from(pages: &Self) -> Self {
        pages.clone()
    }
}

/// Conversions of lists that are copied or moved as a whole.
macro_rules! from_lists {
    ($($list:ty),*) => {$(
        impl From<$list> for Pages {
            fn from(indices: $list) -> Self {
                Self::from(Arc::<[u32]>::from(indices))
            }
        }
    )*};
}

from_lists!(Vec<u32>, Box<[u32]>, &[u32]);

impl From<&Vec<u32>> for Pages {
    fn from(indices: &Vec<u32>) -> Self {
        Self::from(indices.as_slice())
    }
}

impl<const N: usize> From<[u32; N]> for Pages {
    fn from(indices: [u32; N]) -> Self {
        Self::from(indices.as_slice())
    }
}

impl<const N: usize> From<&[u32; N]> for Pages {
    fn from(indices: &[u32; N]) -> Self {
        Self::from(indices.as_slice())
    }
}

impl From<Range<u32>> for Pages {
    fn from(indices: Range<u32>) -> Self {
        indices.collect()
    }
}

impl From<RangeInclusive<u32>> for Pages {
    fn from(indices: RangeInclusive<u32>) -> Self {
        indices.collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 512 }, failure_persistence: None, ..Default::default() })]

        #[test]
        fn bounds_are_those_of_the_largest_page(indices in prop::collection::vec(0_u32.., 1..50), stride in 0_usize..1 << 40, offset in 0_usize..1 << 40, page in 1_u64..1 << 30, region in 0_u64..1 << 62) {
            let pages = Pages::new(indices.clone()).stride(stride).offset(offset);
            let inside = indices.iter().all(|index| u128::from(*index) * stride as u128 + offset as u128 + u128::from(page) <= u128::from(region));
            prop_assert_eq!(pages.check(page, region, "source", "write_pages").is_ok(), inside);
        }
    }
}
