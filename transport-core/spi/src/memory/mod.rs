//! The owners of memory that a device may touch, and what peers may do with that memory.

#[cfg(all(target_os = "linux", not(miri)))]
mod carved_buffer;
mod host_arenas;
mod host_buffer;
mod host_range;
#[cfg(unix)]
#[cfg_attr(miri, allow(dead_code, reason = "miri has no mmap of files"))]
pub(crate) mod mapping;
#[cfg(unix)]
#[cfg_attr(miri, allow(dead_code, reason = "miri has no shared files"))]
mod sharing;

#[cfg(unix)]
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
#[cfg(unix)]
use std::sync::atomic::{AtomicBool, Ordering};

use crate::Result;
pub use host_arenas::HostArenas;
pub use host_buffer::HostBuffer;
pub use host_range::HostRange;
#[cfg(unix)]
pub use mapping::{Mapping, page_size};
#[cfg(target_os = "linux")]
pub use mapping::{commit_file, populate_range};
#[cfg(unix)]
pub use sharing::HostSharing;

bitflags::bitflags! {
    /// What peers may do with a registered region. The owner itself may always use it: as the source of
    /// writes and sends, as the destination of reads, and for receives.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct Access: u32 {
        /// Peers may write the region.
        const REMOTE_WRITE = 1;
        /// Peers may read the region.
        const REMOTE_READ = 2;
    }
}

impl Access {
    /// Peers may do nothing: for sources and receive buffers.
    pub const LOCAL: Self = Self::empty();
}

/// Where memory lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub enum MemoryKind {
    /// The host's memory.
    Host,
    /// A CUDA device's memory.
    Cuda {
        /// The device's ordinal.
        device: u32,
    },
    /// A PCI device's memory that the kernel gives to programs (p2pmem, PCI peer-to-peer memory).
    P2pmem,
}

/// A hint: what the caller knows about the caches. It changes the speed of a copy and never its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Locality {
    /// The caller knows nothing: the size of the copy decides.
    #[default]
    Auto,
    /// Neither source nor destination is in a cache, and nobody reads the bytes soon: the copy bypasses the caches.
    Cold,
}

/// Where memory lies in a file that other processes may map.
#[cfg(unix)]
#[derive(Debug, Clone, Copy)]
pub struct SharedRange<'a> {
    /// The file.
    pub file: BorrowedFd<'a>,
    /// The offset of the first byte, a multiple of the page size.
    pub offset: u64,
    /// Bytes of the file.
    pub file_len: u64,
    /// Whether a peer may have the file, if its owner wants to know. See [`hand_out`](Self::hand_out).
    pub is_handed_out: Option<&'a AtomicBool>,
}

#[cfg(unix)]
impl SharedRange<'_> {
    /// Notes that a peer may get the file. Called before the last check that the peer may: then the owner knows it when
    /// the peer has left.
    pub fn hand_out(&self) {
        if let Some(is_handed_out) = self.is_handed_out {
            is_handed_out.store(true, Ordering::Release);
        }
    }
}

/// The owner of a range of memory.
///
/// # Safety
/// While the value lives, `as_ptr` returns the same address at every call, `len` bytes from that address are mapped and
/// writable, and nobody holds a Rust reference into them.
pub unsafe trait Memory: Send + Sync {
    /// The address of the first byte.
    fn as_ptr(&self) -> *mut u8;

    /// The number of bytes.
    fn len(&self) -> usize;

    /// Whether there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where the bytes live.
    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }

    /// The PCI function that holds the bytes, for example a GPU. The core moves the bytes by the rail group closest to
    /// it. `None` if all devices are equally close to the memory.
    fn near(&self) -> Option<topology::Address> {
        None
    }

    /// A file that holds exactly these bytes and cannot be resized: on Linux a sealed one, on macOS a POSIX shared
    /// memory object. Other processes of this host map the file, instead of copying through the kernel.
    #[cfg(unix)]
    fn shared_file(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// As [`shared_file`](Self::shared_file), for memory that may be a range of a file. Such a range is populated: an
    /// importer refuses pages that were only allocated. The default is the whole file. An owner that wraps another
    /// passes this call on too.
    #[cfg(unix)]
    fn shared_range(&self) -> Option<SharedRange<'_>> {
        let whole = |file| SharedRange { file, offset: 0, file_len: self.len() as u64, is_handed_out: None };
        self.shared_file().map(whole)
    }

    /// A new file descriptor of the DMA-BUF that holds these bytes, through which NICs reach a GPU's memory. A backend
    /// asks for one per device, and closes it after the registration. `None` for memory without a DMA-BUF.
    ///
    /// # Errors
    /// The memory should have a DMA-BUF, but cannot provide it. The registration fails with this error.
    #[cfg(unix)]
    fn dma_buf(&self) -> Result<Option<DmaBuf>> {
        Ok(None)
    }

    /// The local flush that a reader of this memory needs after a NIC has written; `None` if it needs none. A backend
    /// asks at each registration. All memory of one [`kind`](Memory::kind) has the same flush.
    ///
    /// # Errors
    /// A reader needs a flush, but there is none. The registration fails with this error.
    fn needed_flush(&self) -> Result<Option<Arc<dyn Flush>>> {
        Ok(None)
    }

    /// Whether a thread polls the bytes themselves, instead of waiting for a completion. The device must write such
    /// memory in order.
    fn is_polled(&self) -> bool {
        false
    }

    /// Memory that the processor cannot address (a GPU's, for example) copies `bytes` into itself, from byte `at` on.
    /// Other memory returns `None`, and the caller copies. The caller has checked the range.
    fn store(&self, at: usize, bytes: &[u8]) -> Option<Result<()>> {
        let _ = (at, bytes);
        None
    }

    /// Memory that the processor cannot address copies its own bytes, from byte `at` on, to `into`. Other memory
    /// returns `None`, and the caller copies. The caller has checked the range.
    fn load(&self, at: usize, into: &mut [u8]) -> Option<Result<()>> {
        let _ = (at, into);
        None
    }

    /// Gives the pages back to the system, if possible. The addresses stay mapped, because a device may still write
    /// there.
    ///
    /// The core calls this on memory that nobody else owns, after its region was dropped on a transport that does not
    /// report when late bytes have landed ([`Revocation::Late`](crate::Revocation::Late)).
    ///
    /// # Errors
    /// The system refuses; the pages stay.
    fn discard(&mut self) -> Result<()> {
        Ok(())
    }
}

/// A local flush: makes bytes that NICs have written visible to this host's readers. (The *flush* of
/// [`WorkRequest::len`](crate::WorkRequest::len) is another thing: a request to the peer.)
pub trait Flush: Send + Sync {
    /// Returns once every byte that a NIC had written before the call is visible to all readers.
    fn flush(&self) -> Result<()>;
}

/// A DMA-BUF, and the offset of some memory in it.
#[cfg(unix)]
#[derive(Debug)]
pub struct DmaBuf {
    /// The descriptor.
    pub file: OwnedFd,
    /// The offset of the memory's first byte in the DMA-BUF.
    pub offset: u64,
}
