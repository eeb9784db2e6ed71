//! A file to send.

use std::fs::{File, Metadata};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use crate::files::{Mtime, OfferedEntry};
use multirail::Region;
use rustix::fs::{CWD, Mode, OFlags};

use super::list::{mtime, permissions};
use super::server_channel::SendError;
use crate::content::{self, FilePieces};
use crate::failure::{CommandFailure, CommandResult};

/// The number of bytes read at a time. They stay in a core's cache while they are hashed and copied into the window.
const READ_BYTES: usize = 256 << 10;

/// An open file. It is sent as it was offered, or not at all.
pub struct SourceFile {
    path: PathBuf,
    file: File,
    size: u64,
    /// The file's stamp before any byte was read.
    stamp: Stamp,
}

/// The metadata that changes with the content of a file: size, modification time, and change time, which no program can
/// set back.
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

impl SourceFile {
    /// Opens a regular file that was listed as `entry`. Fails if it has changed since.
    pub fn open(path: PathBuf, entry: &OfferedEntry) -> Result<Self, SendError> {
        let mut flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        // A path of the command line may be a link.
        flags.set(OFlags::NOFOLLOW, !entry.path.is_top());
        let failed = |e: std::io::Error| CommandFailure::new(format!("cannot open {}: {e}", path.display()));
        // Without NONBLOCK, opening a pipe with this name would block.
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

    /// The pieces of the file.
    pub fn pieces(&self, sparse: bool) -> FilePieces<'_> {
        FilePieces::new(&self.file, self.size, sparse)
    }

    /// The digest of the file's content.
    pub fn digest(&self, mut working: impl FnMut() -> CommandResult) -> Result<[u8; 32], SendError> {
        let mut failure = None;
        let go_on = || match working() {
            Ok(()) => true,
            Err(why) => {
                failure = Some(why);
                false
            }
        };
        let digest = content::digest(&self.file, self.size, go_on);
        match failure {
            Some(failure) => Err(failure.into()),
            None => digest.map_err(|error| self.unreadable(&error)),
        }
    }

    /// Reads `len` bytes at `at` in parts.
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

    /// Fails if the file has changed since it was opened, so that all bytes read are of one state.
    pub fn ensure_unchanged(&self) -> Result<(), SendError> {
        let now = self.file.metadata().map_err(|e| self.unreadable(&e))?;
        if Stamp::new(&now) == self.stamp { Ok(()) } else { Err(SendError::FileChanged) }
    }

    /// The error of a failed read. A file that ends too early became shorter.
    pub fn unreadable(&self, error: &std::io::Error) -> SendError {
        match error.kind() {
            std::io::ErrorKind::UnexpectedEof => SendError::FileChanged,
            _ => SendError::Failed(CommandFailure::new(format!(
                "cannot read {}: {error}",
                self.path.display()
            ))),
        }
    }
}
