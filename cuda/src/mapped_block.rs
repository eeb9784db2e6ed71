//! GPU memory by handle (`cuMemCreate`), mapped for every GPU that can reach it.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use cudarc::driver::sys::{
    self, CUdevice_attribute as Attribute, CUdeviceptr, CUmemAllocationHandleType as HandleType,
    CUmemAllocationType as AllocationType, CUmemLocationType as LocationType,
};
use multirail_spi::Result;

use crate::Device;
use crate::driver::check;

const FILE: HandleType = HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// A mapped range of whole GPU pages. Dropping it unmaps the range. The driver frees the memory with its last mapping
/// in any process.
pub(crate) struct MappedBlock {
    start: CUdeviceptr,
    size: usize,
    device: Device,
}

impl MappedBlock {
    /// Whether the GPU can allocate memory by handles that can be passed to other processes.
    pub fn is_supported(device: &Device) -> bool {
        let has = |attribute| device.attribute(attribute) == 1;
        has(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
            && has(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
    }

    /// Allocates at least `len` bytes, not zeroed. NICs can reach them if the GPU supports that.
    pub fn allocate(device: &Device, len: usize) -> Result<Self> {
        let rdma =
            device.attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) == 1;
        let properties = sys::CUmemAllocationProp {
            type_: AllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: FILE,
            location: location(device.raw()),
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: u8::from(rdma),
                usage: 0,
                reserved: [0; 4],
            },
        };
        let (mut page, mut handle) = (0, 0);
        let what = format!("{len} bytes on GPU {}", device.ordinal());
        device.within("allocate GPU memory", || {
            let option = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
            // SAFETY: the call reads the properties, and writes one number.
            let code =
                unsafe { sys::cuMemGetAllocationGranularity(&raw mut page, &raw const properties, option) };
            check("allocate GPU memory", "the query for its page size", code)?;
            let size = len.checked_next_multiple_of(page).unwrap_or(usize::MAX / page * page);
            // SAFETY: as above.
            let code = unsafe { sys::cuMemCreate(&raw mut handle, size, &raw const properties, 0) };
            check("allocate GPU memory", &what, code)?;
            Self::map(device, handle, size)
        })
    }

    /// Maps `size` bytes of another process's memory, by the file that the other process exported.
    pub fn import(device: &Device, file: BorrowedFd<'_>, size: usize) -> Result<Self> {
        let mut handle = 0;
        device.within("map GPU memory", || {
            // The driver takes the descriptor itself as if it were a pointer.
            let file = std::ptr::without_provenance_mut(file.as_raw_fd() as usize);
            // SAFETY: the call writes one handle. The driver checks the file.
            let code = unsafe { sys::cuMemImportFromShareableHandle(&raw mut handle, file, FILE) };
            check("map GPU memory", "a peer's file", code)?;
            Self::map(device, handle, size)
        })
    }

    /// Exports the memory at `start` as a file, by which other processes can map it. `start` is the first byte of a
    /// block.
    ///
    /// # Errors
    /// The driver's error, if the memory was not allocated by a handle that can be exported.
    pub fn export(start: CUdeviceptr) -> Result<OwnedFd> {
        let (mut handle, mut fd) = (0, -1_i32);
        let address = std::ptr::without_provenance_mut(start as usize);
        // SAFETY: each call writes one value; the handle is released.
        let code = unsafe {
            let code = sys::cuMemRetainAllocationHandle(&raw mut handle, address);
            check("share GPU memory", "the memory's handle", code)?;
            let code = sys::cuMemExportToShareableHandle((&raw mut fd).cast(), handle, FILE, 0);
            let _ = sys::cuMemRelease(handle);
            code
        };
        check("share GPU memory", "a file for the memory", code)?;
        // SAFETY: the descriptor is new, and nobody else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// The address of the first byte.
    pub fn start(&self) -> CUdeviceptr {
        self.start
    }

    /// Maps the memory of `handle`, and releases the handle: the mapping keeps the memory.
    fn map(device: &Device, handle: sys::CUmemGenericAllocationHandle, size: usize) -> Result<Self> {
        let mut start = 0;
        // SAFETY: the calls reserve new addresses, and map the handle's memory there.
        let mapped = unsafe {
            check(
                "map GPU memory",
                "a range of addresses",
                sys::cuMemAddressReserve(&raw mut start, size, 0, 0, 0),
            )
            .and_then(|()| {
                let code = sys::cuMemMap(start, size, 0, handle, 0);
                check("map GPU memory", "the mapping", code).inspect_err(|_| {
                    let _ = sys::cuMemAddressFree(start, size);
                })
            })
        };
        // SAFETY: this function owns the handle, and does not use it any more.
        let _ = unsafe { sys::cuMemRelease(handle) };
        mapped?;
        let block = Self { start, size, device: device.clone() };
        block.allow(device.raw())?;
        for other in device.accessors() {
            if let Err(why) = block.allow(other) {
                tracing::debug!(%why, other, gpu = device.ordinal(), "a GPU gets no access to another GPU's memory");
            }
        }
        Ok(block)
    }

    /// Lets a GPU read and write the memory.
    fn allow(&self, device: sys::CUdevice) -> Result<()> {
        let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = sys::CUmemAccessDesc { location: location(device), flags };
        // SAFETY: the range is mapped; one description is read.
        let code = unsafe { sys::cuMemSetAccess(self.start, self.size, &raw const access, 1) };
        check("map GPU memory", "access to the mapping", code)
    }
}

/// Whether the memory at an address was allocated by a handle, and mapped by `cuMemMap`.
pub(crate) fn is_mapped(address: CUdeviceptr) -> bool {
    let mut handle = 0;
    let address = std::ptr::without_provenance_mut(address as usize);
    // SAFETY: the call writes one handle, which is released.
    unsafe {
        let code = sys::cuMemRetainAllocationHandle(&raw mut handle, address);
        let is_mapped = code == sys::CUresult::CUDA_SUCCESS;
        if is_mapped {
            let _ = sys::cuMemRelease(handle);
        }
        is_mapped
    }
}

pub(crate) fn location(device: sys::CUdevice) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: LocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

impl Drop for MappedBlock {
    fn drop(&mut self) {
        let (start, size) = (self.start, self.size);
        self.device.free_later("unmap GPU memory", move || {
            // SAFETY: mapped by `map`, and unmapped once. The driver waits for this process's work that uses the
            // memory.
            unsafe {
                check("unmap GPU memory", "to unmap it", sys::cuMemUnmap(start, size))?;
                check("unmap GPU memory", "to free its addresses", sys::cuMemAddressFree(start, size))
            }
        });
    }
}
