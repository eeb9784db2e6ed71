//! A file to send, read window by window.

use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use multirail::Region;

use crate::cli::failure::{Done, Failure};
use crate::cli::files::FileName;

/// Bytes read at a time: they stay in a core's cache while they are hashed and
/// copied into the window.
const PIECE: usize = 256 << 10;

/// An open file and the size it had then.
pub struct Source {
    path: PathBuf,
    file: File,
    name: FileName,
    size: u64,
}

impl Source {
    /// Opens a regular file.
    pub fn open(path: impl AsRef<Path>) -> Done<Self> {
        let path = path.as_ref();
        let failed = |e: std::io::Error| Failure::new(format!("cannot open {}: {e}", path.display()));
        // A pipe would block here; ask what it is before opening it.
        if !std::fs::metadata(path).map_err(failed)?.is_file() {
            return Err(Failure::new(format!("{} is not a regular file; send files only", path.display())));
        }
        let name = path.file_name().map(|name| FileName::new(name.as_bytes()));
        let name = match name {
            Some(name) => name.map_err(Failure::new)?,
            None => return Err(Failure::new(format!("{} has no file name", path.display()))),
        };
        let file = File::open(path).map_err(failed)?;
        let size = file.metadata().map_err(failed)?.len();
        Ok(Self { path: path.to_owned(), file, name, size })
    }

    /// The name it is sent under.
    pub fn name(&self) -> &FileName {
        &self.name
    }

    /// Bytes to send.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Reads from the start.
    pub fn reader(&self) -> Reader<'_> {
        Reader { source: self, at: 0, hasher: blake3::Hasher::new(), piece: vec![0; PIECE] }
    }
}

/// Reads a file from start to end, hashing it.
pub struct Reader<'a> {
    source: &'a Source,
    at: u64,
    hasher: blake3::Hasher,
    piece: Vec<u8>,
}

impl Reader<'_> {
    /// Reads the next `len` bytes into the region.
    pub fn fill(&mut self, region: &Region, offset: usize, len: usize) -> Done {
        for done in (0..len).step_by(PIECE) {
            let piece = &mut self.piece[..PIECE.min(len - done)];
            self.source.file.read_exact_at(piece, self.at).map_err(|e| self.source.unreadable(&e))?;
            self.hasher.update(piece);
            region.copy_in(offset + done, piece)?;
            self.at += piece.len() as u64;
        }
        Ok(())
    }

    /// The hash of all that was read.
    pub fn hash(&self) -> blake3::Hash {
        self.hasher.finalize()
    }
}

impl Source {
    fn unreadable(&self, error: &std::io::Error) -> Failure {
        let path = self.path.display();
        match error.kind() {
            std::io::ErrorKind::UnexpectedEof => Failure::new(format!(
                "{path} became shorter while it was sent; send it again when it is complete"
            )),
            _ => Failure::new(format!("cannot read {path}: {error}")),
        }
    }
}
