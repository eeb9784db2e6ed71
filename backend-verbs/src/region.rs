//! Registered memory, and imported regions of peers.

use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;

use multirail_spi::{
    Access, DmaBuf, Error, ErrorKind, Memory, MemoryKind, MemoryRegion, Paths, RemoteKey, RemoteMemory,
    Result,
};
use rdma_sys as ib;

use crate::device::Device;
use crate::objects::{Object, last_errno, library};
use crate::status::EINVAL;

/// A registration. The fields are dropped in order: the keys before the memory.
pub(crate) struct Registered {
    mr: Mutex<Option<Object<ib::ibv_mr>>>,
    lkey: u64,
    key: RemoteKey,
    memory: Arc<dyn Memory>,
    device: Arc<Device>,
}

impl Registered {
    /// Registers `memory` for this side, and for peers as `access` allows. `is_paged` says whether the card pages host
    /// memory and p2pmem in on demand. Otherwise the memory is pinned.
    ///
    /// # Safety
    /// As `Domain::register`.
    pub(crate) unsafe fn new(
        device: &Arc<Device>,
        memory: Arc<dyn Memory>,
        access: Access,
        is_paged: bool,
    ) -> Result<Self> {
        // GPU memory is slow without relaxed ordering. A completion still comes after its bytes. The library drops the
        // flag if the kernel does not know it.
        let mut rights = ib::IBV_ACCESS_LOCAL_WRITE;
        if !memory.is_polled() {
            rights |= ib::IBV_ACCESS_RELAXED_ORDERING;
        }
        if access.contains(Access::REMOTE_WRITE) {
            rights |= ib::IBV_ACCESS_REMOTE_WRITE;
        }
        if access.contains(Access::REMOTE_READ) {
            rights |= ib::IBV_ACCESS_REMOTE_READ;
        }
        // SAFETY: by the caller.
        let mr = unsafe {
            match memory.kind() {
                MemoryKind::Host => of_host(device, &*memory, rights, is_paged),
                MemoryKind::P2pmem => match memory.dma_buf()? {
                    None => of_p2pmem(device, &*memory, rights, is_paged),
                    buffer => of_device(device, &*memory, buffer, rights),
                },
                _ => of_device(device, &*memory, memory.dma_buf()?, rights),
            }
        }?;
        // Before a peer can get the key.
        device.flushes.add(&*memory)?;
        let start = memory.as_ptr();
        // SAFETY: the registration is open.
        let (lkey, rkey) = unsafe { ((*mr.as_ptr()).lkey, (*mr.as_ptr()).rkey) };
        Ok(Self {
            mr: Mutex::new(Some(mr)),
            lkey: device.device_regions.add(&memory, lkey),
            key: RemoteKey { base: start as u64, key: rkey.into(), len: memory.len() as u64 },
            memory,
            device: Arc::clone(device),
        })
    }

    /// Deregisters the memory, unless that has happened.
    fn close(&self) -> Result<()> {
        let mut mr = self.mr.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(open) = mr.take() else { return Ok(()) };
        open.close("revoke").map_err(|(open, error)| {
            *mr = Some(open);
            error
        })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.device.device_regions.remove(self.lkey);
        if let Err(error) = self.close() {
            // The card may still write to the memory at any time.
            std::mem::forget(Arc::clone(&self.memory));
            tracing::warn!(%error, "a region cannot be deregistered, so its memory is never freed");
        }
    }
}

/// Registers host memory, pinned or paged in on demand.
///
/// # Safety
/// As `Domain::register`.
unsafe fn of_host(
    device: &Device,
    memory: &dyn Memory,
    rights: u32,
    is_paged: bool,
) -> Result<Object<ib::ibv_mr>> {
    let rights = if is_paged { rights | ib::IBV_ACCESS_ON_DEMAND } else { rights };
    // SAFETY: by the caller.
    let mr = unsafe { by_address(device, memory, rights) }?;
    if mr.is_null() && is_paged && last_errno() == EINVAL {
        let context = format!(
            "{} does not page on demand: register without VerbsConfig::on_demand_paging",
            device.name
        );
        return Err(Error::new(ErrorKind::Unsupported, "register", context));
    }
    Object::of(mr, "register")
}

/// Registers p2pmem, memory of a PCI device that the kernel gives out. It is paged in on demand. The kernel refuses to
/// pin it for any card (Linux' `mm/gup.c`: `EFAULT`, or `EREMOTEIO` for a card that only reads).
///
/// # Safety
/// As `Domain::register`.
unsafe fn of_p2pmem(
    device: &Device,
    memory: &dyn Memory,
    rights: u32,
    is_paged: bool,
) -> Result<Object<ib::ibv_mr>> {
    let rights = if is_paged { rights | ib::IBV_ACCESS_ON_DEMAND } else { rights };
    // SAFETY: by the caller.
    let mr = unsafe { by_address(device, memory, rights) }?;
    Object::of(mr, "register").map_err(|why| {
        let advice = match is_paged {
            true => "the card does not page p2pmem on demand, and the kernel pins none for RDMA: register it by a DMA-BUF",
            false => {
                "the kernel pins none for RDMA: set VerbsConfig::on_demand_paging if the card offers that, or register \
                 it by a DMA-BUF"
            }
        };
        let context = format!("{} cannot register p2pmem: {advice} ({})", device.name, why.context());
        Error::new(why.kind(), "register", context)
    })
}

/// Registers GPU memory by its DMA-BUF, or by its address if a kernel module (nvidia_peermem) makes it known to cards.
///
/// # Safety
/// As `Domain::register`.
unsafe fn of_device(
    device: &Device,
    memory: &dyn Memory,
    buffer: Option<DmaBuf>,
    rights: u32,
) -> Result<Object<ib::ibv_mr>> {
    let refused = |why: &str| {
        let context = format!("{} cannot reach the memory of {:?}: {why}", device.name, memory.kind());
        Error::new(ErrorKind::Unsupported, "register", context)
    };
    let Some(DmaBuf { file, offset }) = buffer else {
        // SAFETY: by the caller.
        let mr = unsafe { by_address(device, memory, rights) }?;
        return Object::of(mr, "register").map_err(|why| {
            refused(&format!("it has no DMA-BUF, and no kernel module makes it known to cards ({why})"))
        });
    };
    let (start, len, library) = (memory.as_ptr(), memory.len(), library()?);
    let fd = file.as_raw_fd();
    // SAFETY: the caller promises the memory; the domain is open, and the descriptor stays open during the call.
    let mr =
        unsafe { library.reg_dmabuf_mr(device.pd.as_ptr(), offset, len, start as u64, fd, rights as i32) };
    let mr = mr.ok_or_else(|| refused("libibverbs is older than rdma-core 34"))?;
    Object::of(mr, "register").map_err(|why| refused(&format!("the card takes no DMA-BUF ({why})")))
}

/// Registers memory by its address in the process. Returns null and sets `errno` if that is refused.
///
/// # Safety
/// As `Domain::register`.
unsafe fn by_address(device: &Device, memory: &dyn Memory, rights: u32) -> Result<*mut ib::ibv_mr> {
    let (start, len, library) = (memory.as_ptr(), memory.len(), library()?);
    // SAFETY: the caller promises the memory; the domain is open.
    Ok(unsafe { library.reg_mr_iova2(device.pd.as_ptr(), start.cast(), len, start as u64, rights) })
}

impl MemoryRegion for Registered {
    fn lkey(&self) -> u64 {
        self.lkey
    }

    fn key(&self) -> RemoteKey {
        self.key
    }

    fn revoke(&self) -> Poll<Result<()>> {
        // Deregistering waits until the card has finished its accesses.
        Poll::Ready(self.close())
    }
}

/// An imported region of a peer. A request needs only its numbers.
pub(crate) struct Imported(pub(crate) RemoteKey);

impl RemoteMemory for Imported {
    fn rkey(&self) -> u64 {
        self.0.key
    }

    fn base(&self) -> u64 {
        self.0.base
    }

    fn paths(&self, _: bool) -> Paths {
        Paths::RDMA
    }
}
