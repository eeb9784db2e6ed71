//! Physical memory of a GPU by handle, mapped for every GPU that reaches it.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use cudarc::driver::sys::{
    self, CUdevice_attribute as Attribute, CUdeviceptr, CUmemAllocationHandleType as HandleType,
    CUmemAllocationType as AllocationType, CUmemLocationType as LocationType,
};
use multirail_spi::Result;

use crate::Device;
use crate::driver::check;

const FILE: HandleType = HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// A mapped range of whole pages of the GPU's. Dropping it unmaps; the memory goes with its last mapping, in
/// whatever process.
pub(crate) struct Block {
    start: CUdeviceptr,
    size: usize,
    device: Device,
}

impl Block {
    /// Whether this GPU's memory can be had by handles that other processes can be given.
    pub fn is_supported(device: &Device) -> bool {
        let has = |attribute| device.attribute(attribute) == 1;
        has(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
            && has(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
    }

    /// New memory, at least `len` bytes, not zeroed. Cards may reach it where they can.
    pub fn allocate(device: &Device, len: usize) -> Result<Self> {
        let rdma =
            device.attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) == 1;
        let wanted = sys::CUmemAllocationProp {
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
            // SAFETY: reads what is wanted, and writes one number.
            let code =
                unsafe { sys::cuMemGetAllocationGranularity(&raw mut page, &raw const wanted, option) };
            check("allocate GPU memory", "the size of its pages", code)?;
            let size = len.checked_next_multiple_of(page).unwrap_or(usize::MAX / page * page);
            // SAFETY: as above.
            let code = unsafe { sys::cuMemCreate(&raw mut handle, size, &raw const wanted, 0) };
            check("allocate GPU memory", &what, code)?;
            Self::map(device, handle, size)
        })
    }

    /// Memory of another process's, `size` bytes, from the file that it was exported as.
    pub fn import(device: &Device, file: BorrowedFd<'_>, size: usize) -> Result<Self> {
        let mut handle = 0;
        device.within("map GPU memory", || {
            // The descriptor itself goes where an address would.
            let file = std::ptr::without_provenance_mut(file.as_raw_fd() as usize);
            // SAFETY: writes one handle. What the file is, the driver finds out.
            let code = unsafe { sys::cuMemImportFromShareableHandle(&raw mut handle, file, FILE) };
            check("map GPU memory", "a peer's", code)?;
            Self::map(device, handle, size)
        })
    }

    /// The file by which other processes can map the memory at `start`, which is some block's first byte.
    ///
    /// # Errors
    /// The driver's, for memory that is no block, or was made without such a handle.
    pub fn export(start: CUdeviceptr) -> Result<OwnedFd> {
        let (mut handle, mut fd) = (0, -1_i32);
        let address = std::ptr::without_provenance_mut(start as usize);
        // SAFETY: each call writes one value; the handle is given back.
        let code = unsafe {
            let code = sys::cuMemRetainAllocationHandle(&raw mut handle, address);
            check("share GPU memory", "its handle", code)?;
            let code = sys::cuMemExportToShareableHandle((&raw mut fd).cast(), handle, FILE, 0);
            let _ = sys::cuMemRelease(handle);
            code
        };
        check("share GPU memory", "a file for it", code)?;
        // SAFETY: new, and nobody else's.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// The first byte.
    pub fn start(&self) -> CUdeviceptr {
        self.start
    }

    /// Maps what `handle` names, and gives the handle back: the mapping keeps the memory.
    fn map(device: &Device, handle: sys::CUmemGenericAllocationHandle, size: usize) -> Result<Self> {
        let mut start = 0;
        // SAFETY: reserves addresses of its own, and maps the handle's memory there.
        let mapped = unsafe {
            check("map GPU memory", "addresses", sys::cuMemAddressReserve(&raw mut start, size, 0, 0, 0))
                .and_then(|()| {
                    let code = sys::cuMemMap(start, size, 0, handle, 0);
                    check("map GPU memory", "the mapping", code).inspect_err(|_| {
                        let _ = sys::cuMemAddressFree(start, size);
                    })
                })
        };
        // SAFETY: ours, and not used any more.
        let _ = unsafe { sys::cuMemRelease(handle) };
        mapped?;
        let block = Self { start, size, device: device.clone() };
        block.admit(device.raw())?;
        for other in crate::visible::others(device) {
            if let Err(why) = block.admit(other) {
                tracing::debug!(%why, other, gpu = device.ordinal(), "a GPU does not reach memory of another");
            }
        }
        Ok(block)
    }

    /// Lets a GPU read and write it.
    fn admit(&self, device: sys::CUdevice) -> Result<()> {
        let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = sys::CUmemAccessDesc { location: location(device), flags };
        // SAFETY: the range is mapped; one description is read.
        let code = unsafe { sys::cuMemSetAccess(self.start, self.size, &raw const access, 1) };
        check("map GPU memory", "access to it", code)
    }
}

/// Whether the memory at an address is that of a handle, mapped by `cuMemMap`.
pub(crate) fn is_mapped(address: CUdeviceptr) -> bool {
    let mut handle = 0;
    let address = std::ptr::without_provenance_mut(address as usize);
    // SAFETY: it writes one handle, which is given back.
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

impl Drop for Block {
    fn drop(&mut self) {
        let (start, size) = (self.start, self.size);
        self.device.give_back("unmap GPU memory", move || {
            // SAFETY: mapped by `map`, once. The driver waits for work of this process that uses it.
            unsafe {
                check("unmap GPU memory", "it", sys::cuMemUnmap(start, size))?;
                check("unmap GPU memory", "its addresses", sys::cuMemAddressFree(start, size))
            }
        });
    }
}
