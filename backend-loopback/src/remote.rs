//! Peers' regions as they are used from here, and the table that names them.

use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock};

use arc_swap::{ArcSwapOption, Guard};
#[cfg(target_os = "linux")]
use multirail_spi::{Access, Error, ErrorKind, Mapping, RemoteMemory, Result, WorkKind};

use crate::domain::Shared;
#[cfg(target_os = "linux")]
use crate::guard::GuardPage;
use crate::peer::Outbound;
use crate::region::Key;

/// A peer's region: what it is, and where its bytes are.
pub(crate) struct Import {
    /// Our name for it: generation and index in the [`Imports`] table.
    pub(crate) rkey: u64,
    pub(crate) target: Arc<Outbound>,
    pub(crate) place: Place,
    pub(crate) len: u64,
    pub(crate) access: Access,
    pub(crate) key: Key,
    /// The local region to which a GPU was last found to reach, by writes and by reads.
    pub(crate) reached: [AtomicU64; 2],
    /// Goes before what it locks.
    lock: Option<cuda::PageLock>,
    /// Keeps the bytes mapped where they are the peer's file.
    #[cfg(target_os = "linux")]
    mapping: Option<Mapping>,
    /// The same for its GPU's memory.
    _shared: Option<cuda::ImportedMemory>,
}

/// Where a region's first byte is.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Place {
    /// At an address of this process.
    Here(NonNull<u8>),
    /// At an address of the peer's process.
    #[cfg(target_os = "linux")]
    There { base: u64, guard: GuardPage },
    /// Where only the peer's own worker gets: through its stage.
    Staged,
    /// On a GPU, as this process counts them, at an address for the GPUs of this process.
    Gpu { base: u64, ordinal: u32 },
}

// SAFETY: the addresses are plain numbers here; they are followed only between
// `enter` and `leave`, while the target keeps its bytes (or `mapping` ours).
unsafe impl Send for Import {}
// SAFETY: as above.
unsafe impl Sync for Import {}

impl Import {
    /// The offset of `remote`, if `len` bytes from there may be used so.
    #[inline]
    pub(crate) fn check(&self, kind: WorkKind, remote: u64, len: u64) -> Result<usize, ErrorKind> {
        let needed = match kind {
            WorkKind::Write => Access::REMOTE_WRITE,
            WorkKind::Read => Access::REMOTE_READ,
            WorkKind::Send => return Err(ErrorKind::InvalidRequest),
        };
        let inside = remote.checked_add(len).is_some_and(|end| end <= self.len);
        if !inside || !self.access.contains(needed) {
            return Err(ErrorKind::RemoteAccess);
        }
        Ok(remote as usize)
    }

    /// Takes the lease; the caller leaves once its bytes have moved.
    #[inline]
    pub(crate) fn enter(&self) -> Result<(), ErrorKind> {
        if !self.target.is_alive() {
            return Err(ErrorKind::PeerDied);
        }
        let lease = &self.target.layout().board[self.key.slot as usize];
        match lease.enter(self.key.generation) {
            true => Ok(()),
            // A peer that closes takes its regions back on the way.
            false if !self.target.is_alive() => Err(ErrorKind::PeerDied),
            false => Err(ErrorKind::Revoked),
        }
    }

    /// Gives the lease back.
    #[inline]
    pub(crate) fn leave(&self) {
        self.target.layout().board[self.key.slot as usize].leave();
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        // Unlocking waits for the GPU: not in a worker.
        if let Some(lock) = self.lock.take() {
            #[cfg(target_os = "linux")]
            let lock = (lock, self.mapping.take());
            cuda::drop_in_background(lock);
        }
    }
}

/// What the target said about a region.
pub(crate) struct Answer {
    pub(crate) key: Key,
    pub(crate) len: u64,
    pub(crate) access: Access,
    pub(crate) place: Place,
    #[cfg(target_os = "linux")]
    pub(crate) mapping: Option<Mapping>,
    pub(crate) shared: Option<cuda::ImportedMemory>,
    pub(crate) lock: Option<cuda::PageLock>,
}

/// Entries of the first page; each page has twice as many as the one before.
const FIRST: usize = 16;
const PAGES: usize = 14;
/// Entries of all pages.
const MOST: usize = FIRST * ((1 << PAGES) - 1);

/// The page that entry `index` is on, its size, and the place there.
#[inline]
fn locate(index: usize) -> (usize, usize, usize) {
    let number = index + FIRST;
    let page = (number / FIRST).ilog2() as usize;
    (page, FIRST << page, number - (FIRST << page))
}

type Entry = ArcSwapOption<Import>;

/// All imports of a domain. Looked up without locks, by the worker, per batch.
pub(crate) struct Imports {
    pages: [OnceLock<Box<[Entry]>>; PAGES],
    names: Mutex<Names>,
}

#[derive(Default)]
struct Names {
    generations: Vec<u32>,
    free: Vec<u32>,
}

impl Default for Imports {
    fn default() -> Self {
        Self { pages: [const { OnceLock::new() }; PAGES], names: Mutex::default() }
    }
}

impl Drop for Imports {
    fn drop(&mut self) {
        let pages = self.pages.iter_mut().filter_map(OnceLock::take);
        for entry in pages.flat_map(<[Entry]>::into_vec) {
            // To drop one that holds nothing costs as much as to drop one that does.
            if entry.load().is_none() {
                std::mem::forget(entry);
            }
        }
    }
}

impl Imports {
    /// Gives `answer` a name.
    pub(crate) fn insert(&self, target: Arc<Outbound>, answer: Answer) -> Result<Arc<Import>> {
        let mut names = self.names.lock().expect("import names");
        let index = match names.free.pop() {
            Some(index) => index,
            None if names.generations.len() < MOST => {
                names.generations.push(0);
                names.generations.len() as u32 - 1
            }
            None => {
                let context = format!("{MOST} regions of peers are in use: drop some");
                return Err(Error::new(ErrorKind::Exhausted, "import", context));
            }
        };
        names.generations[index as usize] += 1;
        let import = Arc::new(Import {
            rkey: u64::from(names.generations[index as usize]) << 32 | u64::from(index),
            target,
            place: answer.place,
            len: answer.len,
            access: answer.access,
            key: answer.key,
            reached: [const { AtomicU64::new(u64::MAX) }; 2],
            #[cfg(target_os = "linux")]
            mapping: answer.mapping,
            _shared: answer.shared,
            lock: answer.lock,
        });
        let (page, size, place) = locate(index as usize);
        let page = self.pages[page].get_or_init(|| (0..size).map(|_| ArcSwapOption::empty()).collect());
        page[place].store(Some(import.clone()));
        Ok(import)
    }

    /// The import of that name, if it is still in use.
    #[inline]
    pub(crate) fn find(&self, rkey: u64) -> Option<Guard<Option<Arc<Import>>>> {
        let found = self.entry(rkey)?.load();
        found.as_ref().is_some_and(|import| import.rkey == rkey).then_some(found)
    }

    fn entry(&self, rkey: u64) -> Option<&Entry> {
        let (page, _, place) = locate(rkey as u32 as usize);
        self.pages.get(page)?.get()?.get(place)
    }

    fn remove(&self, rkey: u64) {
        if let Some(entry) = self.entry(rkey) {
            entry.store(None);
        }
        let index = rkey as u32;
        let mut names = self.names.lock().expect("import names");
        if names.generations[index as usize] < u32::MAX {
            names.free.push(index);
        }
    }
}

/// An import in the hands of its owner; its name dies with it.
pub(crate) struct Remote {
    pub(crate) import: Arc<Import>,
    pub(crate) shared: Arc<Shared>,
}

impl RemoteMemory for Remote {
    fn rkey(&self) -> u64 {
        self.import.rkey
    }

    fn base(&self) -> u64 {
        0
    }

    fn warm_up(&self) {
        #[cfg(target_os = "linux")]
        self.import.mapping.iter().for_each(Mapping::populate);
    }

    fn path(&self) -> &'static str {
        match self.import.place {
            Place::Here(_) => "mapped memory",
            #[cfg(target_os = "linux")]
            Place::There { .. } => "process_vm_writev and process_vm_readv",
            Place::Staged => "staged through shared memory",
            Place::Gpu { .. } => "copies by a GPU",
        }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.shared.core.imports.remove(self.import.rkey);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_index_has_a_place_of_its_own() {
        let mut next = (0, 0);
        for index in 0..MOST {
            let (page, size, place) = locate(index);
            assert_eq!((page, place), next);
            next = if place + 1 == size { (page + 1, 0) } else { (page, place + 1) };
        }
        assert_eq!(next, (PAGES, 0));
        assert!(Imports::default().find(u64::MAX).is_none());
    }
}
