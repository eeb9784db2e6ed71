//! The page table of a slot that carries several pages: the initiator writes it into the target's slot, in front of the
//! bytes, and names the number of pages in its slot request.
//!
//! The bytes of the pages follow the table without gaps, in the order of the table. For a read, the target puts the
//! bytes at the same places of the initiator's slot.

use std::sync::atomic::{AtomicU64, Ordering};

use multirail_spi::Piece;

use crate::staging_buffer::{SLOT_BYTES, SLOT_LEN};

/// The most pages of one slot. Pages of 1 KiB fill a slot of 256 KiB; for smaller ones the work of a slot request and a
/// response is small beside that of the pages.
pub(crate) const MAX_PAGES: usize = 256;
/// Words of an encoded page.
pub(crate) const PAGE_WORDS: usize = 3;

/// An entry of a table.
pub(crate) type PageEntry = [AtomicU64; PAGE_WORDS];

/// Bit 31 of the first word: the page has an imm.
const HAS_IMM: u64 = 1 << 31;
/// Bit 30 of the first word: the target leaves the page out.
const IS_SKIPPED: u64 = 1 << 30;
/// The bits of the first word that hold the length.
const LEN_BITS: u64 = IS_SKIPPED - 1;

/// What the target does with one page of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Page {
    /// The key of the target's region.
    pub key: u64,
    /// The offset of the first byte in a staged region, with the bit [`RemoteKey::STAGED`](multirail_spi::RemoteKey);
    /// otherwise the remote address.
    pub offset: u64,
    /// The number of bytes.
    pub len: u64,
    /// The imm that the target reports once the page is in its region.
    pub imm: Option<u32>,
    /// Whether the target leaves the page out: its work request failed before the table was written.
    pub is_skipped: bool,
}

impl Page {
    pub(crate) fn to_words(self) -> [u64; PAGE_WORDS] {
        let flags =
            if self.imm.is_some() { HAS_IMM } else { 0 } | if self.is_skipped { IS_SKIPPED } else { 0 };
        let first = (self.len & LEN_BITS) | flags | u64::from(self.imm.unwrap_or_default()) << 32;
        [first, self.key, self.offset]
    }

    /// Stores the page in an entry of the table.
    #[inline]
    pub(crate) fn store(self, entry: &PageEntry) {
        for (word, value) in entry.iter().zip(self.to_words()) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Lets the target leave a page out that is in the table.
    #[cold]
    pub(crate) fn skip(entry: &PageEntry) {
        entry[0].fetch_or(IS_SKIPPED, Ordering::Relaxed);
    }

    /// Reads an entry of the table, each word once: the peer may change it at any time.
    #[inline]
    pub(crate) fn load(entry: &PageEntry) -> Self {
        Self::from_words(std::array::from_fn(|index| entry[index].load(Ordering::Relaxed)))
    }

    /// Decodes a page. Every value of the words is a page; [`PlacedPages`] and the region check its range.
    pub(crate) fn from_words([first, key, offset]: [u64; PAGE_WORDS]) -> Self {
        let imm = (first & HAS_IMM != 0).then_some((first >> 32) as u32);
        Self { key, offset, len: first & LEN_BITS, imm, is_skipped: first & IS_SKIPPED != 0 }
    }
}

/// Bytes of a table of `pages` pages: a multiple of a cache line.
pub(crate) const fn table_len(pages: usize) -> u64 {
    (pages * PAGE_WORDS * 8).next_multiple_of(64) as u64
}

/// Whether a slot holds `pages` pages of `bytes` bytes together.
pub(crate) fn fits(pages: usize, bytes: u64) -> bool {
    pages <= MAX_PAGES && bytes <= SLOT_BYTES as u64
}

/// The first of `pieces` that have 1 to `max_len` bytes: how many these are, and their bytes.
pub(crate) fn small_prefix(pieces: &[Piece], max_len: u64) -> (usize, u64) {
    let (mut count, mut bytes) = (0, 0);
    // Most pieces of a run have the same length.
    while let Some(Piece { len, .. }) = pieces.get(count)
        && (1..=max_len).contains(len)
    {
        let same = pieces[count..].iter().take_while(|piece| piece.len == *len).count();
        (count, bytes) = (count + same, bytes + same as u64 * len);
    }
    (count, bytes)
}

/// The first of `pieces`, which have `bytes` bytes together, that fit so many pages and so many bytes: how many these are,
/// and their bytes.
pub(crate) fn fitting(pieces: &[Piece], bytes: u64, (max_pages, max_bytes): (usize, u64)) -> (usize, u64) {
    if pieces.len() <= max_pages && bytes <= max_bytes {
        return (pieces.len(), bytes);
    }
    let (mut count, mut taken) = (0, 0);
    while let Some(piece) = pieces[..pieces.len().min(max_pages)].get(count)
        && taken + piece.len <= max_bytes
    {
        (count, taken) = (count + 1, taken + piece.len);
    }
    (count, taken)
}

/// Finds the offset in the slot of each page.
pub(crate) struct PlacedPages {
    next: u64,
}

impl PlacedPages {
    /// The place of one page that has no table.
    pub(crate) fn without_table() -> Self {
        Self { next: 0 }
    }

    /// The places of `pages` pages that have a table.
    pub(crate) fn behind_table(pages: usize) -> Self {
        Self { next: table_len(pages) }
    }

    /// The offset in the slot of the next page. `None` if the page does not fit the slot.
    pub(crate) fn place(&mut self, len: u64) -> Option<u64> {
        let (start, end) = (self.next, self.next.checked_add(len)?);
        self.next = end;
        (end <= SLOT_LEN as u64).then_some(start)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_page_is_decoded_as_it_was_encoded(
            key: u64, offset: u64, len in 0..=SLOT_LEN as u64, imm: Option<u32>, is_skipped: bool, words: [u64; PAGE_WORDS],
        ) {
            let page = Page { key, offset, len, imm, is_skipped };
            prop_assert_eq!(Page::from_words(page.to_words()), page);
            // Words of a hostile peer are a page too, whose length is below 2^30.
            prop_assert!(Page::from_words(words).len <= LEN_BITS);
        }

        #[test]
        fn pages_do_not_overlap_and_stay_in_the_slot(lens in prop::collection::vec(0..=LEN_BITS, 0..=MAX_PAGES)) {
            let mut places = PlacedPages::behind_table(lens.len());
            let mut free = table_len(lens.len());
            for len in &lens {
                let Some(start) = places.place(*len) else { break };
                prop_assert!(start == free && start + len <= SLOT_LEN as u64);
                free = start + len;
            }
            let fits = fits(lens.len(), lens.iter().sum());
            prop_assert!(!fits || places.next <= SLOT_LEN as u64);
        }
    }
}
