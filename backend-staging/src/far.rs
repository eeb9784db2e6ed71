//! GPU memory that the card takes: where it is, for what was read into a slot and belongs there.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;

use cuda::Reach;
use multirail_spi::{KeyMaterial, Memory, MemoryKind, MemoryRegion, Result};

use crate::region::Place;

/// All of a domain: the last byte and the GPU, and how many have registered it, by the first byte.
#[derive(Default)]
pub(crate) struct Far(Mutex<BTreeMap<u64, (u64, u32, usize)>>);

impl Far {
    /// Remembers a registration of the card's, if it is of a GPU's memory.
    pub(crate) fn note(
        self: &Arc<Self>,
        memory: &dyn Memory,
        region: Arc<dyn MemoryRegion>,
    ) -> Arc<dyn MemoryRegion> {
        let MemoryKind::Cuda { device } = memory.kind() else { return region };
        let start = memory.as_ptr() as u64;
        let last = start + (memory.len() as u64).saturating_sub(1);
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = all.entry(start).or_insert((last, device, 0));
        (known.0, known.2) = (known.0.max(last), known.2 + 1);
        Arc::new(Noted { start, far: Arc::clone(self), region })
    }

    /// Whose memory an address is that somebody has registered.
    pub(crate) fn place(&self, address: u64) -> Place {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match all.range(..=address).next_back() {
            // What a kernel reaches was not asked; any copy of the driver's reaches it.
            Some((_, (last, device, _))) if address <= *last => Place::Gpu(*device, Reach::Driver),
            _ => Place::Host,
        }
    }
}

/// A registration of the card's, noted while it lives.
struct Noted {
    start: u64,
    far: Arc<Far>,
    region: Arc<dyn MemoryRegion>,
}

impl MemoryRegion for Noted {
    fn lkey(&self) -> u64 {
        self.region.lkey()
    }

    fn key(&self) -> KeyMaterial {
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

impl Drop for Noted {
    fn drop(&mut self) {
        let mut all = self.far.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = all.get_mut(&self.start) {
            known.2 -= 1;
            if known.2 == 0 {
                all.remove(&self.start);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory that nobody touches.
    struct Said(u64, MemoryKind);

    // SAFETY: nobody follows the address.
    #[allow(unsafe_code, reason = "a stand-in for GPU memory")]
    unsafe impl Memory for Said {
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

    struct Nothing;

    impl MemoryRegion for Nothing {
        fn lkey(&self) -> u64 {
            7
        }

        fn key(&self) -> KeyMaterial {
            KeyMaterial { base: 0, key: 0, len: 4096 }
        }

        fn revoke(&self) -> Poll<Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[test]
    fn known_while_somebody_has_registered_it() {
        let far = Arc::new(Far::default());
        let note = |at, kind| far.note(&Said(at, kind), Arc::new(Nothing));
        let gpu = Place::Gpu(1, Reach::Driver);
        let _host = note(1 << 20, MemoryKind::Host);
        let (first, second) =
            (note(1 << 30, MemoryKind::Cuda { device: 1 }), note(1 << 30, MemoryKind::Cuda { device: 1 }));
        let at = |offset: u64| far.place((1 << 30) + offset);
        assert_eq!((at(0), at(4095), at(4096)), (gpu, gpu, Place::Host));
        assert_eq!(far.place(1 << 20), Place::Host);
        drop(first);
        assert_eq!((second.lkey(), at(1)), (7, gpu));
        drop(second);
        assert_eq!(at(1), Place::Host);
    }
}
