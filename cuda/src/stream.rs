//! A stream: a queue of work of one GPU.

use cudarc::driver::sys::{self, CUdeviceptr};
use multirail_spi::{ErrorKind, Result};

use crate::driver::{check, in_context};

/// A stream that does not wait for the work of other streams. It belongs to a device, but does not keep it. Queued work
/// still runs after the stream is dropped.
pub(crate) struct Stream(sys::CUstream);

// SAFETY: streams may be used from any thread (CUDA driver API, "Stream Management").
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Opens a stream in a device's context.
    pub fn new(context: sys::CUcontext) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        in_context(context, "open a stream", || {
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            // SAFETY: the context is current; the call writes one handle.
            check("open a stream", "a stream", unsafe { sys::cuStreamCreate(&raw mut raw, flags) })
        })?;
        Ok(Self(raw))
    }

    pub fn raw(&self) -> sys::CUstream {
        self.0
    }

    /// Queues one copy. The GPU's context is current.
    ///
    /// # Safety
    /// Both ranges stay until the copy is done.
    pub unsafe fn copy(&self, to: CUdeviceptr, from: CUdeviceptr, len: u64) -> Result<()> {
        // SAFETY: by the caller.
        check("copy", "the copy", unsafe { sys::cuMemcpyAsync(to, from, len as usize, self.0) })
    }

    /// Copies, and waits for the copy and all work that was queued before. The GPU's context is current.
    ///
    /// # Safety
    /// Both ranges stay during the call.
    pub unsafe fn copy_now(&self, to: CUdeviceptr, from: CUdeviceptr, len: u64) -> Result<()> {
        // SAFETY: by the caller; the call below waits.
        unsafe { self.copy(to, from, len) }?;
        self.wait()
    }

    /// Zeroes bytes, and waits for that and all work that was queued before. The GPU's context is current.
    ///
    /// # Safety
    /// The range is memory of the GPU, and stays during the call.
    pub unsafe fn zero_now(&self, start: CUdeviceptr, len: u64) -> Result<()> {
        // SAFETY: by the caller; the call below waits.
        let code = unsafe { sys::cuMemsetD8Async(start, 0, len as usize, self.0) };
        check("zero GPU memory", "to zero it", code)?;
        self.wait()
    }

    /// Waits for all queued work, by polling.
    pub fn wait(&self) -> Result<()> {
        loop {
            match self.is_done() {
                Ok(true) => return Ok(()),
                Err(why) if why.kind() == ErrorKind::DeviceLost => return Err(why),
                // Any other error says nothing about the queued work, which goes on.
                _ => std::hint::spin_loop(),
            }
        }
    }

    /// Queues the write of a word. The GPU writes it once all work before it is done and visible to the whole system.
    /// The GPU's context is current.
    ///
    /// # Safety
    /// The word stays allocated until it is written.
    pub unsafe fn write(&self, word: CUdeviceptr, value: u32) -> Result<()> {
        let flags = sys::CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        // SAFETY: by the caller.
        check("copy", "the write of the completion word", unsafe {
            sys::cuStreamWriteValue32_v2(self.0, word, value, flags)
        })
    }

    /// Whether all queued work is done.
    ///
    /// # Errors
    /// The error of the queued work or of the GPU, mostly `DeviceLost`.
    pub fn is_done(&self) -> Result<bool> {
        // SAFETY: the stream is open.
        match unsafe { sys::cuStreamQuery(self.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check("copy", "queued work", code).map(|()| true),
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: opened by `new`. Queued work still ends. A destructor cannot report an error.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.0) };
    }
}
