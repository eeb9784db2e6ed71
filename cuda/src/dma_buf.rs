//! Export of a range as a DMA-BUF.

use std::os::fd::{FromRawFd, OwnedFd};

use cudarc::driver::sys::{self, CUdeviceptr, CUmemRangeHandleType as Handle};
use multirail_spi::{DmaBuf, Error, ErrorKind, Result};

use crate::attributes::Allocation;
use crate::driver::check;

/// Exports `len` bytes at `start` of `allocation`, page by page of the host's: outward.
///
/// # Errors
/// `Permission` where a page holds bytes beyond the allocation, which may be somebody else's, unless
/// `may_expose`.
pub(crate) fn export(
    allocation: &Allocation,
    start: CUdeviceptr,
    len: usize,
    may_expose: bool,
) -> Result<DmaBuf> {
    let page = rustix::param::page_size() as u64;
    let (first, last) = outward(start, len as u64, page);
    let beyond = first < allocation.start || last > allocation.start + allocation.len;
    if beyond && !may_expose {
        let why = format!(
            "a DMA-BUF is of whole pages of {page} bytes, and {len} bytes at {start:#x} share one with what lies \
             beside their allocation: allocate whole pages, or allow it by CudaMemory::may_expose_neighbours"
        );
        return Err(Error::new(ErrorKind::Permission, "export GPU memory", why));
    }
    let mut fd: i32 = -1;
    // SAFETY: the range is allocated, as the caller holds it; a descriptor is written on success.
    let code = unsafe {
        let handle = Handle::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        sys::cuMemGetHandleForAddressRange((&raw mut fd).cast(), first, (last - first) as usize, handle, 0)
    };
    check("export GPU memory", "a DMA-BUF", code)?;
    // SAFETY: new, and nobody else's.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    Ok(DmaBuf { file, offset: start - first })
}

/// The pages in which a range lies: the first byte, and the one after the last.
fn outward(start: u64, len: u64, page: u64) -> (u64, u64) {
    (start / page * page, (start + len).div_ceil(page) * page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_grow_to_whole_pages() {
        assert_eq!(outward(0x2000, 4096, 4096), (0x2000, 0x3000));
        assert_eq!(outward(0x2fff, 2, 4096), (0x2000, 0x4000));
    }
}
