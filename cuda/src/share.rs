//! GPU memory in the hands of other processes of this host.

use std::os::fd::{AsFd, OwnedFd};

use cudarc::driver::sys::{self, CUdeviceptr};
use multirail_spi::{Error, ErrorKind, Result};

use crate::Device;
use crate::attributes::allocation;
use crate::block::Block;
use crate::device::Uuid;
use crate::driver::{check, start};

/// What another process needs to reach memory of a GPU.
#[derive(Debug)]
pub struct Share {
    /// The GPU.
    pub gpu: Uuid,
    /// Bytes of the whole allocation: another process reaches all of it.
    pub size: u64,
    /// Bytes of it before the memory.
    pub offset: u64,
    /// By what it is mapped.
    pub handle: Handle,
}

/// By what GPU memory is mapped in another process.
#[derive(Debug)]
pub enum Handle {
    /// A file, for memory of `cuMemCreate`, as that of [`CudaMemory::new`](crate::CudaMemory::new).
    File(OwnedFd),
    /// Sixty-four bytes, for memory of `cuMemAlloc` (`cuIpcGetMemHandle`).
    Bytes([u8; 64]),
}

impl Share {
    /// Of `len` bytes at `address`, memory of a GPU of this process.
    ///
    /// # Errors
    /// `InvalidRequest` or `OutOfBounds` for what is none, the driver's for memory that cannot be shared, like
    /// that of its pools (`cuMemAllocAsync`).
    pub fn of(address: u64, len: usize) -> Result<Self> {
        start()?;
        let whole = allocation(address, len)?;
        let device = Device::open(whole.ordinal)?;
        let handle = device.within("share GPU memory", || handle_of(whole.start))?;
        Ok(Self { gpu: device.uuid(), size: whole.len, offset: address - whole.start, handle })
    }
}

fn handle_of(start: CUdeviceptr) -> Result<Handle> {
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: writes one handle.
    let code = unsafe { sys::cuIpcGetMemHandle(&raw mut handle, start) };
    let Err(legacy) = check("share GPU memory", "a handle for it", code) else {
        return Ok(Handle::Bytes(handle.reserved.map(|byte| byte as u8)));
    };
    let by_file = Block::export(start).map(Handle::File);
    by_file.map_err(|why| {
        let why =
            format!("{}; {}: allocate it by CudaMemory::new or cuMemAlloc", legacy.context(), why.context());
        Error::new(ErrorKind::Unsupported, "share GPU memory", why)
    })
}

/// Memory of a GPU that another process has shared, mapped here.
pub struct Shared {
    address: u64,
    device: Device,
    _mapping: Mapping,
}

enum Mapping {
    Block(#[expect(dead_code, reason = "unmaps when dropped")] Block),
    Legacy { start: CUdeviceptr, device: Device },
}

impl Shared {
    /// Maps `len` bytes of what `share` says. A peer wrote that: the driver checks what it is.
    ///
    /// # Errors
    /// `Protocol` for numbers that do not fit each other, `NotFound` where this process does not see the GPU,
    /// the driver's else.
    pub fn open(share: &Share, len: u64) -> Result<Self> {
        let fits = share.offset.checked_add(len).is_some_and(|end| end <= share.size);
        let size = usize::try_from(share.size).ok().filter(|_| fits);
        let Some(size) = size else {
            let why = "the peer's memory is larger than its allocation: do not trust this peer";
            return Err(Error::new(ErrorKind::Protocol, "map GPU memory", why));
        };
        let device = Device::of_uuid(share.gpu)?;
        let (start, mapping) = match &share.handle {
            Handle::File(file) => {
                let block = Block::import(&device, file.as_fd(), size)?;
                (block.start(), Mapping::Block(block))
            }
            Handle::Bytes(bytes) => {
                let start = device.within("map GPU memory", || open_legacy(bytes, len, share.offset))?;
                (start, Mapping::Legacy { start, device: device.clone() })
            }
        };
        Ok(Self { address: start + share.offset, device, _mapping: mapping })
    }

    /// The first byte, for the GPUs of this process.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The GPU that it is on.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

fn open_legacy(bytes: &[u8; 64], len: u64, offset: u64) -> Result<CUdeviceptr> {
    let handle = sys::CUipcMemHandle { reserved: bytes.map(|byte| byte as std::ffi::c_char) };
    let mut start = 0;
    // SAFETY: writes one address; what the bytes are, the driver finds out.
    let code = unsafe {
        let flags = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        sys::cuIpcOpenMemHandle_v2(&raw mut start, handle, flags)
    };
    check("map GPU memory", "a peer's", code)?;
    // The peer's word for the size is not enough: beyond this allocation lie others.
    let fits = allocation(start, 1).and_then(|whole| {
        let inside = offset.checked_add(len).is_some_and(|end| end <= whole.len);
        let why = "the peer's memory goes beyond its allocation: do not trust this peer";
        let beyond = || Error::new(ErrorKind::Protocol, "map GPU memory", why);
        (inside && whole.start == start).then_some(start).ok_or_else(beyond)
    });
    fits.inspect_err(|_| {
        // SAFETY: opened above.
        let _ = unsafe { sys::cuIpcCloseMemHandle(start) };
    })
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let Self::Legacy { start, device } = self else { return };
        let start = *start;
        device.give_back("unmap GPU memory", move || {
            // SAFETY: opened by `Shared::open`, once for each.
            check("unmap GPU memory", "a peer's", unsafe { sys::cuIpcCloseMemHandle(start) })
        });
    }
}
