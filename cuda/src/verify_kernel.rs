//! The kernel that compares bytes with what they should be, `kernels/verify.cu`.

use cudarc::driver::sys::CUdeviceptr;
use multirail_spi::Result;

use crate::function::KernelFunction;
use crate::stream::Stream;

const PTX: &str = include_str!("../kernels/verify.ptx");
const NAME: &std::ffi::CStr = c"multirail_verify";
/// Threads of a block.
const THREADS: u32 = 256;
/// Enough blocks to fill a GPU. Each thread takes further words in turns.
const MAX_BLOCKS: u64 = 4096;

/// The kernel's argument: `Launch` in `kernels/verify.cu` is the same.
#[repr(C)]
pub(crate) struct VerifyLaunch {
    /// The pages, one behind the other.
    pub start: CUdeviceptr,
    /// The SplitMix64 state at the beginning of each page.
    pub streams: CUdeviceptr,
    /// The result: the offset of the first wrong byte. Larger than any offset before the launch.
    pub first: CUdeviceptr,
    /// Bytes of a page.
    pub size: u64,
    /// Words of a page, the last of which may be partial.
    pub words: u64,
    /// Words of all pages.
    pub total: u64,
}

/// The kernel, loaded on one GPU.
pub(crate) struct VerifyKernel(KernelFunction);

impl VerifyKernel {
    /// Compiles the kernel for the GPU whose context is current.
    pub fn load() -> Result<Self> {
        KernelFunction::load(PTX, NAME).map(Self)
    }

    /// Starts the kernel on `stream`.
    ///
    /// # Safety
    /// The stream's GPU reaches all memory that `launch` describes, and that memory stays until the kernel has ended.
    pub unsafe fn launch(
        &self,
        operation: &'static str,
        stream: &Stream,
        launch: VerifyLaunch,
    ) -> Result<()> {
        let blocks = launch.total.div_ceil(u64::from(THREADS)).min(MAX_BLOCKS) as u32;
        // SAFETY: by the caller; the kernel takes one `VerifyLaunch`.
        unsafe { self.0.launch(operation, stream, (blocks, THREADS), launch) }
    }
}
