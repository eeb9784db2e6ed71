//! Memory of PCI devices that the kernel gives out (p2pmem).

#[deny(unsafe_code)]
mod allocator;
#[cfg(all(test, not(miri)))]
mod tests;

use std::io;
use std::os::fd::BorrowedFd;

use topology::Address;

pub use allocator::P2pAllocator;

use crate::spi::{Mapping, page_size};
use crate::{Memory, MemoryKind};

/// Zeroed memory of a PCI device, such as a disk's controller memory buffer: other devices reach it
/// without the host's memory. [`P2pAllocator`] takes it, in whole pages, and it is given back when this
/// is dropped, or the process ends. Linux 6.2 and later, built with `CONFIG_PCI_P2PDMA`.
///
/// It is this process's to read and write like other memory, and the system's calls `read` and `write`
/// take it, by `O_DIRECT` from device to device. Each load of the processor crosses PCIe, so it is slow.
/// Beyond that (Linux 7.3):
///
/// - Cards: the kernel never pins it for RDMA. It registers with `verbs` where the card pages on demand
///   and `VerbsConfig::on_demand_paging` is set, and with an error that says so else. `efa` and
///   `loopback` refuse it as `Unsupported`, so that a fabric for it is one of `verbs` alone: other
///   processes cannot get at it by `process_vm_readv` (`EFAULT`), and there is no
///   [`shared_file`](Memory::shared_file) of it, nor a DMA-BUF.
/// - `mlock` fails (`EREMOTEIO`), and is not needed: it is never swapped out.
/// - `fork`: a child shares the bytes, and holds them until it ends or executes another program.
///   `ibv_fork_init` takes them from children, and that cannot be undone.
/// - A device that goes away, or is unbound from its driver, takes the memory with it: whoever touches
///   it then dies of `SIGBUS`. Drop it first.
pub struct P2pMemory {
    pages: Mapping,
    len: usize,
    provider: Address,
}

impl P2pMemory {
    /// `len` bytes, at least one, of `provider` by its file `allocate`.
    fn map(allocate: BorrowedFd<'_>, len: usize, provider: Address) -> io::Result<Self> {
        let whole = len.checked_next_multiple_of(page_size()).ok_or(io::ErrorKind::OutOfMemory)?;
        let pages = Mapping::of_device(allocate, whole)?;
        // The kernel leaves what the last owner wrote.
        // SAFETY: `whole` bytes that were just mapped writable, and that nobody else knows of.
        unsafe { pages.start().as_ptr().write_bytes(0, whole) };
        Ok(Self { pages, len, provider })
    }

    /// The device whose memory it is.
    pub fn provider(&self) -> Address {
        self.provider
    }
}

// SAFETY: the mapping lives as long as the value, never moves, spans `len` bytes and more, and no
// method hands out a reference into it. That the device stays bound to its driver is the user's part.
unsafe impl Memory for P2pMemory {
    fn as_ptr(&self) -> *mut u8 {
        self.pages.start().as_ptr()
    }

    fn len(&self) -> usize {
        self.len
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::P2pmem
    }

    fn near(&self) -> Option<Address> {
        Some(self.provider)
    }
}
