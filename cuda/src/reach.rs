//! How GPUs reach memory, and whether they may.

use cudarc::driver::sys::{self, CUmemAccess_flags as AccessFlags};
use multirail_spi::Result;

use crate::Device;
use crate::attributes::{pool, whole_is_page_locked};
use crate::driver::check;
use crate::mapped_block::{is_mapped, location};

const READ_WRITE: AccessFlags = AccessFlags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;

/// How a GPU copies a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// By the kernel, which reaches both ends: GPU memory, or page-locked host memory.
    Kernel,
    /// By the driver. One end is host memory that is not page-locked, which the driver copies while
    /// [`BatchCopier::launch`](crate::BatchCopier::launch) waits, or memory of a GPU that this one does not reach.
    Driver,
}

impl Reach {
    /// How the GPUs of this process reach `len` bytes of host memory at `address`: by the kernel if one call
    /// page-locked all of them. If no GPU is open, the answer is `Driver`, without a query.
    pub fn of_host(address: u64, len: u64) -> Self {
        let Some(device) = Device::opened() else { return Self::Driver };
        // The driver answers this query only within a context.
        let locked = device.within("use host memory", || Ok(whole_is_page_locked(address, len)));
        if locked.unwrap_or(false) { Self::Kernel } else { Self::Driver }
    }

    /// How `device` reaches `len` bytes at `address` on the GPU `owner`. `None` if `device` has no access to them: a
    /// kernel or a copy that touched them would make the process's context unusable. Only the first and the last byte
    /// are checked.
    ///
    /// A GPU gets access to memory by handle (`cuMemMap`) and to pools by `cuMemSetAccess` and `cuMemPoolSetAccess`,
    /// and to memory of `cuMemAlloc` by peer access.
    pub fn of_gpu(device: &Device, owner: &Device, address: u64, len: u64) -> Option<Self> {
        let last = address + len.saturating_sub(1);
        let ask = || Ok((has_access(device, address)?, has_access(device, last)?));
        match device.within("reach GPU memory", ask) {
            Ok((None, None)) if device.reaches(owner) => Some(Self::Kernel),
            Ok((None, None)) => Some(Self::Driver),
            Ok((first, last)) => (first != Some(false) && last != Some(false)).then_some(Self::Kernel),
            Err(why) => {
                let gpu = device.ordinal();
                tracing::warn!(%why, gpu, "the driver does not tell whether a GPU has access to memory");
                None
            }
        }
    }
}

/// Whether a GPU was given access to read and write at `address`. `None` for memory that needs no such access.
fn has_access(device: &Device, address: u64) -> Result<Option<bool>> {
    let mut location = location(device.raw());
    if let Some(pool) = pool(address)? {
        let mut flags = AccessFlags::CU_MEM_ACCESS_FLAGS_PROT_NONE;
        // SAFETY: the pool is the one of this address; the call writes one value.
        let code = unsafe { sys::cuMemPoolGetAccess(&raw mut flags, pool, &raw mut location) };
        return check("reach GPU memory", "the query for access to a pool", code)
            .map(|()| Some(flags == READ_WRITE));
    }
    // Memory of `cuMemAlloc` has no handle. The driver would answer that no GPU has access to it.
    if !is_mapped(address) {
        return Ok(None);
    }
    let mut flags = 0;
    // SAFETY: the call writes one number.
    let code = unsafe { sys::cuMemGetAccess(&raw mut flags, &raw const location, address) };
    check("reach GPU memory", "the query for access to memory", code)
        .map(|()| Some(flags == READ_WRITE as u64))
}
