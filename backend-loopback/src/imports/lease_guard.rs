//! Guards of leases that were entered. A guard leaves its lease when it is dropped.

use std::sync::Arc;

use arc_swap::Guard;
use multirail_spi::{ErrorKind, WorkRequest};

use super::{Import, RegionLocation};
use crate::segment::lease_table::DEVICE_MEMORY;

/// The lease on an import that was looked up in the table. A batch keeps the lease of its last request.
pub(crate) struct LeaseGuard(Guard<Option<Arc<Import>>>);

impl LeaseGuard {
    /// Enters the import that was found for a request.
    ///
    /// # Errors
    /// `RemoteAccess` if no import was found, or another peer's; those of [`Import::enter`].
    pub(crate) fn enter(
        found: Option<Guard<Option<Arc<Import>>>>,
        request: &WorkRequest,
    ) -> Result<Self, ErrorKind> {
        let found = found.ok_or(ErrorKind::RemoteAccess)?;
        let import = found.as_ref().filter(|import| import.target.peer == request.peer);
        import.ok_or(ErrorKind::RemoteAccess)?.enter()?;
        Ok(Self(found))
    }

    /// The import to which the lease belongs.
    #[inline]
    pub(crate) fn import(&self) -> &Arc<Import> {
        self.0.as_ref().expect("`enter` found an import")
    }

    /// Returns true if a request names this import.
    #[inline]
    pub(crate) fn is_of(&self, request: &WorkRequest) -> bool {
        let import = self.import();
        import.rkey == request.rkey && import.target.peer == request.peer
    }

    /// Returns true if a GPU must carry out a request to this import, because one end is in device memory.
    #[inline]
    pub(crate) fn needs_gpu(&self, request: &WorkRequest) -> bool {
        request.lkey & DEVICE_MEMORY != 0 || matches!(self.import().location, RegionLocation::Gpu { .. })
    }
}

impl Drop for LeaseGuard {
    fn drop(&mut self) {
        self.import().leave();
    }
}

/// The lease of one request in the calling thread. Its `Drop` leaves the lease even if the copy unwinds.
pub(crate) struct ScopedLease<'a>(&'a Import);

impl<'a> ScopedLease<'a> {
    /// Enters the lease of `import`.
    #[inline(always)]
    pub(crate) fn enter(import: &'a Import) -> Result<Self, ErrorKind> {
        import.enter()?;
        Ok(Self(import))
    }

    /// The import to which the lease belongs.
    #[inline(always)]
    pub(crate) fn import(&self) -> &'a Import {
        self.0
    }
}

impl Drop for ScopedLease<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.leave();
    }
}
