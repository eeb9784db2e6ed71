//! The hidden directory of unfinished files in the served directory.
//!
//! One server at a time has its lock. `temp-*` are complete small files and links that
//! wait for their names. If a server is killed, the next server removes them.
//! `part-KEY-N` is a large file that arrives in pieces, and `part-KEY-N.journal` lists its
//! stored pieces. With both files an attempt can be continued. The server ignores other names.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::files::{STAGING, TreePath};
use rustix::fs::{AtFlags, Dir, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::failed;
use super::journal::Journal;
use super::quota::Quota;
use super::reservation;
use super::staged_file::StagedFile;
use crate::failure::{CommandFailure, CommandResult};

/// The maximum number of partial files of one path: one per sender, and those of earlier attempts.
const SLOTS: usize = 16;

/// The mode of a file until it is complete.
const PRIVATE: Mode = Mode::RUSR.union(Mode::WUSR);

/// The directory of unfinished files.
pub struct StagingDirectory {
    root: OwnedFd,
    pub(super) fd: OwnedFd,
    pub(super) quota: Quota,
    pub(super) slots: Mutex<BTreeMap<String, PartialFileState>>,
    counter: AtomicU64,
}

/// The state of a partial file.
pub struct PartialFileState {
    /// True if a session uses the file.
    pub busy: bool,
    /// The bytes counted against the quota.
    pub bytes: u64,
}

impl StagingDirectory {
    /// Locks the directory, removes files that cannot be continued, and counts the others.
    pub fn open(root: OwnedFd, quota: Quota) -> CommandResult<Self> {
        let fd = locked(&root)?;
        let slots = Mutex::default();
        let staging = Self { root, fd, quota, slots, counter: AtomicU64::new(0) };
        staging.remove_leftovers()?;
        Ok(staging)
    }

    fn remove_leftovers(&self) -> CommandResult {
        let unreadable = |error: Errno| failed("read its directory .multirail", error);
        for entry in Dir::read_from(&self.fd).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?;
            // The server's own names are ASCII.
            let Ok(name) = entry.file_name().to_str() else { continue };
            let data = name.strip_suffix(".journal").unwrap_or(name);
            if is_temporary(name) {
                self.remove(name);
            } else if is_slot(data) {
                match self.journal(data).filter(|(_, journal)| journal.count() > 0) {
                    Some((path, journal)) => {
                        let unreadable = |error| failed("read a journal", error);
                        let (_, pieces) = journal.bytes(reservation::piece).map_err(unreadable)?;
                        let bytes = reservation::partial(&path).saturating_add(pieces);
                        self.cut(data, journal.end().map_err(unreadable)?)?;
                        let known =
                            self.lock().insert(data.to_owned(), PartialFileState { busy: false, bytes });
                        // A partial file has two names but counts once.
                        self.quota.count(if known.is_none() { bytes } else { 0 });
                    }
                    None => self.remove(name),
                }
            }
        }
        Ok(())
    }

    /// Removes bytes after `end` of a partial file. A killed server wrote them, and no record counts them.
    fn cut(&self, slot: &str, end: u64) -> CommandResult {
        let Some(file) = self.existing(slot) else { return Ok(()) };
        let cut = file.metadata().and_then(|metadata| match metadata.len() > end {
            true => file.set_len(end),
            false => Ok(()),
        });
        cut.map_err(|error| failed("cut a partial file", error))
    }

    /// The journal of a slot and its path, if the slot's file exists too.
    fn journal(&self, slot: &str) -> Option<(TreePath, Journal)> {
        self.existing(slot)?;
        let file = self.existing(&format!("{slot}.journal"))?;
        let path = Journal::path(&file).filter(|path| slot.starts_with(&key(path)))?;
        Journal::open(file, &path).ok().flatten().map(|journal| (path, journal))
    }

    /// Creates a file that is removed unless it gets its final name.
    pub fn temporary(&self) -> CommandResult<(StagedFile<'_>, File)> {
        let name = self.temporary_name();
        let file = self.create(&name)?;
        Ok((StagedFile::temporary(self, name), file))
    }

    /// Creates a symbolic link that is removed unless it gets its final name.
    pub fn link(&self, target: &[u8]) -> CommandResult<StagedFile<'_>> {
        let name = self.temporary_name();
        rustix::fs::symlinkat(target, &self.fd, &name).map_err(|e| failed("create a symbolic link", e))?;
        Ok(StagedFile::temporary(self, name))
    }

    fn temporary_name(&self) -> String {
        format!("temp-{:016x}", self.counter.fetch_add(1, Ordering::Relaxed))
    }

    /// Creates a partial file of `path`.
    pub fn begin(&self, path: &TreePath) -> CommandResult<(StagedFile<'_>, File, Journal)> {
        let name = self.free_slot(path)?;
        let staged = StagedFile::slot(self, name.clone(), path, 0);
        let file = self.create(&name)?;
        let journal = Journal::create(self.create(&format!("{name}.journal"))?, path);
        Ok((staged, file, journal.map_err(|e| failed("write a journal", e))?))
    }

    fn free_slot(&self, path: &TreePath) -> CommandResult<String> {
        let (key, mut slots) = (key(path), self.lock());
        let name = (0..SLOTS).map(|n| format!("{key}{n}")).find(|name| !slots.contains_key(name));
        let name = name
            .ok_or_else(|| CommandFailure::new("too many senders send this file at once; try again later"))?;
        slots.insert(name.clone(), PartialFileState { busy: true, bytes: 0 });
        Ok(name)
    }

    /// The largest partial file of `path` that no session uses.
    pub fn find(&self, path: &TreePath) -> Option<(StagedFile<'_>, File, Journal)> {
        let (name, bytes) = {
            let (key, mut slots) = (key(path), self.lock());
            let idle = slots.range_mut(key.clone()..).take_while(|(name, _)| name.starts_with(&key));
            let (name, slot) = idle.filter(|(_, slot)| !slot.busy).max_by_key(|(_, slot)| slot.bytes)?;
            slot.busy = true;
            (name.clone(), slot.bytes)
        };
        let staged = StagedFile::slot(self, name.clone(), path, bytes);
        let file = self.existing(&name)?;
        let (_, journal) = self.journal(&name).filter(|(found, _)| found == path)?;
        Some((staged, file, journal))
    }

    /// The quota of the file that [`StagingDirectory::find`] would return.
    pub fn bytes(&self, path: &TreePath) -> Option<u64> {
        let (key, slots) = (key(path), self.lock());
        let of_path = slots.range(key.clone()..).take_while(|(name, _)| name.starts_with(&key));
        of_path.filter(|(_, slot)| !slot.busy).map(|(_, slot)| slot.bytes).max()
    }

    /// Removes partial files of `path` that no session uses.
    pub fn discard(&self, path: &TreePath) {
        let key = key(path);
        let mut slots = self.lock();
        let of_path = slots.range(key.clone()..).take_while(|(name, _)| name.starts_with(&key));
        let idle: Vec<_> = of_path.filter(|(_, slot)| !slot.busy).map(|(name, _)| name.clone()).collect();
        for name in idle {
            self.remove(&name);
            self.remove(&format!("{name}.journal"));
            self.quota.release(slots.remove(&name).map_or(0, |slot| slot.bytes));
        }
    }

    /// The number of partial files of all paths.
    pub fn partials(&self) -> usize {
        self.lock().len()
    }

    fn create(&self, name: &str) -> CommandResult<File> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let created = rustix::fs::openat(&self.fd, name, flags, PRIVATE);
        Ok(File::from(created.map_err(|e| failed("create a file", e))?))
    }

    /// Opens a file for reading.
    pub fn read(&self, name: &str) -> CommandResult<File> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = rustix::fs::openat(&self.fd, name, flags, Mode::empty());
        Ok(File::from(opened.map_err(|e| failed("read a complete file", e))?))
    }

    /// Opens an existing file. A complete file without its final name has its final mode already, which may not allow
    /// writing.
    fn existing(&self, name: &str) -> Option<File> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = || rustix::fs::openat(&self.fd, name, flags, Mode::empty());
        let opened = open().or_else(|error| {
            let stat = rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW)?;
            let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
            if error != Errno::ACCESS || !is_file {
                return Err(error);
            }
            rustix::fs::chmodat(&self.fd, name, PRIVATE, AtFlags::empty())?;
            open()
        });
        opened.map(File::from).ok()
    }

    pub(super) fn remove(&self, name: &str) {
        if let Err(error) = rustix::fs::unlinkat(&self.fd, name, AtFlags::empty()) {
            tracing::warn!(%error, name, "cannot remove a temporary file");
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, BTreeMap<String, PartialFileState>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for StagingDirectory {
    /// Removes the directory if it is empty, while it is still locked.
    fn drop(&mut self) {
        let _ = rustix::fs::unlinkat(&self.root, STAGING, AtFlags::REMOVEDIR);
    }
}

/// Opens or creates the directory and locks it.
fn locked(root: &OwnedFd) -> CommandResult<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    loop {
        match rustix::fs::mkdirat(root, STAGING, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(failed("create .multirail in the directory", error)),
        }
        let fd = match rustix::fs::openat(root, STAGING, flags, Mode::empty()) {
            Ok(fd) => fd,
            // Another server ended and removed the directory.
            Err(Errno::NOENT) => continue,
            Err(error) => return Err(failed("open .multirail in the directory", error)),
        };
        match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                return Err(CommandFailure::new(
                    "another multirail serve uses this directory; stop it, or choose another directory",
                ));
            }
            Err(error) => return Err(failed("lock .multirail in the directory", error)),
        }
        let ours = rustix::fs::fstat(&fd).map(|stat| stat.st_ino);
        let named = rustix::fs::statat(root, STAGING, AtFlags::SYMLINK_NOFOLLOW).map(|stat| stat.st_ino);
        if ours.is_ok() && ours == named {
            return Ok(fd);
        }
    }
}

/// The start of the slot names of `path`.
fn key(path: &TreePath) -> String {
    format!("part-{}-", &blake3::hash(path.as_bytes()).to_hex()[..32])
}

fn is_temporary(name: &str) -> bool {
    name.strip_prefix("temp-").is_some_and(|rest| rest.len() == 16 && is_hex(rest))
}

fn is_slot(name: &str) -> bool {
    let parts = name.strip_prefix("part-").and_then(|rest| rest.split_once('-'));
    parts.is_some_and(|(key, n)| key.len() == 32 && is_hex(key) && n.parse().is_ok_and(|n: usize| n < SLOTS))
}

fn is_hex(text: &str) -> bool {
    text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use crate::files::FilePiece;
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

    use super::*;

    #[test]
    fn a_partial_file_with_its_final_mode_can_be_continued() {
        let into = tempfile::TempDir::new().unwrap();
        let root = || OwnedFd::from(File::open(into.path()).unwrap());
        let path = TreePath::new(b"name").unwrap();
        let staging = StagingDirectory::open(root(), Quota::new(None)).unwrap();
        let (mut staged, file, mut journal) = staging.begin(&path).unwrap();
        let piece = FilePiece { offset: 0, len: 1, hash: [0; 32] };
        journal.push(&piece).unwrap();
        staged.add(reservation::partial(&path) + reservation::piece(&piece));
        rustix::fs::fchmod(&file, Mode::RUSR).unwrap();
        // The state that a killed server leaves.
        drop(staged);
        drop(staging);
        let continue_it = || {
            // Root could write in any mode.
            let mut sets = capabilities(None).unwrap();
            sets.effective.remove(CapabilitySet::DAC_OVERRIDE);
            set_capabilities(None, sets).unwrap();
            let staging = StagingDirectory::open(root(), Quota::new(None)).unwrap();
            let (_, file, journal) = staging.find(&path).expect("the partial file still exists");
            assert_eq!((journal.count(), file.metadata().unwrap().len()), (1, 0));
        };
        std::thread::scope(|scope| scope.spawn(continue_it).join().unwrap());
    }
}
