//! What an address is.

use std::ffi::c_void;

use cudarc::driver::sys::{self, CUdeviceptr, CUmemorytype_enum as Type, CUpointer_attribute as Attribute};
use multirail_spi::{Error, ErrorKind, Result};

use crate::driver::check;

/// An allocation on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Allocation {
    pub ordinal: u32,
    pub start: CUdeviceptr,
    pub len: u64,
}

/// The allocation in which `len` bytes at `start` lie.
///
/// # Errors
/// `InvalidRequest` for what is not a GPU's, or goes beyond its allocation; `Unsupported` for managed
/// memory, which moves.
pub(crate) fn allocation(start: CUdeviceptr, len: usize) -> Result<Allocation> {
    let refuse = |kind, why: String| Err(Error::new(kind, "use GPU memory", why));
    let unknown = |_| {
        Error::new(ErrorKind::InvalidRequest, "use GPU memory", format!("{start:#x} is no address of CUDA's"))
    };
    let kind: u32 = attribute(Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, start).map_err(unknown)?;
    let is_managed: u32 = attribute(Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED, start)?;
    if is_managed != 0 {
        let why = "managed memory moves between host and GPU; allocate it with cuMemAlloc or CudaMemory::new";
        return refuse(ErrorKind::Unsupported, format!("{start:#x}: {why}"));
    }
    if kind != Type::CU_MEMORYTYPE_DEVICE as u32 {
        let why = format!("{start:#x} is memory of the host; register it as such");
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

/// The GPU whose memory an address is.
pub(crate) fn ordinal(start: CUdeviceptr) -> Option<u32> {
    let kind = attribute::<u32>(Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, start);
    let ordinal = attribute::<i32>(Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, start);
    kind.ok().filter(|kind| *kind == Type::CU_MEMORYTYPE_DEVICE as u32)?;
    ordinal.ok().and_then(|ordinal| u32::try_from(ordinal).ok())
}

/// Whether all of a range is memory of the host's that was page-locked as one, which GPUs reach by its own
/// addresses.
pub(crate) fn whole_is_page_locked(start: CUdeviceptr, len: u64) -> bool {
    let kind = attribute::<u32>(Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, start);
    let there = attribute::<CUdeviceptr>(Attribute::CU_POINTER_ATTRIBUTE_DEVICE_POINTER, start);
    let first = attribute::<CUdeviceptr>(Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, start);
    let whole = attribute::<usize>(Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE, start);
    let covers = |first: u64, whole: usize| first <= start && start - first + len <= whole as u64;
    kind.is_ok_and(|kind| kind == Type::CU_MEMORYTYPE_HOST as u32)
        && there.is_ok_and(|there| there == start)
        && matches!((first, whole), (Ok(first), Ok(whole)) if covers(first, whole))
}

/// The pool that an address is of, if any.
pub(crate) fn pool(start: CUdeviceptr) -> Result<Option<sys::CUmemoryPool>> {
    let handle: usize = attribute(Attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, start)?;
    Ok((handle != 0).then(|| std::ptr::with_exposed_provenance_mut(handle)))
}

/// Lets copies of CUDA's that are done count as done for cards too: without it a synchronous copy may
/// return before its bytes are there (CUDA driver API, `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`).
pub(crate) fn synchronise(start: CUdeviceptr) -> Result<()> {
    let on: u32 = 1;
    // SAFETY: an address of CUDA's; the value is read only.
    let code = unsafe {
        let on: *const c_void = (&raw const on).cast();
        sys::cuPointerSetAttribute(on, Attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, start)
    };
    check("use GPU memory", "to synchronise copies (SYNC_MEMOPS)", code)
}

fn attribute<T: Default>(attribute: Attribute, start: CUdeviceptr) -> Result<T> {
    let mut value = T::default();
    // SAFETY: the callers ask for the type that the attribute has (`cuPointerGetAttribute`).
    let code = unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), attribute, start) };
    check("use GPU memory", "an attribute of an address", code)?;
    Ok(value)
}
