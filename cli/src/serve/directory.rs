//! The directory where the server stores files.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use crate::files::{EntryKind, Mtime, OfferedEntry, TreePath};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, Stat, Timespec, Timestamps, UTIME_OMIT};
use rustix::io::Errno;

use super::beneath;
use super::durable::Durable;
use super::failed;
use super::quota::Quota;
use super::staged_file::StagedFile;
use super::staging_directory::StagingDirectory;
use crate::content;
use crate::failure::{CommandFailure, CommandResult};

/// The mode of a directory that a server made, until its content is stored. A later server recognises by the sticky bit
/// that mode and time are still to be set. The bit has no effect where only the owner may write, and no sender can set
/// it.
const UNFINISHED: Mode = Mode::RWXU.union(Mode::SVTX);

/// The number of suffixes that are tried if a name exists.
const RENAMES: usize = 10_000;

/// What to do if a file's name exists. An existing directory receives the files sent into it under every rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum NameClash {
    /// Refuse the file and end the session
    Refuse,
    /// Replace an existing file or link, and set mode and time of an existing directory
    Overwrite,
    /// Store the file as NAME.1, NAME.2, ...
    Rename,
    /// Keep the existing file and go on; skip a directory whose name is an existing file
    Skip,
}

/// The directory where files are stored.
pub struct Directory {
    fd: OwnedFd,
    /// The directory of unfinished files.
    pub staging: StagingDirectory,
    /// The rule for existing names.
    pub on_clash: NameClash,
    /// Syncs the file system.
    pub durable: Durable,
}

impl Directory {
    /// Opens a directory and locks it for this server.
    pub fn open(path: PathBuf, on_clash: NameClash, quota: Quota) -> CommandResult<Self> {
        let unusable = |error: Errno, advice| {
            let reason = std::io::Error::from(error);
            CommandFailure::new(format!("cannot open the directory {}: {reason}; {advice}", path.display()))
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(CWD, &path, flags, Mode::empty())
            .map_err(|error| unusable(error, "create it first"))?;
        let again = fd.try_clone().map_err(|error| failed("open the directory twice", error))?;
        Ok(Self { staging: StagingDirectory::open(again, quota)?, fd, on_clash, durable: Durable::new() })
    }

    /// Opens the parent directory of `path`.
    pub fn parent(&self, path: &TreePath) -> CommandResult<OwnedFd> {
        beneath::open(&self.fd, path.parent()).map_err(parent_failure)
    }

    /// The metadata of the existing file at `path`, if there is one.
    pub fn stat(&self, path: &TreePath) -> CommandResult<Option<Stat>> {
        let parent = match beneath::open(&self.fd, path.parent()) {
            Err(Errno::NOENT) => return Ok(None),
            opened => opened.map_err(parent_failure)?,
        };
        match rustix::fs::statat(&parent, path.name_os(), AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(None),
            found => found.map(Some).map_err(|error| failed("check whether the name exists", error)),
        }
    }

    /// Returns true if a parent of `path` is an existing file or link.
    pub fn has_file_as_parent(&self, path: &TreePath) -> bool {
        matches!(beneath::open(&self.fd, path.parent()), Err(Errno::NOTDIR | Errno::LOOP))
    }

    /// Opens an existing regular file.
    pub fn file(&self, path: &TreePath) -> CommandResult<File> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = rustix::fs::openat(self.parent(path)?, path.name_os(), flags, Mode::empty());
        Ok(File::from(opened.map_err(|error| failed("read the existing file", error))?))
    }

    /// Creates a directory, or uses the existing one.
    pub fn make(&self, path: &TreePath) -> CommandResult {
        match rustix::fs::mkdirat(self.parent(path)?, path.name_os(), UNFINISHED) {
            Err(Errno::EXIST) => {
                let fd = beneath::open(&self.fd, path.as_bytes()).map_err(parent_failure)?;
                let mode = rustix::fs::fstat(&fd).map(|stat| Mode::from_raw_mode(stat.st_mode));
                // It gets the sender's mode after the last of its entries.
                match mode {
                    Ok(mode) if self.on_clash == NameClash::Overwrite && !mode.contains(Mode::RWXU) => {
                        rustix::fs::fchmod(&fd, mode | Mode::RWXU)
                    }
                    mode => mode.map(drop),
                }
                .map_err(|error| failed("use the existing directory", error))
            }
            // On other systems mkdir may not set this bit.
            #[cfg(not(target_os = "linux"))]
            Ok(()) => beneath::open(&self.fd, path.as_bytes())
                .and_then(|fd| rustix::fs::fchmod(fd, UNFINISHED))
                .map_err(parent_failure),
            made => made.map_err(|error| failed("create a directory", error)),
        }
    }

    /// Sets mode and time of a directory whose entries are stored, unless the directory existed before and the rule
    /// keeps it.
    pub fn finish_directory(&self, entry: &OfferedEntry) -> CommandResult {
        let fd = beneath::open(&self.fd, entry.path.as_bytes()).map_err(parent_failure)?;
        let mode = rustix::fs::fstat(&fd).map(|stat| Mode::from_raw_mode(stat.st_mode));
        match mode.map_err(|error| failed("read the mode of the existing directory", error))? {
            // A directory inherits the set-group-ID bit.
            mode if mode - Mode::SGID == UNFINISHED || self.on_clash == NameClash::Overwrite => {
                set_mode_and_time(&File::from(fd), entry)
            }
            _ => Ok(()),
        }
    }

    /// Makes all bytes durable that were written so far.
    pub fn sync(&self) -> CommandResult {
        self.durable.all(|| {
            #[cfg(target_os = "linux")]
            let synced = rustix::fs::syncfs(&self.fd);
            // On other systems every file is synced when it is complete, see `Durable::one`.
            #[cfg(not(target_os = "linux"))]
            let synced = rustix::fs::fsync(&self.fd);
            synced
        })
    }

    /// Gives a staged file its final name, by the rule for existing names. Returns false if another file has the name
    /// and stays.
    ///
    /// With `resume`, an existing file or link with the same content is no clash: an interrupted sender has sent it,
    /// and the server gave it its name after it had decided about this entry.
    pub fn publish(&self, staged: StagedFile<'_>, entry: &OfferedEntry, resume: bool) -> CommandResult<bool> {
        let path = &entry.path;
        let (parent, from) = (self.parent(path)?, &self.staging.fd);
        let name = path.name_os();
        let exclusively = |to: &std::ffi::OsStr| rename_exclusively(from, staged.name(), &parent, to);
        let renamed = match self.on_clash {
            NameClash::Overwrite => rustix::fs::renameat(from, staged.name(), &parent, name),
            NameClash::Refuse | NameClash::Skip | NameClash::Rename => match exclusively(name) {
                Err(Errno::EXIST) if resume && self.has_same_content(&staged, entry)? => {
                    staged.abandon();
                    self.staging.discard(path);
                    return Ok(true);
                }
                Err(Errno::EXIST) if self.on_clash == NameClash::Rename => (1..RENAMES)
                    .map(|n| exclusively(&numbered(path.name(), n)))
                    .find(|renamed| *renamed != Err(Errno::EXIST))
                    .unwrap_or(Err(Errno::EXIST)),
                renamed => renamed,
            },
        };
        match renamed {
            Ok(()) => staged.set_named(),
            Err(Errno::EXIST) if self.on_clash == NameClash::Skip => {
                staged.abandon();
                return Ok(false);
            }
            Err(Errno::EXIST) => return Err(exists()),
            Err(Errno::ISDIR | Errno::NOTEMPTY) => return Err(is_directory()),
            Err(error) => return Err(failed("rename the complete file", error)),
        }
        self.staging.discard(path);
        #[cfg(not(target_os = "linux"))]
        rustix::fs::fsync(&parent).map_err(|error| failed("sync the directory", error))?;
        Ok(true)
    }

    /// Returns true if an existing file or link has the name of `entry` and the content of the staged file. In that
    /// case it also sets the file's mode and time.
    fn has_same_content(&self, staged: &StagedFile<'_>, entry: &OfferedEntry) -> CommandResult<bool> {
        let found = self.stat(&entry.path)?.map(|found| FileType::from_raw_mode(found.st_mode));
        match (&entry.kind, found) {
            (EntryKind::Link { target }, Some(FileType::Symlink)) => self.is_link(&entry.path, target),
            (EntryKind::File { size, .. }, Some(FileType::RegularFile)) => {
                let (Ok(there), Ok(ours)) = (self.file(&entry.path), self.staging.read(staged.name())) else {
                    return Ok(false);
                };
                let unreadable = |error| failed("compare with the existing file", error);
                if there.metadata().map_err(unreadable)?.len() != *size {
                    return Ok(false);
                }
                let digest = |file| content::digest(file, *size, || true).map_err(unreadable);
                let same = digest(&there)? == digest(&ours)?;
                if same {
                    set_mode_and_time(&there, entry)?;
                }
                Ok(same)
            }
            _ => Ok(false),
        }
    }

    /// Returns true if an existing symbolic link points to `target`.
    pub fn is_link(&self, path: &TreePath, target: &[u8]) -> CommandResult<bool> {
        let there = rustix::fs::readlinkat(self.parent(path)?, path.name_os(), Vec::new());
        Ok(there.is_ok_and(|there| there.as_bytes() == target))
    }
}

/// Sets mode and time of a file or directory.
pub fn set_mode_and_time(file: &File, entry: &OfferedEntry) -> CommandResult {
    rustix::fs::fchmod(file, Mode::from_raw_mode(entry.mode.into()))
        .and_then(|()| rustix::fs::futimens(file, &times(entry.mtime)))
        .map_err(|error| failed("set mode and time", error))
}

/// A modification time as the system's type.
pub fn times(mtime: Mtime) -> Timestamps {
    Timestamps {
        last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT as _ },
        last_modification: Timespec { tv_sec: mtime.seconds, tv_nsec: mtime.nanoseconds.into() },
    }
}

/// The failure for a file whose name exists.
pub fn exists() -> CommandFailure {
    CommandFailure::new(
        "a file of that name exists; rename it, or start the server with --on-clash overwrite",
    )
}

/// The failure for a file that would replace a directory.
pub fn is_directory() -> CommandFailure {
    CommandFailure::new("a directory of that name exists; remove or rename it")
}

fn rename_exclusively(
    from: &OwnedFd,
    name: &str,
    to: &OwnedFd,
    new: &std::ffi::OsStr,
) -> rustix::io::Result<()> {
    match rustix::fs::renameat_with(from, name, to, new, RenameFlags::NOREPLACE) {
        // On file systems without this flag, a hard link fails for an existing name as well.
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {
            rustix::fs::linkat(from, name, to, new, AtFlags::empty())
                .and_then(|()| rustix::fs::unlinkat(from, name, AtFlags::empty()))
        }
        renamed => renamed,
    }
}

/// `NAME.n`, with the name cut if it would be too long.
fn numbered(name: &[u8], n: usize) -> std::ffi::OsString {
    use std::os::unix::ffi::OsStringExt;
    let suffix = format!(".{n}");
    let kept = name.len().min(TreePath::LONGEST_NAME - suffix.len());
    std::ffi::OsString::from_vec([&name[..kept], suffix.as_bytes()].concat())
}

fn parent_failure(error: Errno) -> CommandFailure {
    CommandFailure::new(match error {
        Errno::LOOP => "one of its parents is a symbolic link, which the server does not follow",
        Errno::NOTDIR => "one of its parents is not a directory; remove or rename that file",
        Errno::XDEV => {
            "one of its parents is a mount point of another file system; serve that directory itself"
        }
        Errno::NOENT => "its directory does not exist",
        error => return failed("open its directory", error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::reservation::ENTRY;
    use crate::units::Size;

    #[test]
    fn the_loser_of_a_race_for_a_name_leaves_no_file() {
        let into = tempfile::TempDir::new().unwrap();
        let quota = Quota::new(Some(Size(100 * ENTRY)));
        let directory = Directory::open(into.path().to_owned(), NameClash::Skip, quota).unwrap();
        let staging = &directory.staging;
        let path = TreePath::new(b"name").unwrap();
        let (kind, mtime) = (EntryKind::File { size: 1, data: 1 }, Mtime { seconds: 0, nanoseconds: 0 });
        let entry = OfferedEntry { path: path.clone(), kind, mode: 0o644, mtime };
        let partial = || {
            let (mut staged, ..) = staging.begin(&path).unwrap();
            staging.quota.reserve(90 * ENTRY).unwrap();
            staged.add(90 * ENTRY);
            staged
        };
        drop(partial());
        assert_eq!(staging.bytes(&path), Some(90 * ENTRY), "an interrupted file stays");
        staging.discard(&path);

        let loser = partial();
        std::fs::write(into.path().join("name"), "winner").unwrap();
        assert!(!directory.publish(loser, &entry, false).unwrap());
        assert_eq!(std::fs::read(into.path().join("name")).unwrap(), b"winner");
        assert_eq!(staging.bytes(&path), None);
        assert_eq!(std::fs::read_dir(into.path().join(".multirail")).unwrap().count(), 0);
        staging.quota.check(100 * ENTRY).unwrap();

        std::fs::remove_file(into.path().join("name")).unwrap();
        assert!(directory.publish(partial(), &entry, false).unwrap());
        assert!(staging.quota.check(11 * ENTRY).is_err(), "the bytes count under the final name too");
    }
}
