//! Local memory, registered on every rail of every transport.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::Poll;

use crate::copy::{self, Way};
use crate::descriptor::Entry;
use crate::fabric::FabricInner;
use crate::spi::MemoryRegion;
use crate::{Access, Descriptor, Error, ErrorKind, Memory, Op, Result};

/// Registered memory. Clones share it; the last one deregisters.
///
/// There is no safe way to a `&[u8]`: a peer may be writing. Copy in and out.
#[derive(Clone)]
pub struct Region(pub(crate) Arc<RegionInner>);

pub(crate) struct RegionInner {
    /// Registrations `[transport][rail]`, none on the rails of other groups than its own;
    /// dropped before the memory they cover.
    pub regions: Vec<Vec<Option<Arc<dyn MemoryRegion>>>>,
    pub memory: Arc<dyn Memory>,
    pub start: *mut u8,
    pub len: u64,
    /// All ones where the processor cannot follow `start`, so that no limit of what it copies holds; else 0.
    pub far: u64,
    pub access: Access,
    pub id: u64,
    pub fabric_id: u64,
    pub fabric: Weak<FabricInner>,
    pub revoked: AtomicBool,
}

// SAFETY: `start` is the address that `Memory` guarantees while `memory` lives; it
// is dereferenced only through `copy` and the backends, under their contracts.
unsafe impl Send for RegionInner {}
// SAFETY: as above.
unsafe impl Sync for RegionInner {}

impl Region {
    /// Bytes.
    pub fn len(&self) -> usize {
        self.0.len as usize
    }

    /// Whether there are no bytes; such a region cannot be registered.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// What peers may do with it.
    pub fn access(&self) -> Access {
        self.0.access
    }

    /// The first byte. Peers may change what is behind it at any time.
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.start
    }

    /// Copies `bytes` into the region from `offset` on.
    pub fn copy_in(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.0.check(offset..offset.saturating_add(bytes.len()), "copy_in")?;
        if let Some(done) = self.0.memory.store(offset, bytes) {
            return done;
        }
        // SAFETY: the target range was checked and is mapped while `self` lives;
        // a `&[u8]` cannot overlap it, for nobody holds references into a region.
        unsafe { copy::copy(Way::Plain, self.0.start.add(offset), bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies bytes from `offset` on out of the region.
    pub fn copy_out(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        self.0.check(offset..offset.saturating_add(into.len()), "copy_out")?;
        if let Some(done) = self.0.memory.load(offset, into) {
            return done;
        }
        // SAFETY: as in `copy_in`, the other way.
        unsafe { copy::copy(Way::Plain, into.as_mut_ptr(), self.0.start.add(offset), into.len()) };
        Ok(())
    }

    /// What a peer needs to reach this region.
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

    /// Takes the region back from all peers. The operation resolves once no late
    /// byte can land: from then on the memory is the owner's alone.
    ///
    /// A peer that was stopped in the middle of a copy holds it up; then the
    /// operation ends by its deadline with `DeadlineExceeded`, and may be repeated.
    pub fn revoke(&self) -> Result<Op> {
        let fabric = self
            .0
            .fabric
            .upgrade()
            .ok_or_else(|| Error::new(ErrorKind::Closed, "revoke", "the fabric is closed"))?;
        self.0.revoked.store(true, Ordering::Release);
        fabric.revoke(Arc::clone(&self.0))
    }
}

impl RegionInner {
    /// Checks a range of this region and gives it as offset and length.
    #[inline]
    pub fn check(&self, range: Range<usize>, operation: &'static str) -> Result<(u64, u64)> {
        let (start, end) = (range.start as u64, range.end as u64);
        if start > end || end > self.len {
            return Err(outside(operation, &range, self.len));
        }
        Ok((start, end - start))
    }

    /// Takes every key back; ready once no peer is inside a copy.
    pub fn poll_quiet(&self) -> Poll<Result<()>> {
        let mut quiet = Poll::Ready(Ok(()));
        let mut failed = None;
        for region in self.regions.iter().flatten().flatten() {
            match region.revoke() {
                Poll::Pending => quiet = Poll::Pending,
                // Every key is taken back, whatever became of the others.
                Poll::Ready(Err(error)) => failed = Some(error),
                Poll::Ready(Ok(())) => {}
            }
        }
        failed.map_or(quiet, |error| Poll::Ready(Err(error)))
    }

    pub fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire)
    }
}

#[cold]
fn outside(operation: &'static str, range: &Range<usize>, len: u64) -> Error {
    Error::new(ErrorKind::OutOfBounds, operation, format!("bytes {range:?} of a region of {len}"))
}
