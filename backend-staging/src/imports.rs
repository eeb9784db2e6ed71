//! The peers' registered regions that requests may address through slots.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use multirail_spi::{Paths, PeerSlot, RemoteKey, RemoteMemory};

use crate::initiator::MAX_COALESCED;
use crate::key_hash::KeyHash;

/// All imports of a domain over connections that coalesce, by the peer and the rkey of their requests. Several imports
/// have the same rkey if the peer's region was imported several times, or if the peer's device has used a key again.
#[derive(Default)]
pub(crate) struct CoalescedImports(Mutex<ImportMap>);

/// Imports by the peer and the rkey of their requests.
type ImportMap = HashMap<(PeerSlot, u64), Vec<ImportedRange>, KeyHash>;

/// The range of an imported region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ImportedRange {
    /// The remote address of the first byte.
    base: u64,
    len: u64,
    /// The key by which the peer knows the region.
    key: u64,
}

/// What a slot request says of a region, for requests with one rkey.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlotAddress {
    /// The key by which the peer knows the region.
    pub key: u64,
    /// The remote address of the region's first byte.
    pub base: u64,
}

impl CoalescedImports {
    /// Finds the import that has the remote address.
    pub(crate) fn find(&self, peer: PeerSlot, rkey: u64, remote: u64) -> Option<SlotAddress> {
        let all = self.locked();
        let has_address = |range: &&ImportedRange| remote.wrapping_sub(range.base) <= range.len;
        let range = all.get(&(peer, rkey))?.iter().rev().find(has_address)?;
        Some(SlotAddress { key: range.key, base: range.base })
    }

    fn locked(&self) -> MutexGuard<'_, ImportMap> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An import over a connection that coalesces.
pub(crate) struct CoalescedImport {
    inner: Arc<dyn RemoteMemory>,
    peer: PeerSlot,
    range: ImportedRange,
    imports: Arc<CoalescedImports>,
}

impl CoalescedImport {
    pub(crate) fn new(
        imports: &Arc<CoalescedImports>,
        peer: PeerSlot,
        key: &RemoteKey,
        inner: Arc<dyn RemoteMemory>,
    ) -> Self {
        let range = ImportedRange { base: inner.base(), len: key.len, key: key.key };
        imports.locked().entry((peer, inner.rkey())).or_default().push(range);
        Self { inner, peer, range, imports: Arc::clone(imports) }
    }
}

impl RemoteMemory for CoalescedImport {
    fn rkey(&self) -> u64 {
        self.inner.rkey()
    }

    fn base(&self) -> u64 {
        self.inner.base()
    }

    fn warm_up(&self) {
        self.inner.warm_up();
    }

    fn prefers_ascending(&self) -> bool {
        self.inner.prefers_ascending()
    }

    fn max_coalesced(&self) -> u64 {
        MAX_COALESCED
    }

    fn path(&self) -> &'static str {
        self.inner.path()
    }

    fn paths(&self, in_device_memory: bool) -> Paths {
        self.inner.paths(in_device_memory)
    }
}

impl Drop for CoalescedImport {
    fn drop(&mut self) {
        let mut all = self.imports.locked();
        let at = (self.peer, self.inner.rkey());
        let Some(ranges) = all.get_mut(&at) else { return };
        if let Some(index) = ranges.iter().position(|range| *range == self.range) {
            ranges.remove(index);
        }
        if ranges.is_empty() {
            all.remove(&at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An import that no request addresses.
    struct BareImport {
        base: u64,
    }

    impl RemoteMemory for BareImport {
        fn rkey(&self) -> u64 {
            7
        }

        fn base(&self) -> u64 {
            self.base
        }

        fn paths(&self, _: bool) -> Paths {
            Paths::RDMA
        }
    }

    #[test]
    fn an_import_is_found_by_its_addresses_while_it_lives() {
        let imports = Arc::new(CoalescedImports::default());
        let import = |peer, base, key| {
            let key = RemoteKey { base: 0, key, len: 4096 };
            CoalescedImport::new(&imports, PeerSlot(peer), &key, Arc::new(BareImport { base }))
        };
        let (first, second, other) = (import(0, 1 << 20, 1), import(0, 1 << 30, 2), import(1, 1 << 20, 3));
        let key_at = |peer, remote| imports.find(PeerSlot(peer), 7, remote).map(|found| found.key);
        assert_eq!(
            (key_at(0, 1 << 20), key_at(0, (1 << 30) + 4095), key_at(1, 1 << 20)),
            (Some(1), Some(2), Some(3))
        );
        assert_eq!((key_at(0, (1 << 20) - 1), key_at(2, 1 << 20)), (None, None));
        let again = import(0, 1 << 20, 1);
        drop(first);
        assert_eq!(key_at(0, 1 << 20), Some(1));
        drop(again);
        assert_eq!((key_at(0, 1 << 20), key_at(0, 1 << 30)), (None, Some(2)));
        drop((second, other));
        assert!(imports.locked().is_empty());
    }
}
