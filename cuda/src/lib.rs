//! GPU memory: CUDA's driver API, loaded at run time.
//!
//! A program that uses this builds and starts anywhere; where there is no driver or no GPU,
//! [`Device::all`] says so. In reading order:
//!
//! - [`Device`]: a GPU, by CUDA's ordinal, and its PCI function.
//! - [`CudaMemory`]: memory of one, to be registered with a fabric: its own ([`CudaMemory::new`]) or
//!   somebody else's by its address ([`CudaMemory::of_pointer`]). It lies near its GPU, so that the cards
//!   of that GPU's rail group take it, and is given to cards by a DMA-BUF.
//! - [`PinnedBuffer`]: host memory that is page-locked for GPUs, by a [`PageLock`].
//! - [`Mover`]: copies on a GPU, in batches that are not waited for: what loopback moves bytes by.
//! - [`Share`], [`Shared`]: memory in the hands of other processes.
//! - [`PlainCopy`]: one copy by CUDA, the limit of benchmarks.
//! - [`CudaWord`]: a word that a stream waits for, or begins a transfer by.
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
//! Everything may be used from any thread: a call pushes the GPU's primary context and pops it, and
//! leaves the thread's own as it was. Memory keeps its GPU's context; the last of it lets it go. What is
//! dropped goes back on a thread of its own, since the driver waits for the GPU then, where a stream may wait for
//! whoever drops it.
//!
//! What is behind the names: `driver` loads the library and maps its statuses, `attributes` asks
//! what an address is, `reach` who gets there, `visible` what GPUs there are, `context` where work is done;
//! `block` is memory by handle, `dma_buf` exports for cards, `ordering` is when GPUs see what those write;
//! `stream` queues work; `function` is a kernel on one GPU, `kernel` that of `kernels/pages.cu`, `tables` what it
//! reads, `batch` what is gathered there, `verify` that of `kernels/verify.cu`; `reaper` gives memory back.

mod attributes;
mod batch;
mod block;
mod context;
mod device;
mod dma_buf;
mod driver;
mod function;
mod kernel;
mod memory;
mod mover;
mod ordering;
mod page_lock;
mod pinned;
mod plain;
mod reach;
mod reaper;
mod share;
mod stream;
mod tables;
mod verify;
mod visible;
mod word;

/// The crate whose slices [`CudaMemory::of_slice`] takes.
pub use cudarc;
pub use device::{Device, Uuid};
pub use memory::CudaMemory;
pub use mover::Mover;
pub use ordering::WritesOrdering;
pub use page_lock::PageLock;
pub use pinned::PinnedBuffer;
pub use plain::{End, PlainCopy};
pub use reach::Reach;
pub use reaper::let_go;
pub use share::{Handle, Share, Shared};
pub use word::{CudaWord, RawStream};
