//! Host memory, page-locked while somebody holds on to it.

use std::ffi::c_void;

use cudarc::driver::sys;
use multirail_spi::Result;

use crate::Device;
use crate::driver::check;
use crate::reaper::with_room;

/// What cuMemHostRegister is asked for: every GPU's copies take it as page-locked, and kernels reach it.
const FLAGS: u32 = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;

/// Keeps a range of the host's memory page-locked for all GPUs of this process. Dropping it waits until no GPU
/// uses the range: [`let_go`](crate::let_go) has another thread wait.
pub struct PageLock {
    start: *mut c_void,
    device: Device,
}

// SAFETY: `start` is a number here; nothing is behind it for this value.
unsafe impl Send for PageLock {}
// SAFETY: as above.
unsafe impl Sync for PageLock {}

impl PageLock {
    /// Locks `len` bytes from `start` on, by way of `device`. 256 MiB took 13 ms.
    ///
    /// # Errors
    /// `Exhausted` where there are not enough to lock, the driver's for memory it cannot.
    ///
    /// # Safety
    /// The range stays mapped while the value lives. Where it is registered with a fabric, it was locked before,
    /// and stays so until the region is gone.
    pub unsafe fn new(device: &Device, start: *mut u8, len: usize) -> Result<Self> {
        let start = start.cast();
        with_room(|| {
            device.within("page-lock memory", || {
                // SAFETY: by the caller, until `drop` gives it back.
                let code = unsafe { sys::cuMemHostRegister_v2(start, len, FLAGS) };
                check("page-lock memory", &format!("{len} bytes of the host's"), code)
            })
        })?;
        Ok(Self { start, device: device.clone() })
    }

    /// The GPU by way of which it was locked.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

impl Drop for PageLock {
    fn drop(&mut self) {
        self.device.give_back_now("unlock memory", || {
            // SAFETY: locked in `new`, unlocked once, and mapped until after this.
            check("unlock memory", "it", unsafe { sys::cuMemHostUnregister(self.start) })
        });
    }
}
