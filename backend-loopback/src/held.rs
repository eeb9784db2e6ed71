//! The import used last, with its lease.

use std::sync::Arc;

use arc_swap::Guard;
use transport_core::spi::WorkRequest;

use crate::remote::Import;

/// An import that was entered, and is left when this is dropped.
pub(crate) struct Held(Guard<Option<Arc<Import>>>);

impl Held {
    /// What [`Imports::find`](crate::remote::Imports::find) returned, with the lease taken.
    pub(crate) fn new(import: Guard<Option<Arc<Import>>>) -> Self {
        Self(import)
    }

    #[inline]
    pub(crate) fn import(&self) -> &Arc<Import> {
        self.0.as_ref().expect("`Imports::find` returns what is there")
    }

    /// Whether it is the region that a request names.
    #[inline]
    pub(crate) fn is_of(&self, request: &WorkRequest) -> bool {
        let import = self.import();
        import.rkey == request.rkey && import.target.peer == request.peer
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.import().leave();
    }
}
