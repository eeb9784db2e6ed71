//! The handle of a registered region, which the engine owns.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use multirail_spi::{MemoryRegion, RemoteKey, Result};

use super::Regions;
use crate::segment::lease_table::{DEVICE_MEMORY, RegionKey};

/// Dropping it deregisters the region. The memory stays allocated until no peer is inside.
pub(crate) struct RegionHandle {
    regions: Arc<Regions>,
    key: RegionKey,
    len: u64,
    /// The region is in device memory: the CPU cannot use its addresses.
    in_device_memory: bool,
    closed: AtomicBool,
    quiescent: AtomicBool,
    /// Keeps the domain open.
    _domain: Arc<dyn Any + Send + Sync>,
}

impl RegionHandle {
    /// The handle of a region that is in the table.
    pub(crate) fn new(
        regions: &Arc<Regions>,
        key: RegionKey,
        len: u64,
        in_device_memory: bool,
        domain: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self {
            regions: Arc::clone(regions),
            key,
            len,
            in_device_memory,
            closed: AtomicBool::new(false),
            quiescent: AtomicBool::new(false),
            _domain: domain,
        }
    }

    fn close(&self) {
        if !self.closed.swap(true, Ordering::AcqRel) {
            self.regions.close(self.key);
        }
    }
}

impl MemoryRegion for RegionHandle {
    fn lkey(&self) -> u64 {
        self.key.to_wire() | if self.in_device_memory { DEVICE_MEMORY } else { 0 }
    }

    fn key(&self) -> RemoteKey {
        RemoteKey { base: 0, key: self.key.to_wire(), len: self.len }
    }

    /// Local copies use the memory itself, which requests keep allocated.
    fn lkey_outlives_revoke(&self) -> bool {
        true
    }

    fn revoke(&self) -> Poll<Result<()>> {
        self.close();
        if !self.quiescent.load(Ordering::Acquire) {
            if !self.regions.is_quiescent(self.key) {
                return Poll::Pending;
            }
            self.quiescent.store(true, Ordering::Release);
        }
        Poll::Ready(Ok(()))
    }
}

impl Drop for RegionHandle {
    fn drop(&mut self) {
        self.close();
        self.regions.retire(self.key);
    }
}
