//! Memory of a GPU.

use std::any::Any;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdeviceptr};
use cudarc::driver::{CudaSlice, DevicePtr};
use multirail_spi::{DmaBuf, Error, ErrorKind, Fence, Memory, MemoryKind, Result};
use topology::Address;

use crate::attributes::{Allocation, allocation, synchronise};
use crate::block::Block;
use crate::dma_buf::export;
use crate::driver::{check, start};
use crate::reaper::with_room;
use crate::{Device, WritesOrdering};

/// Bytes on a GPU, for `Fabric::register`.
///
/// A fabric with cards gives them to the cards of the GPU's rail group; loopback has GPUs copy them. The
/// processor cannot follow their address: regions copy in and out by CUDA.
pub struct CudaMemory {
    start: CUdeviceptr,
    len: usize,
    allocation: Allocation,
    may_expose: bool,
    /// Freed, or let go, after everything above.
    _owner: Owner,
    device: Device,
}

/// A slice of cudarc's, which is dropped in its context: in a thread without one it would not be freed.
struct Slice<T: 'static> {
    slice: Option<CudaSlice<T>>,
    device: Device,
}

// SAFETY: what a slice has of `T` is on the GPU, and nobody here looks at it.
unsafe impl<T: 'static> Send for Slice<T> {}
// SAFETY: as above.
unsafe impl<T: 'static> Sync for Slice<T> {}

impl<T: 'static> Drop for Slice<T> {
    fn drop(&mut self) {
        let slice = self.slice.take();
        self.device.give_back("free a slice", move || {
            drop(slice);
            Ok(())
        });
    }
}

/// An allocation of `cuMemAlloc`.
struct Owned {
    start: CUdeviceptr,
    device: Device,
}

impl CudaMemory {
    /// Allocates `len` bytes, all zero, so that other processes and cards can reach them: whole pages of the
    /// GPU's, of 2 MiB, where it can (`cuMemCreate`), else by `cuMemAlloc`.
    ///
    /// # Errors
    /// `InvalidRequest` for no bytes, `Exhausted` where there are not enough.
    pub fn new(device: &Device, len: usize) -> Result<Self> {
        if len == 0 {
            return Err(Error::new(ErrorKind::InvalidRequest, "allocate GPU memory", "zero bytes"));
        }
        // Whole pages of the host, so that a DMA-BUF shows nobody else's.
        let whole = len.checked_next_multiple_of(rustix::param::page_size());
        let too_much = || Error::new(ErrorKind::Exhausted, "allocate GPU memory", format!("{len} bytes"));
        let whole = whole.ok_or_else(too_much)?;
        let (start, owner) = with_room(|| allocate(device, whole))?;
        // SAFETY: new, and of that size.
        unsafe { device.zero(start, whole as u64) }?;
        // SAFETY: allocated above, and freed with its owner.
        unsafe { Self::of_pointer(start, len, owner) }
    }

    /// Somebody else's allocation, or a part of one: from `cuMemAlloc`, a pool, a framework's tensor.
    /// `owner` keeps it.
    ///
    /// Sets `SYNC_MEMOPS` for the allocation where it can be set, so that what CUDA has copied is there
    /// for cards too.
    ///
    /// # Errors
    /// `InvalidRequest` for an address that is not a GPU's, `OutOfBounds` beyond its allocation,
    /// `Unsupported` for managed memory.
    ///
    /// # Safety
    /// The bytes stay allocated while `owner` lives.
    pub unsafe fn of_pointer(address: u64, len: usize, owner: Owner) -> Result<Self> {
        start()?;
        let allocation = allocation(address, len)?;
        let device = Device::open(allocation.ordinal)?;
        match device.within("use GPU memory", || synchronise(address)) {
            Ok(()) => {}
            // Not for memory that is mapped by cuMemMap.
            Err(why) if why.kind() == ErrorKind::InvalidRequest || why.kind() == ErrorKind::Unsupported => {
                tracing::debug!(%why, "SYNC_MEMOPS is not set");
            }
            Err(why) => return Err(why),
        }
        Ok(Self { start: address, len, allocation, may_expose: false, _owner: owner, device })
    }

    /// The bytes of a slice of cudarc's, which it keeps. What was queued for it is waited for, once, here.
    ///
    /// # Errors
    /// `InvalidRequest` for an empty slice, the driver's for what was queued; those of
    /// [`of_pointer`](Self::of_pointer).
    pub fn of_slice<T: 'static>(slice: CudaSlice<T>) -> Result<Self> {
        let len = slice.num_bytes();
        if len == 0 {
            return Err(Error::new(ErrorKind::InvalidRequest, "use GPU memory", "an empty slice"));
        }
        let device = Device::open(slice.ordinal() as u32)?;
        let stream = Arc::clone(slice.stream());
        let start = device.within("use GPU memory", || {
            let start = slice.device_ptr(&stream).0;
            stream.synchronize().map(|()| start).map_err(|why| {
                let why = format!("what was queued for the slice failed: {why}");
                Error::new(ErrorKind::Io, "use GPU memory", why)
            })
        })?;
        let slice = Slice { slice: Some(slice), device };
        // SAFETY: the slice keeps its bytes.
        unsafe { Self::of_pointer(start, len, Arc::new(slice)) }
    }

    /// Lets the DMA-BUF show bytes beside the allocation, where it shares a page of the host with such.
    pub fn may_expose_neighbours(mut self) -> Self {
        self.may_expose = true;
        self
    }

    /// Its GPU.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Copies `bytes` in from byte `at` on; they are there when it returns.
    pub fn copy_in(&self, at: usize, bytes: &[u8]) -> Result<()> {
        let start = self.place(at, bytes.len())?;
        // SAFETY: the range was checked, and lives as long as `self`.
        unsafe { self.device.copy(start, bytes.as_ptr() as u64, bytes.len() as u64) }
    }

    /// Copies bytes out from byte `at` on.
    pub fn copy_out(&self, at: usize, into: &mut [u8]) -> Result<()> {
        let start = self.place(at, into.len())?;
        // SAFETY: as in `copy_in`, the other way.
        unsafe { self.device.copy(into.as_mut_ptr() as u64, start, into.len() as u64) }
    }

    fn place(&self, at: usize, len: usize) -> Result<CUdeviceptr> {
        match at.checked_add(len).filter(|end| *end <= self.len) {
            Some(_) => Ok(self.start + at as u64),
            None => {
                let why = format!("{len} bytes from {at} on, of {}", self.len);
                Err(Error::new(ErrorKind::OutOfBounds, "copy", why))
            }
        }
    }
}

// SAFETY: the address is fixed, the bytes stay while the owner lives, and nobody can have a Rust
// reference into a GPU's memory.
unsafe impl Memory for CudaMemory {
    fn as_ptr(&self) -> *mut u8 {
        std::ptr::without_provenance_mut(self.start as usize)
    }

    fn len(&self) -> usize {
        self.len
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Cuda { device: self.device.ordinal() }
    }

    fn near(&self) -> Option<Address> {
        self.device.address()
    }

    fn dma_buf(&self) -> Result<Option<DmaBuf>> {
        if !self.device.has_dma_buf() {
            return Ok(None);
        }
        let exported = || export(&self.allocation, self.start, self.len, self.may_expose);
        self.device.within("export GPU memory", exported).map(Some)
    }

    fn fence(&self) -> Result<Option<Arc<dyn Fence>>> {
        if self.device.writes_ordering() > WritesOrdering::None {
            return Ok(None);
        }
        if !self.device.can_flush_writes() {
            let why = "the GPU does not order what cards write, and flushes it by no call (CUDA driver API, \
                       CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS): register host memory";
            return Err(Error::new(ErrorKind::Unsupported, "register", why));
        }
        Ok(Some(Arc::new(self.device.clone())))
    }

    fn store(&self, at: usize, bytes: &[u8]) -> Option<Result<()>> {
        Some(self.copy_in(at, bytes))
    }

    fn load(&self, at: usize, into: &mut [u8]) -> Option<Result<()>> {
        Some(self.copy_out(at, into))
    }
}

type Owner = Arc<dyn Any + Send + Sync>;

/// New memory of whole pages, and what it goes with.
fn allocate(device: &Device, whole: usize) -> Result<(CUdeviceptr, Owner)> {
    if Block::is_supported(device) {
        let block = Block::allocate(device, whole)?;
        return Ok((block.start(), Arc::new(block)));
    }
    let owned = Owned::allocate(device, whole)?;
    Ok((owned.start, Arc::new(owned)))
}

impl Owned {
    fn allocate(device: &Device, len: usize) -> Result<Self> {
        let mut start = 0;
        device.within("allocate GPU memory", || {
            let what = format!("{len} bytes on GPU {}", device.ordinal());
            // SAFETY: the context is current; the driver writes an address, whose bytes are new.
            check("allocate GPU memory", &what, unsafe { sys::cuMemAlloc_v2(&raw mut start, len) })
        })?;
        Ok(Self { start, device: device.clone() })
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        let start = self.start;
        self.device.give_back("free GPU memory", move || {
            // SAFETY: allocated by `CudaMemory::new`, and freed once.
            check("free GPU memory", "it", unsafe { sys::cuMemFree_v2(start) })
        });
    }
}
