//! GPU memory that one process hands to another: the owner describes and exports it, the peer maps it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use cuda::{ExportHandle, ExportedMemory, ImportedMemory};
use multirail_spi::{Error, ErrorKind, Memory, Result};

use super::protocol::{RefusalReason, ServerReply};

/// The owner's reply, and the file that the server sends with it.
pub(crate) struct GpuReply {
    pub(crate) reply: ServerReply,
    file: Option<OwnedFd>,
}

impl GpuReply {
    /// The file to send with the reply, if there is one.
    pub(crate) fn files(&self) -> Vec<BorrowedFd<'_>> {
        self.file.iter().map(AsFd::as_fd).collect()
    }
}

/// Owner: the reply to request `number`, for `memory` of a GPU.
pub(crate) fn describe(number: u64, memory: &dyn Memory, access: u32) -> GpuReply {
    let share = match ExportedMemory::of(memory.as_ptr() as u64, memory.len()) {
        Ok(share) => share,
        Err(why) => {
            tracing::warn!(%why, "loopback: a region of GPU memory cannot be shared with a peer process");
            return GpuReply { reply: ServerReply::Refused { number, why: RefusalReason::Gpu }, file: None };
        }
    };
    let (handle, file) = match share.handle {
        ExportHandle::File(file) => (None, Some(file)),
        ExportHandle::Bytes(bytes) => {
            let half = |at: usize| std::array::from_fn(|byte| bytes[at + byte]);
            (Some((half(0), half(32))), None)
        }
    };
    let ExportedMemory { gpu, size, offset, .. } = share;
    let reply = ServerReply::Gpu { number, len: memory.len() as u64, access, gpu, size, offset, handle };
    GpuReply { reply, file }
}

/// Peer: maps the memory that the owner described.
pub(crate) fn open(
    files: Vec<OwnedFd>,
    gpu: cuda::Uuid,
    size: u64,
    offset: u64,
    handle: Option<([u8; 32], [u8; 32])>,
    len: u64,
) -> Result<ImportedMemory> {
    let handle = match (handle, <[OwnedFd; 1]>::try_from(files)) {
        (Some((first, second)), _) => {
            ExportHandle::Bytes(std::array::from_fn(|at| if at < 32 { first[at] } else { second[at - 32] }))
        }
        (None, Ok([file])) => ExportHandle::File(file),
        (None, Err(_)) => {
            let context =
                "the peer did not hand over the region's file: the peer breaks the protocol, disconnect it";
            return Err(Error::new(ErrorKind::Protocol, "import", context));
        }
    };
    let shared = ImportedMemory::open(&ExportedMemory { gpu, size, offset, handle }, len)?;
    shared.device().prepare()?;
    Ok(shared)
}

/// Peer: the error for a region that the owner cannot share.
pub(crate) fn not_shared() -> Error {
    let context = "CUDA does not share the region's GPU memory with other processes (memory of a pool, for example): \
                   the peer's log has the reason; allocate it by CudaMemory::new or cuMemAlloc";
    Error::new(ErrorKind::Unsupported, "import", context)
}

/// Peer: page-locks a mapping of the owner's host memory, if this process uses a GPU.
pub(crate) fn lock(start: std::ptr::NonNull<u8>, len: usize) -> Option<cuda::PageLock> {
    let device = cuda::Device::opened()?;
    // SAFETY: the import keeps the mapping until after the lock is gone.
    let locked = unsafe { cuda::PageLock::new(&device, start.as_ptr(), len) };
    locked
        .inspect_err(
            |why| tracing::warn!(%why, "loopback: page-locking a peer's memory failed; GPUs copy it slower"),
        )
        .ok()
}
