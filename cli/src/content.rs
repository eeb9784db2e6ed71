//! The extents of a file, and the digest of its content.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use crate::files::{CHUNK, next_piece};
use rustix::fs::SeekFrom;
use rustix::io::Errno;

/// The pieces of a file in ascending order: its extents, cut at chunks.
pub struct FilePieces<'a> {
    file: &'a File,
    size: u64,
    /// The rest of the current extent.
    extent: Range<u64>,
}

impl<'a> FilePieces<'a> {
    /// The pieces of the first `size` bytes. Unless `sparse`, holes count as bytes.
    pub fn new(file: &'a File, size: u64, sparse: bool) -> Self {
        Self { file, size, extent: if sparse { 0..0 } else { 0..size } }
    }

    /// The next piece.
    pub fn next(&mut self) -> io::Result<Option<Range<u64>>> {
        if self.extent.is_empty() {
            match extent(self.file, self.extent.end, self.size)? {
                Some(extent) => self.extent = extent,
                None => return Ok(None),
            }
        }
        let piece = next_piece(&self.extent);
        self.extent.start = piece.end;
        Ok(Some(piece))
    }

    /// Skips the first `count` pieces. Returns true if they have `bytes` bytes and end at `end`.
    pub fn skip(&mut self, count: u64, bytes: u64, end: u64) -> io::Result<bool> {
        let (mut skipped, mut at) = (0, 0);
        for _ in 0..count {
            let Some(piece) = self.next()? else { return Ok(false) };
            (skipped, at) = (skipped + piece.end - piece.start, piece.end);
        }
        Ok((skipped, at) == (bytes, end))
    }
}

/// Counts the bytes of a file of `size` bytes that are in no hole.
pub fn data(file: &File, size: u64) -> io::Result<u64> {
    let (mut at, mut data) = (0, 0);
    while let Some(extent) = extent(file, at, size)? {
        data += extent.end - extent.start;
        at = extent.end;
    }
    Ok(data)
}

/// Returns the first extent at or after `at`.
fn extent(file: &File, at: u64, size: u64) -> io::Result<Option<Range<u64>>> {
    if at >= size {
        return Ok(None);
    }
    let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(start) if start < size => start,
        Ok(_) | Err(Errno::NXIO) => return Ok(None),
        // This file system does not report holes.
        Err(Errno::INVAL | Errno::NOTSUP) => return Ok(Some(at..size)),
        Err(error) => return Err(error.into()),
    };
    let end = rustix::fs::seek(file, SeekFrom::Hole(start))?;
    Ok((end > start).then(|| start..end.min(size)))
}

/// Computes a digest of the first `size` bytes that does not depend on holes: BLAKE3 over the number and the
/// BLAKE3 of every chunk that has a byte other than zero, then over the size.
///
/// # Errors
/// `Interrupted` once `go_on` returns false.
pub fn digest(file: &File, size: u64, mut go_on: impl FnMut() -> bool) -> io::Result<[u8; 32]> {
    let mut digest = blake3::Hasher::new();
    let mut bytes = vec![0; CHUNK.min(size) as usize];
    let mut at = 0;
    while let Some(extent) = extent(file, at, size)? {
        let start = extent.start / CHUNK * CHUNK;
        at = (start + CHUNK).min(size);
        let chunk = &mut bytes[..(at - start) as usize];
        if !go_on() {
            return Err(io::Error::new(io::ErrorKind::Interrupted, "the digest is no longer needed"));
        }
        file.read_exact_at(chunk, start)?;
        if chunk.iter().any(|&byte| byte != 0) {
            digest.update(&(start / CHUNK).to_le_bytes());
            digest.update(blake3::hash(chunk).as_bytes());
        }
    }
    digest.update(&size.to_le_bytes());
    Ok(digest.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_and_digests_ignore_holes() {
        let size = 3 * CHUNK + 100;
        let (dense, sparse) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let mut bytes = vec![0; size as usize];
        bytes[CHUNK as usize + 5000] = 1;
        dense.write_all_at(&bytes, 0).unwrap();
        sparse.set_len(size).unwrap();
        sparse.write_all_at(&[1], CHUNK + 5000).unwrap();
        let digest_of = |file: &File| digest(file, size, || true).unwrap();
        assert_eq!(digest_of(&dense), digest_of(&sparse));
        sparse.write_all_at(&[2], CHUNK + 5000).unwrap();
        assert_ne!(digest_of(&dense), digest_of(&sparse));
        assert_eq!(digest(&dense, size, || false).unwrap_err().kind(), io::ErrorKind::Interrupted);

        let (mut pieces, mut at) = (FilePieces::new(&sparse, size, false), 0);
        while let Some(piece) = pieces.next().unwrap() {
            assert!(piece.start == at && piece.end > at && piece.end - piece.start <= CHUNK);
            at = piece.end;
        }
        assert_eq!(at, size);
        let (mut pieces, mut total) = (FilePieces::new(&sparse, size, true), 0);
        while let Some(piece) = pieces.next().unwrap() {
            total += piece.end - piece.start;
        }
        assert_eq!(total, data(&sparse, size).unwrap());

        // The skipped pieces must be those of before.
        let first = FilePieces::new(&sparse, size, true).next().unwrap().unwrap();
        let skips = || {
            let (len, end) = (first.end - first.start, first.end);
            FilePieces::new(&sparse, size, true).skip(1, len, end).unwrap()
        };
        assert!(skips());
        sparse.write_all_at(&[1], 0).unwrap();
        assert!(!skips(), "a hole was filled");
        sparse.set_len(0).unwrap();
        assert!(!skips(), "bytes became a hole");
    }
}
