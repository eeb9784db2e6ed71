//! The page table of a slot that carries several pages: the initiator writes it into the target's slot, in front of the
//! bytes, and names the number of pages and of the table's words in its slot request.
//!
//! The pages of one run have the same key, length and imm: they are a *group*. The table has a header for each group,
//! and behind it one word for each of its pages: the offset in the region. So most of the work for a page is one word
//! at both ends.
//!
//! The bytes of the pages follow the table without gaps, in the order of the table. For a read, the target puts the
//! bytes at the same places of the initiator's slot.

use std::sync::atomic::{AtomicU64, Ordering};

use multirail_spi::Piece;

use crate::copies::MemoryLocation;
use crate::staging_buffer::SLOT_BYTES;

/// The most pages of one slot. Pages of 1 KiB fill a slot; for smaller ones the work of a slot request and a response
/// is small beside that of the pages.
pub(crate) const MAX_PAGES: usize = SLOT_BYTES >> 10;
/// Words of the header of a group.
pub(crate) const GROUP_WORDS: usize = 3;
/// The most words of a table: each page is a group of its own.
pub(crate) const MAX_TABLE_WORDS: usize = MAX_PAGES * (GROUP_WORDS + 1);

/// The offset of a page that the target leaves out: its copy has failed before the table was written.
pub(crate) const SKIPPED: u64 = u64::MAX;

/// Bit 31 of the first word: the pages have an imm.
const HAS_IMM: u64 = 1 << 31;
/// Bit 30 of the first word: the target leaves the pages out.
const IS_SKIPPED: u64 = 1 << 30;
/// The bits of the first word that hold the length.
const LEN_BITS: u64 = IS_SKIPPED - 1;
/// Bit 63 of the third word: the region is staged.
const IS_STAGED: u64 = 1 << 63;

/// What the target does with some pages of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct PageGroup {
    /// The number of pages.
    pub pages: u32,
    /// The key of the target's region.
    pub key: u64,
    /// Whether the region is staged: then the offsets have the bit
    /// [`RemoteKey::STAGED`](multirail_spi::RemoteKey::STAGED).
    pub is_staged: bool,
    /// The number of bytes of each page.
    pub len: u64,
    /// The imm that the target reports for each page once all pages are in their regions.
    pub imm: Option<u32>,
    /// Whether the target leaves the pages out: their work requests failed before the table was written.
    pub is_skipped: bool,
}

impl PageGroup {
    pub(crate) fn to_words(self) -> [u64; GROUP_WORDS] {
        let flags =
            if self.imm.is_some() { HAS_IMM } else { 0 } | if self.is_skipped { IS_SKIPPED } else { 0 };
        let first = (self.len & LEN_BITS) | flags | u64::from(self.imm.unwrap_or_default()) << 32;
        [first, self.key, u64::from(self.pages) | if self.is_staged { IS_STAGED } else { 0 }]
    }

    /// Decodes a header. Every value of the words is one; the target checks its ranges.
    pub(crate) fn from_words([first, key, pages]: [u64; GROUP_WORDS]) -> Self {
        Self {
            pages: pages as u32,
            key,
            is_staged: pages & IS_STAGED != 0,
            len: first & LEN_BITS,
            imm: (first & HAS_IMM != 0).then_some((first >> 32) as u32),
            is_skipped: first & IS_SKIPPED != 0,
        }
    }

    /// Stores the header in a table.
    pub(crate) fn store(self, words: &[AtomicU64]) {
        for (word, value) in words.iter().zip(self.to_words()) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Reads a header, each word once: the peer may change it at any time. Returns it, and the words behind it. `None`
    /// if the table ends before.
    pub(crate) fn load(table: &[AtomicU64]) -> Option<(Self, &[AtomicU64])> {
        let (words, rest) = table.split_at_checked(GROUP_WORDS)?;
        let words = std::array::from_fn(|index| words[index].load(Ordering::Relaxed));
        Some((Self::from_words(words), rest))
    }
}

/// Bytes of a table of so many words: a multiple of a cache line.
pub(crate) const fn table_len(words: usize) -> u64 {
    (words * 8).next_multiple_of(64) as u64
}

/// What an initiator puts into one slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlotLimit {
    pub pages: usize,
    pub bytes: u64,
}

impl SlotLimit {
    /// A GPU fills whole slots: the launch of its kernel takes as long for a small one.
    const GPU: Self = Self { pages: MAX_PAGES, bytes: SLOT_BYTES as u64 };
    /// The processor fills less, so that the device and the peer begin sooner, and the device reads bytes that are
    /// still in the cache.
    pub(crate) const HOST: Self = Self { pages: MAX_PAGES / 2, bytes: SLOT_BYTES as u64 / 2 };

    /// The limit for pages that lie at `location`.
    pub(crate) fn of(location: MemoryLocation) -> Self {
        if location == MemoryLocation::Host { Self::HOST } else { Self::GPU }
    }

    /// Whether `pages` pages of `bytes` bytes together are within the limit.
    pub(crate) fn fits(self, pages: usize, bytes: u64) -> bool {
        pages <= self.pages && bytes <= self.bytes
    }
}

/// How many of the first `pieces` have the same number of bytes, from 1 to `max_len`.
#[inline]
pub(crate) fn alike(pieces: &[Piece], max_len: u64) -> usize {
    match pieces.first() {
        Some(first) if (1..=max_len).contains(&first.len) => {
            pieces.iter().position(|piece| piece.len != first.len).unwrap_or(pieces.len())
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::staging_buffer::SLOT_LEN;

    proptest! {
        #[test]
        fn a_group_is_decoded_as_it_was_encoded(
            pages: u32, key: u64, is_staged: bool, len in 0..=SLOT_LEN as u64, imm: Option<u32>, is_skipped: bool,
            words: [u64; GROUP_WORDS],
        ) {
            let group = PageGroup { pages, key, is_staged, len, imm, is_skipped };
            let table = [0; GROUP_WORDS + 1].map(AtomicU64::new);
            group.store(&table);
            let (loaded, rest) = PageGroup::load(&table).unwrap();
            prop_assert_eq!((loaded, rest.len()), (group, 1));
            prop_assert!(PageGroup::load(rest).is_none());
            // Words of a hostile peer are a group too, whose pages are shorter than 2^30.
            prop_assert!(PageGroup::from_words(words).len <= LEN_BITS);
        }
    }

    #[test]
    fn a_slot_has_room_for_all_pages_and_their_table() {
        assert!(table_len(MAX_TABLE_WORDS) as usize + SLOT_BYTES <= SLOT_LEN);
    }

    #[test]
    fn alike_pieces_have_the_same_small_length() {
        let piece = |len| Piece { local: std::ptr::null_mut(), remote: 0, len };
        let pieces = [8, 8, 9, 8, 0, 8].map(piece);
        let counts: Vec<_> = (0..=pieces.len()).map(|from| alike(&pieces[from..], 8)).collect();
        assert_eq!(counts, [2, 1, 0, 1, 0, 1, 0]);
    }
}
