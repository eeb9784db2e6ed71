//! The journal of the stored pieces of a partial file.
//!
//! It has a header with the file's path, then one record of 44 bytes per piece, written after
//! the piece. An incomplete record does not count. If a power failure lost bytes of a piece,
//! the piece's checksum shows it when the file is continued.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::files::{FilePiece, TreePath};

const MAGIC: [u8; 8] = *b"mrjrnl01";
/// The bytes of a record.
pub const RECORD: u64 = 44;

/// The journal of one partial file.
pub struct Journal {
    file: File,
    header: u64,
    count: u64,
}

impl Journal {
    /// Creates a journal in an empty file.
    pub fn create(file: File, path: &TreePath) -> io::Result<Self> {
        let header = header(path);
        file.write_all_at(&header, 0)?;
        Ok(Self { file, header: header.len() as u64, count: 0 })
    }

    /// Opens a journal. Returns `None` if it belongs to another path or is no journal.
    pub fn open(file: File, path: &TreePath) -> io::Result<Option<Self>> {
        let wanted = header(path);
        let mut found = vec![0; wanted.len()];
        let len = file.metadata()?.len();
        if len < wanted.len() as u64 {
            return Ok(None);
        }
        file.read_exact_at(&mut found, 0)?;
        let header = wanted.len() as u64;
        Ok((found == wanted).then_some(Self { file, header, count: (len - header) / RECORD }))
    }

    /// The path in a journal, or `None` if the file is no journal.
    pub fn path(file: &File) -> Option<TreePath> {
        let mut start = [0; 10];
        file.read_exact_at(&mut start, 0).ok()?;
        let (magic, len) = start.split_at(8);
        let mut path = vec![0; usize::from(u16::from_le_bytes(len.try_into().ok()?))];
        file.read_exact_at(&mut path, 10).ok()?;
        (magic == MAGIC).then(|| TreePath::new(&path).ok())?
    }

    /// The number of pieces.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Adds a piece.
    pub fn push(&mut self, piece: &FilePiece) -> io::Result<()> {
        let mut record = [0; RECORD as usize];
        record[..8].copy_from_slice(&piece.offset.to_le_bytes());
        record[8..12].copy_from_slice(&piece.len.to_le_bytes());
        record[12..].copy_from_slice(&piece.hash);
        self.file.write_all_at(&record, self.header + self.count * RECORD)?;
        self.count += 1;
        Ok(())
    }

    /// Piece `index`, or `None` if its record is invalid.
    pub fn piece(&self, index: u64) -> io::Result<Option<FilePiece>> {
        let mut record = [0; RECORD as usize];
        self.file.read_exact_at(&mut record, self.header + index * RECORD)?;
        let (offset, rest) = record.split_at(8);
        let (len, hash) = rest.split_at(4);
        let piece = match (offset.try_into(), len.try_into(), hash.try_into()) {
            (Ok(offset), Ok(len), Ok(hash)) => {
                FilePiece { offset: u64::from_le_bytes(offset), len: u32::from_le_bytes(len), hash }
            }
            _ => return Ok(None),
        };
        Ok(piece.is_valid(i64::MAX as u64).then_some(piece))
    }

    /// The bytes of all pieces, and their sum by `cost`.
    pub fn bytes(&self, cost: impl Fn(&FilePiece) -> u64) -> io::Result<(u64, u64)> {
        (0..self.count).try_fold((0, 0), |(bytes, taken): (u64, u64), index| {
            let piece = self.piece(index)?;
            let (len, cost) = piece.map_or((0, RECORD), |piece| (piece.len, cost(&piece)));
            Ok((bytes.saturating_add(len.into()), taken.saturating_add(cost)))
        })
    }

    /// The end of the last piece.
    pub fn end(&self) -> io::Result<u64> {
        (0..self.count)
            .try_fold(0, |end, index| Ok(end.max(self.piece(index)?.map_or(0, |piece| piece.end()))))
    }

    /// Keeps the first `count` pieces and removes the others.
    pub fn keep(&mut self, count: u64) -> io::Result<()> {
        self.count = count.min(self.count);
        self.file.set_len(self.header + self.count * RECORD)
    }
}

/// The bytes of the header of a journal for `path`.
pub fn header_bytes(path: &TreePath) -> u64 {
    header(path).len() as u64
}

fn header(path: &TreePath) -> Vec<u8> {
    let path = path.as_bytes();
    [&MAGIC[..], &(path.len() as u16).to_le_bytes(), path].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complete_records_are_read_and_incomplete_ones_are_not() {
        let file = tempfile::tempfile().unwrap();
        let path = TreePath::new(b"a/b").unwrap();
        let mut journal = Journal::create(file.try_clone().unwrap(), &path).unwrap();
        let pieces = [(0, 10), (4096, 20), (1 << 20, 30)].map(|(offset, len)| FilePiece {
            offset,
            len,
            hash: [len as u8; 32],
        });
        pieces.iter().for_each(|piece| journal.push(piece).unwrap());
        assert_eq!(Journal::path(&file), Some(path.clone()));
        file.set_len(file.metadata().unwrap().len() - 1).unwrap();
        let mut found = Journal::open(file.try_clone().unwrap(), &path).unwrap().expect("a journal");
        assert_eq!((found.count(), found.bytes(|piece| piece.len.into()).unwrap()), (2, (30, 30)));
        assert_eq!(found.end().unwrap(), 4096 + 20);
        assert_eq!(found.piece(1).unwrap(), Some(pieces[1]));
        found.keep(1).unwrap();
        assert_eq!(found.count(), 1);
        let other = TreePath::new(b"a/c").unwrap();
        assert!(Journal::open(file.try_clone().unwrap(), &other).unwrap().is_none());
        file.set_len(3).unwrap();
        assert!(Journal::path(&file).is_none());
    }
}
