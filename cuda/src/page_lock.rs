//! Page-locks host memory as long as a value lives.

use std::ffi::c_void;

use cudarc::driver::sys;
use multirail_spi::Result;

use crate::Device;
use crate::background::with_room;
use crate::driver::check;

/// The flags for cuMemHostRegister: copies of every GPU treat the memory as page-locked, and kernels reach it.
const FLAGS: u32 = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;

/// Keeps a range of host memory page-locked for all GPUs of this process. Dropping it waits until no GPU uses the
/// range; [`drop_in_background`](crate::drop_in_background) lets another thread wait.
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
