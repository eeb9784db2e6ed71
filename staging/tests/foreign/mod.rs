//! Memory that devices refuse here.

use std::sync::Arc;

use transport_core::{
    Access, DmaBuf, Error, ErrorKind, Fabric, HostBuffer, Memory, MemoryKind, Region, Result,
};

/// The host's memory, as if a PCI device gave it out.
struct Foreign(HostBuffer);

// SAFETY: the buffer's own promises.
unsafe impl Memory for Foreign {
    fn as_ptr(&self) -> *mut u8 {
        self.0.as_ptr()
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::P2pmem
    }

    // Else a card would be given its address, and take it: the host's it is.
    fn dma_buf(&self) -> Result<Option<DmaBuf>> {
        Err(Error::new(ErrorKind::Unsupported, "register", "this memory has no DMA-BUF"))
    }
}

pub fn foreign(fabric: &Fabric, len: usize, access: Access) -> Result<Region> {
    let memory = Arc::new(Foreign(HostBuffer::new(len)?));
    // SAFETY: nobody holds references into it.
    unsafe { fabric.register(memory, access) }
}
