//! GPU memory that is exported to other processes of this host, and imported from them.

use std::os::fd::{AsFd, OwnedFd};

use cudarc::driver::sys::{self, CUdeviceptr};
use multirail_spi::{Error, ErrorKind, Result};

use crate::Device;
use crate::attributes::allocation;
use crate::device::Uuid;
use crate::driver::{check, start};
use crate::mapped_block::MappedBlock;

/// What another process needs to map memory of a GPU.
#[derive(Debug)]
pub struct ExportedMemory {
    /// The GPU on which the memory is.
    pub gpu: Uuid,
    /// Bytes of the whole allocation. The other process can access all of it.
    pub size: u64,
    /// Bytes of the allocation before the memory.
    pub offset: u64,
    /// The handle by which the other process maps the allocation.
    pub handle: ExportHandle,
}

/// The handle by which another process maps GPU memory.
#[derive(Debug)]
pub enum ExportHandle {
    /// A file, for memory of `cuMemCreate`: [`CudaMemory::new`](crate::CudaMemory::new) uses that if it can.
    File(OwnedFd),
    /// 64 bytes, for memory of `cuMemAlloc` (`cuIpcGetMemHandle`).
    Bytes([u8; 64]),
}

impl ExportedMemory {
    /// Exports `len` bytes at `address`, which are on a GPU of this process.
    ///
    /// # Errors
    /// `InvalidRequest` or `OutOfBounds` if the bytes are not in one allocation on a GPU; `Unsupported` for memory that
    /// cannot be exported, for example memory of a pool (`cuMemAllocAsync`).
    pub fn of(address: u64, len: usize) -> Result<Self> {
        start()?;
        let whole = allocation(address, len)?;
        let device = Device::open(whole.ordinal)?;
        let handle = device.within("share GPU memory", || handle_of(whole.start))?;
        Ok(Self { gpu: device.uuid(), size: whole.len, offset: address - whole.start, handle })
    }
}

fn handle_of(start: CUdeviceptr) -> Result<ExportHandle> {
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: the call writes one handle.
    let code = unsafe { sys::cuIpcGetMemHandle(&raw mut handle, start) };
    let Err(ipc_error) = check("share GPU memory", "a handle for the memory", code) else {
        return Ok(ExportHandle::Bytes(handle.reserved.map(|byte| byte as u8)));
    };
    let by_file = MappedBlock::export(start).map(ExportHandle::File);
    by_file.map_err(|why| {
        let why = format!(
            "{}; {}: allocate it by CudaMemory::new or cuMemAlloc",
            ipc_error.context(),
            why.context()
        );
        Error::new(ErrorKind::Unsupported, "share GPU memory", why)
    })
}

/// GPU memory of another process, mapped into this one.
pub struct ImportedMemory {
    address: u64,
    device: Device,
    _mapping: SharedMapping,
}

enum SharedMapping {
    ByFile(#[expect(dead_code, reason = "unmaps when dropped")] MappedBlock),
    /// Mapped by `cuIpcOpenMemHandle`.
    ByIpcHandle {
        start: CUdeviceptr,
        device: Device,
    },
}

impl ImportedMemory {
    /// Maps `len` bytes of `exported`. The peer's values are not trusted: this call and the driver check them.
    ///
    /// # Errors
    /// `Protocol` if the sizes contradict each other, `NotFound` if this process does not see the GPU, else the
    /// driver's error.
    pub fn open(exported: &ExportedMemory, len: u64) -> Result<Self> {
        let fits = exported.offset.checked_add(len).is_some_and(|end| end <= exported.size);
        let size = usize::try_from(exported.size).ok().filter(|_| fits);
        let Some(size) = size else {
            let why = "the peer's memory is larger than its allocation: the peer breaks the protocol, disconnect it";
            return Err(Error::new(ErrorKind::Protocol, "map GPU memory", why));
        };
        let device = Device::of_uuid(exported.gpu)?;
        let (start, mapping) = match &exported.handle {
            ExportHandle::File(file) => {
                let block = MappedBlock::import(&device, file.as_fd(), size)?;
                (block.start(), SharedMapping::ByFile(block))
            }
            ExportHandle::Bytes(bytes) => {
                let start =
                    device.within("map GPU memory", || open_ipc_handle(bytes, len, exported.offset))?;
                (start, SharedMapping::ByIpcHandle { start, device: device.clone() })
            }
        };
        Ok(Self { address: start + exported.offset, device, _mapping: mapping })
    }

    /// The address of the first byte, for the GPUs of this process.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The GPU on which the memory is.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

fn open_ipc_handle(bytes: &[u8; 64], len: u64, offset: u64) -> Result<CUdeviceptr> {
    let handle = sys::CUipcMemHandle { reserved: bytes.map(|byte| byte as std::ffi::c_char) };
    let mut start = 0;
    // SAFETY: the call writes one address; the driver checks the handle.
    let code = unsafe {
        let flags = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        sys::cuIpcOpenMemHandle_v2(&raw mut start, handle, flags)
    };
    check("map GPU memory", "a peer's handle", code)?;
    // The size that the peer sent is checked against the real one: there may be other allocations behind this one.
    let fits = allocation(start, 1).and_then(|whole| {
        let inside = offset.checked_add(len).is_some_and(|end| end <= whole.len);
        let why = "the peer's memory goes beyond its allocation: the peer breaks the protocol, disconnect it";
        let beyond = || Error::new(ErrorKind::Protocol, "map GPU memory", why);
        (inside && whole.start == start).then_some(start).ok_or_else(beyond)
    });
    fits.inspect_err(|_| {
        // SAFETY: opened above.
        let _ = unsafe { sys::cuIpcCloseMemHandle(start) };
    })
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        let Self::ByIpcHandle { start, device } = self else { return };
        let start = *start;
        device.free_later("unmap GPU memory", move || {
            // SAFETY: opened by `ImportedMemory::open`, and closed once.
            check("unmap GPU memory", "to unmap a peer's memory", unsafe { sys::cuIpcCloseMemHandle(start) })
        });
    }
}
