//! The import used last, with its lease.

use std::sync::Arc;

use arc_swap::Guard;
use multirail_spi::{ErrorKind, WorkRequest};

use crate::gpu::FAR;
use crate::remote::{Import, Place};

/// An import that was entered, and is left when this is dropped.
pub(crate) struct Held(Guard<Option<Arc<Import>>>);

impl Held {
    /// Enters what was found for a request.
    ///
    /// # Errors
    /// `RemoteAccess` where that is nothing, or another peer's; those of [`Import::enter`].
    pub(crate) fn enter(
        found: Option<Guard<Option<Arc<Import>>>>,
        request: &WorkRequest,
    ) -> Result<Self, ErrorKind> {
        let found = found.ok_or(ErrorKind::RemoteAccess)?;
        let import = found.as_ref().filter(|import| import.target.peer == request.peer);
        import.ok_or(ErrorKind::RemoteAccess)?.enter()?;
        Ok(Self(found))
    }

    #[inline]
    pub(crate) fn import(&self) -> &Arc<Import> {
        self.0.as_ref().expect("`enter` saw that it is there")
    }

    /// Whether it is the region that a request names.
    #[inline]
    pub(crate) fn is_of(&self, request: &WorkRequest) -> bool {
        let import = self.import();
        import.rkey == request.rkey && import.target.peer == request.peer
    }

    /// Whether a request between it and its local region is a GPU's.
    #[inline]
    pub(crate) fn is_far(&self, request: &WorkRequest) -> bool {
        request.lkey & FAR != 0 || matches!(self.import().place, Place::Gpu { .. })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.import().leave();
    }
}
