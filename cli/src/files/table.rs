//! The tables in windows: entries that are offered, and items that are stored.

use serde::{Deserialize, Serialize};

use super::{Piece, TreePath, check_link};

/// A time of modification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mtime {
    /// Seconds since 1970.
    pub seconds: i64,
    /// And below a billion of these.
    pub nanoseconds: u32,
}

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// A directory; what lies in it follows, then its [`Kind::Leave`].
    Directory,
    /// A regular file.
    File {
        /// Its length.
        size: u64,
        /// Bytes of it that are no hole.
        data: u64,
    },
    /// A symbolic link.
    Link {
        /// Where it points, see [`check_link`].
        target: Vec<u8>,
    },
    /// A directory is complete: its mode and time can be set.
    Leave,
}

/// Something a sender offers; checked when it comes from [`decode_entries`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Where it goes.
    pub path: TreePath,
    /// What it is.
    pub kind: Kind,
    /// Permissions, of 0o777.
    pub mode: u16,
    /// When it was modified.
    pub mtime: Mtime,
}

/// What happens to entries of a group, in ascending order of their index.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Item {
    /// A directory, a link, or the end of a directory.
    Make {
        /// Of the group's entries.
        index: u32,
    },
    /// A whole file without holes; its bytes are the window's next.
    Whole {
        /// Of the group's entries.
        index: u32,
        /// Its BLAKE3.
        hash: [u8; 32],
    },
    /// The server's file has this content already.
    Same {
        /// Of the group's entries.
        index: u32,
    },
    /// A file in pieces begins.
    Begin {
        /// Of the group's entries.
        index: u32,
        /// So many pieces, which the server has, stay.
        keep: u64,
    },
    /// A piece of it; its bytes are the window's next.
    Piece(Piece),
    /// All its pieces have come.
    End,
}

type Fields = (Vec<u8>, Kind, u16, Mtime);

impl Entry {
    /// Appends it to a table.
    pub fn encode(&self, table: &mut Vec<u8>) -> Result<(), String> {
        encode(&(self.path.as_bytes(), &self.kind, self.mode, self.mtime), table)
    }

    fn check((path, kind, mode, mtime): Fields) -> Result<Self, String> {
        let path = TreePath::new(&path)?;
        match &kind {
            Kind::Link { target } => check_link(&path, target)?,
            Kind::File { size, data } if data > size || *size > i64::MAX as u64 => {
                return Err(format!("the size of {path} makes no sense"));
            }
            _ => {}
        }
        if mode > 0o777 || mtime.nanoseconds >= 1_000_000_000 {
            return Err(format!("mode or time of {path} makes no sense"));
        }
        Ok(Self { path, kind, mode, mtime })
    }

    /// Its length, if it is a file.
    pub fn size(&self) -> u64 {
        match self.kind {
            Kind::File { size, .. } => size,
            _ => 0,
        }
    }

    /// Bytes that storing it takes at most.
    pub fn data(&self) -> u64 {
        match self.kind {
            Kind::File { data, .. } => data,
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

/// The entries of a table from the wire: all of them are checked, and nothing is left over.
pub fn decode_entries(table: &[u8]) -> Result<Vec<Entry>, String> {
    decode(table)?.into_iter().map(Entry::check).collect()
}

/// The items of a table from the wire; what they refer to is the receiver's to check.
pub fn decode_items(table: &[u8]) -> Result<Vec<Item>, String> {
    decode(table)
}

fn decode<'a, T: Deserialize<'a>>(mut table: &'a [u8]) -> Result<Vec<T>, String> {
    let mut values = Vec::new();
    while !table.is_empty() {
        let (value, rest) = postcard::take_from_bytes(table)
            .map_err(|_| "a table is broken; run the same multirail version on both sides")?;
        values.push(value);
        table = rest;
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MTIME: Mtime = Mtime { seconds: -5, nanoseconds: 7 };

    fn table(path: &[u8], kind: Kind, mode: u16, mtime: Mtime) -> Vec<u8> {
        let mut table = Vec::new();
        encode(&(path, kind, mode, mtime), &mut table).unwrap();
        table
    }

    #[test]
    fn entries_go_round_and_are_checked() {
        let mut bytes = Vec::new();
        let entries = [(&b"a"[..], Kind::Directory), (b"a/\xff", Kind::File { size: 9, data: 3 })].map(
            |(path, kind)| Entry { path: TreePath::new(path).unwrap(), kind, mode: 0o640, mtime: MTIME },
        );
        entries.iter().for_each(|entry| entry.encode(&mut bytes).unwrap());
        assert_eq!(decode_entries(&bytes).unwrap(), entries);
        assert!(decode_entries(&bytes[..bytes.len() - 1]).is_err());
        let late = Mtime { seconds: 0, nanoseconds: 1_000_000_000 };
        for bad in [
            table(b"../a", Kind::Directory, 0, MTIME),
            table(b"a", Kind::Directory, 0o4755, MTIME),
            table(b"a", Kind::Leave, 0, late),
            table(b"a", Kind::File { size: 1, data: 2 }, 0, MTIME),
            table(b"a", Kind::File { size: u64::MAX, data: 2 }, 0, MTIME),
            table(b"a/b", Kind::Link { target: b"../../c".to_vec() }, 0, MTIME),
        ] {
            assert!(decode_entries(&bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn items_go_round() {
        let piece = Piece { offset: 1, len: 2, hash: [3; 32] };
        let items =
            [Item::Make { index: 0 }, Item::Begin { index: 1, keep: 2 }, Item::Piece(piece), Item::End];
        let mut bytes = Vec::new();
        items.iter().for_each(|item| encode(item, &mut bytes).unwrap());
        assert_eq!(decode_items(&bytes).unwrap(), items);
        assert!(decode_items(&[0xff; 9]).is_err());
    }
}
