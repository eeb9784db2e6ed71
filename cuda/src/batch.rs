//! What is gathered for one launch: entries of a table for the kernel, and copies for the copy engine.

use crate::Reach;
use crate::tables::{ENTRIES, Filling};

/// A contiguous piece for the copy engine: one of 1 MiB at a time moved at half of the line, of 4 MiB at 0.8.
const LARGE: u64 = 2 << 20;
/// Pieces that lie one after the other are joined up to that.
const LONGEST: u64 = 1 << 30;
/// Bytes at which it is full: the line carries them in a third of a millisecond, which is how long a region
/// is held.
const MOST: u64 = 128 << 20;

/// Where bytes go, where they come from, and how many they are.
pub(crate) type Ends = (u64, u64, u64);

/// Pieces in no order.
#[derive(Default)]
pub(crate) struct Batch {
    /// The table that has its entries.
    pub table: usize,
    pub entries: usize,
    /// Bytes of the longest entry.
    pub longest: u32,
    /// Bytes of every entry while all are equal, and the table says none; else 0.
    pub each: u32,
    pub bytes: u64,
    /// For the copy engine.
    pub copies: Vec<Piece>,
    /// May still grow.
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
    /// Whether another one begins where it ends, at both ends, and goes the same way.
    fn leads_to(&self, next: &Self) -> bool {
        (self.to + self.len, self.from + self.len, self.reach) == (next.to, next.from, next.reach)
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

    /// Whether it is one piece that may still grow, for the copy engine in the end.
    #[inline]
    pub fn is_growing(&self) -> bool {
        let large = |last: &Piece| last.len >= LARGE && last.reach == Reach::Kernel;
        self.is_empty() && self.last.as_ref().is_some_and(large)
    }

    /// Whether there is nothing but what may still grow.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.entries == 0 && self.copies.is_empty()
    }

    /// Adds pieces, to `table` those that are entries; there is [`room`](Self::room).
    #[inline]
    pub fn add(&mut self, table: &mut Filling<'_>, mut pieces: impl Iterator<Item = Ends>, reach: Reach) {
        let mut next = pieces.next();
        while let Some((to, from, len)) = next {
            self.join(table, Piece { to, from, len, reach });
            next = self.enter_alike(table, &mut pieces);
        }
    }

    /// Joins a piece to the last one, which it follows at both ends, or files that and keeps this.
    fn join(&mut self, table: &mut Filling<'_>, piece: Piece) {
        self.bytes += piece.len;
        match &mut self.last {
            Some(last) if last.leads_to(&piece) && last.len + piece.len <= LONGEST => last.len += piece.len,
            last => {
                if let Some(before) = last.replace(piece) {
                    self.file(table, before);
                }
            }
        }
    }

    /// Enters pieces that are as long as the last one and all entries are, up to the first that is not, or that has
    /// to be joined, which it gives back. They go as the last one does.
    #[inline(always)]
    fn enter_alike(
        &mut self,
        table: &mut Filling<'_>,
        pieces: &mut impl Iterator<Item = Ends>,
    ) -> Option<Ends> {
        let each = u64::from(self.each);
        let is_alike = |last: &Piece| each > 0 && last.len == each && last.reach == Reach::Kernel;
        let Some(mut last) = self.last.filter(is_alike) else { return pieces.next() };
        let first = self.entries;
        let mut at = first;
        let next = loop {
            match pieces.next() {
                Some((to, from, len))
                    if len == each && at < ENTRIES && (to, from) != (last.to + each, last.from + each) =>
                {
                    table.enter(at, last.to, last.from);
                    (last.to, last.from) = (to, from);
                    at += 1;
                }
                next => break next,
            }
        };
        self.entries = at;
        self.bytes += (at - first) as u64 * each;
        self.last = Some(last);
        next
    }

    /// What is added from now on is not joined to what was added before.
    pub fn divide(&mut self, table: &mut Filling<'_>) {
        if let Some(last) = self.last.take() {
            self.file(table, last);
        }
    }

    fn file(&mut self, table: &mut Filling<'_>, piece: Piece) {
        if piece.len == 0 {
            return;
        }
        if piece.reach == Reach::Driver || piece.len >= LARGE {
            return self.copies.push(piece);
        }
        // Below `LARGE`, so it fits.
        let (at, len) = (self.entries, piece.len as u32);
        table.enter(at, piece.to, piece.from);
        if at == 0 {
            self.each = len;
        } else if len != self.each {
            // What was equal is said nowhere yet.
            let unsaid = if self.each > 0 { 0..at } else { at..at };
            unsaid.for_each(|before| table.enter_len(before, self.each));
            table.enter_len(at, len);
            self.each = 0;
        }
        self.longest = self.longest.max(len);
        self.entries += 1;
    }

    /// Forgets all; what comes is entered into `table`.
    pub fn begin(&mut self, table: usize) {
        let mut copies = std::mem::take(&mut self.copies);
        copies.clear();
        *self = Self { table, copies, ..Self::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tables::Table;

    /// What a batch of `pieces` has: its entries, as the kernel reads them, and its copies.
    fn gathered(pieces: &[(Ends, Reach)]) -> (Batch, Vec<Ends>, Vec<Ends>) {
        let (mut table, mut batch) = (Table::empty(), Batch::default());
        let mut filling = table.fill();
        for alike in pieces.chunk_by(|(_, one), (_, other)| one == other) {
            batch.add(&mut filling, alike.iter().map(|(ends, _)| *ends), alike[0].1);
        }
        batch.divide(&mut filling);
        let len = |at| if batch.each > 0 { batch.each } else { table.len[at] };
        let entries = (0..batch.entries).map(|at| (table.to[at], table.from[at], len(at).into())).collect();
        let copies = batch.copies.iter().map(|piece| (piece.to, piece.from, piece.len)).collect();
        (batch, entries, copies)
    }

    fn page(number: u64, len: u64) -> Ends {
        (number << 30 | 1 << 50, number << 30 | 1 << 51, len)
    }

    #[test]
    fn pages_of_one_size_have_no_lengths_until_one_differs() {
        let mut pages: Vec<_> = (0..40).map(|number| (page(number, 4096), Reach::Kernel)).collect();
        let (batch, entries, _) = gathered(&pages);
        assert_eq!((batch.each, batch.longest, batch.bytes), (4096, 4096, 40 * 4096));
        assert_eq!(entries, (0..40).map(|number| page(number, 4096)).collect::<Vec<_>>());
        // And some of the first size again, behind it.
        pages.splice(20..20, [(page(50, 100), Reach::Kernel)]);
        let (batch, entries, _) = gathered(&pages);
        assert_eq!((batch.each, batch.longest, batch.bytes), (0, 4096, 40 * 4096 + 100));
        assert_eq!(entries, pages.iter().map(|(ends, _)| *ends).collect::<Vec<_>>());
    }

    #[test]
    fn neighbours_at_both_ends_are_joined() {
        let (to, from, len) = page(7, 4096);
        let next = (to + len, from + len, len);
        let beside = (to + 2 * len, from + 9 * len, len);
        let pages =
            [page(1, len), page(2, len), (to, from, len), next, beside].map(|ends| (ends, Reach::Kernel));
        let (batch, entries, _) = gathered(&pages);
        assert_eq!(entries, [page(1, len), page(2, len), (to, from, 2 * len), beside]);
        assert_eq!((batch.each, batch.longest, batch.bytes), (0, 8192, 5 * len));
    }

    #[test]
    fn what_the_kernel_does_not_move_is_copied() {
        let pieces = [
            (page(1, 4096), Reach::Kernel),
            (page(2, 4096), Reach::Driver),
            (page(3, 4096), Reach::Driver),
            (page(4, LARGE), Reach::Kernel),
            (page(5, 4096), Reach::Kernel),
            (page(6, 0), Reach::Kernel),
            (page(7, 4096), Reach::Kernel),
        ];
        let (batch, entries, copies) = gathered(&pieces);
        assert_eq!(entries, [page(1, 4096), page(5, 4096), page(7, 4096)]);
        assert_eq!(copies, [page(2, 4096), page(3, 4096), page(4, LARGE)]);
        assert_eq!(batch.each, 4096);
    }

    #[test]
    fn a_full_one_has_no_room() {
        let pages: Vec<_> = (0..ENTRIES as u64 - 1).map(|number| (page(number, 64), Reach::Kernel)).collect();
        let (mut batch, entries, _) = gathered(&pages);
        assert_eq!((entries.len(), batch.room()), (ENTRIES - 1, 0));
        batch.begin(3);
        assert_eq!((batch.table, batch.room(), batch.is_empty()), (3, ENTRIES - 1, true));
        let (batch, ..) = gathered(&[(page(1, MOST), Reach::Kernel)]);
        assert_eq!(batch.room(), 0);
    }

    #[test]
    fn one_large_piece_grows() {
        let (mut table, mut batch) = (Table::empty(), Batch::default());
        let (to, from, _) = page(1, 0);
        batch.add(
            &mut table.fill(),
            (0..4).map(|at| (to + at * LARGE, from + at * LARGE, LARGE)),
            Reach::Kernel,
        );
        assert!(batch.is_growing() && batch.copies.is_empty());
        batch.divide(&mut table.fill());
        assert_eq!((batch.copies[0].len, batch.is_growing()), (4 * LARGE, false));
    }
}
