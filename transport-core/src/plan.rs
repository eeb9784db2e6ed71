//! How an operation splits over rails: a template and a range per rail.
//!
//! Items are numbered; item `i` is one work request. A plan is never expanded as
//! a whole: the poster asks for one piece at a time.

use std::ops::Range;

use crate::pages::PageLayout;

/// The template: what item `i` of the operation is.
#[derive(Debug, Clone)]
pub(crate) enum Shape {
    /// One range on each side, cut into pieces of `chunk` bytes.
    Range { local: u64, remote: u64, len: u64, chunk: u64 },
    /// One page per item.
    Pages { local: PageLayout, remote: PageLayout, page: u64, count: u32 },
    /// No bytes, and a piece for every rail.
    Touch { rails: u32 },
}

impl Shape {
    /// Pieces in the whole operation; a zero-byte operation is one empty piece.
    pub fn items(&self) -> u32 {
        match self {
            Self::Range { len, chunk, .. } => u32::try_from(len.div_ceil(*chunk).max(1)).unwrap_or(u32::MAX),
            Self::Pages { count, .. } => *count,
            Self::Touch { rails } => *rails,
        }
    }

    pub fn bytes(&self) -> u64 {
        match self {
            Self::Range { len, .. } => *len,
            Self::Pages { page, count, .. } => page * u64::from(*count),
            Self::Touch { .. } => 0,
        }
    }

    /// Appends what `make` makes of pieces `items`, which are below `items()`: of
    /// their offsets in the local and the remote region, and their length.
    #[inline]
    pub fn expand<T>(&self, items: Range<u32>, into: &mut Vec<T>, mut make: impl FnMut(u64, u64, u64) -> T) {
        match self {
            Self::Range { local, remote, len, chunk } => into.extend(items.map(|item| {
                let start = u64::from(item) * chunk;
                make(local + start, remote + start, (*len - start).min(*chunk))
            })),
            Self::Pages { local, remote, page, .. } => {
                let places = local.places(items.clone()).zip(remote.places(items));
                into.extend(places.map(|(local, remote)| make(local, remote, *page)));
            }
            Self::Touch { .. } => into.extend(items.map(|_| make(0, 0, 0))),
        }
    }

    /// Whether it is one piece of no bytes: an imm alone.
    pub fn is_empty(&self) -> bool {
        matches!(self, Self::Range { len: 0, .. })
    }

    /// Whether it is a list of pages.
    pub fn is_pages(&self) -> bool {
        matches!(self, Self::Pages { .. })
    }

    /// Bytes of pieces `items`.
    #[inline]
    pub fn bytes_of(&self, items: Range<u32>) -> u64 {
        match self {
            Self::Range { len, chunk, .. } => {
                let at = |item: u32| (u64::from(item) * chunk).min(*len);
                at(items.end) - at(items.start)
            }
            Self::Pages { page, .. } => items.len() as u64 * page,
            Self::Touch { .. } => 0,
        }
    }

    /// The largest piece; for none of bytes, what it counts as in a batch.
    #[inline]
    pub fn piece_bytes(&self) -> u64 {
        match self {
            Self::Range { chunk, .. } => *chunk,
            Self::Pages { page, .. } => *page,
            Self::Touch { .. } => 1,
        }
    }

    /// The chunk that keeps the number of items within `u32`.
    pub fn chunk_for(len: u64, preferred: u64, max: u64) -> u64 {
        preferred.max(len.div_ceil(u64::from(u32::MAX - 1))).clamp(1, max.max(1))
    }
}

/// Items `start..end` for one rail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct RailRange {
    pub start: u32,
    pub end: u32,
}

/// Splits `items` over `rails` usable rails, beginning with rail `first`, as
/// evenly as whole items allow. Writes one range per rail into `ranges`.
pub(crate) fn split(items: u32, rails: u32, first: u32, ranges: &mut Vec<RailRange>) {
    ranges.clear();
    ranges.resize(rails as usize, RailRange::default());
    if rails == 0 {
        return;
    }
    // A rail that would get less than one item gets none.
    let used = items.min(rails);
    let mut start = 0;
    for turn in 0..used {
        // Spread the remainder over the first rails: sizes differ by one at most.
        let end = ((u64::from(items) * u64::from(turn + 1)) / u64::from(used)) as u32;
        ranges[((first + turn) % rails) as usize] = RailRange { start, end };
        start = end;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pages::Pages;

    #[derive(Debug, Clone, Copy, PartialEq)]
    struct Piece {
        local: u64,
        remote: u64,
        len: u64,
    }

    /// Expands every rail's range and says which destination bytes each piece covers.
    fn expand(shape: &Shape, rails: u32, first: u32) -> Vec<Piece> {
        let mut ranges = Vec::new();
        split(shape.items(), rails, first, &mut ranges);
        let mut pieces = Vec::new();
        for range in ranges {
            let (before, items) = (pieces.len(), range.start..range.end);
            shape.expand(items.clone(), &mut pieces, |local, remote, len| Piece { local, remote, len });
            assert_eq!(pieces[before..].iter().map(|piece| piece.len).sum::<u64>(), shape.bytes_of(items));
        }
        pieces
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 512 }, failure_persistence: None, ..Default::default() })]

        #[test]
        fn ranges_cover_every_byte_once(len in 0_u64..5_000_000, chunk in 1_u64..70_000, rails in 1_u32..40, first in 0_u32..40) {
            let chunk = Shape::chunk_for(len, chunk.max(len / 2000), u64::MAX);
            let mut pieces = expand(&Shape::Range { local: 7, remote: 1000, len, chunk }, rails, first % rails);
            pieces.sort_by_key(|piece| piece.local);
            let mut next = 0;
            for piece in &pieces {
                prop_assert_eq!(piece.local, 7 + next);
                prop_assert_eq!(piece.remote, 1000 + next);
                prop_assert!(piece.len <= chunk);
                next += piece.len;
            }
            prop_assert_eq!(next, len);
            prop_assert_eq!(pieces.len() as u64, len.div_ceil(chunk).max(1));
        }

        #[test]
        fn pages_are_each_moved_once(indices in prop::collection::vec(0_u32..1000, 1..300), rails in 1_u32..40, first in 0_u32..40) {
            let page = 4096;
            let count = indices.len() as u32;
            let src = Pages::new(indices.clone()).stride(5000).offset(3);
            let dst = Pages::new((0..count).rev().collect::<Vec<_>>());
            let shape = Shape::Pages { local: src.layout(page), remote: dst.layout(page), page, count };
            let mut pieces = expand(&shape, rails, first % rails);
            pieces.sort_by_key(|piece| std::cmp::Reverse(piece.remote));
            prop_assert_eq!(pieces.len(), indices.len());
            for (item, piece) in pieces.iter().enumerate() {
                let want = Piece { local: 3 + u64::from(indices[item]) * 5000, remote: (u64::from(count) - 1 - item as u64) * page, len: page };
                prop_assert_eq!(*piece, want);
            }
        }

        #[test]
        fn rails_are_even(items in 0_u32..100_000, rails in 1_u32..64, first in 0_u32..64) {
            let mut ranges = Vec::new();
            split(items, rails, first % rails, &mut ranges);
            let sizes: Vec<_> = ranges.iter().map(|range| range.end - range.start).collect();
            prop_assert_eq!(sizes.iter().sum::<u32>(), items);
            prop_assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1);
        }

        #[test]
        fn a_touch_is_one_empty_piece_per_rail(rails in 1_u32..64, first in 0_u32..64) {
            let pieces = expand(&Shape::Touch { rails }, rails, first % rails);
            prop_assert_eq!(pieces, vec![Piece { local: 0, remote: 0, len: 0 }; rails as usize]);
            let mut ranges = Vec::new();
            split(rails, rails, first % rails, &mut ranges);
            prop_assert!(ranges.iter().all(|range| range.end - range.start == 1));
        }

        #[test]
        fn bounds_are_those_of_the_largest_page(indices in prop::collection::vec(0_u32.., 1..50), stride in 0_usize..1 << 40, offset in 0_usize..1 << 40, page in 1_u64..1 << 30, region in 0_u64..1 << 62) {
            let pages = Pages::new(indices.clone()).stride(stride).offset(offset);
            let inside = indices.iter().all(|index| u128::from(*index) * stride as u128 + offset as u128 + u128::from(page) <= u128::from(region));
            prop_assert_eq!(pages.check(page, region, "source").is_ok(), inside);
        }
    }
}
