//! Flushes that are due before arrivals are reported.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::Completions;
use crate::{Fence, Memory, MemoryKind, Result};

/// The [`Fence`]s of the memory that a card was given: a backend whose device writes by itself adds each memory
/// that it registers, and settles at the end of each poll, before anybody hears of what has arrived.
#[derive(Default)]
pub struct Fences {
    any: AtomicBool,
    /// One for each place that memory is of.
    all: Mutex<Vec<(MemoryKind, Arc<dyn Fence>)>>,
}

impl Fences {
    /// From now on what arrives may be in that memory.
    ///
    /// # Errors
    /// [`Memory::fence`]'s: bytes that a card wrote there could be read stale.
    pub fn add(&self, memory: &dyn Memory) -> Result<()> {
        let Some(fence) = memory.fence()? else { return Ok(()) };
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        if all.iter().all(|(kind, _)| *kind != memory.kind()) {
            all.push((memory.kind(), fence));
        }
        // Who polls from now on sees it: before a peer is told of the memory.
        self.any.store(true, Ordering::Release);
        Ok(())
    }

    /// Flushes if there are arrivals among what was polled.
    #[inline]
    pub fn settle(&self, polled: &Completions) {
        if self.any.load(Ordering::Acquire) && !polled.as_slice().is_empty() {
            self.flush();
        }
    }

    #[cold]
    fn flush(&self) {
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        for (kind, fence) in &*all {
            if let Err(why) = fence.flush() {
                tracing::error!(%why, ?kind, "what has arrived may be read stale");
            }
        }
    }
}

impl std::fmt::Debug for Fences {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fences").field("any", &self.any).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;
    use crate::{Error, ErrorKind};
    use crate::{Event, PeerSlot};

    /// Memory of a device that counts its flushes, or has none.
    struct Said(u32, Option<Arc<Counted>>);

    #[derive(Default)]
    struct Counted(AtomicU32);

    impl Fence for Counted {
        fn flush(&self) -> Result<()> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    }

    // SAFETY: nobody follows the address.
    unsafe impl Memory for Said {
        fn as_ptr(&self) -> *mut u8 {
            std::ptr::null_mut()
        }

        fn len(&self) -> usize {
            1
        }

        fn kind(&self) -> MemoryKind {
            MemoryKind::Cuda { device: self.0 }
        }

        fn fence(&self) -> Result<Option<Arc<dyn Fence>>> {
            match &self.1 {
                Some(counted) => Ok(Some(Arc::clone(counted) as _)),
                None if self.0 == 0 => Ok(None),
                None => Err(Error::new(ErrorKind::Unsupported, "register", "no flush")),
            }
        }
    }

    #[test]
    fn once_for_each_device_and_only_before_arrivals() {
        let (fences, first, second) = (Fences::default(), Arc::default(), Arc::default());
        let mut polled = Completions::with_room(4);
        assert!(polled.push(Event::Imm { peer: PeerSlot(0), imm: 1 }).is_ok());
        fences.add(&Said(0, None)).unwrap();
        assert!(!fences.any.load(Ordering::Relaxed), "nothing to flush");
        for (device, counted) in [(1, &first), (1, &first), (2, &second)] {
            fences.add(&Said(device, Some(Arc::clone(counted)))).unwrap();
        }
        let counts = || [&first, &second].map(|counted: &Arc<Counted>| counted.0.load(Ordering::Relaxed));
        fences.settle(&Completions::with_room(4));
        assert_eq!(counts(), [0, 0]);
        fences.settle(&polled);
        assert_eq!(counts(), [1, 1]);
        assert_eq!(fences.add(&Said(3, None)).unwrap_err().kind(), ErrorKind::Unsupported);
    }
}
