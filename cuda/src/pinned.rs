//! Host memory that CUDA has page-locked.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use multirail_spi::{HostBuffer, Memory, Result};

use crate::{Device, PageLock, let_go};

/// A [`HostBuffer`] in page-locked memory: GPUs copy it without a detour, at the speed of their link. Peers
/// of this host can map it as any other.
pub struct PinnedBuffer {
    /// There until it is dropped.
    lock: Option<PageLock>,
    buffer: Arc<HostBuffer>,
    device: Device,
}

impl PinnedBuffer {
    /// `len` zeroed bytes, at least one, page-locked for all GPUs of this process by way of `device`.
    ///
    /// # Errors
    /// `InvalidRequest` for no bytes, `Exhausted` where there are not enough to lock.
    pub fn new(device: &Device, len: usize) -> Result<Self> {
        let buffer = HostBuffer::new(len)?;
        // SAFETY: the buffer is mapped until after the lock is gone.
        let lock = unsafe { PageLock::new(device, buffer.as_ptr(), len) }?;
        Ok(Self { lock: Some(lock), buffer: Arc::new(buffer), device: device.clone() })
    }

    /// The GPU by way of which it was locked.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // The lock goes before what it locks.
        let_go((self.lock.take(), Arc::clone(&self.buffer)));
    }
}

// SAFETY: the buffer's own promises; locking its pages moves nothing.
unsafe impl Memory for PinnedBuffer {
    fn as_ptr(&self) -> *mut u8 {
        self.buffer.as_ptr()
    }

    fn len(&self) -> usize {
        self.buffer.len()
    }

    fn shared_file(&self) -> Option<BorrowedFd<'_>> {
        self.buffer.shared_file()
    }
}
