//! Files on their way into a directory: under a temporary name until they are whole.

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::cli::failure::{Done, Failure};
use crate::cli::files::FileName;

/// Attempts at a temporary name nobody has.
const ATTEMPTS: usize = 16;

/// Bytes of the name kept in the temporary one, so that it is never too long.
const KEPT: usize = 200;

/// Where files are stored.
pub struct Directory {
    path: PathBuf,
    fd: OwnedFd,
    overwrite: bool,
}

impl Directory {
    /// Opens a directory; with `overwrite`, files in it may be replaced.
    pub fn open(path: PathBuf, overwrite: bool) -> Done<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match rustix::fs::openat(CWD, &path, flags, Mode::empty()) {
            Ok(fd) => Ok(Self { path, fd, overwrite }),
            Err(error) => {
                let reason = std::io::Error::from(error);
                Err(Failure::new(format!(
                    "cannot open the directory {}: {reason}; create it first",
                    path.display()
                )))
            }
        }
    }

    fn refuse_existing(&self, name: &FileName) -> Done {
        if self.overwrite {
            return Ok(());
        }
        match rustix::fs::statat(&self.fd, name.as_os_str(), AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(()),
            Ok(_) => Err(exists()),
            Err(error) => Err(failed("look for the name in the directory", error)),
        }
    }

    /// Gives `temporary` its final name.
    fn rename(&self, temporary: &OsString, name: &FileName) -> Done {
        let (fd, to) = (&self.fd, name.as_os_str());
        if self.overwrite {
            return rustix::fs::renameat(fd, temporary, fd, to)
                .map_err(|e| failed("rename the whole file", e));
        }
        let renamed = match rustix::fs::renameat_with(fd, temporary, fd, to, RenameFlags::NOREPLACE) {
            // File systems without that flag: a link refuses an existing name as well.
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {
                rustix::fs::linkat(fd, temporary, fd, to, AtFlags::empty())
                    .and_then(|()| rustix::fs::unlinkat(fd, temporary, AtFlags::empty()))
            }
            renamed => renamed,
        };
        match renamed {
            Err(Errno::EXIST) => Err(exists()),
            other => other.map_err(|e| failed("rename the whole file", e)),
        }
    }
}

/// A file that is not whole yet. Dropping it removes it.
pub struct Incoming<'a> {
    directory: &'a Directory,
    name: FileName,
    temporary: OsString,
    file: File,
    written: u64,
    hasher: blake3::Hasher,
    kept: bool,
}

impl<'a> Incoming<'a> {
    /// Creates the temporary file of `name`.
    pub fn create(directory: &'a Directory, name: &FileName) -> Done<Self> {
        directory.refuse_existing(name)?;
        let (temporary, file) = create(directory, name)?;
        let hasher = blake3::Hasher::new();
        Ok(Self { directory, name: name.clone(), temporary, file, written: 0, hasher, kept: false })
    }

    /// Writes and hashes the next bytes.
    pub fn append(&mut self, bytes: &[u8]) -> Done {
        self.hasher.update(bytes);
        self.file.write_all_at(bytes, self.written).map_err(|e| failed("write the file", e))?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// Compares the sender's hash, makes the bytes durable and gives the file its name.
    pub fn keep(mut self, wanted: [u8; 32]) -> Done<blake3::Hash> {
        let found = self.hasher.finalize();
        if found != blake3::Hash::from(wanted) {
            return Err(Failure::new("what arrived has another checksum than what was sent; send it again"));
        }
        self.file.sync_all().map_err(|e| failed("sync the file", e))?;
        self.directory.rename(&self.temporary, &self.name)?;
        self.kept = true;
        rustix::fs::fsync(&self.directory.fd).map_err(|e| failed("sync the directory", e))?;
        Ok(found)
    }
}

impl Drop for Incoming<'_> {
    fn drop(&mut self) {
        if !self.kept
            && let Err(error) = rustix::fs::unlinkat(&self.directory.fd, &self.temporary, AtFlags::empty())
        {
            let path = self.directory.path.join(&self.temporary);
            tracing::warn!(%error, path = %path.display(), "temporary file stays behind");
        }
    }
}

/// A new file `.NAME.multirail-XXXXXXXX`.
fn create(directory: &Directory, name: &FileName) -> Done<(OsString, File)> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let mode = Mode::from_raw_mode(0o666);
    let shown = &name.as_bytes()[..name.as_bytes().len().min(KEPT)];
    for _ in 0..ATTEMPTS {
        let mut temporary = OsString::from(".");
        temporary.push(std::ffi::OsStr::from_bytes(shown));
        temporary.push(format!(".multirail-{:08x}", fastrand::u32(..)));
        match rustix::fs::openat(&directory.fd, &temporary, flags, mode) {
            Ok(fd) => return Ok((temporary, File::from(fd))),
            Err(Errno::EXIST) => {}
            Err(error) => return Err(failed("create a file in the directory", error)),
        }
    }
    Err(Failure::new("no temporary name is free in the directory; remove old .*.multirail-* files"))
}

fn exists() -> Failure {
    Failure::new("a file of that name exists; rename it, or start the server with --overwrite")
}

/// What the sender is told too, so without the directory's path.
fn failed(what: &str, error: impl Into<std::io::Error>) -> Failure {
    let error = error.into();
    let remedy = match error.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => "; make room there",
        std::io::ErrorKind::PermissionDenied => "; check the directory's permissions",
        _ => "",
    };
    Failure::new(format!("the server cannot {what}: {error}{remedy}"))
}
