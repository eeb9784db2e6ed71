//! A fabric of a trial, on one side of its transfers.

use std::ops::Deref;
use std::sync::Arc;

use transport_core::{Access, Fabric, Region};

use crate::backend_under_test::{BackendUnderTest, TransferSide};
use crate::check::{TestResult, TrialFailure};
use crate::trial::TrialContext;

/// A fabric, and the side of a transfer that it is on: the side decides the kind of its memory.
#[derive(Clone)]
pub(crate) struct TrialFabric {
    fabric: Fabric,
    backend: Arc<dyn BackendUnderTest>,
    side: TransferSide,
}

impl TrialFabric {
    pub(crate) fn new(fabric: Fabric, context: &TrialContext, side: TransferSide) -> Self {
        Self { fabric, backend: Arc::clone(&context.backend), side }
    }

    /// Wraps another fabric on the same side.
    pub(crate) fn same_side(&self, fabric: Fabric) -> Self {
        Self { fabric, ..self.clone() }
    }

    /// The same fabric on the given side.
    pub(crate) fn on_side(self, side: TransferSide) -> Self {
        Self { side, ..self }
    }

    /// A region in this side's kind of memory.
    #[track_caller]
    pub(crate) fn region(&self, len: usize, access: Access) -> TestResult<Region> {
        match self.backend.memory(self.side, len).map_err(TrialFailure::new)? {
            None => Ok(self.fabric.alloc(len, access)?),
            // SAFETY: the backend under test allocated the memory just now, and only the region knows it.
            Some(memory) => Ok(unsafe { self.fabric.register(memory, access) }?),
        }
    }
}

impl Deref for TrialFabric {
    type Target = Fabric;

    fn deref(&self) -> &Fabric {
        &self.fabric
    }
}
