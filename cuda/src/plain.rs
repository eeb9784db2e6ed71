//! A plain copy: what CUDA does by itself, for others to be measured against.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};
use transport_core::{Error, ErrorKind, Memory, Result};

use crate::driver::check;
use crate::{CudaMemory, Device, PinnedBuffer};

const OPERATION: &str = "copy plainly";

/// One contiguous cuMemcpyAsync between two memories on a stream of its own, and the wait for it. It allocates
/// nothing when it runs.
///
/// Between GPUs it goes by their peer access, which [`PlainCopy::new`] turns on; where they have none, by the
/// way that the driver takes then, through the host.
pub struct PlainCopy {
    stream: Stream,
    from: End,
    to: End,
}

/// One side of a plain copy.
#[derive(Clone)]
pub enum End {
    /// A GPU's memory.
    Gpu(Arc<CudaMemory>),
    /// Page-locked memory of the host.
    Host(Arc<PinnedBuffer>),
}

impl PlainCopy {
    /// A copy of all of `from` to all of `to`.
    ///
    /// # Errors
    /// `InvalidRequest` for memories of different lengths, or that overlap.
    pub fn new(from: impl Into<End>, to: impl Into<End>) -> Result<Self> {
        let (from, to) = (from.into(), to.into());
        let (here, there) = (from.range(), to.range());
        if here.len() != there.len() {
            let why = format!("{} bytes to {}: give memories of one length", here.len(), there.len());
            return Err(Error::new(ErrorKind::InvalidRequest, OPERATION, why));
        }
        // Addresses are unique over the host and all GPUs (CUDA driver API, "Unified Addressing").
        if here.start < there.end && there.start < here.end {
            let why = "source and target overlap: give two memories";
            return Err(Error::new(ErrorKind::InvalidRequest, OPERATION, why));
        }
        if let (End::Gpu(from), End::Gpu(to)) = (&from, &to) {
            reach(from.device(), to.device())?;
        }
        // The source's GPU pushes; towards a GPU from the host it is the target's.
        let device = match (&from, &to) {
            (End::Gpu(memory), _) | (End::Host(_), End::Gpu(memory)) => memory.device(),
            (End::Host(memory), End::Host(_)) => memory.device(),
        };
        Ok(Self { stream: Stream::new(device)?, from, to })
    }

    /// Copies everything once; the bytes are there when it returns.
    pub fn run(&self) -> Result<()> {
        let (from, to) = (self.from.range(), self.to.range());
        self.stream.device.within(OPERATION, || {
            // SAFETY: both ranges are whole memories, of one length, that live as long as `self`; nobody has
            // references into them. The stream is this value's.
            unsafe {
                let code = sys::cuMemcpyAsync(to.start as u64, from.start as u64, to.len(), self.stream.raw);
                check(OPERATION, "the copy", code)?;
                check(OPERATION, "to wait for it", sys::cuStreamSynchronize(self.stream.raw))
            }
        })
    }
}

impl From<Arc<CudaMemory>> for End {
    fn from(memory: Arc<CudaMemory>) -> Self {
        Self::Gpu(memory)
    }
}

impl From<Arc<PinnedBuffer>> for End {
    fn from(memory: Arc<PinnedBuffer>) -> Self {
        Self::Host(memory)
    }
}

impl End {
    fn range(&self) -> Range<usize> {
        let (start, len) = match self {
            Self::Gpu(memory) => (memory.as_ptr(), memory.len()),
            Self::Host(memory) => (memory.as_ptr(), memory.len()),
        };
        start as usize..start as usize + len
    }
}

/// A stream that waits for nobody else's.
struct Stream {
    raw: sys::CUstream,
    device: Device,
}

// SAFETY: streams may be used from any thread, by several at once (CUDA driver API, "Stream Management").
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    fn new(device: &Device) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        device.within(OPERATION, || {
            let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
            // SAFETY: the context is current; the driver writes the stream.
            check(OPERATION, "a stream", unsafe { sys::cuStreamCreate(&raw mut raw, flags) })
        })?;
        Ok(Self { raw, device: device.clone() })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let destroyed = self.device.within(OPERATION, || {
            // SAFETY: created in `new`; `run` has waited for all that was on it.
            check(OPERATION, "to end a stream", unsafe { sys::cuStreamDestroy_v2(self.raw) })
        });
        if let Err(why) = destroyed {
            tracing::warn!(%why, "a stream is left");
        }
    }
}

/// Lets two GPUs access each other's memory, if they can.
fn reach(one: &Device, other: &Device) -> Result<()> {
    if one.ordinal() == other.ordinal() {
        return Ok(());
    }
    for (from, to) in [(one, other), (other, one)] {
        let (number, context) = current(to)?;
        from.within(OPERATION, || {
            let (mut own, mut can) = (0, 0);
            // SAFETY: the context is current, the other's is kept by its device; numbers are written.
            let code = unsafe {
                check(OPERATION, "the current GPU", sys::cuCtxGetDevice(&raw mut own))?;
                let code = sys::cuDeviceCanAccessPeer(&raw mut can, own, number);
                check(OPERATION, "whether GPUs reach each other", code)?;
                match can {
                    0 => return Ok(()),
                    _ => sys::cuCtxEnablePeerAccess(context, 0),
                }
            };
            match code {
                CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
                code => check(OPERATION, "peer access", code),
            }
        })?;
    }
    Ok(())
}

/// A GPU's number and context.
fn current(device: &Device) -> Result<(sys::CUdevice, sys::CUcontext)> {
    let (mut number, mut context) = (0, std::ptr::null_mut());
    device.within(OPERATION, || {
        // SAFETY: the context is current; one value each is written.
        unsafe {
            check(OPERATION, "the current GPU", sys::cuCtxGetDevice(&raw mut number))?;
            check(OPERATION, "the current context", sys::cuCtxGetCurrent(&raw mut context))
        }
    })?;
    Ok((number, context))
}
