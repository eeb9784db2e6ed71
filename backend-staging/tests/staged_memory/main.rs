//! Fabrics with staging, and memory that their devices refuse.
#![cfg(target_os = "linux")]

mod broken;
#[cfg(target_env = "gnu")]
mod refused;

use std::sync::Arc;

use multirail_spi::{Access, Backend, DmaBuf, Error, ErrorKind, HostBuffer, Memory, MemoryKind, Result};
use multirail_staging::{Staged, StagingPolicy};
use transport_core::{Fabric, FabricBuilder, Region, TransportConfig};

const OPEN: Access = Access::REMOTE_WRITE.union(Access::REMOTE_READ);

/// Opens a fabric on the first device of `inner`. Without a device it prints the reason and returns `None`.
fn open(inner: impl Backend + 'static, staging: StagingPolicy) -> Option<Fabric> {
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

/// Host memory that claims to be memory of a PCI device.
struct RefusedMemory(HostBuffer);

// SAFETY: all methods return what the buffer returns, which keeps this contract itself.
unsafe impl Memory for RefusedMemory {
    fn as_ptr(&self) -> *mut u8 {
        self.0.as_ptr()
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::P2pmem
    }

    // Otherwise the device would register it by its address, and succeed, because it is host memory.
    fn dma_buf(&self) -> Result<Option<DmaBuf>> {
        Err(Error::new(ErrorKind::Unsupported, "register", "this memory has no DMA-BUF"))
    }
}

/// Registers memory that the device refuses.
fn register_refused(fabric: &Fabric, len: usize) -> Result<Region> {
    let memory = Arc::new(RefusedMemory(HostBuffer::new(len)?));
    // SAFETY: there are no references into the memory.
    unsafe { fabric.register(memory, OPEN) }
}
