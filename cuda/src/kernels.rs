//! Kernels that are loaded on a GPU: one copies the pages of a table (`kernels/pages.cu`), the other compares bytes
//! with their expected values (`kernels/verify.cu`).

use std::ffi::{CStr, CString, c_void};

use cudarc::driver::sys;
use cudarc::driver::sys::CUdeviceptr;
use multirail_spi::{Error, ErrorKind, Result};

use crate::driver::check;
use crate::stream::Stream;

/// A kernel that is loaded into a GPU's primary context. It stays there as long as the context.
pub(crate) struct KernelFunction(sys::CUfunction);

// SAFETY: functions may be launched from any thread (CUDA driver API, "Execution Control").
unsafe impl Send for KernelFunction {}
// SAFETY: as above.
unsafe impl Sync for KernelFunction {}

impl KernelFunction {
    /// Compiles the kernel `name` of `ptx` for the GPU whose context is current. `ci/ptx/generate` makes PTX 6.3 for
    /// sm_70, which every driver from CUDA 10.0 on compiles for every GPU from Volta on.
    pub fn load(ptx: &str, name: &CStr) -> Result<Self> {
        let operation = "compile a kernel";
        let text = CString::new(ptx)
            .map_err(|_| Error::new(ErrorKind::Io, operation, "its PTX contains a zero byte"))?;
        let what = name.to_string_lossy();
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: a context is current; the text ends with a zero byte, and each call writes one handle.
        unsafe {
            let code = sys::cuModuleLoadData(&raw mut module, text.as_ptr().cast());
            check(operation, &what, code)?;
            let code = sys::cuModuleGetFunction(&raw mut function, module, name.as_ptr());
            check(operation, &what, code)?;
        }
        Ok(Self(function))
    }

    /// Starts the kernel on `stream`, with `blocks` blocks of `threads` threads. The GPU's context is current.
    ///
    /// # Safety
    /// The kernel takes one `A`. The stream's GPU reaches all memory that the argument points to, and that memory stays
    /// until the kernel has ended. The kernel, the stream and the current context belong to one GPU.
    pub unsafe fn launch<A>(
        &self,
        operation: &'static str,
        stream: &Stream,
        (blocks, threads): (u32, u32),
        mut argument: A,
    ) -> Result<()> {
        let mut arguments: [*mut c_void; 1] = [(&raw mut argument).cast()];
        let (extra, shared) = (std::ptr::null_mut(), 0);
        // SAFETY: the call copies the argument; by the caller for the rest.
        let code = unsafe {
            let arguments = arguments.as_mut_ptr();
            sys::cuLaunchKernel(self.0, blocks, 1, 1, threads, 1, 1, shared, stream.raw(), arguments, extra)
        };
        check(operation, "to start the kernel", code)
    }
}

const PAGES_PTX: &str = include_str!("../kernels/pages.ptx");
const PAGES_NAME: &std::ffi::CStr = c"multirail_pages";
/// Threads of a block that copies pages.
const PAGE_THREADS: u32 = 1024;
/// Bytes that a warp copies at a time: `UNIT` in `kernels/pages.cu`.
pub(crate) const UNIT: u32 = 4096;
/// Units that a block copies in parallel: its warps.
pub(crate) const WARPS: u32 = PAGE_THREADS / 32;

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

/// The kernel that copies pages, loaded on one GPU.
pub(crate) struct PageKernel(KernelFunction);

impl PageKernel {
    /// Compiles the kernel for the GPU whose context is current.
    pub fn load() -> Result<Self> {
        KernelFunction::load(PAGES_PTX, PAGES_NAME).map(Self)
    }

    /// Starts the kernel on `stream`, with `blocks` blocks.
    ///
    /// # Safety
    /// `launch` describes a table. Its entries and both words stay until the word is written. The stream's GPU reaches
    /// the memory of every entry.
    pub unsafe fn launch(&self, stream: &Stream, blocks: u32, launch: PageLaunch) -> Result<()> {
        // SAFETY: by the caller; the kernel takes one `PageLaunch`.
        unsafe { self.0.launch("copy pages", stream, (blocks, PAGE_THREADS), launch) }
    }
}

const VERIFY_PTX: &str = include_str!("../kernels/verify.ptx");
const VERIFY_NAME: &std::ffi::CStr = c"multirail_verify";
/// Threads of a block that compares bytes.
const VERIFY_THREADS: u32 = 256;
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

/// The kernel that compares bytes, loaded on one GPU.
pub(crate) struct VerifyKernel(KernelFunction);

impl VerifyKernel {
    /// Compiles the kernel for the GPU whose context is current.
    pub fn load() -> Result<Self> {
        KernelFunction::load(VERIFY_PTX, VERIFY_NAME).map(Self)
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
        let blocks = launch.total.div_ceil(u64::from(VERIFY_THREADS)).min(MAX_BLOCKS) as u32;
        // SAFETY: by the caller; the kernel takes one `VerifyLaunch`.
        unsafe { self.0.launch(operation, stream, (blocks, VERIFY_THREADS), launch) }
    }
}
