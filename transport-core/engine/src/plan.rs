//! How an operation splits over rails: a template and a range per rail.
//!
//! The pieces of an operation are numbered, and each is one work request. A plan is never expanded as a whole: the
//! engine asks for the pieces that it posts next.

mod list;
pub mod way;

use std::ops::Range;
use std::sync::Arc;

pub use list::{ListPlan, PieceRule, Segment};

use crate::spi::extend_by_pairs;

/// The template of an operation's pieces.
#[derive(Debug, Clone)]
pub enum Shape {
    /// One range on each side, cut into pieces of `chunk` bytes.
    Range { local: u64, remote: u64, len: u64, chunk: u64 },
    /// One page per piece.
    Pages { local: PageLayout, remote: PageLayout, page: u64, count: u32 },
    /// Every piece listed: its offsets in the local and the remote region, and its length. `bytes` is their sum.
    Listed { pieces: Arc<[(u64, u64, u64)]>, bytes: u64, paged: bool },
    /// Pieces of many regions.
    List(Arc<ListPlan>),
    /// A warm-up: one piece without bytes for each rail.
    WarmUp { rails: u32 },
}

impl Shape {
    /// The number of pieces in the whole operation. An operation without bytes has one empty piece.
    #[inline]
    pub fn piece_count(&self) -> u32 {
        match self {
            // The usual case; it needs no division.
            Self::Range { len, chunk, .. } if len <= chunk => 1,
            Self::Range { len, chunk, .. } => u32::try_from(len.div_ceil(*chunk)).unwrap_or(u32::MAX),
            Self::Pages { count, .. } => *count,
            Self::Listed { pieces, .. } => pieces.len() as u32,
            Self::List(list) => list.piece_count(),
            Self::WarmUp { rails } => *rails,
        }
    }

    #[inline]
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Range { len, .. } => *len,
            Self::Pages { page, count, .. } => page * u64::from(*count),
            Self::Listed { bytes, .. } => *bytes,
            Self::List(list) => list.bytes(),
            Self::WarmUp { .. } => 0,
        }
    }

    /// Calls `make` for each piece in `range`, with the piece's offsets in the local and the remote region and its
    /// length, and appends the results to `into`.
    #[inline]
    pub fn expand<T>(&self, range: Range<u32>, into: &mut Vec<T>, mut make: impl FnMut(u64, u64, u64) -> T) {
        match self {
            Self::Range { local, remote, len, chunk } => into.extend(range.map(|piece| {
                let start = u64::from(piece) * chunk;
                make(local + start, remote + start, (*len - start).min(*chunk))
            })),
            Self::Pages { local, remote, page, .. } => {
                let add = |here: u32, there: u32| make(local.offset_of(here), remote.offset_of(there), *page);
                extend_by_pairs(into, local.indices_of(range.clone()), remote.indices_of(range), add);
            }
            Self::Listed { pieces, .. } => {
                let pieces = &pieces[range.start as usize..range.end as usize];
                into.extend(pieces.iter().map(|(local, remote, len)| make(*local, *remote, *len)));
            }
            Self::List(list) => {
                into.extend(list.pieces(range).map(|(local, remote, len)| make(local, remote, len)));
            }
            Self::WarmUp { .. } => into.extend(range.map(|_| make(0, 0, 0))),
        }
    }

    /// Whether the shape is one piece without bytes: an imm alone.
    #[inline]
    pub fn is_empty(&self) -> bool {
        matches!(self, Self::Range { len: 0, .. })
    }

    /// Whether the shape is a list of pages.
    #[inline]
    pub fn is_pages(&self) -> bool {
        match self {
            Self::Pages { .. } | Self::Listed { paged: true, .. } => true,
            Self::List(list) => list.paged,
            _ => false,
        }
    }

    /// The list, if the shape is one.
    #[inline]
    pub fn list(&self) -> Option<&ListPlan> {
        if let Self::List(list) = self { Some(list) } else { None }
    }

    /// The same shape with every piece listed. A warm-up and a list stay as they are.
    pub fn listed(&self) -> Self {
        if matches!(self, Self::WarmUp { .. } | Self::List(_)) {
            return self.clone();
        }
        let mut pieces = Vec::with_capacity(self.piece_count() as usize);
        self.expand(0..self.piece_count(), &mut pieces, |local, remote, len| (local, remote, len));
        Self::Listed { pieces: pieces.into(), bytes: self.bytes(), paged: self.is_pages() }
    }

    /// The pieces in `ranges` alone, which ascend. Not for a warm-up.
    #[cold]
    pub fn part_of(&self, ranges: &[RailRange]) -> Self {
        let ranges = ranges.iter().map(|range| range.start..range.end);
        if let Self::List(list) = self {
            return Self::List(Arc::new(list.part_of(ranges)));
        }
        let mut pieces = Vec::new();
        ranges.for_each(|range| self.expand(range, &mut pieces, |local, remote, len| (local, remote, len)));
        let bytes = pieces.iter().map(|(_, _, len)| len).sum();
        Self::Listed { pieces: pieces.into(), bytes, paged: self.is_pages() }
    }

    /// The bytes of the pieces in `range`.
    #[inline(always)]
    pub fn bytes_of(&self, range: Range<u32>) -> u64 {
        match self {
            Self::Range { len, chunk, .. } => {
                let offset = |piece: u32| (u64::from(piece) * chunk).min(*len);
                offset(range.end) - offset(range.start)
            }
            Self::Pages { page, .. } => range.len() as u64 * page,
            Self::Listed { pieces, .. } => {
                pieces[range.start as usize..range.end as usize].iter().map(|(_, _, len)| len).sum()
            }
            Self::List(list) => list.bytes_of(range),
            Self::WarmUp { .. } => 0,
        }
    }

    /// The bytes of the largest piece. A piece of a warm-up counts as 1 byte, so that a batch has a limit.
    #[inline]
    pub fn piece_bytes(&self) -> u64 {
        match self {
            Self::Range { chunk, .. } => *chunk,
            Self::Pages { page, .. } => *page,
            Self::Listed { pieces, .. } => pieces.first().map_or(0, |(_, _, len)| *len),
            Self::List(list) => list.largest(),
            Self::WarmUp { .. } => 1,
        }
    }

    /// The part of `pieces` between two fractions: `from / whole` and `to / whole` of its pieces, or of its bytes where
    /// pieces differ in length.
    #[inline]
    pub fn part(&self, pieces: RailRange, from: u64, to: u64, whole: u64) -> RailRange {
        let Self::List(list) = self else { return pieces.part(from, to, whole) };
        let at = |part| list.piece_at(pieces.start..pieces.end, part, whole);
        RailRange { start: at(from), end: at(to) }
    }

    /// The chunk size, near `preferred` and at most `max`, with which the number of pieces fits into `u32`.
    #[inline]
    pub fn chunk_for(len: u64, preferred: u64, max: u64) -> u64 {
        preferred.max(len.div_ceil(u64::from(u32::MAX - 1))).clamp(1, max.max(1))
    }
}

/// A checked page list with its final stride.
#[derive(Debug, Clone)]
pub struct PageLayout {
    indices: Arc<[u32]>,
    stride: u64,
    offset: u64,
}

impl PageLayout {
    /// Pages at `offset + index * stride` bytes. The caller has checked that the largest index is in bounds.
    #[inline]
    pub fn new(indices: Arc<[u32]>, stride: u64, offset: u64) -> Self {
        Self { indices, stride, offset }
    }

    /// The indices of the pages in `range`, which must not end beyond the number of pages.
    #[inline]
    fn indices_of(&self, range: Range<u32>) -> &[u32] {
        &self.indices[range.start as usize..range.end as usize]
    }

    /// The offset of the page with an index of [`PageLayout::indices_of`]. It is in bounds, because the caller of
    /// [`PageLayout::new`] has checked the largest index.
    #[inline]
    fn offset_of(&self, index: u32) -> u64 {
        self.offset + u64::from(index) * self.stride
    }

    /// The offsets of the pages in `range`, in order; `range` must not end beyond the number of pages. The offsets are
    /// in bounds, because the caller of [`PageLayout::new`] has checked the largest index.
    #[inline]
    pub fn offsets(&self, range: Range<u32>) -> impl ExactSizeIterator<Item = u64> + '_ {
        let (stride, offset) = (self.stride, self.offset);
        let indices = self.indices[range.start as usize..range.end as usize].iter();
        indices.map(move |index| offset + u64::from(*index) * stride)
    }
}

/// The pieces `start..end`, for one rail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RailRange {
    pub start: u32,
    pub end: u32,
}

impl RailRange {
    /// All pieces of `shape`.
    #[inline]
    pub fn all_of(shape: &Shape) -> Self {
        Self { start: 0, end: shape.piece_count() }
    }

    /// The number of pieces.
    #[inline]
    #[expect(clippy::len_without_is_empty, reason = "nobody asks")]
    pub fn len(self) -> u32 {
        self.end - self.start
    }

    /// The part of the range between two fractions of it: `from / whole` and `to / whole`.
    #[inline]
    pub fn part(self, from: u64, to: u64, whole: u64) -> Self {
        let at = |part: u64| (u128::from(self.len()) * u128::from(part) / u128::from(whole.max(1))) as u32;
        Self { start: self.start + at(from), end: self.start + at(to) }
    }
}

/// Splits `pieces` of `shape` over rails by their weights, beginning with rail `first`, as evenly as whole pieces allow.
/// A rail of weight 0 gets none. Writes one range per rail into `ranges`.
pub fn split(
    shape: &Shape,
    pieces: RailRange,
    weights: impl Iterator<Item = u32> + Clone,
    first: u32,
    ranges: &mut Vec<RailRange>,
) {
    ranges.clear();
    ranges.extend(weights.clone().map(|_| RailRange::default()));
    let usable = weights.clone().filter(|weight| *weight > 0);
    let rails = usable.clone().count() as u32;
    if rails == 0 {
        return;
    }
    let first = (first as usize) % ranges.len();
    let turns = weights.clone().enumerate().skip(first).chain(weights.clone().enumerate().take(first));
    let turns = turns.filter(|(_, weight)| *weight > 0);
    let heaviest = usable.clone().max();
    if usable.clone().min() == heaviest {
        // A rail that would get less than one piece gets none.
        let used = pieces.len().min(rails);
        for (turn, (rail, _)) in (0..used).zip(turns) {
            // Spread the remainder over the rails: sizes differ by one at most.
            ranges[rail] = shape.part(pieces, turn.into(), u64::from(turn) + 1, used.into());
        }
        return;
    }
    let whole: u64 = usable.map(u64::from).sum();
    let mut from = 0;
    for (rail, weight) in turns {
        let to = from + u64::from(weight);
        ranges[rail] = shape.part(pieces, from, to, whole);
        from = to;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_warm_up_stays_one_when_it_is_listed() {
        let warm_up = Shape::WarmUp { rails: 2 };
        let listed = warm_up.listed();
        assert!(matches!(listed, Shape::WarmUp { rails: 2 }));
        // The engine divides by `piece_bytes`.
        assert_eq!((listed.piece_count(), listed.piece_bytes()), (2, 1));
    }

    #[derive(Debug, Clone, Copy, PartialEq)]
    struct Piece {
        local: u64,
        remote: u64,
        len: u64,
    }

    /// Expands every rail's range and says which destination bytes each piece covers.
    fn expand(shape: &Shape, weights: &[u32], first: u32) -> Vec<Piece> {
        let mut ranges = Vec::new();
        split(shape, RailRange::all_of(shape), weights.iter().copied(), first, &mut ranges);
        let mut pieces = Vec::new();
        for range in ranges {
            let (before, numbers) = (pieces.len(), range.start..range.end);
            shape.expand(numbers.clone(), &mut pieces, |local, remote, len| Piece { local, remote, len });
            assert_eq!(pieces[before..].iter().map(|piece| piece.len).sum::<u64>(), shape.bytes_of(numbers));
        }
        pieces
    }

    /// Some alike, some not, at least one not 0.
    fn weights() -> impl Strategy<Value = Vec<u32>> {
        let alike = (1_usize..40, 1_u32..500).prop_map(|(rails, weight)| vec![weight; rails]);
        let mixed = prop::collection::vec(0_u32..500, 1..40);
        let mixed = mixed.prop_filter("a weight", |weights| weights.iter().any(|weight| *weight > 0));
        prop_oneof![alike, mixed]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 512 }, failure_persistence: None, ..Default::default() })]

        #[test]
        fn ranges_cover_every_byte_once(len in 0_u64..5_000_000, chunk in 1_u64..70_000, weights in weights(), first in 0_u32..40) {
            let chunk = Shape::chunk_for(len, chunk.max(len / 2000), u64::MAX);
            let mut pieces = expand(&Shape::Range { local: 7, remote: 1000, len, chunk }, &weights, first);
            pieces.sort_by_key(|piece| piece.local);
            let mut next = 0;
            for piece in &pieces {
                prop_assert_eq!(piece.local, 7 + next);
                prop_assert_eq!(piece.remote, 1000 + next);
                prop_assert!(piece.len <= chunk);
                next += piece.len;
            }
            prop_assert_eq!(next, len);
            let shape = Shape::Range { local: 7, remote: 1000, len, chunk };
            let mut written = expand(&shape.listed(), &weights, first);
            written.sort_by_key(|piece| piece.local);
            prop_assert_eq!(written, pieces.clone());
            prop_assert_eq!(pieces.len() as u64, len.div_ceil(chunk).max(1));
        }

        #[test]
        fn pages_are_each_moved_once(indices in prop::collection::vec(0_u32..1000, 1..300), weights in weights(), first in 0_u32..40) {
            let page = 4096;
            let count = indices.len() as u32;
            let local = PageLayout::new(indices.clone().into(), 5000, 3);
            let remote = PageLayout::new((0..count).rev().collect(), page, 0);
            let shape = Shape::Pages { local, remote, page, count };
            let mut pieces = expand(&shape, &weights, first);
            pieces.sort_by_key(|piece| std::cmp::Reverse(piece.remote));
            prop_assert_eq!(pieces.len(), indices.len());
            for (index, piece) in pieces.iter().enumerate() {
                let want = Piece { local: 3 + u64::from(indices[index]) * 5000, remote: (u64::from(count) - 1 - index as u64) * page, len: page };
                prop_assert_eq!(*piece, want);
            }
        }

        #[test]
        fn rails_are_as_even_as_their_weights(start in 0_u32..1000, count in 0_u32..100_000, weights in weights(), first in 0_u32..64) {
            let mut ranges = Vec::new();
            let pieces = RailRange { start, end: start + count };
            let alike = Shape::Range { local: 0, remote: 0, len: 1, chunk: 1 };
            split(&alike, pieces, weights.iter().copied(), first, &mut ranges);
            prop_assert_eq!(ranges.iter().map(|range| range.len()).sum::<u32>(), pieces.len());
            let whole: f64 = weights.iter().map(|weight| f64::from(*weight)).sum();
            for (range, weight) in ranges.iter().zip(&weights) {
                let share = f64::from(pieces.len()) * f64::from(*weight) / whole;
                prop_assert!((f64::from(range.len()) - share).abs() <= 1.0, "{:?} of {}", range, share);
                prop_assert!(range.len() == 0 || (pieces.start <= range.start && range.end <= pieces.end));
            }
        }
    }
}
