//! Asks the driver what an address is.

use std::ffi::c_void;

use cudarc::driver::sys::{self, CUdeviceptr, CUmemorytype_enum as Type, CUpointer_attribute as Attribute};
use multirail_spi::{Error, ErrorKind, Result};

use crate::driver::check;

/// An allocation on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Allocation {
    /// The ordinal of the GPU.
    pub ordinal: u32,
    pub start: CUdeviceptr,
    pub len: u64,
}

/// The allocation that contains `len` bytes at `start`.
///
/// # Errors
/// `InvalidRequest` if the address is not on a GPU, `OutOfBounds` if the bytes go beyond their allocation, and
/// `Unsupported` for managed memory, which moves between host and GPU.
pub(crate) fn allocation(start: CUdeviceptr, len: usize) -> Result<Allocation> {
    let refuse = |kind, why: String| Err(Error::new(kind, "use GPU memory", why));
    let unknown = |_| {
        let why = format!("{start:#x} is not an address of CUDA memory");
        Error::new(ErrorKind::InvalidRequest, "use GPU memory", why)
    };
    let kind: u32 = attribute(Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, start).map_err(unknown)?;
    let is_managed: u32 = attribute(Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED, start)?;
    if is_managed != 0 {
        let why = "managed memory moves between host and GPU; allocate it with cuMemAlloc or CudaMemory::new";
        return refuse(ErrorKind::Unsupported, format!("{start:#x}: {why}"));
    }
    if kind != Type::CU_MEMORYTYPE_DEVICE as u32 {
        let why = format!("{start:#x} is host memory; register it as such");
        return refuse(ErrorKind::InvalidRequest, why);
    }
    let ordinal: i32 = attribute(Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, start)?;
    let first: CUdeviceptr = attribute(Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, start)?;
    let whole: usize = attribute(Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE, start)?;
    let end = start.checked_add(len as u64);
    if start < first || end.is_none_or(|end| end > first + whole as u64) {
        let why =
            format!("{len} bytes at {start:#x} go beyond their allocation, {whole} bytes at {first:#x}");
        return refuse(ErrorKind::OutOfBounds, why);
    }
    Ok(Allocation { ordinal: ordinal as u32, start: first, len: whole as u64 })
}

/// The ordinal of the GPU on which the memory at `start` lies.
pub(crate) fn ordinal_of(start: CUdeviceptr) -> Option<u32> {
    let kind = attribute::<u32>(Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, start);
    let ordinal = attribute::<i32>(Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, start);
    kind.ok().filter(|kind| *kind == Type::CU_MEMORYTYPE_DEVICE as u32)?;
    ordinal.ok().and_then(|ordinal| u32::try_from(ordinal).ok())
}

/// Whether all of a range is host memory that was page-locked by one call, and that GPUs reach at the same addresses as
/// the host.
pub(crate) fn whole_is_page_locked(start: CUdeviceptr, len: u64) -> bool {
    let kind = attribute::<u32>(Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, start);
    let on_gpu = attribute::<CUdeviceptr>(Attribute::CU_POINTER_ATTRIBUTE_DEVICE_POINTER, start);
    let first = attribute::<CUdeviceptr>(Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, start);
    let whole = attribute::<usize>(Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE, start);
    let covers = |first: u64, whole: usize| first <= start && start - first + len <= whole as u64;
    kind.is_ok_and(|kind| kind == Type::CU_MEMORYTYPE_HOST as u32)
        && on_gpu.is_ok_and(|on_gpu| on_gpu == start)
        && matches!((first, whole), (Ok(first), Ok(whole)) if covers(first, whole))
}

/// The memory pool that an address belongs to, if any.
pub(crate) fn pool(start: CUdeviceptr) -> Result<Option<sys::CUmemoryPool>> {
    let handle: usize = attribute(Attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, start)?;
    Ok((handle != 0).then(|| std::ptr::with_exposed_provenance_mut(handle)))
}

/// Makes synchronous copies of CUDA complete for NICs, too. Otherwise such a copy may return before its bytes are in
/// the memory (CUDA driver API, `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`).
pub(crate) fn synchronise(start: CUdeviceptr) -> Result<()> {
    let on: u32 = 1;
    // SAFETY: an address of CUDA memory; the call only reads the value.
    let code = unsafe {
        let on: *const c_void = (&raw const on).cast();
        sys::cuPointerSetAttribute(on, Attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, start)
    };
    check("use GPU memory", "synchronous copies (SYNC_MEMOPS)", code)
}

fn attribute<T: Default>(attribute: Attribute, start: CUdeviceptr) -> Result<T> {
    let mut value = T::default();
    // SAFETY: the callers ask for the type that the attribute has (`cuPointerGetAttribute`).
    let code = unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), attribute, start) };
    check("use GPU memory", "an attribute of an address", code)?;
    Ok(value)
}
