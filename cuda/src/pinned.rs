//! Host memory that CUDA has page-locked.

use std::os::fd::BorrowedFd;

use cudarc::driver::sys;
use transport_core::{HostBuffer, Memory, Result};

use crate::Device;
use crate::driver::check;

/// What cuMemHostRegister is asked for: every GPU's copies take it as page-locked, and kernels can reach it.
const FLAGS: u32 = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;

/// A [`HostBuffer`] in page-locked memory: GPUs copy it without a detour, at the speed of their link. Peers
/// of this host can map it as any other.
pub struct PinnedBuffer {
    buffer: HostBuffer,
    device: Device,
}

impl PinnedBuffer {
    /// `len` zeroed bytes, at least one, page-locked for all GPUs of this process by way of `device`.
    ///
    /// # Errors
    /// `InvalidRequest` for no bytes, `Exhausted` where there are not enough to lock.
    pub fn new(device: &Device, len: usize) -> Result<Self> {
        let buffer = HostBuffer::new(len)?;
        device.within("page-lock memory", || {
            // SAFETY: the buffer is mapped, and stays so until it is unregistered in `drop`.
            let code = unsafe { sys::cuMemHostRegister_v2(buffer.as_ptr().cast(), len, FLAGS) };
            check("page-lock memory", &format!("{len} bytes of host memory"), code)
        })?;
        Ok(Self { buffer, device: device.clone() })
    }

    /// The GPU by way of which it was locked.
    pub fn device(&self) -> &Device {
        &self.device
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

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let unlocked = self.device.within("unlock memory", || {
            // SAFETY: registered in `new`, unregistered once, and mapped until after this.
            check("unlock memory", "it", unsafe { sys::cuMemHostUnregister(self.buffer.as_ptr().cast()) })
        });
        if let Err(why) = unlocked {
            tracing::warn!(%why, "memory stays page-locked");
        }
    }
}
