//! Staged regions of this side: who may touch them, and who is at it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;

use cuda::{Device, Reach};
use multirail_spi::{Access, Error, ErrorKind, KeyMaterial, Memory, MemoryKind, MemoryRegion, Result};

/// All of a domain, by key.
#[derive(Default)]
pub(crate) struct Regions(Mutex<HashMap<u64, Arc<Entry>>>);

pub(crate) struct Entry {
    key: u64,
    memory: Arc<dyn Memory>,
    pub place: Place,
    start: u64,
    access: Access,
    /// Peers' copies under way.
    inside: AtomicU32,
    is_revoked: AtomicBool,
}

/// Who copies from memory, and into it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// The processor.
    Host,
    /// A GPU, by CUDA's ordinal.
    Gpu(u32, Reach),
}

impl Place {
    /// Of a region's memory.
    fn of(memory: &dyn Memory) -> Result<Self> {
        let MemoryKind::Cuda { device } = memory.kind() else { return Ok(Self::Host) };
        let device = Device::open(device)?;
        let reach = Reach::of_gpu(&device, &device, memory.as_ptr() as u64, memory.len() as u64);
        let why =
            || Error::new(ErrorKind::Unsupported, "register", "its own GPU has no leave to use this memory");
        Ok(Self::Gpu(device.ordinal(), reach.ok_or_else(why)?))
    }
}

/// The right to copy between a range of a region and a slot: the region is not quiet while it lives.
pub(crate) struct Inside {
    entry: Arc<Entry>,
    pub start: *mut u8,
}

// SAFETY: an address; who may follow it is `Inside`'s holder, wherever it is.
unsafe impl Send for Inside {}

impl Inside {
    pub(crate) fn place(&self) -> Place {
        self.entry.place
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.entry.inside.fetch_sub(1, SeqCst);
    }
}

impl Regions {
    /// Lets peers touch `memory` as `access` says; `why` it is staged is for people.
    pub(crate) fn add(
        self: &Arc<Self>,
        memory: Arc<dyn Memory>,
        access: Access,
        why: &str,
    ) -> Result<Registered> {
        let place = Place::of(&*memory)?;
        let mut bytes = [0; 8];
        let none = |error| Error::new(ErrorKind::Io, "register", format!("no random numbers: {error}"));
        let start = memory.as_ptr() as u64;
        loop {
            getrandom::fill(&mut bytes).map_err(none)?;
            // Nobody guesses it, and it is no lkey of anybody else's once the bit is set.
            let key = u64::from_ne_bytes(bytes) & !KeyMaterial::STAGED;
            let (inside, is_revoked) = (AtomicU32::new(0), AtomicBool::new(false));
            let entry = Arc::new(Entry {
                key,
                memory: Arc::clone(&memory),
                place,
                start,
                access,
                inside,
                is_revoked,
            });
            let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if let std::collections::hash_map::Entry::Vacant(free) = all.entry(key) {
                free.insert(Arc::clone(&entry));
                let why = format!("staged through the host's memory: {why}");
                return Ok(Registered { entry, why, regions: Arc::clone(self) });
            }
        }
    }

    /// The region of a local key.
    pub(crate) fn local(&self, lkey: u64) -> Option<Arc<Entry>> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(&(lkey & !KeyMaterial::STAGED)).filter(|_| lkey & KeyMaterial::STAGED != 0).cloned()
    }

    /// Lets a peer touch `len` bytes from `offset` on, if it may.
    pub(crate) fn enter(&self, key: u64, need: Access, offset: u64, len: u64) -> Result<Inside, ErrorKind> {
        let entry = {
            let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(all.get(&key).ok_or(ErrorKind::RemoteAccess)?)
        };
        let is_within = offset.checked_add(len).is_some_and(|end| end <= entry.memory.len() as u64);
        if !entry.access.contains(need) || !is_within {
            return Err(ErrorKind::RemoteAccess);
        }
        // In before the look: `revoke` does it the other way round, so that one of the two sees the other.
        entry.inside.fetch_add(1, SeqCst);
        let start = (entry.start + offset) as *mut u8;
        let inside = Inside { entry, start };
        if inside.entry.is_revoked.load(SeqCst) { Err(ErrorKind::Revoked) } else { Ok(inside) }
    }
}

/// A staged registration.
pub(crate) struct Registered {
    entry: Arc<Entry>,
    /// For people.
    why: String,
    regions: Arc<Regions>,
}

impl MemoryRegion for Registered {
    fn lkey(&self) -> u64 {
        self.entry.key | KeyMaterial::STAGED
    }

    fn key(&self) -> KeyMaterial {
        KeyMaterial { base: KeyMaterial::STAGED, key: self.entry.key, len: self.entry.memory.len() as u64 }
    }

    fn staging_reason(&self) -> Option<&str> {
        Some(&self.why)
    }

    /// Copies of this side hold the entry.
    fn lkey_outlives_revoke(&self) -> bool {
        true
    }

    fn revoke(&self) -> Poll<Result<()>> {
        self.entry.is_revoked.store(true, SeqCst);
        if self.entry.inside.load(SeqCst) == 0 { Poll::Ready(Ok(())) } else { Poll::Pending }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // Who is inside keeps the memory.
        self.entry.is_revoked.store(true, SeqCst);
        self.regions.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.entry.key);
    }
}

#[cfg(test)]
mod tests {
    use multirail_spi::HostBuffer;

    use super::*;

    #[test]
    fn a_region_is_quiet_once_nobody_is_inside() {
        let regions = Arc::new(Regions::default());
        let memory = Arc::new(HostBuffer::new(4096).unwrap());
        let staged = regions.add(memory, Access::REMOTE_WRITE, "a test").unwrap();
        let key = staged.key();
        assert!(key.is_staged() && regions.local(staged.lkey()).is_some());
        assert!(regions.local(key.key).is_none(), "a peer's key is no local one");
        let enter = |need, offset, len| regions.enter(key.key, need, offset, len).map(|_| ());
        assert_eq!(enter(Access::REMOTE_WRITE, 4000, 96), Ok(()));
        for (need, offset, len) in [
            (Access::REMOTE_WRITE, 4000, 97),
            (Access::REMOTE_WRITE, u64::MAX, 2),
            (Access::REMOTE_READ, 0, 1),
        ] {
            assert_eq!(enter(need, offset, len), Err(ErrorKind::RemoteAccess));
        }
        let inside =
            regions.enter(key.key, Access::REMOTE_WRITE, 0, 1).unwrap_or_else(|why| panic!("{why:?}"));
        assert!(staged.revoke().is_pending());
        assert_eq!(enter(Access::REMOTE_WRITE, 0, 1), Err(ErrorKind::Revoked));
        drop(inside);
        assert!(staged.revoke().is_ready());
        drop(staged);
        assert_eq!(enter(Access::REMOTE_WRITE, 0, 1), Err(ErrorKind::RemoteAccess));
    }
}
