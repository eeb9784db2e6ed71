//! GPU memory, for `Fabric::register`.

use std::any::Any;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdeviceptr, CUmemRangeHandleType as RangeHandle};
use cudarc::driver::{CudaSlice, DevicePtr};
use multirail_spi::{DmaBuf, Error, ErrorKind, Flush, Memory, MemoryKind, Result};
use topology::Address;

use crate::attributes::{Allocation, allocation, synchronise};
use crate::background::with_room;
use crate::driver::{check, start};
use crate::kernels::VerifyLaunch;
use crate::mapped_block::MappedBlock;
use crate::{Device, Reach, WritesOrdering};

/// Bytes of one number of a SplitMix64 stream.
const WORD: usize = 8;

/// Bytes on a GPU, for `Fabric::register`.
///
/// A fabric registers them with the NICs of the GPU's rail group; loopback lets GPUs copy them. The processor cannot
/// access their address: `copy_in` and `copy_out` go through CUDA.
pub struct CudaMemory {
    start: CUdeviceptr,
    len: usize,
    allocation: Allocation,
    may_expose: bool,
    /// Keeps the bytes allocated.
    _owner: Owner,
    device: Device,
}

type Owner = Arc<dyn Any + Send + Sync>;

impl CudaMemory {
    /// Allocates `len` zeroed bytes that other processes and NICs can reach: whole GPU pages of 2 MiB (`cuMemCreate`)
    /// if the GPU supports that, else by `cuMemAlloc`.
    ///
    /// # Errors
    /// `InvalidRequest` if `len` is 0, `Exhausted` if the GPU has too little memory.
    pub fn new(device: &Device, len: usize) -> Result<Self> {
        if len == 0 {
            return Err(Error::new(ErrorKind::InvalidRequest, "allocate GPU memory", "zero bytes"));
        }
        // A DMA-BUF consists of whole pages of the host. So the allocation does, too, and exposes no other memory.
        let whole = len.checked_next_multiple_of(rustix::param::page_size());
        let too_large = || Error::new(ErrorKind::Exhausted, "allocate GPU memory", format!("{len} bytes"));
        let whole = whole.ok_or_else(too_large)?;
        let (start, owner) = with_room(|| allocate(device, whole))?;
        // SAFETY: the memory is new, and has `whole` bytes.
        unsafe { device.zero(start, whole as u64) }?;
        // SAFETY: allocated above, and freed with its owner.
        unsafe { Self::of_pointer(start, len, owner) }
    }

    /// Takes memory that another library allocated, or a part of it: from `cuMemAlloc`, from a pool, or a framework's
    /// tensor. `owner` keeps the memory allocated.
    ///
    /// Sets `SYNC_MEMOPS` for the allocation where that is possible: then a copy by CUDA that has returned is visible
    /// to NICs, too.
    ///
    /// # Errors
    /// `InvalidRequest` if the address is not on a GPU, `OutOfBounds` if the bytes go beyond their allocation,
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
            // Memory that is mapped by cuMemMap does not have this attribute.
            Err(why) if why.kind() == ErrorKind::InvalidRequest || why.kind() == ErrorKind::Unsupported => {
                tracing::debug!(%why, "SYNC_MEMOPS is not set");
            }
            Err(why) => return Err(why),
        }
        Ok(Self { start: address, len, allocation, may_expose: false, _owner: owner, device })
    }

    /// Takes a slice of cudarc's, and keeps it. Waits once for the work that is queued on the slice's stream.
    ///
    /// # Errors
    /// `InvalidRequest` for an empty slice; the driver's error if the queued work has failed; those of
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
                let why = format!("the work that was queued for the slice failed: {why}");
                Error::new(ErrorKind::Io, "use GPU memory", why)
            })
        })?;
        let slice = OwnedSlice { slice: Some(slice), device };
        // SAFETY: the slice keeps its bytes.
        unsafe { Self::of_pointer(start, len, Arc::new(slice)) }
    }

    /// Allows the DMA-BUF to expose bytes beside the allocation, if the allocation shares a page of the host with them.
    pub fn may_expose_neighbours(mut self) -> Self {
        self.may_expose = true;
        self
    }

    /// The GPU on which the bytes are.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Copies `bytes` into the memory from byte `at` on. The copy is complete when the call returns.
    pub fn copy_in(&self, at: usize, bytes: &[u8]) -> Result<()> {
        let start = self.range(at, bytes.len())?;
        // SAFETY: the range was checked, and lives as long as `self`.
        unsafe { self.device.copy(start, bytes.as_ptr() as u64, bytes.len() as u64) }
    }

    /// Copies bytes out of the memory from byte `at` on.
    pub fn copy_out(&self, at: usize, into: &mut [u8]) -> Result<()> {
        let start = self.range(at, into.len())?;
        // SAFETY: as in `copy_in`, in the other direction.
        unsafe { self.device.copy(into.as_mut_ptr() as u64, start, into.len() as u64) }
    }

    /// Compares the memory with pages of `size` bytes. Each page should hold the little-endian outputs of SplitMix64
    /// (Steele, Lea, Flood 2014) from its state in `streams` on. Returns the offset of the first byte that differs.
    ///
    /// The memory's own GPU compares. So the check fails if the bytes are not visible to that GPU's kernels.
    ///
    /// # Errors
    /// `InvalidRequest` if the pages are not exactly the memory, or if there are none; `Unsupported` if the GPU has no
    /// access to the memory; `Exhausted` if it has no room for the table of pages.
    pub fn first_mismatch(&self, size: u64, streams: &[u64]) -> Result<Option<u64>> {
        const OPERATION: &str = "compare GPU memory";
        let pages = streams.len() as u64;
        if size == 0 || pages == 0 || pages.checked_mul(size) != Some(self.len() as u64) {
            let why = format!("{pages} pages of {size} bytes are not the memory's {} bytes", self.len());
            return Err(Error::new(ErrorKind::InvalidRequest, OPERATION, why));
        }
        let (device, start) = (self.device(), self.as_ptr() as u64);
        if Reach::of_gpu(device, device, start, self.len() as u64) != Some(Reach::Kernel) {
            let why = "the memory's own GPU has no access to it: call cuMemSetAccess or cuMemPoolSetAccess";
            return Err(Error::new(ErrorKind::Unsupported, OPERATION, why));
        }
        // The first word is the result: no offset at first. The streams follow.
        let table = CudaMemory::new(device, (1 + streams.len()) * WORD)?;
        let numbers = std::iter::once(&u64::MAX).chain(streams);
        table.copy_in(0, &numbers.flat_map(|number| number.to_le_bytes()).collect::<Vec<_>>())?;
        let (words, first) = (size.div_ceil(WORD as u64), table.as_ptr() as u64);
        let launch =
            VerifyLaunch { start, streams: first + WORD as u64, first, size, words, total: pages * words };
        let (kernel, stream) = (device.verify_kernel()?, device.waited_stream()?);
        device.within(OPERATION, || {
            // SAFETY: the kernel reads this memory of `pages` of `size` bytes, which its GPU reaches (see above), and
            // the table, and writes the result to the table. Both live until the call below has waited for the kernel.
            unsafe { kernel.launch(OPERATION, stream, launch) }?;
            stream.wait()
        })?;
        let mut first = [0; WORD];
        table.copy_out(0, &mut first)?;
        let first = u64::from_le_bytes(first);
        Ok((first != u64::MAX).then_some(first))
    }

    /// The address of byte `at`, if `len` bytes from there on are in bounds.
    fn range(&self, at: usize, len: usize) -> Result<CUdeviceptr> {
        match at.checked_add(len).filter(|end| *end <= self.len) {
            Some(_) => Ok(self.start + at as u64),
            None => {
                let why = format!("{len} bytes from byte {at} on, of {}", self.len);
                Err(Error::new(ErrorKind::OutOfBounds, "copy", why))
            }
        }
    }
}

// SAFETY: the address is fixed, the bytes stay while the owner lives, and there can be no Rust reference into a GPU's
// memory.
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

    fn needed_flush(&self) -> Result<Option<Arc<dyn Flush>>> {
        if self.device.writes_ordering() > WritesOrdering::None {
            return Ok(None);
        }
        if !self.device.can_flush_writes() {
            let why = "the GPU neither sees a NIC's writes in order nor has a call that flushes them (CUDA driver API, \
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

/// Allocates whole pages. Returns their address and their owner.
fn allocate(device: &Device, whole: usize) -> Result<(CUdeviceptr, Owner)> {
    if MappedBlock::is_supported(device) {
        let block = MappedBlock::allocate(device, whole)?;
        return Ok((block.start(), Arc::new(block)));
    }
    let allocation = OwnedAllocation::new(device, whole)?;
    Ok((allocation.start, Arc::new(allocation)))
}

/// An allocation of `cuMemAlloc`, freed with this value.
struct OwnedAllocation {
    start: CUdeviceptr,
    device: Device,
}

impl OwnedAllocation {
    fn new(device: &Device, len: usize) -> Result<Self> {
        let mut start = 0;
        device.within("allocate GPU memory", || {
            let what = format!("{len} bytes on GPU {}", device.ordinal());
            // SAFETY: the context is current; the driver writes the address of new memory.
            check("allocate GPU memory", &what, unsafe { sys::cuMemAlloc_v2(&raw mut start, len) })
        })?;
        Ok(Self { start, device: device.clone() })
    }
}

impl Drop for OwnedAllocation {
    fn drop(&mut self) {
        let start = self.start;
        self.device.free_later("free GPU memory", move || {
            // SAFETY: allocated by `new`, and freed once.
            check("free GPU memory", "to free it", unsafe { sys::cuMemFree_v2(start) })
        });
    }
}

/// A slice of cudarc's. It is dropped in its GPU's context, because in a thread without a context cudarc would not free
/// it.
struct OwnedSlice<T: 'static> {
    slice: Option<CudaSlice<T>>,
    device: Device,
}

// SAFETY: all values of `T` are on the GPU, and nothing here accesses them.
unsafe impl<T: 'static> Send for OwnedSlice<T> {}
// SAFETY: as above.
unsafe impl<T: 'static> Sync for OwnedSlice<T> {}

impl<T: 'static> Drop for OwnedSlice<T> {
    fn drop(&mut self) {
        let slice = self.slice.take();
        self.device.free_later("free a slice", move || {
            drop(slice);
            Ok(())
        });
    }
}

/// Exports `len` bytes at `start` of `allocation` as a DMA-BUF of whole pages of the host.
///
/// # Errors
/// `Permission` if a page also holds bytes outside the allocation, which another owner may use, unless `may_expose`.
fn export(allocation: &Allocation, start: CUdeviceptr, len: usize, may_expose: bool) -> Result<DmaBuf> {
    let page = rustix::param::page_size() as u64;
    let (first, end) = whole_pages(start, len as u64, page);
    let is_beyond = first < allocation.start || end > allocation.start + allocation.len;
    if is_beyond && !may_expose {
        let why = format!(
            "a DMA-BUF consists of whole pages of {page} bytes, and {len} bytes at {start:#x} share a page with memory \
             outside their allocation: allocate whole pages, or allow it by CudaMemory::may_expose_neighbours"
        );
        return Err(Error::new(ErrorKind::Permission, "export GPU memory", why));
    }
    let mut fd: i32 = -1;
    // SAFETY: the range is allocated, as the caller keeps it; the driver writes a descriptor on success.
    let code = unsafe {
        let handle = RangeHandle::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        sys::cuMemGetHandleForAddressRange((&raw mut fd).cast(), first, (end - first) as usize, handle, 0)
    };
    check("export GPU memory", "a DMA-BUF", code)?;
    // SAFETY: the descriptor is new, and nobody else owns it.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    Ok(DmaBuf { file, offset: start - first })
}

/// The whole pages that contain a range: the first address, and the one after the last.
fn whole_pages(start: u64, len: u64, page: u64) -> (u64, u64) {
    (start / page * page, (start + len).div_ceil(page) * page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_grow_to_whole_pages() {
        assert_eq!(whole_pages(0x2000, 4096, 4096), (0x2000, 0x3000));
        assert_eq!(whole_pages(0x2fff, 2, 4096), (0x2000, 0x4000));
    }
}
