//! Registered memory, and that of peers.

use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;

use multirail_spi::{
    Access, DmaBuf, Error, ErrorKind, Memory, MemoryKind, MemoryRegion, RemoteKey, RemoteMemory, Result,
};
use rdma_sys as ib;

use crate::device::Device;
use crate::library::library;
use crate::objects::{Object, last_errno};
use crate::status::EINVAL;

/// A registration. Closed in order: the keys first, then the memory is let go.
pub(crate) struct Registered {
    mr: Mutex<Option<Object<ib::ibv_mr>>>,
    lkey: u64,
    key: RemoteKey,
    memory: Arc<dyn Memory>,
    device: Arc<Device>,
}

impl Registered {
    /// Registers `memory` for this side, and for peers as `access` allows; the host's and p2pmem is paged
    /// in on demand, or pinned.
    ///
    /// # Safety
    /// As `Domain::register`.
    pub(crate) unsafe fn new(
        device: &Arc<Device>,
        memory: Arc<dyn Memory>,
        access: Access,
        is_paged: bool,
    ) -> Result<Self> {
        // GPUs' memory is slow without relaxed ordering; a completion still comes after its bytes. The
        // library leaves the flag out where the kernel does not know it.
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
        // Before a peer is told of it.
        device.flushes.add(&*memory)?;
        let start = memory.as_ptr();
        // SAFETY: an open registration.
        let (lkey, rkey) = unsafe { ((*mr.as_ptr()).lkey, (*mr.as_ptr()).rkey) };
        Ok(Self {
            mr: Mutex::new(Some(mr)),
            lkey: device.far.add(&memory, lkey),
            key: RemoteKey { base: start as u64, key: rkey.into(), len: memory.len() as u64 },
            memory,
            device: Arc::clone(device),
        })
    }

    /// Deregisters, unless that is done.
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
        self.device.far.remove(self.lkey);
        if let Err(error) = self.close() {
            // The card may write to it for as long as it likes.
            std::mem::forget(Arc::clone(&self.memory));
            tracing::warn!(%error, "the memory of a region is never freed");
        }
    }
}

/// The host's memory: pinned, or paged in as requests come to it.
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
        let context = format!("{} does not page on demand: register without", device.name);
        return Err(Error::new(ErrorKind::Unsupported, "register", context));
    }
    Object::of(mr, "register")
}

/// A device's memory that the kernel gives out: paged in as requests come to it. To be pinned for a
/// card it is refused, whichever the card (Linux' `mm/gup.c`: `EFAULT`, or `EREMOTEIO` for a card that
/// only reads).
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
            true => "it does not page this on demand, and the kernel pins none for RDMA: register it by a DMA-BUF",
            false => {
                "the kernel pins none for RDMA: set VerbsConfig::on_demand_paging, where the card offers that, \
                 or register it by a DMA-BUF"
            }
        };
        let context = format!("{} is given no p2pmem: {advice} ({})", device.name, why.context());
        Error::new(why.kind(), "register", context)
    })
}

/// A GPU's memory: by its DMA-BUF, or by its address, where a module of the kernel (nvidia_peermem)
/// tells cards of it.
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
        return Object::of(mr, "register")
            .map_err(|why| refused(&format!("it is no DMA-BUF, and no module tells cards of it ({why})")));
    };
    let (start, len, library) = (memory.as_ptr(), memory.len(), library()?);
    let fd = file.as_raw_fd();
    // SAFETY: the memory is the caller's promise, the domain is open; the descriptor is open until the end.
    let mr =
        unsafe { library.reg_dmabuf_mr(device.pd.as_ptr(), offset, len, start as u64, fd, rights as i32) };
    let mr = mr.ok_or_else(|| refused("libibverbs is older than rdma-core 34"))?;
    Object::of(mr, "register").map_err(|why| refused(&format!("it takes no DMA-BUF ({why})")))
}

/// As the process addresses it; null, and `errno` set, where that is refused.
///
/// # Safety
/// As `Domain::register`.
unsafe fn by_address(device: &Device, memory: &dyn Memory, rights: u32) -> Result<*mut ib::ibv_mr> {
    let (start, len, library) = (memory.as_ptr(), memory.len(), library()?);
    // SAFETY: the memory is the caller's promise; the domain is open.
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
        // The card waits for what it is in the middle of.
        Poll::Ready(self.close())
    }
}

/// A peer's region: its numbers are all that a request needs.
pub(crate) struct Imported(pub(crate) RemoteKey);

impl RemoteMemory for Imported {
    fn rkey(&self) -> u64 {
        self.0.key
    }

    fn base(&self) -> u64 {
        self.0.base
    }
}
