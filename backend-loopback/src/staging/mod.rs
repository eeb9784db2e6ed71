//! Staging: work requests to regions that this side cannot reach itself. The target's worker copies their bytes.
//!
//! The bytes go through a staging buffer of the target: the initiator copies between its own memory and the buffer, and
//! the target's worker between the buffer and its region ([`multirail_spi::staging`]). Neither process accesses the
//! other's memory, so the only thing that staging needs of the kernel is shared memory. The same processes may connect
//! as without staging: the kernel must report one effective user id for both (SO_PEERCRED). Unlike mapped memory, a
//! staged region is guarded by its owner: a peer cannot skip the checks of bounds, rights and revocation.
//!
//! One promise is weaker than elsewhere. When *this* side ends the connection, its staged work requests end at once,
//! although the target may still be copying one last slot (16 KiB). A cancel, and a revoke at the target, do wait for
//! that slot.

mod initiator;

use multirail_spi::copy::{self, CopyStrategy};
use multirail_spi::{ErrorKind, PeerSlot, WorkKind, WorkRequest};

use crate::completions::CompletionQueue;
use crate::imports::Import;
use crate::regions::Regions;
use crate::segment::staging_buffer::SharedStagingBuffer;
use initiator::StagingInitiator;

/// Target: serves the posted slots from slot `at` on. Returns how many slots were served, and whether the initiator
/// sleeps and must be woken.
pub(crate) fn serve(buffer: &SharedStagingBuffer, at: u64, regions: &Regions) -> (u64, bool) {
    buffer.serve(at, |at| serve_slot(buffer, at, regions))
}

/// Copies the bytes of one slot, if the region allows it.
fn serve_slot(buffer: &SharedStagingBuffer, at: u64, regions: &Regions) -> Result<(), ErrorKind> {
    let slot_request = buffer.request(at)?;
    let range = regions.enter(&slot_request)?;
    let (to, from) = slot_request.kind.copy_ends(buffer.bytes(at), range.start());
    // SAFETY: `enter` checked the range and keeps the region's bytes until `range` is dropped; `len` bytes fit the
    // slot, which stays mapped with `buffer`.
    unsafe { copy::copy(CopyStrategy::Plain, to, from, slot_request.len as usize) };
    Ok(())
}

/// The staged work requests of an endpoint, by peer slot. A peer has an entry from its first staged work request on.
#[derive(Default)]
pub(crate) struct StagedRequests(Vec<Option<StagingInitiator>>);

impl StagedRequests {
    /// Adds a work request to an import that is staged.
    #[cold]
    pub(crate) fn push(&mut self, request: &WorkRequest, import: &Import) {
        let at = request.peer.0 as usize;
        if self.0.len() <= at {
            self.0.resize_with(at + 1, || None);
        }
        self.0[at]
            .get_or_insert_with(|| StagingInitiator::new(import.target.clone()))
            .push(request, import.key);
    }

    /// The number of work requests that were added and are not completed.
    pub(crate) fn requests(&self) -> usize {
        self.0.iter().flatten().map(StagingInitiator::requests).sum()
    }

    /// Copies bytes as far as there are free slots, and completes work requests. If the message ring of a peer has no
    /// room, calls `blocked` with the peer and with the kind of the work request that waits.
    #[inline]
    pub(crate) fn advance(
        &mut self,
        completions: &mut CompletionQueue,
        blocked: impl FnMut(PeerSlot, WorkKind),
    ) {
        if !self.0.is_empty() {
            self.advance_all(completions, blocked);
        }
    }

    #[cold]
    fn advance_all(
        &mut self,
        completions: &mut CompletionQueue,
        mut blocked: impl FnMut(PeerSlot, WorkKind),
    ) {
        for (at, initiator) in self.0.iter_mut().enumerate() {
            if let Some(initiator) = initiator
                && let Some(kind) = initiator.advance(completions)
            {
                blocked(PeerSlot(at as u32), kind);
            }
        }
    }

    /// Fails the work requests to `peer` with `kind`: at once, or when the target is done with the slots that it has
    /// taken.
    pub(crate) fn stop(&mut self, peer: PeerSlot, kind: ErrorKind, completions: &mut CompletionQueue) {
        if let Some(Some(initiator)) = self.0.get_mut(peer.0 as usize) {
            initiator.stop(kind, completions);
        }
    }

    /// Does the same as [`StagedRequests::stop`] for all peers.
    pub(crate) fn stop_all(&mut self, kind: ErrorKind, completions: &mut CompletionQueue) {
        self.0.iter_mut().flatten().for_each(|initiator| initiator.stop(kind, completions));
    }

    /// Fails all work requests to a peer that leaves, at once.
    pub(crate) fn remove(&mut self, peer: PeerSlot, completions: &mut CompletionQueue) {
        if let Some(mut initiator) = self.0.get_mut(peer.0 as usize).and_then(Option::take) {
            initiator.fail(ErrorKind::PeerDied, completions);
        }
    }

    /// Asks all targets for a wakeup at their next response. Returns false if there is a response already.
    pub(crate) fn arm(&self) -> bool {
        self.0.iter().flatten().all(StagingInitiator::arm)
    }
}

#[cfg(test)]
mod tests;
