//! The pieces of a list: ranges of many regions, planned once and posted any number of times.

use std::ops::Range;
use std::sync::Arc;

use crate::memory::{RegionInner, RemoteInner};
use crate::spi::{Batch, Paths, Piece, WorkRequest};

/// The pieces of a list, in segments. All pieces of a segment have the same local and the same remote region.
///
/// All pairs of regions lie on the same rails. So any of these rails can carry any of the pieces.
pub struct ListPlan {
    segments: Vec<Segment>,
    /// The offsets of each piece in the local and in the remote region.
    offsets: Vec<(u64, u64)>,
    /// The bytes of all pieces before each piece, and then the bytes of all pieces.
    bytes_before: Vec<u64>,
    /// The bytes of the largest piece.
    largest: u64,
    /// The entries that have no piece of their own, because they share one with the entry before them.
    merged: u32,
    /// The paths of all pieces.
    path: Paths,
    /// Whether the entries are pages of two regions.
    pub paged: bool,
}

/// Consecutive pieces between the same two regions.
pub struct Segment {
    pub local: Arc<RegionInner>,
    pub remote: Arc<RemoteInner>,
    /// The number behind the segment's last piece.
    end: u32,
}

/// How entries become pieces.
#[derive(Debug, Clone, Copy)]
pub enum PieceRule {
    /// Entries that follow each other in both regions share a piece of at most `chunk` bytes. A longer entry is cut
    /// into pieces of `chunk` bytes.
    Merge { chunk: u64 },
    /// Each entry is a piece: each piece carries an imm.
    PerEntry,
}

impl ListPlan {
    /// A plan without segments that has room for `entries` entries.
    pub fn with_capacity(entries: usize, paged: bool) -> Self {
        let mut bytes_before = Vec::with_capacity(entries + 1);
        bytes_before.push(0);
        Self {
            segments: Vec::new(),
            offsets: Vec::with_capacity(entries),
            bytes_before,
            largest: 0,
            merged: 0,
            path: Paths::empty(),
            paged,
        }
    }

    /// Adds a segment with these entries: their offsets in the local and in the remote region, and their lengths,
    /// which are not 0. The caller has checked that they lie in the two regions, and that the whole list has fewer
    /// than `u32::MAX` pieces.
    pub fn push_segment(
        &mut self,
        local: Arc<RegionInner>,
        remote: Arc<RemoteInner>,
        rule: PieceRule,
        entries: impl Iterator<Item = (u64, u64, u64)>,
    ) {
        self.push_pieces(rule, entries);
        self.path |= local.path_to(&remote);
        self.segments.push(Segment { local, remote, end: self.offsets.len() as u32 });
    }

    /// Adds the pieces of the next segment.
    fn push_pieces(&mut self, rule: PieceRule, entries: impl Iterator<Item = (u64, u64, u64)>) {
        let first = self.offsets.len();
        let chunk = match rule {
            PieceRule::Merge { chunk } => chunk,
            PieceRule::PerEntry => u64::MAX,
        };
        // Where the piece before ends, and how many bytes fit into it. The first entry continues no piece.
        let (mut local_end, mut remote_end, mut room) = (0, 0, 0);
        let mut total = self.bytes();
        for (mut local, mut remote, mut len) in entries {
            total += len;
            if len <= room && local == local_end && remote == remote_end {
                (local_end, remote_end, room) = (local + len, remote + len, room - len);
                self.merged += 1;
                // The last piece grows.
                if let Some(end) = self.bytes_before.last_mut() {
                    *end = total;
                }
                continue;
            }
            while len > chunk {
                self.push_piece(local, remote, total - len + chunk);
                (local, remote, len) = (local + chunk, remote + chunk, len - chunk);
            }
            self.push_piece(local, remote, total);
            (local_end, remote_end) = (local + len, remote + len);
            room = if let PieceRule::PerEntry = rule { 0 } else { chunk - len };
        }
        let pieces = self.bytes_before[first..].windows(2);
        self.largest = pieces.map(|bytes| bytes[1] - bytes[0]).fold(self.largest, u64::max);
    }

    /// A list of the pieces in `ranges` alone, which ascend.
    #[cold]
    pub fn part_of(&self, ranges: impl Iterator<Item = Range<u32>>) -> Self {
        let mut part = Self { path: self.path, ..Self::with_capacity(0, self.paged) };
        let mut segment = 0;
        let mut last = None;
        for range in ranges {
            let mut next = range.start;
            while next < range.end {
                segment = self.segment_of(next, segment);
                let pieces = self.run_from(next, segment, range.end - next);
                next = pieces.end;
                for (local, remote, len) in self.pieces(pieces) {
                    part.push_piece(local, remote, part.bytes() + len);
                    part.largest = part.largest.max(len);
                }
                let end = part.piece_count();
                match part.segments.last_mut().filter(|_| last == Some(segment)) {
                    Some(same) => same.end = end,
                    None => {
                        let Segment { local, remote, .. } = &self.segments[segment as usize];
                        let (local, remote) = (Arc::clone(local), Arc::clone(remote));
                        part.segments.push(Segment { local, remote, end });
                    }
                }
                last = Some(segment);
            }
        }
        part
    }

    fn push_piece(&mut self, local: u64, remote: u64, bytes_to_its_end: u64) {
        self.offsets.push((local, remote));
        self.bytes_before.push(bytes_to_its_end);
    }

    /// The paths of all pieces.
    #[inline]
    pub fn path(&self) -> Paths {
        self.path
    }

    /// The segments. There is at least one.
    #[inline]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The number of a piece's segment. `near` is where the search begins: the segment of a piece shortly before.
    #[inline]
    pub fn segment_of(&self, piece: u32, near: u32) -> u32 {
        let near = near as usize;
        let is_behind = near > 0 && self.segments[near - 1].end > piece;
        let from = match is_behind {
            true => self.segments[..near].partition_point(|segment| segment.end <= piece),
            false => near,
        };
        let further = self.segments[from..].iter().take_while(|segment| segment.end <= piece);
        (from + further.count()) as u32
    }

    /// The pieces from `piece` on that a run of at most `most` pieces can take: those of the same segment.
    #[inline]
    pub fn run_from(&self, piece: u32, segment: u32, most: u32) -> Range<u32> {
        piece..self.segments[segment as usize].end.min(piece.saturating_add(most))
    }

    #[inline]
    pub fn piece_count(&self) -> u32 {
        self.offsets.len() as u32
    }

    #[inline]
    pub fn bytes(&self) -> u64 {
        self.bytes_before.last().copied().unwrap_or(0)
    }

    /// The bytes of the largest piece.
    #[inline]
    pub fn largest(&self) -> u64 {
        self.largest
    }

    /// The entries that have no piece of their own.
    #[inline]
    pub fn merged(&self) -> u32 {
        self.merged
    }

    /// The bytes of the pieces in `range`.
    #[inline]
    pub fn bytes_of(&self, range: Range<u32>) -> u64 {
        self.bytes_before[range.end as usize] - self.bytes_before[range.start as usize]
    }

    /// The pieces in `range`: their offsets in the local and the remote region, and their lengths.
    #[inline]
    pub fn pieces(&self, range: Range<u32>) -> impl Iterator<Item = (u64, u64, u64)> + '_ {
        let (start, end) = (range.start as usize, range.end as usize);
        let ends = self.bytes_before[start..=end].windows(2);
        self.offsets[start..end]
            .iter()
            .zip(ends)
            .map(|((local, remote), bytes)| (*local, *remote, bytes[1] - bytes[0]))
    }

    /// Appends the requests of pieces of one segment to a batch, as `template` is, with the addresses and the keys of the
    /// segment on rail `rail` of the transport. Returns their bytes.
    pub fn expand(
        &self,
        pieces: Range<u32>,
        segment: u32,
        rail: usize,
        template: WorkRequest,
        batch: &mut Batch,
    ) -> u64 {
        let request = self.segments[segment as usize].address(template, rail);
        batch.push_run(request, |into| {
            into.extend(self.pieces(pieces.clone()).map(|(local, remote, len)| Piece {
                local: request.local.wrapping_add(local as usize),
                remote: request.remote.wrapping_add(remote),
                len,
            }));
        });
        self.bytes_of(pieces)
    }

    /// The first piece of those in `range` that begins at or behind `from / whole` of their bytes.
    pub fn piece_at(&self, range: Range<u32>, from: u64, whole: u64) -> u32 {
        let begin = self.bytes_before[range.start as usize];
        let bytes = u128::from(self.bytes_of(range.clone()));
        let part = (bytes * u128::from(from) / u128::from(whole.max(1))) as u64;
        let starts = &self.bytes_before[range.start as usize..range.end as usize];
        range.start + starts.partition_point(|start| *start < begin + part) as u32
    }
}

impl Segment {
    /// The request with the addresses and the keys of both regions on rail `rail` of their transport.
    fn address(&self, template: WorkRequest, rail: usize) -> WorkRequest {
        let registered = self.local.regions[self.remote.transport].get(rail).and_then(Option::as_ref);
        let imported = self.remote.imports.get(rail).and_then(Option::as_ref);
        // All segments lie on the same rails, and the engine uses no others: there are both.
        let lkey = registered.map_or(0, |region| region.lkey());
        let (rkey, remote) = imported.map_or((0, 0), |import| (import.rkey(), import.base()));
        let lkey = lkey | template.lkey & WorkRequest::COALESCE;
        WorkRequest { local: self.local.start(), lkey, rkey, remote, ..template }
    }
}

impl std::fmt::Debug for ListPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ListPlan")
            .field("segments", &self.segments.len())
            .field("pieces", &self.offsets.len())
            .field("bytes", &self.bytes())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::plan::{RailRange, Shape, split};

    /// An entry: its offset in the local and in the remote region, and its length.
    type Entry = (u64, u64, u64);

    fn list(rule: PieceRule, entries: &[Entry]) -> ListPlan {
        let mut list = ListPlan::with_capacity(entries.len(), false);
        list.push_pieces(rule, entries.iter().copied());
        list
    }

    /// Each byte of the entries, with its destination.
    fn bytes(entries: impl IntoIterator<Item = Entry>) -> Vec<(u64, u64)> {
        let of = |(local, remote, len)| (0..len).map(move |byte| (local + byte, remote + byte));
        entries.into_iter().flat_map(of).collect()
    }

    /// Entries of which many follow the one before, on one side or on both.
    fn entries() -> impl Strategy<Value = Vec<Entry>> {
        let steps = prop::collection::vec((0_u64..3, 0_u64..3, 1_u64..30), 1..60);
        steps.prop_map(|steps| {
            let (mut local, mut remote) = (0, 0);
            let entry = |(local_gap, remote_gap, len): (u64, u64, u64)| {
                (local, remote) = (local + local_gap / 2 * 5, remote + remote_gap / 2 * 7);
                let entry = (local, remote, len);
                (local, remote) = (local + len, remote + len);
                entry
            };
            steps.into_iter().map(entry).collect()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 512 }, failure_persistence: None, ..Default::default() })]

        #[test]
        fn pieces_have_each_byte_once(entries in entries(), chunk in 1_u64..70) {
            let list = list(PieceRule::Merge { chunk }, &entries);
            let pieces: Vec<_> = list.pieces(0..list.piece_count()).collect();
            prop_assert_eq!(bytes(pieces.iter().copied()), bytes(entries.iter().copied()));
            prop_assert!(pieces.iter().all(|piece| piece.2 <= chunk));
            prop_assert_eq!(pieces.iter().map(|piece| piece.2).max(), Some(list.largest()));
            // No two pieces could have been one.
            let fit = |pair: &[Entry]| {
                let follows = (pair[0].0 + pair[0].2, pair[0].1 + pair[0].2) == (pair[1].0, pair[1].1);
                follows && pair[0].2 + pair[1].2 <= chunk
            };
            let cut = entries.iter().any(|entry| entry.2 > chunk);
            prop_assert!(cut || !pieces.windows(2).any(fit));
            prop_assert!(cut || list.merged() as usize == entries.len() - pieces.len());
        }

        #[test]
        fn with_an_imm_each_entry_is_a_piece(entries in entries()) {
            let list = list(PieceRule::PerEntry, &entries);
            prop_assert_eq!(list.merged(), 0);
            prop_assert_eq!(list.pieces(0..list.piece_count()).collect::<Vec<_>>(), entries);
        }

        #[test]
        fn rails_share_the_bytes_evenly(entries in entries(), rails in 1_usize..9, first in 0_u32..9) {
            let list = list(PieceRule::PerEntry, &entries);
            let (bytes, largest) = (list.bytes(), list.largest());
            let shape = Shape::List(Arc::new(list));
            let (pieces, mut ranges) = (RailRange::all_of(&shape), Vec::new());
            split(&shape, pieces, (0..rails).map(|_| 1), first, &mut ranges);
            prop_assert_eq!(ranges.iter().map(|range| range.len()).sum::<u32>(), pieces.len());
            let used = rails.min(pieces.len() as usize) as u64;
            for range in ranges {
                prop_assert!(shape.bytes_of(range.start..range.end) <= bytes / used + 2 * largest);
            }
        }
    }
}
