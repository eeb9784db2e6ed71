//! A fabric that stages, and memory that its device refuses.

use std::sync::Arc;

use multirail_spi::{Access, Backend, DmaBuf, Error, ErrorKind, HostBuffer, Memory, MemoryKind, Result};
use multirail_staging::{Staged, Staging};
use transport_core::{Fabric, FabricBuilder, Region, TransportConfig};

pub const OPEN: Access = Access::REMOTE_WRITE.union(Access::REMOTE_READ);

/// Over the first device of `inner`; `None`, and why on standard error, where there is none.
pub fn open(inner: impl Backend + 'static, staging: Staging) -> Option<Fabric> {
    let mut devices = match inner.probe() {
        Ok(devices) => devices,
        Err(why) => {
            eprintln!("skipped: {}; {}", why.reason, why.remedy);
            return None;
        }
    };
    devices.truncate(1);
    let backend = Arc::new(Staged::new(Arc::new(inner), staging));
    let transport = TransportConfig::new("staged", backend).devices(devices);
    Some(FabricBuilder::new().transport(transport).open().expect("a fabric"))
}

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

pub fn foreign(fabric: &Fabric, len: usize) -> Result<Region> {
    let memory = Arc::new(Foreign(HostBuffer::new(len)?));
    // SAFETY: nobody holds references into it.
    unsafe { fabric.register(memory, OPEN) }
}
