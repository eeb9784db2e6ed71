//! Registered regions of device memory, such as GPU memory, which the processor cannot access by its address.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use multirail_spi::{ErrorKind, Memory, MemoryKind, Result, Status};

use crate::status::{NO_STORE, NOT_REGISTERED};

/// A local key has the card's number in its lower 32 bits. The upper bits have the number of the device region, or 0
/// for a region that the processor can access. Bit 63 stays clear: it marks staged memory (`RemoteKey::STAGED`).
const SHIFT: u32 = u32::BITS;
const MOST: u32 = u32::MAX >> 1;

/// Whether the region of this local key is device memory.
#[inline]
pub(crate) fn is_device_memory(lkey: u64) -> bool {
    lkey >> SHIFT != 0
}

/// The device regions of a card, by their numbers.
#[derive(Default)]
pub(crate) struct DeviceRegions(Mutex<Numbered>);

#[derive(Default)]
struct Numbered {
    regions: HashMap<u32, DeviceRegion>,
    last: u32,
}

/// A device region. Only its owner can copy bytes into it.
#[derive(Clone)]
pub(crate) struct DeviceRegion {
    memory: Arc<dyn Memory>,
    has_store: bool,
}

impl DeviceRegions {
    /// Adds a region if it is device memory. Returns the local key with the number of the device region.
    pub(crate) fn add(&self, memory: &Arc<dyn Memory>, lkey: u32) -> u64 {
        if matches!(memory.kind(), MemoryKind::Host | MemoryKind::P2pmem) {
            return lkey.into();
        }
        let has_store = memory.store(0, &[]).is_some();
        let region = DeviceRegion { memory: Arc::clone(memory), has_store };
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let next = |last: u32| last % MOST + 1;
        let mut number = next(all.last);
        while all.regions.contains_key(&number) {
            number = next(number);
        }
        all.last = number;
        all.regions.insert(number, region);
        u64::from(number) << SHIFT | u64::from(lkey)
    }

    /// Removes the region of a local key, because its registration ends.
    pub(crate) fn remove(&self, lkey: u64) {
        if is_device_memory(lkey) {
            let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let removed = all.regions.remove(&((lkey >> SHIFT) as u32));
            // Dropping the owner's memory may take long, so the lock is released first.
            drop(all);
            drop(removed);
        }
    }

    /// The device region that a message for this local key is stored into. `None` if the processor can access the
    /// memory.
    ///
    /// # Errors
    /// The owner has no [`Memory::store`], or the region is not registered any more.
    pub(crate) fn to_receive_into(&self, lkey: u64) -> Result<Option<DeviceRegion>, Status> {
        if !is_device_memory(lkey) {
            return Ok(None);
        }
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match all.regions.get(&((lkey >> SHIFT) as u32)) {
            Some(region) if region.has_store => Ok(Some(region.clone())),
            Some(_) => Err(Status { kind: ErrorKind::InvalidRequest, code: NO_STORE }),
            None => Err(Status { kind: ErrorKind::Revoked, code: NOT_REGISTERED }),
        }
    }
}

impl DeviceRegion {
    /// Has the owner copy bytes to an address of the region. The caller has checked the range.
    pub(crate) fn store(&self, at: *mut u8, bytes: &[u8]) -> Result<(), ErrorKind> {
        let offset = (at as usize).wrapping_sub(self.memory.as_ptr() as usize);
        match self.memory.store(offset, bytes) {
            Some(Ok(())) => Ok(()),
            Some(Err(why)) => {
                tracing::warn!(%why, kind = ?self.memory.kind(), "the owner of a receive's memory did not copy the message into it");
                Err(why.kind())
            }
            None => Err(ErrorKind::InvalidRequest),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::without_provenance_mut;

    use multirail_spi::{Error, HostBuffer};

    use super::*;

    const START: usize = 1 << 40;

    /// A stand-in for GPU memory, at an unmapped address.
    struct Gpu {
        bytes: Option<Mutex<[u8; 8]>>,
    }

    // SAFETY: no code accesses the address.
    unsafe impl Memory for Gpu {
        fn as_ptr(&self) -> *mut u8 {
            without_provenance_mut(START)
        }

        fn len(&self) -> usize {
            8
        }

        fn kind(&self) -> MemoryKind {
            MemoryKind::Cuda { device: 0 }
        }

        fn store(&self, at: usize, bytes: &[u8]) -> Option<Result<()>> {
            let refused = || Error::new(ErrorKind::Io, "copy", "out of bounds");
            let mut all = self.bytes.as_ref()?.lock().unwrap();
            let place = all.get_mut(at..).and_then(|rest| rest.get_mut(..bytes.len()));
            Some(place.map(|place| place.copy_from_slice(bytes)).ok_or_else(refused))
        }
    }

    #[test]
    fn the_owner_of_a_device_region_stores() {
        let regions = DeviceRegions::default();
        let gpu = Arc::new(Gpu { bytes: Some(Mutex::new([0; 8])) });
        let memory: Arc<dyn Memory> = gpu.clone();
        let lkey = regions.add(&memory, 0xdead_beef);
        assert_eq!((lkey as u32, is_device_memory(lkey), lkey >> 63), (0xdead_beef, true, 0));
        let region = regions.to_receive_into(lkey).unwrap().unwrap();
        region.store(without_provenance_mut(START + 3), b"abc").unwrap();
        assert_eq!(*gpu.bytes.as_ref().unwrap().lock().unwrap(), *b"\0\0\0abc\0\0");
        assert_eq!(region.store(without_provenance_mut(START + 7), b"abc"), Err(ErrorKind::Io));
        // The card may have given the number to another region by then.
        regions.remove(lkey);
        let revoked = regions.to_receive_into(lkey).err().unwrap();
        assert_eq!(revoked.kind, ErrorKind::Revoked);
        assert_ne!(regions.add(&memory, 0xdead_beef), lkey);
    }

    #[test]
    fn without_a_store_nothing_is_received_there() {
        let regions = DeviceRegions::default();
        let memory: Arc<dyn Memory> = Arc::new(Gpu { bytes: None });
        let refused = regions.to_receive_into(regions.add(&memory, 7)).err().unwrap();
        assert_eq!(refused, Status { kind: ErrorKind::InvalidRequest, code: NO_STORE });
    }

    #[test]
    fn other_memory_has_no_device_region() {
        let regions = DeviceRegions::default();
        let memory: Arc<dyn Memory> = Arc::new(HostBuffer::new(8).unwrap());
        assert_eq!(regions.add(&memory, u32::MAX), u32::MAX.into());
        assert!(regions.to_receive_into(u32::MAX.into()).unwrap().is_none());
        regions.remove(u32::MAX.into());
    }
}
