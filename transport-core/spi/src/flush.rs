//! Flushes that a backend owes before it reports arrivals.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::{Completions, Fence, Memory, MemoryKind, Result};

/// The [`Fence`]s of all memory that a device may write.
///
/// A backend whose device writes memory by itself adds each memory that it registers, and calls
/// [`Fences::flush_if_arrivals`] at the end of each poll, before the engine sees the arrivals.
#[derive(Default)]
pub struct Fences {
    any: AtomicBool,
    /// One for each kind of memory.
    all: Mutex<Vec<(MemoryKind, Arc<dyn Fence>)>>,
}

impl Fences {
    /// Adds the fence of `memory`, if it has one: peers' bytes may arrive there from now on.
    ///
    /// # Errors
    /// Those of [`Memory::fence`]: a reader could see stale bytes after the device has written.
    pub fn add(&self, memory: &dyn Memory) -> Result<()> {
        let Some(fence) = memory.fence()? else { return Ok(()) };
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        if all.iter().all(|(kind, _)| *kind != memory.kind()) {
            all.push((memory.kind(), fence));
        }
        // The polling thread sees it before a peer is told of the memory.
        self.any.store(true, Ordering::Release);
        Ok(())
    }

    /// Flushes if `polled` holds events.
    #[inline]
    pub fn flush_if_arrivals(&self, polled: &Completions) {
        if self.any.load(Ordering::Acquire) && !polled.as_slice().is_empty() {
            self.flush();
        }
    }

    #[cold]
    fn flush(&self) {
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        for (kind, fence) in &*all {
            if let Err(why) = fence.flush() {
                tracing::error!(%why, ?kind, "a reader may see stale bytes of what has arrived");
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
    use crate::{Error, ErrorKind, Event, PeerSlot};

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
        fences.flush_if_arrivals(&Completions::with_room(4));
        assert_eq!(counts(), [0, 0]);
        fences.flush_if_arrivals(&polled);
        assert_eq!(counts(), [1, 1]);
        assert_eq!(fences.add(&Said(3, None)).unwrap_err().kind(), ErrorKind::Unsupported);
    }
}
