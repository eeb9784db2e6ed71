//! The local flushes ([`Flush`]) that a backend does before it reports arrivals.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::{Completions, Flush, Memory, MemoryKind, Result};

/// The [`Flush`]es of all memory that a device may write.
///
/// A backend whose device writes memory itself adds each memory that it registers. It calls
/// [`Flushes::flush_if_arrivals`] at the end of each poll, before the engine sees the arrivals.
#[derive(Default)]
pub struct Flushes {
    /// Whether `by_kind` is not empty.
    is_needed: AtomicBool,
    /// One flush for each kind of memory.
    by_kind: Mutex<Vec<(MemoryKind, Arc<dyn Flush>)>>,
}

impl Flushes {
    /// Adds the flush of `memory`, if it needs one. The caller calls this before any peer can write to the memory.
    ///
    /// # Errors
    /// Those of [`Memory::needed_flush`]: a reader could see stale bytes after the device has written.
    pub fn add(&self, memory: &dyn Memory) -> Result<()> {
        let Some(flush) = memory.needed_flush()? else { return Ok(()) };
        let mut by_kind = self.by_kind.lock().unwrap_or_else(PoisonError::into_inner);
        if by_kind.iter().all(|(kind, _)| *kind != memory.kind()) {
            by_kind.push((memory.kind(), flush));
        }
        // The polling thread sees this before the first arrival: no peer knows the memory yet.
        self.is_needed.store(true, Ordering::Release);
        Ok(())
    }

    /// Flushes if `polled` holds events.
    #[inline]
    pub fn flush_if_arrivals(&self, polled: &Completions) {
        if self.is_needed.load(Ordering::Acquire) && !polled.as_slice().is_empty() {
            self.flush();
        }
    }

    /// Flushes if any memory needs it, for a reader that has learned of bytes by another way than these events.
    #[inline]
    pub fn flush_if_needed(&self) {
        if self.is_needed.load(Ordering::Acquire) {
            self.flush();
        }
    }

    #[cold]
    fn flush(&self) {
        let by_kind = self.by_kind.lock().unwrap_or_else(PoisonError::into_inner);
        for (kind, flush) in &*by_kind {
            if let Err(why) = flush.flush() {
                tracing::error!(%why, ?kind, "a flush failed: readers may see stale bytes");
            }
        }
    }
}

impl std::fmt::Debug for Flushes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Flushes").field("is_needed", &self.is_needed).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;
    use crate::{Error, ErrorKind, Event, PeerSlot};

    /// Memory of the device with this number, with its flush, if it has one.
    struct DeviceMemory(u32, Option<Arc<Counted>>);

    #[derive(Default)]
    struct Counted(AtomicU32);

    impl Flush for Counted {
        fn flush(&self) -> Result<()> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    }

    // SAFETY: nobody follows the address.
    unsafe impl Memory for DeviceMemory {
        fn as_ptr(&self) -> *mut u8 {
            std::ptr::null_mut()
        }

        fn len(&self) -> usize {
            1
        }

        fn kind(&self) -> MemoryKind {
            MemoryKind::Cuda { device: self.0 }
        }

        fn needed_flush(&self) -> Result<Option<Arc<dyn Flush>>> {
            match &self.1 {
                Some(counted) => Ok(Some(Arc::clone(counted) as _)),
                None if self.0 == 0 => Ok(None),
                None => Err(Error::new(ErrorKind::Unsupported, "register", "no flush")),
            }
        }
    }

    #[test]
    fn flushes_once_for_each_device_and_only_before_arrivals() {
        let (flushes, first, second) = (Flushes::default(), Arc::default(), Arc::default());
        let mut polled = Completions::with_room(4);
        assert!(polled.push(Event::Imm { peer: PeerSlot(0), imm: 1 }).is_ok());
        flushes.add(&DeviceMemory(0, None)).unwrap();
        assert!(!flushes.is_needed.load(Ordering::Relaxed), "nothing to flush");
        for (device, counted) in [(1, &first), (1, &first), (2, &second)] {
            flushes.add(&DeviceMemory(device, Some(Arc::clone(counted)))).unwrap();
        }
        let counts = || [&first, &second].map(|counted: &Arc<Counted>| counted.0.load(Ordering::Relaxed));
        flushes.flush_if_arrivals(&Completions::with_room(4));
        assert_eq!(counts(), [0, 0]);
        flushes.flush_if_arrivals(&polled);
        assert_eq!(counts(), [1, 1]);
        assert_eq!(flushes.add(&DeviceMemory(3, None)).unwrap_err().kind(), ErrorKind::Unsupported);
    }
}
