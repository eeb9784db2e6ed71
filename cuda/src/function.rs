//! A kernel on one GPU.

use std::ffi::{CStr, CString, c_void};

use cudarc::driver::sys;
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
