//! Local memory, registered on rails of every transport.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::Poll;

use super::{RemoteInner, RetainedMemory};
use crate::copy::{self, CopyStrategy};
use crate::index::{IndexVec, TransportIndex};
use crate::spi::{MemoryRegion, Paths};
use crate::{Access, Error, ErrorKind, Memory, MemoryKind, Op, Result};

/// What a region asks of the fabric that registered it.
pub trait RegionOwner: Send + Sync {
    /// The incarnation of the fabric.
    fn incarnation(&self) -> u64;

    /// The label and the domain ids of each transport, as descriptors name them.
    fn addresses(&self) -> Vec<(String, Vec<u64>)>;

    /// Revokes the region on all rails. The operation ends once no late byte can land.
    ///
    /// # Errors
    /// `Closed`, `Busy`.
    fn revoke(&self, region: &Arc<RegionInner>) -> Result<Op>;
}

/// Registered memory.
pub struct RegionInner {
    /// The registrations, `[transport][rail]`. `None` on rails that the region is not registered on. Dropped before the
    /// memory that they cover.
    pub regions: IndexVec<TransportIndex, Vec<Option<Arc<dyn MemoryRegion>>>>,
    memory: Arc<dyn Memory>,
    /// The address of the first byte.
    start: *mut u8,
    len: u64,
    /// All bits set if `start` is in device memory that the CPU cannot address, else 0. A length with these bits set
    /// exceeds every maximum of what the calling thread copies.
    pub device_memory_mask: u64,
    /// What staging adds to the path of the region's bytes over each transport.
    staging: IndexVec<TransportIndex, Paths>,
    pub access: Access,
    pub id: u64,
    pub fabric_id: u64,
    pub owner: Weak<dyn RegionOwner>,
    /// Takes the memory when the region is dropped, if a rail of the fabric may still touch it.
    retained: Weak<RetainedMemory>,
    /// The end of an operation's range must be below this: `len + 1`, or 0 once the region is revoked. So one
    /// comparison checks both.
    limit: AtomicU64,
}

/// The arguments of [`RegionInner::new`]; see the fields of [`RegionInner`].
pub struct RegionSetup {
    pub regions: IndexVec<TransportIndex, Vec<Option<Arc<dyn MemoryRegion>>>>,
    pub access: Access,
    pub id: u64,
    pub fabric_id: u64,
    pub owner: Weak<dyn RegionOwner>,
    pub retained: Weak<RetainedMemory>,
}

// SAFETY: `start` is the address that `Memory` guarantees while `memory` lives; it
// is dereferenced only through `copy` and the backends, under their contracts.
unsafe impl Send for RegionInner {}
// SAFETY: as above.
unsafe impl Sync for RegionInner {}

impl RegionInner {
    /// The region of memory that is registered as `setup` says.
    pub fn new(memory: Arc<dyn Memory>, setup: RegionSetup) -> Self {
        let RegionSetup { regions, access, id, fabric_id, owner, retained } = setup;
        let len = memory.len() as u64;
        let staging = regions.iter().map(|rails| {
            let is_staged = rails.iter().flatten().any(|region| region.staging_reason().is_some());
            if is_staged { Paths::STAGED } else { Paths::empty() }
        });
        Self {
            staging: staging.collect(),
            regions,
            start: memory.as_ptr(),
            len,
            device_memory_mask: if matches!(memory.kind(), MemoryKind::Cuda { .. }) { u64::MAX } else { 0 },
            memory,
            access,
            id,
            fabric_id,
            owner,
            retained,
            limit: AtomicU64::new(len + 1),
        }
    }

    /// The address of the first byte.
    #[inline]
    pub fn start(&self) -> *mut u8 {
        self.start
    }

    /// The length in bytes.
    #[inline]
    #[expect(clippy::len_without_is_empty, reason = "no memory without bytes is registered")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The paths that bytes take between this region and a remote region, over the remote region's transport.
    #[inline]
    pub fn path_to(&self, remote: &RemoteInner) -> Paths {
        remote.paths[usize::from(self.device_memory_mask != 0)] | self.staging[remote.transport]
    }

    /// What staging adds to the path of the region's bytes over a transport.
    #[inline]
    pub fn staging_on(&self, transport: TransportIndex) -> Paths {
        self.staging[transport]
    }

    /// The kind of the memory.
    pub fn kind(&self) -> MemoryKind {
        self.memory.kind()
    }

    /// Refuses all further operations, but for the owner's own copies.
    pub fn refuse_operations(&self) {
        self.limit.store(0, Ordering::Release);
    }

    /// Checks a range that an operation uses. Returns its offset and length.
    #[inline]
    pub fn check(&self, range: Range<usize>, operation: &'static str) -> Result<(u64, u64)> {
        let (start, end) = (range.start as u64, range.end as u64);
        if start > end || end >= self.limit.load(Ordering::Relaxed) {
            return Err(self.refusal(&range, operation));
        }
        Ok((start, end - start))
    }

    /// Copies `bytes` into the region, from `offset` on.
    #[inline]
    pub fn copy_in(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.check_bounds(offset..offset.saturating_add(bytes.len()), "copy_in")?;
        if let Some(done) = self.memory.store(offset, bytes) {
            return done;
        }
        // SAFETY: the target range was checked and is mapped while `self` lives;
        // a `&[u8]` cannot overlap it, for nobody holds references into a region.
        unsafe { copy::copy(CopyStrategy::Plain, self.start.add(offset), bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies bytes out of the region, from `offset` on.
    #[inline]
    pub fn copy_out(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        self.check_bounds(offset..offset.saturating_add(into.len()), "copy_out")?;
        if let Some(done) = self.memory.load(offset, into) {
            return done;
        }
        // SAFETY: as in `copy_in`, the other way.
        unsafe { copy::copy(CopyStrategy::Plain, into.as_mut_ptr(), self.start.add(offset), into.len()) };
        Ok(())
    }

    /// Checks a range for the owner's own copies, which a revocation does not stop.
    fn check_bounds(&self, range: Range<usize>, operation: &'static str) -> Result<()> {
        match range.start <= range.end && range.end as u64 <= self.len {
            true => Ok(()),
            false => Err(outside(operation, &range, self.len)),
        }
    }

    /// Refuses a revoked region.
    #[inline]
    pub fn check_usable(&self, operation: &'static str) -> Result<()> {
        if self.is_revoked() { Err(revoked(operation)) } else { Ok(()) }
    }

    /// The error for an operation that may not use a range.
    #[cold]
    fn refusal(&self, range: &Range<usize>, operation: &'static str) -> Error {
        if self.is_revoked() { revoked(operation) } else { outside(operation, range, self.len) }
    }

    /// Takes the peers' keys back on all devices where the owner's own requests do not need the same key.
    pub fn revoke_at_once(&self) {
        let regions = self.regions.iter().flatten().flatten();
        for region in regions.filter(|region| region.lkey_outlives_revoke()) {
            // The engine revokes again, and reports the result.
            let _ = region.revoke();
        }
    }

    /// Takes the peers' keys back on some rails of a transport. Ready once no peer is copying there. `is_in_use` says
    /// that requests or receives of the owner use the region: then devices that have one key for both sides keep it
    /// for now.
    pub fn poll_quiesced(
        &self,
        transport: TransportIndex,
        rails: Range<usize>,
        is_in_use: bool,
    ) -> Poll<Result<()>> {
        let mut quiet = Poll::Ready(Ok(()));
        let mut failed = None;
        for region in self.regions[transport][rails].iter().flatten() {
            if is_in_use && !region.lkey_outlives_revoke() {
                quiet = Poll::Pending;
                continue;
            }
            match region.revoke() {
                Poll::Pending => quiet = Poll::Pending,
                // An error on one device does not keep the others from taking their keys back.
                Poll::Ready(Err(error)) => failed = Some(error),
                Poll::Ready(Ok(())) => {}
            }
        }
        match (quiet, failed) {
            (Poll::Ready(_), Some(error)) => Poll::Ready(Err(error)),
            (quiet, _) => quiet,
        }
    }

    /// Whether the region is registered on any of these rails.
    pub fn is_registered_on(&self, transport: TransportIndex, rails: Range<usize>) -> bool {
        self.regions[transport][rails].iter().any(Option::is_some)
    }

    #[inline]
    pub fn is_revoked(&self) -> bool {
        self.limit.load(Ordering::Acquire) == 0
    }
}

impl Drop for RegionInner {
    fn drop(&mut self) {
        if self.access != Access::LOCAL
            && let Some(retained) = self.retained.upgrade()
        {
            self.regions = Vec::new().into();
            retained.retain(&self.memory);
        }
    }
}

#[cold]
fn outside(operation: &'static str, range: &Range<usize>, len: u64) -> Error {
    Error::new(ErrorKind::OutOfBounds, operation, format!("bytes {range:?} of a region of {len} bytes"))
}

/// The error of an operation whose local region is revoked.
#[cold]
pub fn revoked(operation: &'static str) -> Error {
    let why = "this side has revoked the local region, so only copy_in and copy_out may use it; register the memory again";
    Error::new(ErrorKind::Revoked, operation, why)
}
