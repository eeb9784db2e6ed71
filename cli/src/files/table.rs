//! The tables in windows: offered entries, and items to store.

use serde::{Deserialize, Serialize};

use super::{FilePiece, TreePath, check_link};

/// A modification time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mtime {
    /// Seconds since 1970.
    pub seconds: i64,
    /// Nanoseconds, below one billion.
    pub nanoseconds: u32,
}

/// The kind of an entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum EntryKind {
    /// A directory. Its entries follow, then its [`EntryKind::Leave`].
    Directory,
    /// A regular file.
    File {
        /// The length in bytes.
        size: u64,
        /// The bytes that are not in a hole.
        data: u64,
    },
    /// A symbolic link.
    Link {
        /// The target, see [`check_link`].
        target: Vec<u8>,
    },
    /// The end of a directory: its mode and time can be set.
    Leave,
}

/// An entry that a sender offers. [`decode_entries`] checks it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OfferedEntry {
    /// The path below the server's directory.
    pub path: TreePath,
    /// The kind.
    pub kind: EntryKind,
    /// The permissions, within 0o777.
    pub mode: u16,
    /// The modification time.
    pub mtime: Mtime,
}

/// What the server does with entries of a group, in ascending order of their index.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum TableItem {
    /// A directory, a link, or the end of a directory.
    Make {
        /// The index in the group's entries.
        index: u32,
    },
    /// A whole file without holes. Its bytes are the next in the window.
    Whole {
        /// The index in the group's entries.
        index: u32,
        /// The BLAKE3 of the file.
        hash: [u8; 32],
    },
    /// The server's file has this content already.
    Same {
        /// The index in the group's entries.
        index: u32,
    },
    /// The start of a file in pieces.
    Begin {
        /// The index in the group's entries.
        index: u32,
        /// The number of the server's pieces to keep.
        keep: u64,
    },
    /// A piece of the file. Its bytes are the next in the window.
    Piece(FilePiece),
    /// The end of a file in pieces.
    End,
}

type Fields = (Vec<u8>, EntryKind, u16, Mtime);

impl OfferedEntry {
    /// Appends the entry to a table.
    pub fn encode(&self, table: &mut Vec<u8>) -> Result<(), String> {
        encode(&(self.path.as_bytes(), &self.kind, self.mode, self.mtime), table)
    }

    fn check((path, kind, mode, mtime): Fields) -> Result<Self, String> {
        let path = TreePath::new(&path)?;
        match &kind {
            EntryKind::Link { target } => check_link(&path, target)?,
            EntryKind::File { size, data } if data > size || *size > i64::MAX as u64 => {
                return Err(format!("the size of {path} is invalid"));
            }
            _ => {}
        }
        if mode > 0o777 || mtime.nanoseconds >= 1_000_000_000 {
            return Err(format!("the mode or time of {path} is invalid"));
        }
        Ok(Self { path, kind, mode, mtime })
    }

    /// The length of a file, or 0.
    pub fn size(&self) -> u64 {
        match self.kind {
            EntryKind::File { size, .. } => size,
            _ => 0,
        }
    }

    /// The bytes of a file without holes, or 0.
    pub fn data(&self) -> u64 {
        match self.kind {
            EntryKind::File { data, .. } => data,
            _ => 0,
        }
    }
}

/// Appends a value to a table.
pub fn encode(value: &impl Serialize, table: &mut Vec<u8>) -> Result<(), String> {
    let bytes = postcard::to_stdvec(value).map_err(|error| format!("cannot encode a table: {error}"))?;
    table.extend_from_slice(&bytes);
    Ok(())
}

/// Decodes and checks the entries of an untrusted table. Bytes after the last entry are an error.
pub fn decode_entries(table: &[u8]) -> Result<Vec<OfferedEntry>, String> {
    decode(table)?.into_iter().map(OfferedEntry::check).collect()
}

/// Decodes the items of an untrusted table. The caller must check their indices and pieces.
pub fn decode_items(table: &[u8]) -> Result<Vec<TableItem>, String> {
    decode(table)
}

fn decode<'a, T: Deserialize<'a>>(mut table: &'a [u8]) -> Result<Vec<T>, String> {
    let mut values = Vec::new();
    while !table.is_empty() {
        let (value, rest) = postcard::take_from_bytes(table)
            .map_err(|_| "a table is malformed; run the same multirail version on both sides")?;
        values.push(value);
        table = rest;
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MTIME: Mtime = Mtime { seconds: -5, nanoseconds: 7 };

    fn table(path: &[u8], kind: EntryKind, mode: u16, mtime: Mtime) -> Vec<u8> {
        let mut table = Vec::new();
        encode(&(path, kind, mode, mtime), &mut table).unwrap();
        table
    }

    #[test]
    fn entries_round_trip_and_are_checked() {
        let mut bytes = Vec::new();
        let entries = [(&b"a"[..], EntryKind::Directory), (b"a/\xff", EntryKind::File { size: 9, data: 3 })]
            .map(|(path, kind)| OfferedEntry {
                path: TreePath::new(path).unwrap(),
                kind,
                mode: 0o640,
                mtime: MTIME,
            });
        entries.iter().for_each(|entry| entry.encode(&mut bytes).unwrap());
        assert_eq!(decode_entries(&bytes).unwrap(), entries);
        assert!(decode_entries(&bytes[..bytes.len() - 1]).is_err());
        let late = Mtime { seconds: 0, nanoseconds: 1_000_000_000 };
        for bad in [
            table(b"../a", EntryKind::Directory, 0, MTIME),
            table(b"a", EntryKind::Directory, 0o4755, MTIME),
            table(b"a", EntryKind::Leave, 0, late),
            table(b"a", EntryKind::File { size: 1, data: 2 }, 0, MTIME),
            table(b"a", EntryKind::File { size: u64::MAX, data: 2 }, 0, MTIME),
            table(b"a/b", EntryKind::Link { target: b"../../c".to_vec() }, 0, MTIME),
        ] {
            assert!(decode_entries(&bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn items_round_trip() {
        let piece = FilePiece { offset: 1, len: 2, hash: [3; 32] };
        let items = [
            TableItem::Make { index: 0 },
            TableItem::Begin { index: 1, keep: 2 },
            TableItem::Piece(piece),
            TableItem::End,
        ];
        let mut bytes = Vec::new();
        items.iter().for_each(|item| encode(item, &mut bytes).unwrap());
        assert_eq!(decode_items(&bytes).unwrap(), items);
        assert!(decode_items(&[0xff; 9]).is_err());
    }
}
