//! A fabric of a trial, at one end of its transfers.

use std::ops::Deref;
use std::sync::Arc;

use transport_core::{Access, Fabric, Region};

use crate::check::{Failure, Verdict};
use crate::subject::{Side, Subject};
use crate::trial::Context;

/// A fabric, and the kind of memory that its end of a transfer has.
#[derive(Clone)]
pub(crate) struct End {
    fabric: Fabric,
    subject: Arc<dyn Subject>,
    side: Side,
}

impl End {
    pub(crate) fn new(fabric: Fabric, context: &Context, side: Side) -> Self {
        Self { fabric, subject: Arc::clone(&context.subject), side }
    }

    /// Another fabric at the same end.
    pub(crate) fn beside(&self, fabric: Fabric) -> Self {
        Self { fabric, ..self.clone() }
    }

    /// The same fabric at that end.
    pub(crate) fn at(self, side: Side) -> Self {
        Self { side, ..self }
    }

    /// A region in memory of this end.
    #[track_caller]
    pub(crate) fn region(&self, len: usize, access: Access) -> Verdict<Region> {
        match self.subject.memory(self.side, len).map_err(Failure::new)? {
            None => Ok(self.fabric.alloc(len, access)?),
            // SAFETY: the subject's memory is new, and only the region knows it.
            Some(memory) => Ok(unsafe { self.fabric.register(memory, access) }?),
        }
    }
}

impl Deref for End {
    type Target = Fabric;

    fn deref(&self) -> &Fabric {
        &self.fabric
    }
}
