//! A registration as its owner holds it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use multirail_spi::{KeyMaterial, MemoryRegion, Result};

use crate::domain::Shared;
use crate::gpu::FAR;
use crate::region::Key;

/// Dropping it deregisters; the memory lives on until no peer is inside.
pub(crate) struct Registration {
    shared: Arc<Shared>,
    key: Key,
    len: u64,
    /// The processor cannot follow its addresses.
    far: bool,
    closed: AtomicBool,
    quiet: AtomicBool,
}

impl Registration {
    /// For a region that is in the table.
    pub(crate) fn new(shared: Arc<Shared>, key: Key, len: u64, far: bool) -> Self {
        Self { shared, key, len, far, closed: AtomicBool::new(false), quiet: AtomicBool::new(false) }
    }

    fn close(&self) {
        if !self.closed.swap(true, Ordering::AcqRel) {
            self.shared.core.regions.close(self.key);
        }
    }
}

impl MemoryRegion for Registration {
    fn lkey(&self) -> u64 {
        self.key.to_wire() | if self.far { FAR } else { 0 }
    }

    fn key(&self) -> KeyMaterial {
        KeyMaterial { base: 0, key: self.key.to_wire(), len: self.len }
    }

    /// Copies of this side go by the memory itself, which requests hold.
    fn lkey_outlives_revoke(&self) -> bool {
        true
    }

    fn revoke(&self) -> Poll<Result<()>> {
        self.close();
        if !self.quiet.load(Ordering::Acquire) {
            if !self.shared.core.regions.is_quiet(self.key) {
                return Poll::Pending;
            }
            self.quiet.store(true, Ordering::Release);
        }
        Poll::Ready(Ok(()))
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.close();
        self.shared.core.regions.bury(self.key);
    }
}
