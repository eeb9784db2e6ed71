//! Memory of PCI devices, which the kernel gives to programs (p2pmem).

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

/// Zeroed memory of a PCI device, such as a disk's controller memory buffer. Other devices reach it without going
/// through host memory. [`P2pAllocator`] allocates it in whole pages. The memory is given back when this value is
/// dropped, or when the process ends. It needs Linux 6.2 or later, built with `CONFIG_PCI_P2PDMA`.
///
/// The process reads and writes it like other memory. The system calls `read` and `write` accept it; with `O_DIRECT`
/// the bytes go from device to device. Each load by the CPU crosses PCIe, so loads are slow. Further limits (Linux
/// 7.3):
///
/// - NICs: the kernel never pins this memory for RDMA. With `verbs` it registers if the NIC supports on-demand paging
///   and `VerbsConfig::on_demand_paging` is set; otherwise the error says so. `efa` and `loopback` refuse it as
///   `Unsupported`, so a fabric for it must have `verbs` transports only. Other processes cannot reach it by
///   `process_vm_readv` (`EFAULT`), and it has no [`shared_file`](Memory::shared_file) and no DMA-BUF.
/// - `mlock` fails (`EREMOTEIO`). It is not needed: the memory is never swapped out.
/// - `fork`: a child shares the bytes, and holds them until it ends or executes another program. `ibv_fork_init` keeps
///   them from children, and cannot be undone.
/// - If the device goes away, or is unbound from its driver, the memory goes away too: a process that touches it then
///   dies of `SIGBUS`. Drop the memory first.
pub struct P2pMemory {
    pages: Mapping,
    len: usize,
    provider: Address,
}

impl P2pMemory {
    /// Maps `len` bytes, at least one, of `provider`, by the provider's file `allocate`.
    fn map(allocate: BorrowedFd<'_>, len: usize, provider: Address) -> io::Result<Self> {
        let whole = len.checked_next_multiple_of(page_size()).ok_or(io::ErrorKind::OutOfMemory)?;
        let pages = Mapping::of_device(allocate, whole)?;
        // The kernel does not clear what the last owner wrote.
        // SAFETY: `whole` bytes that were just mapped writable, and that nobody else knows of.
        unsafe { pages.start().as_ptr().write_bytes(0, whole) };
        Ok(Self { pages, len, provider })
    }

    /// The device that has the memory.
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
