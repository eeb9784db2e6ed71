//! Who owns bytes a device may touch, and what may be done with them.

#[cfg(unix)]
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::Result;

bitflags::bitflags! {
    /// What peers may do with a registered region. The owner may always read
    /// from and receive into it.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct Access: u32 {
        /// Peers may write.
        const REMOTE_WRITE = 1;
        /// Peers may read.
        const REMOTE_READ = 2;
    }
}

impl Access {
    /// No peer may touch it: sources and receive buffers.
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
    /// A PCI device's memory that the kernel gives out: `P2pMemory`.
    P2pmem,
}

/// What the caller knows about the caches. A hint: it changes speed, never bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Locality {
    /// Decide by size.
    #[default]
    Auto,
    /// Neither side is in a cache, nor will be read soon: copies stream.
    Cold,
}

/// The owner of a range of memory.
///
/// # Safety
/// While the value lives: `as_ptr` is the same address at every call, `len` bytes
/// from it are mapped and writable, and nobody holds a Rust reference into them.
pub unsafe trait Memory: Send + Sync {
    /// The first byte.
    fn as_ptr(&self) -> *mut u8;

    /// Bytes.
    fn len(&self) -> usize;

    /// Whether there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where the bytes live.
    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }

    /// The PCI function that the bytes lie behind, a GPU: its own rail group takes them. `None` for
    /// what every rail is as near to.
    fn near(&self) -> Option<topology::Address> {
        None
    }

    /// A shareable file that holds exactly these bytes, sealed against resizing.
    /// Processes of this host then map it instead of going through the kernel.
    #[cfg(unix)]
    fn shared_file(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// A new descriptor of the DMA-BUF in which these bytes lie: cards reach a GPU's memory by it. It
    /// is asked for once per card, and closed after the registration. `None` for what has no such thing.
    ///
    /// # Errors
    /// The reason why there is none although there could be: the registration fails with it.
    #[cfg(unix)]
    fn dma_buf(&self) -> Result<Option<DmaBuf>> {
        Ok(None)
    }

    /// What has to be done before bytes that a card has written are there for those who read them where they lie;
    /// `None` where nothing has. It is asked for at registrations with cards, and is the same for all memory of
    /// one [`kind`](Memory::kind).
    ///
    /// # Errors
    /// The reason why it cannot be done although it has to: the registration fails with it.
    fn fence(&self) -> Result<Option<Arc<dyn Fence>>> {
        Ok(None)
    }

    /// Whether somebody watches the bytes without waiting for the device to tell of them: then it must not write them out
    /// of order.
    fn is_watched(&self) -> bool {
        false
    }

    /// Copies bytes in from byte `at` on, for memory that the processor cannot follow the address of;
    /// `None` where it can. The range was checked.
    fn store(&self, at: usize, bytes: &[u8]) -> Option<Result<()>> {
        let _ = (at, bytes);
        None
    }

    /// As [`Memory::store`], the other way.
    fn load(&self, at: usize, into: &mut [u8]) -> Option<Result<()>> {
        let _ = (at, into);
        None
    }

    /// Gives the pages back to the system, if it can, and keeps the addresses mapped: a backend may still write there,
    /// and nobody reads. It is called when a region was dropped whose transport does not tell when it has finished, on
    /// memory that nobody else has any more.
    ///
    /// # Errors
    /// The system refuses: the pages stay.
    fn discard(&mut self) -> Result<()> {
        Ok(())
    }
}

/// A flush of what cards have written.
pub trait Fence: Send + Sync {
    /// Returns once all that cards had written when it was called is there for everyone.
    fn flush(&self) -> Result<()>;
}

/// A DMA-BUF, and where in it some memory begins.
#[cfg(unix)]
#[derive(Debug)]
pub struct DmaBuf {
    /// The descriptor.
    pub file: OwnedFd,
    /// Bytes before the memory.
    pub offset: u64,
}
