//! A plain copy: what CUDA does by itself, for others to be measured against.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys;
use multirail_spi::{Error, ErrorKind, Memory, Result};

use crate::driver::check;
use crate::stream::Stream;
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
    device: Device,
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
            let _ = from.device().reaches(to.device()) && to.device().reaches(from.device());
        }
        // The source's GPU pushes; towards a GPU from the host it is the target's.
        let device = match (&from, &to) {
            (End::Gpu(memory), _) | (End::Host(_), End::Gpu(memory)) => memory.device(),
            (End::Host(memory), End::Host(_)) => memory.device(),
        };
        Ok(Self { stream: device.stream()?, device: device.clone(), from, to })
    }

    /// Copies everything once; the bytes are there when it returns.
    pub fn run(&self) -> Result<()> {
        let (from, to) = (self.from.range(), self.to.range());
        self.device.within(OPERATION, || {
            // SAFETY: both ranges are whole memories, of one length, that live as long as `self`; nobody has
            // references into them. The stream is this value's.
            unsafe {
                self.stream.copy(to.start as u64, from.start as u64, to.len() as u64)?;
                check(OPERATION, "to wait for it", sys::cuStreamSynchronize(self.stream.raw()))
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
