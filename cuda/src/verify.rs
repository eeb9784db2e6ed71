//! What arrived on a GPU, compared there, `kernels/verify.cu`.

use cudarc::driver::sys::CUdeviceptr;
use multirail_spi::{Error, ErrorKind, Memory, Result};

use crate::function::Function;
use crate::{CudaMemory, Reach};

const OPERATION: &str = "compare GPU memory";
const PTX: &str = include_str!("../kernels/verify.ptx");
const NAME: &std::ffi::CStr = c"multirail_verify";
/// Threads of a block.
const THREADS: u32 = 256;
/// Enough to fill a GPU; each thread takes what is left in turns.
const MOST_BLOCKS: u64 = 4096;
/// Bytes of one number of a stream.
const WORD: usize = 8;

/// What the kernel is given, `Launch` of the kernel.
#[repr(C)]
struct Launch {
    start: CUdeviceptr,
    streams: CUdeviceptr,
    first: CUdeviceptr,
    size: u64,
    words: u64,
    total: u64,
}

/// Compiles the kernel for the GPU whose context is current.
pub(crate) fn load() -> Result<Function> {
    Function::load(PTX, NAME)
}

impl CudaMemory {
    /// The offset of the first byte that differs from page after page of `size` bytes, each the outputs of
    /// SplitMix64 (Steele, Lea, Flood 2014), little-endian, from its state in `streams` on. Its GPU compares, so
    /// that it is that GPU's kernels which have to see the bytes.
    ///
    /// # Errors
    /// `InvalidRequest` where the pages are not all of the memory, or there are none; `Unsupported` where its GPU
    /// has no leave to use the memory; `Exhausted` where it has no room for the table of pages.
    pub fn first_wrong(&self, size: u64, streams: &[u64]) -> Result<Option<u64>> {
        let pages = streams.len() as u64;
        if size == 0 || pages == 0 || pages.checked_mul(size) != Some(self.len() as u64) {
            let why = format!("{pages} pages of {size} bytes are not the {} that are there", self.len());
            return Err(Error::new(ErrorKind::InvalidRequest, OPERATION, why));
        }
        let (device, start) = (self.device(), self.as_ptr() as u64);
        if Reach::of_gpu(device, device, start, self.len() as u64) != Some(Reach::Kernel) {
            let why = "its GPU has no leave to use it: give it by cuMemSetAccess or cuMemPoolSetAccess";
            return Err(Error::new(ErrorKind::Unsupported, OPERATION, why));
        }
        // The answer, which is none at first, and then the streams.
        let table = CudaMemory::new(device, (1 + streams.len()) * WORD)?;
        let numbers = std::iter::once(&u64::MAX).chain(streams);
        table.copy_in(0, &numbers.flat_map(|number| number.to_le_bytes()).collect::<Vec<_>>())?;
        let (words, first) = (size.div_ceil(WORD as u64), table.as_ptr() as u64);
        let launch = Launch { start, streams: first + WORD as u64, first, size, words, total: pages * words };
        let blocks = launch.total.div_ceil(u64::from(THREADS)).min(MOST_BLOCKS) as u32;
        let (kernel, stream) = (device.verifier()?, device.waited()?);
        device.within(OPERATION, || {
            // SAFETY: the kernel takes one `Launch`. It reads this memory, of `pages` of `size`, which its GPU
            // reaches as was asked, and the table, and writes the answer there; both live here, and it is waited for.
            unsafe { kernel.launch(OPERATION, stream, (blocks, THREADS), launch) }?;
            stream.wait()
        })?;
        let mut first = [0; WORD];
        table.copy_out(0, &mut first)?;
        let first = u64::from_le_bytes(first);
        Ok((first != u64::MAX).then_some(first))
    }
}
