//! Where a file has bytes, and the digest of what it holds.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use crate::files::{CHUNK, next_piece};
use rustix::fs::SeekFrom;
use rustix::io::Errno;

/// The pieces of a file, ascending: its extents, cut at chunks.
pub struct Pieces<'a> {
    file: &'a File,
    size: u64,
    /// What is left of the extent at hand.
    extent: Range<u64>,
}

impl<'a> Pieces<'a> {
    /// Of the first `size` bytes; if not `sparse`, holes count as bytes.
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

    /// Passes over the first `count` pieces; whether they have `bytes` bytes and end at `end`.
    pub fn pass(&mut self, count: u64, bytes: u64, end: u64) -> io::Result<bool> {
        let (mut passed, mut at) = (0, 0);
        for _ in 0..count {
            let Some(piece) = self.next()? else { return Ok(false) };
            (passed, at) = (passed + piece.end - piece.start, piece.end);
        }
        Ok((passed, at) == (bytes, end))
    }
}

/// Bytes of a file of `size` bytes that are in no hole.
pub fn data(file: &File, size: u64) -> io::Result<u64> {
    let (mut at, mut data) = (0, 0);
    while let Some(extent) = extent(file, at, size)? {
        data += extent.end - extent.start;
        at = extent.end;
    }
    Ok(data)
}

/// The first run of bytes at or behind `at` that is no hole.
fn extent(file: &File, at: u64, size: u64) -> io::Result<Option<Range<u64>>> {
    if at >= size {
        return Ok(None);
    }
    let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(start) if start < size => start,
        Ok(_) | Err(Errno::NXIO) => return Ok(None),
        // A file system that knows no holes.
        Err(Errno::INVAL | Errno::NOTSUP) => return Ok(Some(at..size)),
        Err(error) => return Err(error.into()),
    };
    let end = rustix::fs::seek(file, SeekFrom::Hole(start))?;
    Ok((end > start).then(|| start..end.min(size)))
}

/// A digest of the first `size` bytes that does not depend on where holes are: BLAKE3
/// over number and BLAKE3 of every chunk that is not all zeros, then the size.
/// Stops with an error of kind `Interrupted` once `wanted` says no.
pub fn digest(file: &File, size: u64, mut wanted: impl FnMut() -> bool) -> io::Result<[u8; 32]> {
    let mut digest = blake3::Hasher::new();
    let mut bytes = vec![0; CHUNK.min(size) as usize];
    let mut at = 0;
    while let Some(extent) = extent(file, at, size)? {
        let start = extent.start / CHUNK * CHUNK;
        at = (start + CHUNK).min(size);
        let chunk = &mut bytes[..(at - start) as usize];
        if !wanted() {
            return Err(io::Error::new(io::ErrorKind::Interrupted, "no longer wanted"));
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

        let (mut pieces, mut at) = (Pieces::new(&sparse, size, false), 0);
        while let Some(piece) = pieces.next().unwrap() {
            assert!(piece.start == at && piece.end > at && piece.end - piece.start <= CHUNK);
            at = piece.end;
        }
        assert_eq!(at, size);
        let (mut pieces, mut total) = (Pieces::new(&sparse, size, true), 0);
        while let Some(piece) = pieces.next().unwrap() {
            total += piece.end - piece.start;
        }
        assert_eq!(total, data(&sparse, size).unwrap());

        // What is passed over must be what was there before.
        let first = Pieces::new(&sparse, size, true).next().unwrap().unwrap();
        let passes = || {
            let (len, end) = (first.end - first.start, first.end);
            Pieces::new(&sparse, size, true).pass(1, len, end).unwrap()
        };
        assert!(passes());
        sparse.write_all_at(&[1], 0).unwrap();
        assert!(!passes(), "a hole was filled meanwhile");
        sparse.set_len(0).unwrap();
        assert!(!passes(), "bytes became a hole");
    }
}
