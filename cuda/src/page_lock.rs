//! Page-locks host memory as long as a value lives.

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use cudarc::driver::sys;
use multirail_spi::{HostBuffer, Memory, Result};

use crate::background::with_room;
use crate::driver::check;
use crate::{Device, drop_in_background};

/// The flags for cuMemHostRegister: copies of every GPU treat the memory as page-locked, and kernels reach it.
const FLAGS: u32 = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;

/// Keeps a range of host memory page-locked for all GPUs of this process. Dropping it waits until no GPU uses the
/// range; [`drop_in_background`] lets another thread wait.
pub struct PageLock {
    start: *mut c_void,
    device: Device,
}

// SAFETY: `start` is only used as a number; the value does not access the memory.
unsafe impl Send for PageLock {}
// SAFETY: as above.
unsafe impl Sync for PageLock {}

impl PageLock {
    /// Locks `len` bytes from `start` on, in the context of `device`. 256 MiB took 13 ms.
    ///
    /// # Errors
    /// `Exhausted` if so much memory cannot be locked; the driver's error for memory that it cannot lock.
    ///
    /// # Safety
    /// The range stays mapped while the value lives. If the range is registered with a fabric, it is locked before
    /// that, and stays locked until the region is dropped.
    pub unsafe fn new(device: &Device, start: *mut u8, len: usize) -> Result<Self> {
        let start = start.cast();
        with_room(|| {
            device.within("page-lock memory", || {
                // SAFETY: by the caller, until `drop` unlocks the range.
                let code = unsafe { sys::cuMemHostRegister_v2(start, len, FLAGS) };
                check("page-lock memory", &format!("to lock {len} bytes of host memory"), code)
            })
        })?;
        Ok(Self { start, device: device.clone() })
    }

    /// The GPU in whose context the range was locked.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

impl Drop for PageLock {
    fn drop(&mut self) {
        self.device.free_now("unlock memory", || {
            // SAFETY: locked in `new`, unlocked once, and mapped until after this.
            check("unlock memory", "to unlock it", unsafe { sys::cuMemHostUnregister(self.start) })
        });
    }
}

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
