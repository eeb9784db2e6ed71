//! The kernel that copies the pages of a table, `kernels/pages.cu`.

use cudarc::driver::sys::CUdeviceptr;
use multirail_spi::Result;

use crate::function::KernelFunction;
use crate::stream::Stream;

const PTX: &str = include_str!("../kernels/pages.ptx");
const NAME: &std::ffi::CStr = c"multirail_pages";
/// Threads of a block.
const THREADS: u32 = 1024;
/// Bytes that a warp copies at a time: `UNIT` in `kernels/pages.cu`.
pub(crate) const UNIT: u32 = 4096;
/// Units that a block copies in parallel: its warps.
pub(crate) const WARPS: u32 = THREADS / 32;

/// The kernel's argument: `Launch` in `kernels/pages.cu` is the same.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct PageLaunch {
    /// The addresses of three arrays of `entries` numbers each: a page's source, its destination and its bytes.
    pub from: CUdeviceptr,
    pub to: CUdeviceptr,
    pub len: CUdeviceptr,
    /// A word on the GPU that is zero: the kernel counts the blocks that have ended.
    pub ended: CUdeviceptr,
    /// A word in host memory, to which the kernel writes `value` when all pages are copied.
    pub done: CUdeviceptr,
    pub value: u32,
    pub entries: u32,
    /// Units of the longest entry.
    pub units: u32,
    /// Bytes of every entry; 0 if they differ, and the kernel reads `len`.
    pub each: u32,
}

/// The kernel, loaded on one GPU.
pub(crate) struct PageKernel(KernelFunction);

impl PageKernel {
    /// Compiles the kernel for the GPU whose context is current.
    pub fn load() -> Result<Self> {
        KernelFunction::load(PTX, NAME).map(Self)
    }

    /// Starts the kernel on `stream`, with `blocks` blocks.
    ///
    /// # Safety
    /// `launch` describes a table. Its entries and both words stay until the word is written. The stream's GPU reaches
    /// the memory of every entry.
    pub unsafe fn launch(&self, stream: &Stream, blocks: u32, launch: PageLaunch) -> Result<()> {
        // SAFETY: by the caller; the kernel takes one `PageLaunch`.
        unsafe { self.0.launch("copy pages", stream, (blocks, THREADS), launch) }
    }
}
