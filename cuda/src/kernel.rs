//! The kernel that copies pages by a table, `kernels/pages.cu`.

use std::ffi::{CString, c_void};

use cudarc::driver::sys::{self, CUdeviceptr};
use transport_core::{Error, ErrorKind, Result};

use crate::driver::check;
use crate::stream::Stream;

/// As `ci/ptx/generate` makes it: PTX 6.3 for sm_70, which every driver from CUDA 10.0 on compiles for
/// every GPU from Volta on.
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

/// It, loaded into a GPU's primary context, where it stays as long as that does.
pub(crate) struct PageKernel(sys::CUfunction);

// SAFETY: functions may be launched from any thread (CUDA driver API, "Execution Control").
unsafe impl Send for PageKernel {}
// SAFETY: as above.
unsafe impl Sync for PageKernel {}

impl PageKernel {
    /// Compiles it for the GPU whose context is current.
    pub fn load() -> Result<Self> {
        let text =
            CString::new(PTX).map_err(|_| Error::new(ErrorKind::Io, "compile the page kernel", "a zero"))?;
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: a context is current; the text ends with a zero, and each call writes one handle.
        unsafe {
            let code = sys::cuModuleLoadData(&raw mut module, text.as_ptr().cast());
            check("compile the page kernel", "its PTX", code)?;
            let code = sys::cuModuleGetFunction(&raw mut function, module, NAME.as_ptr());
            check("compile the page kernel", "its function", code)?;
        }
        Ok(Self(function))
    }

    /// Starts it on `stream`, in `blocks` blocks.
    ///
    /// # Safety
    /// `launch` describes a table whose entries, and both words, stay until the word is written; the ends
    /// of every entry are memory that the stream's GPU reaches.
    pub unsafe fn launch(&self, stream: &Stream, blocks: u32, mut launch: Launch) -> Result<()> {
        let mut arguments: [*mut c_void; 1] = [(&raw mut launch).cast()];
        let (extra, shared) = (std::ptr::null_mut(), 0);
        // SAFETY: the kernel takes one `Launch`, which the call copies; the rest by the caller.
        let code = unsafe {
            let arguments = arguments.as_mut_ptr();
            sys::cuLaunchKernel(self.0, blocks, 1, 1, THREADS, 1, 1, shared, stream.raw(), arguments, extra)
        };
        check("copy pages", "to start the kernel", code)
    }
}
