//! The kernel that copies pages by a table, `kernels/pages.cu`.

use cudarc::driver::sys::CUdeviceptr;
use multirail_spi::Result;

use crate::function::Function;
use crate::stream::Stream;

const PTX: &str = include_str!("../kernels/pages.ptx");
const NAME: &std::ffi::CStr = c"multirail_pages";
/// Threads of a block.
const THREADS: u32 = 1024;
/// Bytes that a warp moves at a time, `UNIT` of the kernel.
pub(crate) const UNIT: u32 = 4096;
/// Units that a block moves side by side: its warps.
pub(crate) const WARPS: u32 = THREADS / 32;

/// What the kernel is given, `Launch` of the kernel.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Launch {
    /// Addresses of `entries` numbers each: where a page comes from and goes to, and its bytes.
    pub from: CUdeviceptr,
    pub to: CUdeviceptr,
    pub len: CUdeviceptr,
    /// A word on the GPU, zero.
    pub ended: CUdeviceptr,
    /// A word of the host's, which becomes `value` at the end.
    pub done: CUdeviceptr,
    pub value: u32,
    pub entries: u32,
    /// Units of the longest entry.
    pub units: u32,
    /// Bytes of every entry; 0 where `len` says them.
    pub each: u32,
}

/// It, on one GPU.
pub(crate) struct PageKernel(Function);

impl PageKernel {
    /// Compiles it for the GPU whose context is current.
    pub fn load() -> Result<Self> {
        Function::load(PTX, NAME).map(Self)
    }

    /// Starts it on `stream`, in `blocks` blocks.
    ///
    /// # Safety
    /// `launch` describes a table whose entries, and both words, stay until the word is written; the ends
    /// of every entry are memory that the stream's GPU reaches.
    pub unsafe fn launch(&self, stream: &Stream, blocks: u32, launch: Launch) -> Result<()> {
        // SAFETY: by the caller; the kernel takes one `Launch`.
        unsafe { self.0.launch("copy pages", stream, (blocks, THREADS), launch) }
    }
}
