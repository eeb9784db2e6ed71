//! The staged regions of this process, and the peers' copies that are under way in them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use multirail_spi::staging::SlotRequestKind;
use multirail_spi::{Access, Error, ErrorKind, Memory, MemoryRegion, RemoteKey, Result, WorkRequest};

use crate::copies::MemoryLocation;
use crate::key_hash::KeyHash;

/// All regions of a domain that peers reach through slots: staged ones, by key, and those that the inner device
/// registered, by the inner device's key.
#[derive(Default)]
pub(crate) struct StagedRegions(Mutex<RegionTables>);

#[derive(Default)]
pub(crate) struct RegionTables {
    staged: RegionMap,
    registered: RegionMap,
}

/// Regions by key.
type RegionMap = HashMap<u64, Arc<StagedRegion>, KeyHash>;

/// One region that peers reach through slots. It lives until the last copy from or to it has ended.
pub(crate) struct StagedRegion {
    key: u64,
    memory: Arc<dyn Memory>,
    pub location: MemoryLocation,
    start: u64,
    access: Access,
    /// The number of peers' copies that are under way.
    peer_copies: AtomicU32,
    is_revoked: AtomicBool,
}

impl StagedRegions {
    /// Registers `memory`, so that peers can access it as `access` allows. `why` is the reason for staging, as a text
    /// for the user.
    pub(crate) fn add(
        self: &Arc<Self>,
        memory: Arc<dyn Memory>,
        access: Access,
        why: &str,
    ) -> Result<StagedRegistration> {
        let location = MemoryLocation::of(&*memory)?;
        let mut bytes = [0; 8];
        let failed = |error| Error::new(ErrorKind::Io, "register", format!("no random numbers: {error}"));
        loop {
            getrandom::fill(&mut bytes).map_err(failed)?;
            // A random key cannot be guessed. With the bit `STAGED` set it equals no lkey of the inner device.
            let key = u64::from_ne_bytes(bytes) & !(RemoteKey::STAGED | WorkRequest::COALESCE);
            let region = Arc::new(StagedRegion::new(key, Arc::clone(&memory), location, access));
            if let std::collections::hash_map::Entry::Vacant(vacant) = self.tables().staged.entry(key) {
                vacant.insert(Arc::clone(&region));
                let why = format!("staged through the host's memory: {why}");
                return Ok(StagedRegistration { region, why, regions: Arc::clone(self) });
            }
        }
    }

    /// Lets peers reach a region that the inner device registered through slots too.
    pub(crate) fn add_registered(
        self: &Arc<Self>,
        memory: Arc<dyn Memory>,
        access: Access,
        inner: Arc<dyn MemoryRegion>,
    ) -> Result<CoalescedRegistration> {
        let location = MemoryLocation::of(&*memory)?;
        let region = Arc::new(StagedRegion::new(inner.key().key, memory, location, access));
        self.tables().registered.insert(region.key, Arc::clone(&region));
        Ok(CoalescedRegistration { region, inner, regions: Arc::clone(self) })
    }

    fn tables(&self) -> MutexGuard<'_, RegionTables> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The staged region with this lkey. Returns `None` for an lkey of the inner device.
    pub(crate) fn by_lkey(&self, lkey: u64) -> Option<Arc<StagedRegion>> {
        if lkey & RemoteKey::STAGED == 0 {
            return None;
        }
        self.tables().staged.get(&(lkey & !RemoteKey::STAGED)).cloned()
    }

    /// Begins a peer's access to a region, if the region allows it.
    pub(crate) fn begin_access(
        &self,
        name: RegionName,
        kind: SlotRequestKind,
    ) -> Result<PeerAccess, ErrorKind> {
        let tables = self.tables();
        let table = if name.is_staged { &tables.staged } else { &tables.registered };
        let region = Arc::clone(table.get(&name.key).ok_or(ErrorKind::RemoteAccess)?);
        drop(tables);
        // `PageRange::at` checks the offsets.
        if !kind.is_allowed(region.access) {
            return Err(ErrorKind::RemoteAccess);
        }
        // This method counts the copy before it reads `is_revoked`, and `revoke` sets `is_revoked` before it reads the
        // count. So at least one of the two sees the other.
        region.peer_copies.fetch_add(1, SeqCst);
        let access = PeerAccess { name, region };
        if access.region.is_revoked.load(SeqCst) { Err(ErrorKind::Revoked) } else { Ok(access) }
    }
}

/// How a peer names a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RegionName {
    pub key: u64,
    /// Whether the region is staged: then offsets have the bit [`RemoteKey::STAGED`].
    pub is_staged: bool,
}

/// A peer's right to copy between a region and a slot. The region's revocation waits until it is dropped.
pub(crate) struct PeerAccess {
    name: RegionName,
    region: Arc<StagedRegion>,
}

/// Where ranges of a certain length may be in a region.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PageRange {
    pub location: MemoryLocation,
    /// The address of the region's first byte.
    start: u64,
    /// What the peer calls the offset of that byte.
    base: u64,
    /// The greatest offset from it.
    last: u64,
}

impl PeerAccess {
    #[inline]
    pub(crate) fn name(&self) -> RegionName {
        self.name
    }

    /// Where ranges of `len` bytes may be.
    ///
    /// # Errors
    /// `RemoteAccess` if the region is shorter.
    pub(crate) fn range_of(&self, len: u64) -> Result<PageRange, ErrorKind> {
        let StagedRegion { start, location, memory, .. } = &*self.region;
        let last = (memory.len() as u64).checked_sub(len).ok_or(ErrorKind::RemoteAccess)?;
        let base = if self.name.is_staged { RemoteKey::STAGED } else { 0 };
        Ok(PageRange { location: *location, start: *start, base, last })
    }
}

impl PageRange {
    /// The address of the range at an offset. `None` if the range is out of bounds.
    #[inline]
    pub(crate) fn at(&self, offset: u64) -> Option<*mut u8> {
        let offset = offset.wrapping_sub(self.base);
        (offset <= self.last).then(|| (self.start + offset) as *mut u8)
    }
}

impl Drop for PeerAccess {
    fn drop(&mut self) {
        self.region.peer_copies.fetch_sub(1, SeqCst);
    }
}

impl StagedRegion {
    fn new(key: u64, memory: Arc<dyn Memory>, location: MemoryLocation, access: Access) -> Self {
        let start = memory.as_ptr() as u64;
        let (peer_copies, is_revoked) = (AtomicU32::new(0), AtomicBool::new(false));
        Self { key, memory, location, start, access, peer_copies, is_revoked }
    }

    /// Refuses further copies of peers. Returns whether none is under way.
    fn revoke(&self) -> bool {
        self.is_revoked.store(true, SeqCst);
        self.peer_copies.load(SeqCst) == 0
    }
}

/// The registration of a staged region, which the user holds.
pub(crate) struct StagedRegistration {
    region: Arc<StagedRegion>,
    /// The reason for staging, as a text for the user.
    why: String,
    regions: Arc<StagedRegions>,
}

impl MemoryRegion for StagedRegistration {
    fn lkey(&self) -> u64 {
        self.region.key | RemoteKey::STAGED
    }

    fn key(&self) -> RemoteKey {
        RemoteKey { base: RemoteKey::STAGED, key: self.region.key, len: self.region.memory.len() as u64 }
    }

    fn staging_reason(&self) -> Option<&str> {
        Some(&self.why)
    }

    /// True: this process's own copies keep the region alive by its `Arc`.
    fn lkey_outlives_revoke(&self) -> bool {
        true
    }

    fn revoke(&self) -> Poll<Result<()>> {
        if self.region.revoke() { Poll::Ready(Ok(())) } else { Poll::Pending }
    }
}

impl Drop for StagedRegistration {
    fn drop(&mut self) {
        // Copies that are under way keep the memory by their own `Arc`.
        self.region.revoke();
        self.regions.tables().staged.remove(&self.region.key);
    }
}

/// The registration of a region with the inner device, which peers reach through slots too. The user holds it.
pub(crate) struct CoalescedRegistration {
    region: Arc<StagedRegion>,
    inner: Arc<dyn MemoryRegion>,
    regions: Arc<StagedRegions>,
}

impl MemoryRegion for CoalescedRegistration {
    fn lkey(&self) -> u64 {
        self.inner.lkey()
    }

    fn key(&self) -> RemoteKey {
        self.inner.key()
    }

    fn staging_reason(&self) -> Option<&str> {
        self.inner.staging_reason()
    }

    fn lkey_outlives_revoke(&self) -> bool {
        self.inner.lkey_outlives_revoke()
    }

    fn revoke(&self) -> Poll<Result<()>> {
        if self.region.revoke() { self.inner.revoke() } else { Poll::Pending }
    }
}

impl Drop for CoalescedRegistration {
    fn drop(&mut self) {
        self.region.revoke();
        let mut tables = self.regions.tables();
        // The device may have given the key to a later region already.
        let is_this = |known: &Arc<StagedRegion>| Arc::ptr_eq(known, &self.region);
        if tables.registered.get(&self.region.key).is_some_and(is_this) {
            tables.registered.remove(&self.region.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use multirail_spi::HostBuffer;
    use multirail_spi::staging::SlotRequestKind::{Read, Write};

    use super::*;

    #[test]
    fn a_revocation_waits_for_peers_copies() {
        let regions = Arc::new(StagedRegions::default());
        let memory = Arc::new(HostBuffer::new(4096).unwrap());
        let staged = regions.add(memory, Access::REMOTE_WRITE, "a test").unwrap();
        let key = staged.key();
        assert!(key.is_staged() && regions.by_lkey(staged.lkey()).is_some());
        assert!(regions.by_lkey(key.key).is_none(), "a peer's key is not an lkey");
        let begin = |kind, offset: u64, len| {
            let offset = offset | RemoteKey::STAGED;
            let access = regions.begin_access(RegionName { key: key.key, is_staged: true }, kind)?;
            let range = access.range_of(len)?;
            assert!(
                range.at(offset & !RemoteKey::STAGED).is_none(),
                "an offset in a region that is not staged"
            );
            range.at(offset).map(|_| access).ok_or(ErrorKind::RemoteAccess)
        };
        let access = |kind, offset, len| begin(kind, offset, len).map(|_| ());
        assert_eq!(access(Write, 4000, 96), Ok(()));
        for (kind, offset, len) in [(Write, 4000, 97), (Write, u64::MAX, 2), (Read, 0, 1)] {
            assert_eq!(access(kind, offset, len), Err(ErrorKind::RemoteAccess));
        }
        let under_way = begin(Write, 0, 1).unwrap_or_else(|why| panic!("{why:?}"));
        let unstaged = RegionName { key: key.key, is_staged: false };
        assert_eq!(regions.begin_access(unstaged, Write).err(), Some(ErrorKind::RemoteAccess));
        assert!(staged.revoke().is_pending());
        assert_eq!(access(Write, 0, 1), Err(ErrorKind::Revoked));
        drop(under_way);
        assert!(staged.revoke().is_ready());
        drop(staged);
        assert_eq!(access(Write, 0, 1), Err(ErrorKind::RemoteAccess));
    }
}
