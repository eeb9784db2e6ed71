//! A queue of work of one GPU.

use cudarc::driver::sys::{self, CUdeviceptr};
use multirail_spi::{ErrorKind, Result};

use crate::context::within;
use crate::driver::check;

/// A stream of our own, which waits for no other. It belongs to a device, which it does not keep. Dropping it
/// lets its work end by itself.
pub(crate) struct Stream(sys::CUstream);

// SAFETY: streams may be used from any thread (CUDA driver API, "Stream Management").
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// One in a device's context.
    pub fn new(context: sys::CUcontext) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        within(context, "open a stream", || {
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            // SAFETY: the context is current; it writes one handle.
            check("open a stream", "a stream", unsafe { sys::cuStreamCreate(&raw mut raw, flags) })
        })?;
        Ok(Self(raw))
    }

    pub fn raw(&self) -> sys::CUstream {
        self.0
    }

    /// Queues one copy. Its GPU's context is current.
    ///
    /// # Safety
    /// Both ends stay until it is done.
    pub unsafe fn copy(&self, to: CUdeviceptr, from: CUdeviceptr, len: u64) -> Result<()> {
        // SAFETY: by the caller.
        check("copy", "the copy", unsafe { sys::cuMemcpyAsync(to, from, len as usize, self.0) })
    }

    /// Copies, and waits for it and all that was queued before. Its GPU's context is current.
    ///
    /// # Safety
    /// Both ends stay through the call.
    pub unsafe fn copy_now(&self, to: CUdeviceptr, from: CUdeviceptr, len: u64) -> Result<()> {
        // SAFETY: by the caller; it is waited for.
        unsafe { self.copy(to, from, len) }?;
        self.wait()
    }

    /// Zeroes, and waits for it and all that was queued before. Its GPU's context is current.
    ///
    /// # Safety
    /// The range is memory of its GPU, and stays through the call.
    pub unsafe fn zero_now(&self, start: CUdeviceptr, len: u64) -> Result<()> {
        // SAFETY: by the caller; it is waited for.
        let code = unsafe { sys::cuMemsetD8Async(start, 0, len as usize, self.0) };
        check("zero GPU memory", "to zero it", code)?;
        self.wait()
    }

    /// Waits for all that was queued, by looking.
    pub fn wait(&self) -> Result<()> {
        loop {
            match self.is_done() {
                Ok(true) => return Ok(()),
                Err(why) if why.kind() == ErrorKind::DeviceLost => return Err(why),
                // Any other refusal says nothing of the work, which goes on.
                _ => std::hint::spin_loop(),
            }
        }
    }

    /// Queues the writing of a word, once all before it is done and visible to everyone. Its GPU's context
    /// is current.
    ///
    /// # Safety
    /// The word stays until it is written.
    pub unsafe fn write(&self, word: CUdeviceptr, value: u32) -> Result<()> {
        let flags = sys::CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        // SAFETY: by the caller.
        check("copy", "to tell of its end", unsafe {
            sys::cuStreamWriteValue32_v2(self.0, word, value, flags)
        })
    }

    /// Whether all that was queued is done.
    ///
    /// # Errors
    /// What became of it, or of the GPU: `DeviceLost`, most likely.
    pub fn is_done(&self) -> Result<bool> {
        // SAFETY: the stream is open.
        match unsafe { sys::cuStreamQuery(self.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check("copy", "what was queued", code).map(|()| true),
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: opened by `new`. What is queued still ends; an error has no one left to hear it.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.0) };
    }
}
