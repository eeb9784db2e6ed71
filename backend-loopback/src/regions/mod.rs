//! The table of registered memory. It knows the owner of each region, the peers that may access it, and when its memory
//! may be freed.

mod deferred_free;
mod region_handle;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use multirail_spi::staging::SlotRequest;
use multirail_spi::{Access, Error, ErrorKind, Memory, MemoryKind, Result};

use crate::inbound::Inbound;
use crate::segment::lease_table::{DEVICE_MEMORY, Lease, REGION_SLOTS, RegionKey};
use crate::status::{describe, status};
use deferred_free::DeferredFree;
pub(crate) use region_handle::RegionHandle;

/// All regions of a domain, and all peers that have leases on them.
#[derive(Default)]
pub(crate) struct Regions {
    table: Mutex<RegionTable>,
    /// The length of `RegionTable::retired`.
    retired: AtomicUsize,
}

#[derive(Default)]
struct RegionTable {
    slots: Vec<RegionSlot>,
    free: Vec<u32>,
    peers: Vec<LeaseHolder>,
    /// Slots of regions that were dropped while an initiator was still inside.
    retired: Vec<u32>,
}

#[derive(Default)]
struct RegionSlot {
    generation: u32,
    entry: Option<RegionEntry>,
    /// Staged copies by this side that are under way. A peer cannot change this number.
    staged_copies: u32,
}

struct RegionEntry {
    memory: Arc<dyn Memory>,
    access: Access,
    is_shareable: bool,
    closed: bool,
}

/// A peer with a lease table.
struct LeaseHolder {
    inbound: Arc<Inbound>,
    leaving: bool,
}

/// The description of a region, for a peer that asks.
pub(crate) struct RegionInfo {
    pub(crate) memory: Arc<dyn Memory>,
    pub(crate) access: Access,
    /// True if other processes may map the memory's file.
    pub(crate) is_shareable: bool,
}

/// The memory at the local end of a request.
pub(crate) struct LocalMemory {
    pub(crate) kind: MemoryKind,
    /// The address of the first byte.
    pub(crate) start: u64,
    pub(crate) memory: Arc<dyn Memory>,
}

/// The range of a region that a staged copy uses. The region keeps its bytes until this is dropped.
pub(crate) struct StagedRange<'a> {
    regions: &'a Regions,
    slot: u32,
    start: *mut u8,
}

impl Regions {
    /// Puts `memory` into the table.
    pub(crate) fn insert(&self, memory: Arc<dyn Memory>, access: Access) -> Result<RegionKey> {
        match memory.kind() {
            MemoryKind::Host => {}
            // Copies need the GPU's context and kernels. Here, making them delays no request.
            MemoryKind::Cuda { device } => cuda::Device::open(device)?.prepare()?,
            kind => {
                let context = format!("loopback copies memory of the host and of GPUs, not {kind:?}");
                return Err(Error::new(ErrorKind::Unsupported, "register", context));
            }
        }
        self.sweep();
        deferred_free::sweep();
        let is_shareable = memory.shared_range().is_some_and(|range| {
            // Elsewhere importers map whole files alone.
            let can_be_mapped = cfg!(target_os = "linux") || range.file_len == memory.len() as u64;
            let is_shareable = usize::try_from(range.file_len)
                .is_ok_and(|len| crate::segment::mapping::is_shareable(range.file, len));
            can_be_mapped && is_shareable
        });
        let mut table = self.lock();
        let slot = match table.free.pop() {
            Some(slot) => slot,
            None if table.slots.len() < REGION_SLOTS => {
                table.slots.push(RegionSlot::default());
                table.slots.len() as u32 - 1
            }
            None => {
                let context = format!(
                    "{REGION_SLOTS} regions are registered, which is the limit: drop some, or register larger ones"
                );
                return Err(Error::new(ErrorKind::Exhausted, "register", context));
            }
        };
        let entry = &mut table.slots[slot as usize];
        entry.generation += 1;
        entry.entry = Some(RegionEntry { memory, access, is_shareable, closed: false });
        Ok(RegionKey { slot, generation: entry.generation })
    }

    /// Adds a peer, which may then import regions, unless it was disconnected meanwhile.
    pub(crate) fn add_peer(&self, inbound: Arc<Inbound>) {
        self.sweep_peers();
        let mut table = self.lock();
        // A later disconnect finds the peer here: it closes `inbound` first, and takes the lock then.
        if inbound.is_closed() {
            return;
        }
        table.peers.push(LeaseHolder { inbound, leaving: false });
    }

    /// Lets a peer that imports a region enter it: opens the peer's lease.
    pub(crate) fn open(&self, inbound: &Inbound, key: u64) -> Result<()> {
        let refused = |kind| Error::new(kind, "import", describe(status(kind)));
        let key = RegionKey::from_wire(key).ok_or_else(|| refused(ErrorKind::RemoteAccess))?;
        let table = self.lock();
        let slot = table.slots.get(key.slot as usize).filter(|slot| slot.generation == key.generation);
        if slot.and_then(|slot| slot.entry.as_ref()).is_none_or(|entry| entry.closed) {
            return Err(refused(ErrorKind::Revoked));
        }
        // A later disconnect closes `inbound` first, and then takes the lock and closes the leases.
        if inbound.is_closed() {
            return Err(refused(ErrorKind::PeerDied));
        }
        inbound.open(key.slot as usize, key.generation)
    }

    /// Closes the leases of a peer on all regions. The table keeps the peer until it has left all of them.
    pub(crate) fn remove_peer(&self, inbound: &Arc<Inbound>) {
        let mut table = self.lock();
        if let Some(peer) = table.peers.iter_mut().find(|peer| Arc::ptr_eq(&peer.inbound, inbound)) {
            peer.leaving = true;
            inbound.leases().for_each(Lease::close);
        }
        drop(table);
        self.sweep_peers();
    }

    /// Frees the retired regions that are quiescent. Cheap if no region is retired.
    pub(crate) fn sweep(&self) {
        if self.retired.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut freed = Vec::new();
        let mut table = self.lock();
        for slot in std::mem::take(&mut table.retired) {
            if table.is_quiescent(slot) {
                freed.extend(table.release(slot));
            } else {
                table.retired.push(slot);
            }
        }
        self.retired.store(table.retired.len(), Ordering::Relaxed);
        drop(table);
        // Memory that is dropped runs its owner's code, which may call this table: the lock must be free.
        drop(freed);
    }

    fn sweep_peers(&self) {
        let mut table = self.lock();
        table.peers.retain(|peer| {
            let is_quiescent = || peer.inbound.leases().all(Lease::is_quiescent);
            !peer.leaving || !(peer.inbound.is_initiator_gone() || is_quiescent())
        });
    }

    /// Closes a region: no peer may enter it any more.
    pub(crate) fn close(&self, key: RegionKey) {
        let mut table = self.lock();
        if let Some(entry) = &mut table.slots[key.slot as usize].entry {
            entry.closed = true;
        }
        for peer in &table.peers {
            peer.inbound.lease(key.slot as usize).inspect(|lease| lease.close());
        }
    }

    /// Returns true if no peer and no staged copy is inside the region.
    pub(crate) fn is_quiescent(&self, key: RegionKey) -> bool {
        self.lock().is_quiescent(key.slot)
    }

    /// Frees the slot and the memory of a closed region, now or once it is quiescent.
    pub(crate) fn retire(&self, key: RegionKey) {
        let mut table = self.lock();
        if table.is_quiescent(key.slot) {
            let memory = table.release(key.slot);
            drop(table);
            drop(memory);
        } else {
            table.retired.push(key.slot);
            self.retired.store(table.retired.len(), Ordering::Relaxed);
        }
    }

    /// The region of `key`, for a peer that asks.
    pub(crate) fn find(&self, key: u64) -> Result<RegionInfo, ErrorKind> {
        let key = RegionKey::from_wire(key).ok_or(ErrorKind::RemoteAccess)?;
        let table = self.lock();
        let slot = table.slots.get(key.slot as usize).ok_or(ErrorKind::RemoteAccess)?;
        if key.generation > slot.generation {
            return Err(ErrorKind::RemoteAccess);
        }
        match &slot.entry {
            // A region without remote access is hidden from peers: they get not even its file.
            Some(entry) if entry.access.is_empty() => Err(ErrorKind::RemoteAccess),
            Some(entry) if key.generation == slot.generation && !entry.closed => Ok(RegionInfo {
                memory: entry.memory.clone(),
                access: entry.access,
                is_shareable: entry.is_shareable,
            }),
            _ => Err(ErrorKind::Revoked),
        }
    }

    /// Enters the range of a region that a peer's slot request names, for a staged copy.
    pub(crate) fn enter(&self, request: &SlotRequest) -> Result<StagedRange<'_>, ErrorKind> {
        let found = self.find(request.key)?;
        let is_allowed = request.is_allowed(found.access, found.memory.len() as u64);
        // The CPU copies staged bytes, and cannot use addresses of device memory.
        if !is_allowed || found.memory.kind() != MemoryKind::Host {
            return Err(ErrorKind::RemoteAccess);
        }
        let key = RegionKey::from_wire(request.key).ok_or(ErrorKind::RemoteAccess)?;
        let mut table = self.lock();
        let slot = &mut table.slots[key.slot as usize];
        // The region may have been revoked between the two locks.
        if slot.generation != key.generation || slot.entry.as_ref().is_none_or(|entry| entry.closed) {
            return Err(ErrorKind::Revoked);
        }
        slot.staged_copies += 1;
        let start = found.memory.as_ptr().wrapping_add(request.offset as usize);
        Ok(StagedRange { regions: self, slot: key.slot, start })
    }

    /// The memory of a local key.
    pub(crate) fn local(&self, lkey: u64) -> Option<LocalMemory> {
        let key = RegionKey::from_wire(lkey & !DEVICE_MEMORY)?;
        let table = self.lock();
        let slot = table.slots.get(key.slot as usize).filter(|slot| slot.generation == key.generation)?;
        let memory = Arc::clone(&slot.entry.as_ref()?.memory);
        Some(LocalMemory { kind: memory.kind(), start: memory.as_ptr() as u64, memory })
    }

    fn lock(&self) -> MutexGuard<'_, RegionTable> {
        self.table.lock().expect("region table")
    }
}

impl RegionTable {
    fn is_quiescent(&self, slot: u32) -> bool {
        self.slots[slot as usize].staged_copies == 0
            && self.peers.iter().all(|peer| {
                let lease = peer.inbound.lease(slot as usize);
                lease.is_none_or(Lease::is_quiescent) || peer.inbound.is_initiator_gone()
            })
    }

    fn release(&mut self, slot: u32) -> Option<Arc<dyn Memory>> {
        let entry = &mut self.slots[slot as usize];
        if entry.generation < u32::MAX {
            self.free.push(slot);
        }
        entry.entry.take().map(|entry| entry.memory)
    }
}

impl Drop for Regions {
    fn drop(&mut self) {
        self.sweep();
        let table = self.table.get_mut().expect("region table");
        let peers: Vec<_> = table.peers.iter().map(|peer| peer.inbound.clone()).collect();
        let retired = std::mem::take(&mut table.retired);
        let deferred = retired.into_iter().filter_map(|slot| {
            let memory = table.slots[slot as usize].entry.take()?.memory;
            Some(DeferredFree::new(slot as usize, peers.clone(), memory))
        });
        deferred_free::defer(deferred);
    }
}

impl StagedRange<'_> {
    /// The first byte of the range.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start
    }
}

impl Drop for StagedRange<'_> {
    fn drop(&mut self) {
        self.regions.lock().slots[self.slot as usize].staged_copies -= 1;
    }
}
