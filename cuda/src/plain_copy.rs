//! One copy by CUDA alone: the upper limit with which benchmarks compare.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys;
use multirail_spi::{Error, ErrorKind, Memory, Result};

use crate::driver::check;
use crate::stream::Stream;
use crate::{CudaMemory, Device, PinnedBuffer};

const OPERATION: &str = "copy plainly";

/// One contiguous cuMemcpyAsync of all of one memory to another, on a stream of its own, and the wait for it. A run
/// allocates nothing.
///
/// Between GPUs the copy uses their peer access, which [`PlainCopy::new`] enables. Without peer access the driver
/// copies through the host.
pub struct PlainCopy {
    stream: Stream,
    from: PlainCopyEnd,
    to: PlainCopyEnd,
    device: Device,
}

/// One side of a plain copy.
#[derive(Clone)]
pub enum PlainCopyEnd {
    /// GPU memory.
    Gpu(Arc<CudaMemory>),
    /// Page-locked host memory.
    Host(Arc<PinnedBuffer>),
}

impl PlainCopy {
    /// A copy of all of `from` to all of `to`.
    ///
    /// # Errors
    /// `InvalidRequest` if the lengths differ, or if the two memories overlap.
    pub fn new(from: impl Into<PlainCopyEnd>, to: impl Into<PlainCopyEnd>) -> Result<Self> {
        let (from, to) = (from.into(), to.into());
        let (here, there) = (from.range(), to.range());
        if here.len() != there.len() {
            let why = format!("{} bytes to {}: pass two memories of one length", here.len(), there.len());
            return Err(Error::new(ErrorKind::InvalidRequest, OPERATION, why));
        }
        // Addresses are unique over the host and all GPUs (CUDA driver API, "Unified Addressing").
        if here.start < there.end && there.start < here.end {
            let why = "source and target overlap: pass two memories";
            return Err(Error::new(ErrorKind::InvalidRequest, OPERATION, why));
        }
        if let (PlainCopyEnd::Gpu(from), PlainCopyEnd::Gpu(to)) = (&from, &to) {
            let _ = from.device().reaches(to.device()) && to.device().reaches(from.device());
        }
        // The source's GPU copies; from host memory, the target's GPU.
        let device = match (&from, &to) {
            (PlainCopyEnd::Gpu(memory), _) | (PlainCopyEnd::Host(_), PlainCopyEnd::Gpu(memory)) => {
                memory.device()
            }
            (PlainCopyEnd::Host(memory), PlainCopyEnd::Host(_)) => memory.device(),
        };
        Ok(Self { stream: device.stream()?, device: device.clone(), from, to })
    }

    /// Copies all bytes once. The copy is complete when the call returns.
    pub fn run(&self) -> Result<()> {
        let (from, to) = (self.from.range(), self.to.range());
        self.device.within(OPERATION, || {
            // SAFETY: both ranges are whole memories, of one length, that live as long as `self`; there are no
            // references into them. The stream belongs to this value.
            unsafe {
                self.stream.copy(to.start as u64, from.start as u64, to.len() as u64)?;
                check(OPERATION, "the wait for the copy", sys::cuStreamSynchronize(self.stream.raw()))
            }
        })
    }
}

impl From<Arc<CudaMemory>> for PlainCopyEnd {
    fn from(memory: Arc<CudaMemory>) -> Self {
        Self::Gpu(memory)
    }
}

impl From<Arc<PinnedBuffer>> for PlainCopyEnd {
    fn from(memory: Arc<PinnedBuffer>) -> Self {
        Self::Host(memory)
    }
}

impl PlainCopyEnd {
    fn range(&self) -> Range<usize> {
        let (start, len) = match self {
            Self::Gpu(memory) => (memory.as_ptr(), memory.len()),
            Self::Host(memory) => (memory.as_ptr(), memory.len()),
        };
        start as usize..start as usize + len
    }
}
