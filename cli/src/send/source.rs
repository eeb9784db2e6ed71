//! A file to send.

use std::fs::{File, Metadata};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use crate::files::{Entry, Mtime};
use multirail::Region;
use rustix::fs::{CWD, Mode, OFlags};

use super::list::{mtime, permissions};
use super::server_channel::SendError;
use crate::content::{self, Pieces};
use crate::failure::{CommandResult, Failure};

/// Bytes read at a time: they stay in a core's cache while they are hashed and
/// copied into the window.
const READ_BYTES: usize = 256 << 10;

/// An open file, which is sent as it was offered or not at all.
pub struct Source {
    path: PathBuf,
    file: File,
    size: u64,
    /// What the file system said of its content before any of it was read.
    stamp: Stamp,
}

/// What the file system changes with the content of a file: size, time of modification, and
/// time of any change, which no program can set back.
#[derive(PartialEq, Eq)]
struct Stamp {
    size: u64,
    mtime: Mtime,
    ctime: (i64, i64),
}

impl Stamp {
    fn new(metadata: &Metadata) -> Self {
        let ctime = (metadata.ctime(), metadata.ctime_nsec());
        Self { size: metadata.len(), mtime: mtime(metadata), ctime }
    }
}

impl Source {
    /// Opens a regular file that was listed as `entry`, if it is still as it was listed.
    pub fn open(path: PathBuf, entry: &Entry) -> Result<Self, SendError> {
        let mut flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        // A path that was asked for itself may be a link.
        flags.set(OFlags::NOFOLLOW, !entry.path.is_top());
        let failed = |e: std::io::Error| Failure::new(format!("cannot open {}: {e}", path.display()));
        // A pipe that took its place would block, without NONBLOCK.
        let file = rustix::fs::openat(CWD, &path, flags, Mode::empty()).map_err(|e| failed(e.into()))?;
        let file = File::from(file);
        let metadata = file.metadata().map_err(failed)?;
        let kept =
            metadata.is_file() && (permissions(&metadata), mtime(&metadata)) == (entry.mode, entry.mtime);
        if !kept || metadata.len() != entry.size() {
            return Err(SendError::FileChanged);
        }
        Ok(Self { path, file, size: entry.size(), stamp: Stamp::new(&metadata) })
    }

    /// Its pieces.
    pub fn pieces(&self, sparse: bool) -> Pieces<'_> {
        Pieces::new(&self.file, self.size, sparse)
    }

    /// The digest of its content.
    pub fn digest(&self, mut working: impl FnMut() -> CommandResult) -> Result<[u8; 32], SendError> {
        let mut failure = None;
        let wanted = || match working() {
            Ok(()) => true,
            Err(why) => {
                failure = Some(why);
                false
            }
        };
        let digest = content::digest(&self.file, self.size, wanted);
        match failure {
            Some(failure) => Err(failure.into()),
            None => digest.map_err(|error| self.unreadable(&error)),
        }
    }

    /// Reads `len` bytes at `at`, part by part.
    pub fn read(
        &self,
        mut at: u64,
        len: usize,
        part: &mut Vec<u8>,
        mut take: impl FnMut(&[u8]) -> CommandResult,
    ) -> Result<(), SendError> {
        part.resize(READ_BYTES, 0);
        for done in (0..len).step_by(READ_BYTES) {
            let bytes = &mut part[..READ_BYTES.min(len - done)];
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
    ) -> Result<(), SendError> {
        self.read(at, len, part, |bytes| {
            hash(bytes);
            region.copy_in(to, bytes)?;
            to += bytes.len();
            Ok(())
        })
    }

    /// Makes sure that all that was read so far is of one content: nothing changed the file
    /// since it was opened.
    pub fn is_unchanged(&self) -> Result<(), SendError> {
        let now = self.file.metadata().map_err(|e| self.unreadable(&e))?;
        if Stamp::new(&now) == self.stamp { Ok(()) } else { Err(SendError::FileChanged) }
    }

    /// Why it cannot be read. A file that ends too early became shorter.
    pub fn unreadable(&self, error: &std::io::Error) -> SendError {
        match error.kind() {
            std::io::ErrorKind::UnexpectedEof => SendError::FileChanged,
            _ => SendError::Failed(Failure::new(format!("cannot read {}: {error}", self.path.display()))),
        }
    }
}
