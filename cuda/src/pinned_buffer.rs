//! Host memory that is page-locked for GPUs.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use multirail_spi::{HostBuffer, Memory, Result};

use crate::{Device, PageLock, drop_in_background};

/// A [`HostBuffer`] in page-locked memory: GPUs copy it directly, at the speed of their link. Other processes of this
/// host can map it like any host buffer.
pub struct PinnedBuffer {
    /// `Some` until the buffer is dropped.
    lock: Option<PageLock>,
    buffer: Arc<HostBuffer>,
    device: Device,
}

impl PinnedBuffer {
    /// Allocates `len` zeroed bytes, and page-locks them in the context of `device`, for all GPUs of this process.
    ///
    /// # Errors
    /// `InvalidRequest` if `len` is 0, `Exhausted` if so much memory cannot be locked.
    pub fn new(device: &Device, len: usize) -> Result<Self> {
        let buffer = HostBuffer::new(len)?;
        // SAFETY: the buffer stays mapped until the lock is dropped.
        let lock = unsafe { PageLock::new(device, buffer.as_ptr(), len) }?;
        Ok(Self { lock: Some(lock), buffer: Arc::new(buffer), device: device.clone() })
    }

    /// The GPU in whose context the buffer was locked.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // A tuple's fields are dropped in order: the lock before the memory.
        drop_in_background((self.lock.take(), Arc::clone(&self.buffer)));
    }
}

// SAFETY: all methods return what the buffer returns, which keeps this contract itself. Locking its pages moves
// nothing.
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
