//! A region of a peer, as this domain uses it.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use multirail_spi::{Access, ErrorKind, Mapping, Result, WorkKind, WorkRequest, copy};

#[cfg(target_os = "linux")]
use crate::other_process::GuardPage;
use crate::outbound::Outbound;
use crate::segment::lease_table::RegionKey;

/// A region of a peer: its size and rights, and where its bytes are.
pub(crate) struct Import {
    /// The generation and index in the [`ImportTable`](super::ImportTable) table.
    pub(crate) rkey: u64,
    pub(crate) target: Arc<Outbound>,
    pub(crate) location: RegionLocation,
    pub(crate) len: u64,
    pub(crate) access: Access,
    pub(crate) key: RegionKey,
    /// The lkeys of the local regions for which a GPU was last found to reach both ends: for writes and for reads.
    pub(crate) gpu_reaches: [AtomicU64; 2],
    /// Locks the pages of `mapping`, and is dropped before it.
    lock: Option<cuda::PageLock>,
    /// Keeps the bytes mapped, if they are in the peer's file.
    mapping: Option<Mapping>,
    /// Keeps the bytes mapped, if they are in the memory of the peer's GPU.
    _gpu_memory: Option<cuda::ImportedMemory>,
}

/// Where the first byte of a region is.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RegionLocation {
    /// At an address of this process.
    Mapped(NonNull<u8>),
    /// At an address of the peer's process.
    #[cfg(target_os = "linux")]
    Foreign { base: u64, guard: GuardPage },
    /// Where only the peer's worker can reach it. Requests go through the peer's staging buffer.
    Staged,
    /// At a device address that the GPUs of this process can use, on the GPU with that ordinal in this process.
    Gpu { base: u64, ordinal: u32 },
}

/// A region that a peer has described, and the way in which this side reaches it.
pub(crate) struct ResolvedRegion {
    pub(crate) key: RegionKey,
    pub(crate) len: u64,
    pub(crate) access: Access,
    pub(crate) location: RegionLocation,
    pub(crate) mapping: Option<Mapping>,
    pub(crate) gpu_memory: Option<cuda::ImportedMemory>,
    pub(crate) lock: Option<cuda::PageLock>,
}

// SAFETY: the addresses are plain numbers here; they are followed only between
// `enter` and `leave`, while the target keeps its bytes (or `mapping` keeps them).
unsafe impl Send for Import {}
// SAFETY: as above.
unsafe impl Sync for Import {}

impl Import {
    pub(super) fn new(rkey: u64, target: Arc<Outbound>, region: ResolvedRegion) -> Self {
        Self {
            rkey,
            target,
            location: region.location,
            len: region.len,
            access: region.access,
            key: region.key,
            gpu_reaches: [const { AtomicU64::new(u64::MAX) }; 2],
            mapping: region.mapping,
            _gpu_memory: region.gpu_memory,
            lock: region.lock,
        }
    }

    /// Checks a request against the bounds and rights of the region. Returns the offset of `remote`.
    #[inline]
    pub(crate) fn check(&self, kind: WorkKind, remote: u64, len: u64) -> Result<usize, ErrorKind> {
        let needed = match kind {
            WorkKind::Write => Access::REMOTE_WRITE,
            WorkKind::Read => Access::REMOTE_READ,
            WorkKind::Send => return Err(ErrorKind::InvalidRequest),
        };
        let inside = remote.checked_add(len).is_some_and(|end| end <= self.len);
        if !inside || !self.access.contains(needed) {
            return Err(ErrorKind::RemoteAccess);
        }
        Ok(remote as usize)
    }

    /// Enters the lease. The caller leaves it once its bytes have moved.
    #[inline]
    pub(crate) fn enter(&self) -> Result<(), ErrorKind> {
        if !self.target.is_alive() {
            return Err(ErrorKind::PeerDied);
        }
        let lease = &self.target.layout().leases[self.key.slot as usize];
        match lease.enter(self.key.generation) {
            true => Ok(()),
            // A peer that closes the connection also closes its leases.
            false if !self.target.is_alive() => Err(ErrorKind::PeerDied),
            false => Err(ErrorKind::Revoked),
        }
    }

    /// Leaves the lease.
    #[inline]
    pub(crate) fn leave(&self) {
        self.target.layout().leases[self.key.slot as usize].leave();
    }

    /// Maps the pages of the peer's file, so that the first request takes no page faults.
    pub(crate) fn warm_up(&self) {
        self.mapping.iter().for_each(Mapping::populate);
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        // Unlocking waits for the GPU. This thread may be a worker, which must not wait.
        if let Some(lock) = self.lock.take() {
            let lock = (lock, self.mapping.take());
            cuda::drop_in_background(lock);
        }
    }
}

/// Moves the bytes of a write or read between the local span and `remote`, in mapped memory.
///
/// # Safety
/// `request.len` bytes are valid at both ends.
#[inline(always)]
pub(crate) unsafe fn copy_mapped(request: &WorkRequest, remote: *mut u8) {
    let strategy = request.strategy;
    let (to, from) = match request.kind {
        WorkKind::Read => (request.local, remote.cast_const()),
        _ => (remote, request.local.cast_const()),
    };
    // SAFETY: by the caller.
    unsafe { copy::copy(strategy, to, from, request.len as usize) };
    copy::finish(strategy);
}
