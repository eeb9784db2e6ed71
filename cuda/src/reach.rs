//! How GPUs reach memory.

use cudarc::driver::sys::{self, CUmemAccess_flags as Leave};
use multirail_spi::Result;

use crate::Device;
use crate::attributes::{pool, whole_is_page_locked};
use crate::block::{is_mapped, location};
use crate::driver::check;

const BOTH: Leave = Leave::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;

/// How a piece may be moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// The kernel reaches both ends: memory of GPUs, or page-locked memory of the host's.
    Kernel,
    /// Only the driver does: memory of the host's that is not page-locked, which it copies while
    /// [`Mover::launch`](crate::Mover::launch) waits, or of a GPU that this one does not reach.
    Driver,
}

impl Reach {
    /// How the GPUs of this process reach `len` bytes of the host's at `address`: the kernel those that are
    /// page-locked as one. Asks nothing where no GPU is open.
    pub fn of_host(address: u64, len: u64) -> Self {
        let Some(device) = Device::opened() else { return Self::Driver };
        // What an address is to a GPU, the driver says in a context alone.
        let locked = device.within("use host memory", || Ok(whole_is_page_locked(address, len)));
        if locked.unwrap_or(false) { Self::Kernel } else { Self::Driver }
    }

    /// How `device` reaches `len` bytes of the GPU `owner`'s at `address`. `None` where nobody has let it: a kernel,
    /// or a copy, that touched them would end the process's context. The first byte and the last are asked about.
    ///
    /// Memory of handles (`cuMemMap`) and of pools is each GPU's by leave (`cuMemSetAccess`,
    /// `cuMemPoolSetAccess`), that of `cuMemAlloc` by peer access.
    pub fn of_gpu(device: &Device, owner: &Device, address: u64, len: u64) -> Option<Self> {
        let last = address + len.saturating_sub(1);
        let ask = || Ok((may_use(device, address)?, may_use(device, last)?));
        match device.within("reach GPU memory", ask) {
            Ok((None, None)) if device.reaches(owner) => Some(Self::Kernel),
            Ok((None, None)) => Some(Self::Driver),
            Ok((first, last)) => (first != Some(false) && last != Some(false)).then_some(Self::Kernel),
            Err(why) => {
                tracing::warn!(%why, gpu = device.ordinal(), "it is not known who may use GPU memory");
                None
            }
        }
    }
}

/// Whether a GPU has leave to read and write at `address`; `None` where none is needed.
fn may_use(device: &Device, address: u64) -> Result<Option<bool>> {
    let mut location = location(device.raw());
    if let Some(pool) = pool(address)? {
        let mut flags = Leave::CU_MEM_ACCESS_FLAGS_PROT_NONE;
        // SAFETY: the pool has memory; it writes one value.
        let code = unsafe { sys::cuMemPoolGetAccess(&raw mut flags, pool, &raw mut location) };
        return check("reach GPU memory", "who may use its pool", code).map(|()| Some(flags == BOTH));
    }
    // `cuMemAlloc`'s has no handle, and the driver says of it that nobody has leave.
    if !is_mapped(address) {
        return Ok(None);
    }
    let mut flags = 0;
    // SAFETY: it writes one number.
    let code = unsafe { sys::cuMemGetAccess(&raw mut flags, &raw const location, address) };
    check("reach GPU memory", "who may use it", code).map(|()| Some(flags == BOTH as u64))
}
