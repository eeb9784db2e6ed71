//! A file to send.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use multirail::Region;
use rustix::fs::{CWD, Mode, OFlags};

use crate::cli::content::Pieces;
use crate::cli::failure::{Done, Failure};

/// Bytes read at a time: they stay in a core's cache while they are hashed and
/// copied into the window.
const PART: usize = 256 << 10;

/// An open file, of which so many bytes were offered.
pub struct Source {
    path: PathBuf,
    file: File,
    size: u64,
}

impl Source {
    /// Opens a regular file that was listed; `follow` if it may be a link.
    pub fn open(path: PathBuf, size: u64, follow: bool) -> Done<Self> {
        let mut flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        flags.set(OFlags::NOFOLLOW, !follow);
        let failed = |e: std::io::Error| Failure::new(format!("cannot open {}: {e}", path.display()));
        // A pipe that took its place would block, without NONBLOCK.
        let file = rustix::fs::openat(CWD, &path, flags, Mode::empty()).map_err(|e| failed(e.into()))?;
        let file = File::from(file);
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(Failure::new(format!(
                "{} is no longer a regular file; send it again",
                path.display()
            )));
        }
        Ok(Self { path, file, size })
    }

    /// Its pieces.
    pub fn pieces(&self, sparse: bool) -> Pieces<'_> {
        Pieces::new(&self.file, self.size, sparse)
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Reads `len` bytes at `at`, part by part.
    pub fn read(
        &self,
        mut at: u64,
        len: usize,
        part: &mut Vec<u8>,
        mut take: impl FnMut(&[u8]) -> Done,
    ) -> Done {
        part.resize(PART, 0);
        for done in (0..len).step_by(PART) {
            let bytes = &mut part[..PART.min(len - done)];
            self.file.read_exact_at(bytes, at).map_err(|e| self.unreadable(&e))?;
            at += bytes.len() as u64;
            take(bytes)?;
        }
        Ok(())
    }

    /// Reads `len` bytes at `at` into the region.
    pub fn fill(
        &self,
        at: u64,
        len: usize,
        part: &mut Vec<u8>,
        region: &Region,
        mut to: usize,
        mut hash: impl FnMut(&[u8]),
    ) -> Done {
        self.read(at, len, part, |bytes| {
            hash(bytes);
            region.copy_in(to, bytes)?;
            to += bytes.len();
            Ok(())
        })
    }

    /// That the file did not become shorter: what is missing looks like a hole.
    pub fn is_whole(&self) -> Done {
        let len = self.file.metadata().map_err(|e| self.unreadable(&e))?.len();
        if len < self.size { Err(self.unreadable(&std::io::ErrorKind::UnexpectedEof.into())) } else { Ok(()) }
    }

    /// Where it had holes, it has bytes now, or the other way round.
    pub fn changed(&self) -> Failure {
        Failure::new(format!(
            "{} changed while it was sent; send it again when it is complete",
            self.path.display()
        ))
    }

    /// Why it cannot be read.
    pub fn unreadable(&self, error: &std::io::Error) -> Failure {
        let path = self.path.display();
        match error.kind() {
            std::io::ErrorKind::UnexpectedEof => Failure::new(format!(
                "{path} became shorter while it was sent; send it again when it is complete"
            )),
            _ => Failure::new(format!("cannot read {path}: {error}")),
        }
    }
}
