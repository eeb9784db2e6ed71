//! GPU memory: CUDA's driver API, loaded at run time.
//!
//! A program that uses this crate builds and starts on any machine. If there is no driver or no GPU, [`Device::all`]
//! returns an error that says so. The types, in reading order:
//!
//! - [`Device`]: a GPU, by CUDA's ordinal, and its PCI function.
//! - [`CudaMemory`]: memory of one GPU, to be registered with a fabric. It allocates the memory ([`CudaMemory::new`])
//!   or takes an address from another library ([`CudaMemory::of_pointer`]). The NICs of the GPU's rail group register
//!   it by its DMA-BUF.
//! - [`PinnedBuffer`]: host memory that is page-locked for GPUs, by a [`PageLock`].
//! - [`CudaSignal`]: a word that a stream waits for, or that a stream writes to begin a transfer.
//! - [`BatchCopier`]: batches of copies on one GPU that complete later; [`CopyQueue`] keeps a tag with each batch.
//!   Loopback and staging copy by it.
//! - [`ExportedMemory`], [`ImportedMemory`]: GPU memory that another process maps.
//! - [`PlainCopy`]: one copy by CUDA alone, the upper limit of benchmarks.
//!
//! ```
//! use multirail_cuda::{CudaMemory, Device};
//! # fn main() -> multirail_spi::Result<()> {
//! let devices = match Device::all() {
//!     Ok(devices) => devices,
//!     Err(why) => return Ok(println!("no GPU memory: {why}")),
//! };
//! let memory = CudaMemory::new(&devices[0], 2 << 20)?;
//! memory.copy_in(4096, b"pages")?;
//! # Ok(())
//! # }
//! ```
//!
//! # Threads and cleanup
//! Every type can be used from any thread. Each call pushes the GPU's primary context and pops it again, so the
//! thread's own context does not change. Memory keeps its GPU's context, and the last user of the context releases it.
//! Dropped memory is freed on a background thread: the driver waits for the GPU before it frees, and a stream of that
//! GPU may be waiting for the thread that drops.
//!
//! # Private modules
//! - `driver` loads the library and maps its statuses; `attributes` asks what an address is; `reach` which GPU can
//!   access it.
//! - `mapped_block` is memory by handle (`cuMemCreate`); `background` frees memory.
//! - `stream` queues work; `kernels` has the kernels that are loaded on a GPU. One (`kernels/pages.cu`) copies the
//!   pages of `tables`, which `batch` fills; the other (`kernels/verify.cu`) compares bytes.

mod attributes;
mod background;
mod batch;
mod batch_copier;
mod copy_queue;
mod device;
mod driver;
mod kernels;
mod mapped_block;
mod memory;
mod page_lock;
mod plain_copy;
mod reach;
mod sharing;
mod signal;
mod stream;
mod tables;

pub use background::drop_in_background;
pub use batch_copier::BatchCopier;
pub use copy_queue::CopyQueue;
/// The crate whose slices [`CudaMemory::of_slice`] takes.
pub use cudarc;
pub use device::{Device, Uuid, WritesOrdering};
pub use memory::CudaMemory;
pub use page_lock::{PageLock, PinnedBuffer};
pub use plain_copy::{PlainCopy, PlainCopyEnd};
pub use reach::Reach;
pub use sharing::{ExportHandle, ExportedMemory, ImportedMemory};
pub use signal::{CudaSignal, RawStream};
