//! Local memory, registered on rails of every transport.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::Poll;

use crate::copy::{self, CopyStrategy};
use crate::descriptor::Entry;
use crate::fabric::FabricInner;
use crate::index::{IndexVec, TransportIndex};
use crate::retained::RetainedMemory;
use crate::spi::MemoryRegion;
use crate::{Access, Descriptor, Error, ErrorKind, Memory, Op, Result};

/// Registered memory. Clones share the region. Dropping the last clone deregisters the memory.
///
/// A region never gives out a `&[u8]`, because a peer may be writing. Copy bytes in and out.
#[derive(Clone)]
pub struct Region(pub(crate) Arc<RegionInner>);

pub(crate) struct RegionInner {
    /// The registrations, `[transport][rail]`. `None` on rails that the region is not registered on. Dropped before the
    /// memory that they cover.
    pub regions: IndexVec<TransportIndex, Vec<Option<Arc<dyn MemoryRegion>>>>,
    pub memory: Arc<dyn Memory>,
    pub start: *mut u8,
    pub len: u64,
    /// All bits set if `start` is in device memory that the CPU cannot address, else 0. A length with these bits set
    /// exceeds every maximum of what the calling thread copies.
    pub device_memory_mask: u64,
    pub access: Access,
    pub id: u64,
    pub fabric_id: u64,
    pub fabric: Weak<FabricInner>,
    /// Takes the memory when the region is dropped, if a rail of the fabric may still touch it.
    pub retained: Weak<RetainedMemory>,
    /// The end of an operation's range must be below this: `len + 1`, or 0 once the region is revoked. So one
    /// comparison checks both.
    pub limit: AtomicU64,
}

// SAFETY: `start` is the address that `Memory` guarantees while `memory` lives; it
// is dereferenced only through `copy` and the backends, under their contracts.
unsafe impl Send for RegionInner {}
// SAFETY: as above.
unsafe impl Sync for RegionInner {}

impl Region {
    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.0.len as usize
    }

    /// Whether there are no bytes; such a region cannot be registered.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// What peers may do with the region.
    pub fn access(&self) -> Access {
        self.0.access
    }

    /// The address of the first byte. Peers may change the bytes at any time.
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.start
    }

    /// Copies `bytes` into the region, from `offset` on.
    pub fn copy_in(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.0.check_bounds(offset..offset.saturating_add(bytes.len()), "copy_in")?;
        if let Some(done) = self.0.memory.store(offset, bytes) {
            return done;
        }
        // SAFETY: the target range was checked and is mapped while `self` lives;
        // a `&[u8]` cannot overlap it, for nobody holds references into a region.
        unsafe { copy::copy(CopyStrategy::Plain, self.0.start.add(offset), bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies bytes out of the region, from `offset` on.
    pub fn copy_out(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        self.0.check_bounds(offset..offset.saturating_add(into.len()), "copy_out")?;
        if let Some(done) = self.0.memory.load(offset, into) {
            return done;
        }
        // SAFETY: as in `copy_in`, the other way.
        unsafe { copy::copy(CopyStrategy::Plain, into.as_mut_ptr(), self.0.start.add(offset), into.len()) };
        Ok(())
    }

    /// The descriptor that a peer needs to reach this region.
    pub fn descriptor(&self) -> Descriptor {
        let inner = &*self.0;
        let transports = inner.fabric.upgrade().map(|fabric| fabric.addresses()).unwrap_or_default();
        let mut entries = Vec::new();
        for ((label, domains), rails) in transports.iter().zip(&inner.regions) {
            let registered =
                rails.iter().enumerate().filter_map(|(rail, region)| Some((rail, region.as_ref()?)));
            entries.extend(registered.map(|(rail, region)| Entry {
                transport: label.clone(),
                domain: domains[rail],
                rail: rail as u16,
                key: region.key(),
            }));
        }
        let incarnation = inner.fabric.upgrade().map_or(0, |fabric| fabric.identity().incarnation);
        Descriptor::new(incarnation, inner.id, inner.len, inner.access, inner.memory.kind(), entries)
    }

    /// Takes the region back from all peers. The operation resolves once no late byte can land. From then on the memory
    /// belongs to its owner alone.
    ///
    /// From this call on, the owner may use the region only for [`Region::copy_in`] and [`Region::copy_out`]. Every
    /// other use is refused as `Revoked`, also as the local side of a write, read, send or receive. The owner's
    /// operations and receives that are under way on the region are cancelled, and end with `Revoked`. The registration
    /// stays until the device has finished them. If the device has one key for both sides (verbs, libfabric's
    /// hardware providers), peers keep their access until then; otherwise they lose it at once.
    ///
    /// Two things can delay the operation: a peer that was stopped in the middle of a copy, and a request of the owner
    /// that the device does not complete. At its deadline the operation ends with `DeadlineExceeded`, and may be
    /// repeated.
    ///
    /// # Errors
    /// `Closed`. `Busy` if `max_operations` are under way: the region is revoked all the same, and the call may be
    /// repeated to wait for the end of the revocation.
    ///
    /// The operation ends with the device's error if the device does not deregister the memory. Then peers may still
    /// reach the memory. It ends with `Unsupported` if peers that may write are connected over a transport that cannot
    /// say when it has finished the writes it was receiving ([`Revocation::Late`](crate::spi::Revocation::Late):
    /// libfabric's software providers). Then the key is taken back and refused, but late bytes may land.
    pub fn revoke(&self) -> Result<Op> {
        let fabric = self
            .0
            .fabric
            .upgrade()
            .ok_or_else(|| Error::new(ErrorKind::Closed, "revoke", "the fabric is closed"))?;
        self.0.limit.store(0, Ordering::Release);
        fabric.revoke(&self.0)
    }
}

impl RegionInner {
    /// Checks a range that an operation uses. Returns its offset and length.
    #[inline]
    pub fn check(&self, range: Range<usize>, operation: &'static str) -> Result<(u64, u64)> {
        let (start, end) = (range.start as u64, range.end as u64);
        if start > end || end >= self.limit.load(Ordering::Relaxed) {
            return Err(self.refusal(&range, operation));
        }
        Ok((start, end - start))
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
pub(crate) fn revoked(operation: &'static str) -> Error {
    let why = "this side has revoked the local region, so only copy_in and copy_out may use it; register the memory again";
    Error::new(ErrorKind::Revoked, operation, why)
}
