//! Contexts between being taken and being posted.

use std::ffi::c_void;

use multirail_spi::PeerSlot;

use super::{Contexts, FREE};

/// Takes contexts for requests to one peer. Those that were not kept are free again in the end.
///
/// Nothing ends meanwhile: the free ones are a list, and those that were taken still know the next.
pub(crate) struct Taking<'a> {
    contexts: &'a mut Contexts,
    /// Of the next request.
    id: u64,
    peer: u32,
    /// The first one that is not kept.
    kept: u32,
    /// The next one to take.
    next: u32,
}

impl<'a> Taking<'a> {
    #[inline]
    pub(super) fn new(contexts: &'a mut Contexts, id: u64, peer: PeerSlot) -> Self {
        Self { id, peer: peer.0, kept: contexts.free, next: contexts.free, contexts }
    }

    /// The next one; `None` if all are posted.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<*mut c_void> {
        let context = self.contexts.all.get_mut(self.next as usize)?;
        (context.id, context.peer) = (self.id, self.peer);
        self.next = context.next;
        self.id += 1;
        Some(context.notes.get().cast())
    }

    /// What was taken so far is posted.
    #[inline]
    pub(crate) fn keep(&mut self) {
        self.kept = self.next;
    }
}

impl Drop for Taking<'_> {
    #[inline]
    fn drop(&mut self) {
        let mut at = self.kept;
        self.contexts.free = at;
        while at != self.next {
            let context = &mut self.contexts.all[at as usize];
            (context.peer, at) = (FREE, context.next);
        }
    }
}
