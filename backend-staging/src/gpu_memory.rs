//! The GPU memory that the inner device did register. Its GPU copies staged bytes from and into it.
//!
//! If only the peer's region is staged, this process still copies a read's bytes from a slot into its own region.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;

use cuda::Reach;
use multirail_spi::{Memory, MemoryKind, MemoryRegion, RemoteKey, Result};

use crate::copies::MemoryLocation;

/// All GPU memory of a domain that the inner device registered, by its first address.
#[derive(Default)]
pub(crate) struct RegisteredGpuMemory(Mutex<BTreeMap<u64, GpuRange>>);

struct GpuRange {
    /// The last address.
    last: u64,
    /// The GPU, and how its copies reach the memory.
    location: MemoryLocation,
    /// The number of registrations that begin at the same address.
    registrations: usize,
}

impl RegisteredGpuMemory {
    /// Tracks a registration of the inner device while the returned value lives. Returns `region` itself if it is not
    /// GPU memory.
    pub(crate) fn track(
        self: &Arc<Self>,
        memory: &dyn Memory,
        region: Arc<dyn MemoryRegion>,
    ) -> Arc<dyn MemoryRegion> {
        let MemoryKind::Cuda { device } = memory.kind() else { return region };
        let start = memory.as_ptr() as u64;
        let last = start + (memory.len() as u64).saturating_sub(1);
        // `Reach::Driver` is safe for all GPU memory.
        let location = MemoryLocation::of(memory).unwrap_or(MemoryLocation::Gpu(device, Reach::Driver));
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let range = all.entry(start).or_insert(GpuRange { last, location, registrations: 0 });
        range.last = range.last.max(last);
        range.registrations += 1;
        Arc::new(TrackedRegion { start, memory: Arc::clone(self), region })
    }

    /// Where the registered memory at this address lies.
    pub(crate) fn locate(&self, address: u64) -> MemoryLocation {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match all.range(..=address).next_back() {
            Some((_, range)) if address <= range.last => range.location,
            _ => MemoryLocation::Host,
        }
    }
}

/// A registration of the inner device, tracked until it is dropped.
struct TrackedRegion {
    start: u64,
    memory: Arc<RegisteredGpuMemory>,
    region: Arc<dyn MemoryRegion>,
}

impl MemoryRegion for TrackedRegion {
    fn lkey(&self) -> u64 {
        self.region.lkey()
    }

    fn key(&self) -> RemoteKey {
        self.region.key()
    }

    fn staging_reason(&self) -> Option<&str> {
        self.region.staging_reason()
    }

    fn lkey_outlives_revoke(&self) -> bool {
        self.region.lkey_outlives_revoke()
    }

    fn revoke(&self) -> Poll<Result<()>> {
        self.region.revoke()
    }
}

impl Drop for TrackedRegion {
    fn drop(&mut self) {
        let mut all = self.memory.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(range) = all.get_mut(&self.start) {
            range.registrations -= 1;
            if range.registrations == 0 {
                all.remove(&self.start);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory with an address and a kind, which nothing accesses.
    struct FakeMemory(u64, MemoryKind);

    // SAFETY: nothing accesses the address.
    #[allow(unsafe_code, reason = "a stand-in for GPU memory")]
    unsafe impl Memory for FakeMemory {
        fn as_ptr(&self) -> *mut u8 {
            self.0 as *mut u8
        }

        fn len(&self) -> usize {
            4096
        }

        fn kind(&self) -> MemoryKind {
            self.1
        }
    }

    struct FakeRegion;

    impl MemoryRegion for FakeRegion {
        fn lkey(&self) -> u64 {
            7
        }

        fn key(&self) -> RemoteKey {
            RemoteKey { base: 0, key: 0, len: 4096 }
        }

        fn revoke(&self) -> Poll<Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[test]
    fn memory_is_known_while_a_registration_of_it_lives() {
        let memory = Arc::new(RegisteredGpuMemory::default());
        let track = |start, kind| memory.track(&FakeMemory(start, kind), Arc::new(FakeRegion));
        let gpu = MemoryLocation::Gpu(1, Reach::Driver);
        let _host = track(1 << 20, MemoryKind::Host);
        let (first, second) =
            (track(1 << 30, MemoryKind::Cuda { device: 1 }), track(1 << 30, MemoryKind::Cuda { device: 1 }));
        let at = |offset: u64| memory.locate((1 << 30) + offset);
        assert_eq!((at(0), at(4095), at(4096)), (gpu, gpu, MemoryLocation::Host));
        assert_eq!(memory.locate(1 << 20), MemoryLocation::Host);
        drop(first);
        assert_eq!((second.lkey(), at(1)), (7, gpu));
        drop(second);
        assert_eq!(at(1), MemoryLocation::Host);
    }
}
