//! What a key names: for peers that ask, for staged copies, and for GPUs.

use std::sync::Arc;

use multirail_spi::{Access, ErrorKind, Memory, MemoryKind, Result};

use super::{Key, Regions};
use crate::gpu::FAR;

/// What a peer learns about a region it asks for.
pub(crate) struct Found {
    pub(crate) memory: Arc<dyn Memory>,
    pub(crate) access: Access,
    /// Whether its file may be mapped by others.
    #[cfg(target_os = "linux")]
    pub(crate) shared: bool,
}

/// A region as requests from it, or into it, need to know it.
pub(crate) struct Local {
    pub(crate) kind: MemoryKind,
    /// Its first byte.
    pub(crate) start: u64,
    pub(crate) memory: Arc<dyn Memory>,
}

/// A staged copy's place inside a region: it keeps the region's bytes until it is dropped.
pub(crate) struct Inside<'a> {
    regions: &'a Regions,
    slot: u32,
    start: *mut u8,
}

impl Inside<'_> {
    /// The first byte of the range that was asked for.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.regions.lock().slots[self.slot as usize].inside -= 1;
    }
}

impl Regions {
    /// What `key` names, for a peer that asks.
    pub(crate) fn find(&self, key: u64) -> Result<Found, ErrorKind> {
        let key = Key::from_wire(key).ok_or(ErrorKind::RemoteAccess)?;
        let state = self.lock();
        let slot = state.slots.get(key.slot as usize).ok_or(ErrorKind::RemoteAccess)?;
        if key.generation > slot.generation {
            return Err(ErrorKind::RemoteAccess);
        }
        match &slot.entry {
            // Not even its file is any business of peers.
            Some(entry) if entry.access.is_empty() => Err(ErrorKind::RemoteAccess),
            Some(entry) if key.generation == slot.generation && !entry.closed => Ok(Found {
                memory: entry.memory.clone(),
                access: entry.access,
                #[cfg(target_os = "linux")]
                shared: entry.shared,
            }),
            _ => Err(ErrorKind::Revoked),
        }
    }

    /// Goes inside `len` bytes of a region from `offset` on, on a peer's behalf.
    pub(crate) fn enter(
        &self,
        key: Key,
        need: Access,
        offset: u64,
        len: u64,
    ) -> Result<Inside<'_>, ErrorKind> {
        let found = self.find(key.to_wire())?;
        let fits = offset.checked_add(len).is_some_and(|end| end <= found.memory.len() as u64);
        // The processor, who moves staged bytes, cannot follow addresses of other memory.
        if !fits || !found.access.contains(need) || found.memory.kind() != MemoryKind::Host {
            return Err(ErrorKind::RemoteAccess);
        }
        let mut state = self.lock();
        let slot = &mut state.slots[key.slot as usize];
        // It may have been taken back between the two locks.
        if slot.generation != key.generation || slot.entry.as_ref().is_none_or(|entry| entry.closed) {
            return Err(ErrorKind::Revoked);
        }
        slot.inside += 1;
        let start = found.memory.as_ptr().wrapping_add(offset as usize);
        Ok(Inside { regions: self, slot: key.slot, start })
    }

    /// The region of a local key.
    pub(crate) fn local(&self, lkey: u64) -> Option<Local> {
        let key = Key::from_wire(lkey & !FAR)?;
        let state = self.lock();
        let slot = state.slots.get(key.slot as usize).filter(|slot| slot.generation == key.generation)?;
        let memory = Arc::clone(&slot.entry.as_ref()?.memory);
        Some(Local { kind: memory.kind(), start: memory.as_ptr() as u64, memory })
    }
}
