//! What is gathered for one launch: entries of a table for the kernel, and copies for the copy engine.

use crate::Reach;
use crate::tables::{ENTRIES, Table};

/// A contiguous piece for the copy engine: one of 1 MiB at a time moved at half of the line, of 4 MiB at 0.8.
const LARGE: u64 = 2 << 20;
/// Pieces that lie one after the other are joined up to that.
const LONGEST: u64 = 1 << 30;
/// Bytes at which it is full: the line carries them in a third of a millisecond, which is how long a region
/// is held.
const MOST: u64 = 128 << 20;

/// Where bytes go, where they come from, and how many they are.
pub(crate) type Ends = (u64, u64, u64);

/// Pieces that one launch moves, in no order.
#[derive(Default)]
pub(crate) struct Batch {
    pub entries: usize,
    /// Bytes of the longest entry.
    pub longest: u32,
    /// Bytes of every entry while all are equal, and the table says none; else 0.
    pub each: u32,
    pub bytes: u64,
    /// For the copy engine.
    pub copies: Vec<Piece>,
    /// May still grow; neither an entry nor a copy yet.
    last: Option<Piece>,
}

#[derive(Clone, Copy)]
pub(crate) struct Piece {
    pub to: u64,
    pub from: u64,
    pub len: u64,
    reach: Reach,
}

impl Piece {
    /// Whether bytes that go the same way can be joined to it: they begin where it ends, at both ends.
    #[inline(always)]
    fn takes(&self, (to, from, len): Ends) -> bool {
        to == self.to + self.len && from == self.from + self.len && self.len + len <= LONGEST
    }
}

impl Batch {
    /// Pieces that may be added.
    #[inline]
    pub fn room(&self) -> usize {
        if self.bytes >= MOST {
            return 0;
        }
        ENTRIES.saturating_sub(self.entries + self.copies.len() + 1)
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.entries == 0 && self.copies.is_empty() && self.last.is_none()
    }

    /// Whether it is one piece that may still grow, for the copy engine in the end.
    #[inline]
    pub fn is_growing(&self) -> bool {
        let large = |last: &Piece| last.len >= LARGE && last.reach == Reach::Kernel;
        self.entries == 0 && self.copies.is_empty() && self.last.as_ref().is_some_and(large)
    }

    /// Adds pieces; there is [`room`](Self::room). Its entries are in `table`, the same always.
    #[inline]
    pub fn add(&mut self, table: &mut Table, mut pieces: impl Iterator<Item = Ends>, reach: Reach) {
        let mut next = pieces.next();
        while let Some((to, from, len)) = next {
            self.join(table, Piece { to, from, len, reach });
            next = self.take_plain(table, &mut pieces);
        }
    }

    /// Joins a piece to the last one, which it follows at both ends, or files that and keeps this.
    fn join(&mut self, table: &mut Table, piece: Piece) {
        self.bytes += piece.len;
        match &mut self.last {
            Some(last) if last.reach == piece.reach && last.takes((piece.to, piece.from, piece.len)) => {
                last.len += piece.len;
            }
            last => {
                if let Some(before) = last.replace(piece) {
                    self.file(table, before);
                }
            }
        }
    }

    /// Takes pieces that go as the last one does: joined to it, or kept in its place while it becomes an entry. Gives
    /// back the first that asks for more: what it follows is for the copy engine, the first entry, or the first to
    /// differ in length.
    #[inline(always)]
    fn take_plain(&mut self, table: &mut Table, pieces: &mut impl Iterator<Item = Ends>) -> Option<Ends> {
        let Some(mut last) = self.last.filter(|last| last.reach == Reach::Kernel) else {
            return pieces.next();
        };
        let is_mixed = self.entries > 0 && self.each == 0;
        // No piece is as long as the latter.
        let each = if self.each > 0 { u64::from(self.each) } else { u64::MAX };
        // Locals, which the compiler keeps in registers across the table's stores.
        let (mut at, mut bytes, mut longest) = (self.entries, self.bytes, self.longest);
        let next = loop {
            let Some((to, from, len)) = pieces.next() else { break None };
            if last.takes((to, from, len)) {
                last.len += len;
            // There is room; said again, it saves the look at the table's length.
            } else if (last.len == each || (is_mixed && last.len < LARGE)) && at < ENTRIES {
                (table.to[at], table.from[at]) = (last.to, last.from);
                if is_mixed {
                    table.len[at] = last.len as u32;
                    longest = longest.max(last.len as u32);
                }
                last = Piece { to, from, len, ..last };
                at += 1;
            } else {
                break Some((to, from, len));
            }
            bytes += len;
        };
        (self.entries, self.bytes, self.longest, self.last) = (at, bytes, longest, Some(last));
        next
    }

    /// What is added from now on is not joined to what was added before.
    pub fn divide(&mut self, table: &mut Table) {
        if let Some(last) = self.last.take() {
            self.file(table, last);
        }
    }

    fn file(&mut self, table: &mut Table, piece: Piece) {
        if piece.reach == Reach::Driver || piece.len >= LARGE {
            return self.copies.push(piece);
        }
        // Below `LARGE`, so it fits.
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

    /// Forgets all.
    pub fn clear(&mut self) {
        let mut copies = std::mem::take(&mut self.copies);
        copies.clear();
        *self = Self { copies, ..Self::default() };
    }
}

#[cfg(test)]
mod tests;
