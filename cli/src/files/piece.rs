//! Pieces of large files and their checksums.

use std::ops::Range;

use blake3::hazmat::{HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root};
use serde::{Deserialize, Serialize};

/// Files are cut at multiples of this length, and a journal has one record per piece. Files up to this length are sent
/// whole.
pub const CHUNK: u64 = 1 << 20;

/// A piece of a large file, within one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilePiece {
    /// The offset in the file.
    pub offset: u64,
    /// The length, at least one byte.
    pub len: u32,
    /// The [`PieceHash`].
    pub hash: [u8; 32],
}

impl FilePiece {
    /// The offset after the last byte.
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(u64::from(self.len))
    }

    /// Returns true if the piece has bytes, is within one chunk, and fits a file of `size` bytes.
    pub fn is_valid(&self, size: u64) -> bool {
        let end = self.offset.checked_add(u64::from(self.len)).filter(|&end| end <= size);
        self.len > 0 && end.is_some_and(|end| end - self.offset / CHUNK * CHUNK <= CHUNK)
    }
}

/// The first piece of an extent, up to the next multiple of [`CHUNK`].
pub fn next_piece(extent: &Range<u64>) -> Range<u64> {
    extent.start..extent.end.min((extent.start / CHUNK + 1).saturating_mul(CHUNK))
}

/// The checksum of a piece. At a multiple of [`CHUNK`] it is the chaining value of this subtree of the file's BLAKE3.
/// At other offsets it is the BLAKE3 of the bytes.
pub struct PieceHash {
    hasher: blake3::Hasher,
    subtree: bool,
}

impl PieceHash {
    /// The checksum of a piece that starts at `offset` and is within one chunk.
    pub fn new(offset: u64) -> Self {
        let (mut hasher, subtree) = (blake3::Hasher::new(), offset.is_multiple_of(CHUNK));
        if subtree {
            hasher.set_input_offset(offset);
        }
        Self { hasher, subtree }
    }

    /// The checksum of these bytes of a piece.
    pub fn of(offset: u64, bytes: &[u8]) -> [u8; 32] {
        let mut hash = Self::new(offset);
        hash.update(bytes);
        hash.finish()
    }

    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.hasher.update(bytes);
    }

    /// The checksum.
    pub fn finish(&self) -> [u8; 32] {
        match self.subtree {
            true => self.hasher.finalize_non_root(),
            false => self.hasher.finalize().into(),
        }
    }
}

/// Computes the BLAKE3 of a file from its pieces, if the file has no hole.
#[derive(Default)]
pub struct FileHash {
    /// The complete subtrees, largest first. The latest piece is separate.
    stack: Vec<[u8; 32]>,
    latest: Option<[u8; 32]>,
    chunks: u64,
    end: u64,
    holes: bool,
}

impl FileHash {
    /// Adds the next piece. Pieces come in ascending order.
    pub fn push(&mut self, piece: &FilePiece) {
        self.holes |= piece.offset != self.end || !piece.offset.is_multiple_of(CHUNK);
        self.end = piece.end();
        // A subtree is merged only when another piece follows, because the last merge makes the root.
        if let Some(mut subtree) = self.latest.replace(piece.hash) {
            self.chunks += 1;
            for _ in 0..self.chunks.trailing_zeros() {
                if let Some(left) = self.stack.pop() {
                    subtree = merge_subtrees_non_root(&left, &subtree, Mode::Hash);
                }
            }
            self.stack.push(subtree);
        }
    }

    /// The BLAKE3 of the file's `size` bytes, or `None` if the file has holes or is one piece.
    pub fn finish(mut self, size: u64) -> Option<blake3::Hash> {
        if self.holes || self.end != size {
            return None;
        }
        let (mut right, first) = (self.latest?, (!self.stack.is_empty()).then(|| self.stack.remove(0))?);
        for left in self.stack.iter().rev() {
            right = merge_subtrees_non_root(left, &right, Mode::Hash);
        }
        Some(merge_subtrees_root(&first, &right, Mode::Hash))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_make_the_hash_of_the_file() {
        let mut bytes = vec![0; 9 * CHUNK as usize + 77];
        fastrand::Rng::with_seed(1).fill(&mut bytes);
        for len in [CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 5, 4 * CHUNK, 7 * CHUNK - 1, bytes.len() as u64] {
            let (mut whole, mut at) = (FileHash::default(), 0);
            while at < len {
                let range = next_piece(&(at..len));
                let content = &bytes[range.start as usize..range.end as usize];
                let piece =
                    FilePiece { offset: at, len: content.len() as u32, hash: PieceHash::of(at, content) };
                assert!(piece.is_valid(len) && !piece.is_valid(range.end - 1));
                whole.push(&piece);
                at = range.end;
            }
            assert_eq!(whole.finish(len), Some(blake3::hash(&bytes[..len as usize])), "{len}");
        }
    }

    #[test]
    fn holes_and_odd_pieces() {
        let piece = |offset, len| FilePiece { offset, len, hash: [0; 32] };
        assert!(piece(CHUNK - 1, 1).is_valid(CHUNK) && piece(CHUNK, 1 << 20).is_valid(2 * CHUNK));
        for odd in [piece(0, 0), piece(1, 1 << 20), piece(u64::MAX, 1), piece(u64::MAX - 1, 9)] {
            assert!(!odd.is_valid(u64::MAX), "{odd:?}");
        }
        let mut hash = FileHash::default();
        hash.push(&piece(0, 4096));
        hash.push(&piece(CHUNK, 4096));
        assert_eq!(hash.finish(CHUNK + 4096), None);
        assert_eq!(PieceHash::of(4096, b"x"), *blake3::hash(b"x").as_bytes());
    }
}
