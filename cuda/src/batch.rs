//! The pieces of one launch: entries of a table for the kernel, and copies for the copy engine.

use crate::Reach;
use crate::tables::{ENTRIES, PieceTable};

/// Contiguous pieces from this size on go to the copy engine. It copied pieces of 1 MiB one at a time at half of the
/// line's speed, pieces of 4 MiB at 0.8.
const LARGE: u64 = 2 << 20;
/// The most bytes of a piece that is joined from adjacent ones.
const MAX_PIECE: u64 = 1 << 30;
/// A batch with so many bytes is full. The line copies them in a third of a millisecond, and their regions are in use
/// for that time.
const MAX_BYTES: u64 = 128 << 20;

/// The destination and the source of bytes, and their number.
pub(crate) type CopyRange = (u64, u64, u64);

/// The pieces of one launch, which are copied in any order.
#[derive(Default)]
pub(crate) struct CopyBatch {
    /// The entries of the table that are filled.
    pub entries: usize,
    /// Bytes of the longest entry.
    pub longest: u32,
    /// Bytes of every entry, while all are equal: the table has no lengths then. 0 if they differ.
    pub each: u32,
    /// Bytes of all pieces.
    pub bytes: u64,
    /// Pieces for the copy engine.
    pub copies: Vec<CopyPiece>,
    /// The last piece, which may still grow: it is neither an entry nor a copy yet.
    last: Option<CopyPiece>,
}

/// Contiguous bytes to be copied.
#[derive(Clone, Copy)]
pub(crate) struct CopyPiece {
    pub to: u64,
    pub from: u64,
    pub len: u64,
    reach: Reach,
}

impl CopyPiece {
    /// Whether bytes with the same reach can be joined to the piece: their destination and their source begin where the
    /// piece's end.
    #[inline(always)]
    fn can_join(&self, (to, from, len): CopyRange) -> bool {
        to == self.to + self.len && from == self.from + self.len && self.len + len <= MAX_PIECE
    }
}

impl CopyBatch {
    /// The number of pieces that may be added.
    #[inline]
    pub fn room(&self) -> usize {
        if self.bytes >= MAX_BYTES {
            return 0;
        }
        ENTRIES.saturating_sub(self.entries + self.copies.len() + 1)
    }

    /// Whether the batch has no pieces.
    pub fn is_empty(&self) -> bool {
        self.entries == 0 && self.copies.is_empty() && self.last.is_none()
    }

    /// Whether the batch is one large piece for the copy engine that may still grow.
    #[inline]
    pub fn is_growing(&self) -> bool {
        let large = |last: &CopyPiece| last.len >= LARGE && last.reach == Reach::Kernel;
        self.entries == 0 && self.copies.is_empty() && self.last.as_ref().is_some_and(large)
    }

    /// Adds pieces. The caller has checked that there is [`room`](Self::room), and passes the same `table` each time.
    #[inline]
    pub fn add(&mut self, table: &mut PieceTable, mut pieces: impl Iterator<Item = CopyRange>, reach: Reach) {
        let mut next = pieces.next();
        while let Some((to, from, len)) = next {
            self.join(table, CopyPiece { to, from, len, reach });
            next = self.take_pages(table, &mut pieces);
        }
    }

    /// Joins a piece to the last one if it is adjacent. Otherwise moves the last one to the entries or copies, and
    /// keeps this piece as the last.
    fn join(&mut self, table: &mut PieceTable, piece: CopyPiece) {
        self.bytes += piece.len;
        match &mut self.last {
            Some(last) if last.reach == piece.reach && last.can_join((piece.to, piece.from, piece.len)) => {
                last.len += piece.len;
            }
            last => {
                if let Some(before) = last.replace(piece) {
                    self.assign(table, before);
                }
            }
        }
    }

    /// The fast path for pages: takes pieces as long as each can be joined to the last piece, or the last piece becomes
    /// a plain entry. Returns the first piece for which that does not hold: because the last piece is for the copy
    /// engine, is the first entry, or is the first entry with another length.
    #[inline(always)]
    fn take_pages(
        &mut self,
        table: &mut PieceTable,
        pieces: &mut impl Iterator<Item = CopyRange>,
    ) -> Option<CopyRange> {
        let Some(mut last) = self.last.filter(|last| last.reach == Reach::Kernel) else {
            return pieces.next();
        };
        let is_mixed = self.entries > 0 && self.each == 0;
        // No piece is `u64::MAX` bytes long.
        let each = if self.each > 0 { u64::from(self.each) } else { u64::MAX };
        // Local variables, because the compiler keeps them in registers across the stores to the table.
        let (mut at, mut bytes, mut longest) = (self.entries, self.bytes, self.longest);
        let next = loop {
            let Some((to, from, len)) = pieces.next() else { break None };
            if last.can_join((to, from, len)) {
                last.len += len;
            // There is room in any case. The comparison `at < ENTRIES` saves the bounds checks of the table.
            } else if (last.len == each || (is_mixed && last.len < LARGE)) && at < ENTRIES {
                (table.to[at], table.from[at]) = (last.to, last.from);
                if is_mixed {
                    table.len[at] = last.len as u32;
                    longest = longest.max(last.len as u32);
                }
                last = CopyPiece { to, from, len, ..last };
                at += 1;
            } else {
                break Some((to, from, len));
            }
            bytes += len;
        };
        (self.entries, self.bytes, self.longest, self.last) = (at, bytes, longest, Some(last));
        next
    }

    /// Moves the last piece to the entries or copies, so that later pieces are not joined to it.
    pub fn end_piece(&mut self, table: &mut PieceTable) {
        if let Some(last) = self.last.take() {
            self.assign(table, last);
        }
    }

    /// Makes a piece an entry of the table, or a copy for the copy engine.
    fn assign(&mut self, table: &mut PieceTable, piece: CopyPiece) {
        if piece.reach == Reach::Driver || piece.len >= LARGE {
            return self.copies.push(piece);
        }
        // Its length is below `LARGE`, so it fits 32 bits.
        let (at, len) = (self.entries, piece.len as u32);
        (table.to[at], table.from[at]) = (piece.to, piece.from);
        if at == 0 && len > 0 {
            self.each = len;
        } else if len != self.each || len == 0 {
            if self.each > 0 {
                table.len[..at].fill(self.each);
                self.each = 0;
            }
            table.len[at] = len;
        }
        self.longest = self.longest.max(len);
        self.entries += 1;
    }

    /// Removes all pieces.
    pub fn clear(&mut self) {
        let mut copies = std::mem::take(&mut self.copies);
        copies.clear();
        *self = Self { copies, ..Self::default() };
    }
}

#[cfg(test)]
mod tests;
