//! Regions of peers, and the table in which requests look them up by rkey.

#[cfg(target_os = "linux")]
pub(crate) mod foreign_copy;
mod import;
mod lease_guard;
mod resolve;

use std::any::Any;
use std::sync::{Arc, Mutex, OnceLock};

use arc_swap::{ArcSwapOption, Guard};
use multirail_spi::{Error, ErrorKind, Paths, RemoteMemory, Result};

use crate::outbound::Outbound;
pub(crate) use import::{Import, RegionLocation, ResolvedRegion, copy_mapped};
pub(crate) use lease_guard::{LeaseGuard, ScopedLease};
pub(crate) use resolve::resolve;

/// Entries of the first page; each page has twice as many as the one before.
const FIRST_PAGE: usize = 16;
const PAGES: usize = 14;
/// Entries of all pages.
const MAX_IMPORTS: usize = FIRST_PAGE * ((1 << PAGES) - 1);

/// The page of entry `index`, the size of the page, and the position of the entry in it.
#[inline]
fn locate(index: usize) -> (usize, usize, usize) {
    let number = index + FIRST_PAGE;
    let page = (number / FIRST_PAGE).ilog2() as usize;
    (page, FIRST_PAGE << page, number - (FIRST_PAGE << page))
}

type ImportEntry = ArcSwapOption<Import>;

/// All imports of a domain. The worker looks them up without locks, once per batch.
pub(crate) struct ImportTable {
    pages: [OnceLock<Box<[ImportEntry]>>; PAGES],
    indices: Mutex<Indices>,
}

#[derive(Default)]
struct Indices {
    generations: Vec<u32>,
    free: Vec<u32>,
}

impl Default for ImportTable {
    fn default() -> Self {
        Self { pages: [const { OnceLock::new() }; PAGES], indices: Mutex::default() }
    }
}

impl Drop for ImportTable {
    fn drop(&mut self) {
        let pages = self.pages.iter_mut().filter_map(OnceLock::take);
        for entry in pages.flat_map(<[ImportEntry]>::into_vec) {
            // An empty entry takes as long to drop as one that holds an import.
            if entry.load().is_none() {
                std::mem::forget(entry);
            }
        }
    }
}

impl ImportTable {
    /// Puts `region` into the table, under a new rkey.
    pub(crate) fn insert(&self, target: Arc<Outbound>, region: ResolvedRegion) -> Result<Arc<Import>> {
        let mut indices = self.indices.lock().expect("import indices");
        let index = match indices.free.pop() {
            Some(index) => index,
            None if indices.generations.len() < MAX_IMPORTS => {
                indices.generations.push(0);
                indices.generations.len() as u32 - 1
            }
            None => {
                let context =
                    format!("{MAX_IMPORTS} regions of peers are imported, which is the limit: drop some");
                return Err(Error::new(ErrorKind::Exhausted, "import", context));
            }
        };
        indices.generations[index as usize] += 1;
        let rkey = u64::from(indices.generations[index as usize]) << 32 | u64::from(index);
        let import = Arc::new(Import::new(rkey, target, region));
        let (page, size, position) = locate(index as usize);
        let page = self.pages[page].get_or_init(|| (0..size).map(|_| ArcSwapOption::empty()).collect());
        page[position].store(Some(import.clone()));
        Ok(import)
    }

    /// The import with that rkey, if it is still in the table.
    #[inline]
    pub(crate) fn find(&self, rkey: u64) -> Option<Guard<Option<Arc<Import>>>> {
        let found = self.entry(rkey)?.load();
        found.as_ref().is_some_and(|import| import.rkey == rkey).then_some(found)
    }

    fn entry(&self, rkey: u64) -> Option<&ImportEntry> {
        let (page, _, position) = locate(rkey as u32 as usize);
        self.pages.get(page)?.get()?.get(position)
    }

    fn remove(&self, rkey: u64) {
        if let Some(entry) = self.entry(rkey) {
            entry.store(None);
        }
        let index = rkey as u32;
        let mut indices = self.indices.lock().expect("import indices");
        if indices.generations[index as usize] < u32::MAX {
            indices.free.push(index);
        }
    }
}

/// The handle of an import, which the engine owns. Dropping it removes the rkey from the table.
pub(crate) struct ImportHandle {
    import: Arc<Import>,
    imports: Arc<ImportTable>,
    /// Keeps the domain open.
    _domain: Arc<dyn Any + Send + Sync>,
}

impl ImportHandle {
    /// The handle of an import that is in the table.
    pub(crate) fn new(
        import: Arc<Import>,
        imports: &Arc<ImportTable>,
        domain: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self { import, imports: Arc::clone(imports), _domain: domain }
    }

    /// The import.
    #[inline]
    pub(crate) fn import(&self) -> &Import {
        &self.import
    }
}

impl RemoteMemory for ImportHandle {
    fn rkey(&self) -> u64 {
        self.import.rkey
    }

    fn base(&self) -> u64 {
        0
    }

    fn warm_up(&self) {
        self.import.warm_up();
    }

    /// As `foreign_copy` says.
    fn prefers_ascending(&self) -> bool {
        #[cfg(target_os = "linux")]
        return matches!(self.import.location, RegionLocation::Foreign { .. });
        #[cfg(not(target_os = "linux"))]
        false
    }

    fn path(&self) -> &'static str {
        match self.import.location {
            RegionLocation::Mapped(_) => "mapped memory",
            #[cfg(target_os = "linux")]
            RegionLocation::Foreign { .. } => "process_vm_writev and process_vm_readv",
            RegionLocation::Staged => "staged through shared memory",
            RegionLocation::Gpu { .. } => "copies by a GPU",
        }
    }

    fn paths(&self, in_device_memory: bool) -> Paths {
        match self.import.location {
            RegionLocation::Staged => Paths::MEMORY_COPY | Paths::STAGED,
            RegionLocation::Gpu { .. } => Paths::GPU_COPY,
            _ if in_device_memory => Paths::GPU_COPY,
            _ => Paths::MEMORY_COPY,
        }
    }
}

impl Drop for ImportHandle {
    fn drop(&mut self) {
        self.imports.remove(self.import.rkey);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_index_has_a_position_of_its_own() {
        let mut next = (0, 0);
        for index in 0..MAX_IMPORTS {
            let (page, size, position) = locate(index);
            assert_eq!((page, position), next);
            next = if position + 1 == size { (page + 1, 0) } else { (page, position + 1) };
        }
        assert_eq!(next, (PAGES, 0));
        assert!(ImportTable::default().find(u64::MAX).is_none());
    }
}
