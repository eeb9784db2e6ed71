//! Requests to regions that this side cannot reach itself, and that the target's worker moves.
//!
//! The bytes go through a staging buffer of the target, and the target's worker moves them into or out of its own
//! region. Neither process touches the other's memory, so that staging needs nothing of the kernel but shared memory.
//! The rule for who may connect is the same as for every other way: the kernel must report one effective user id for
//! both processes (SO_PEERCRED). Unlike mapped memory, a staged region is guarded by its owner: a peer cannot skip
//! the checks of bounds, rights and revocation.
//!
//! One promise is weaker than elsewhere. When *this* side ends the connection, its staged requests end at once,
//! although the target may still be moving one last slot (16 KiB). A cancel, and a revoke at the target, do wait for
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
    let (to, from) = slot_request.copy_ends(buffer.bytes(at), range.start());
    // SAFETY: `enter` checked the range and keeps the region's bytes until `range` is dropped; `len` bytes fit the slot,
    // which stays mapped with `buffer`.
    unsafe { copy::copy(CopyStrategy::Plain, to, from, slot_request.len as usize) };
    Ok(())
}

/// The staged requests of an endpoint, by peer slot. A peer has an entry from its first staged request on.
#[derive(Default)]
pub(crate) struct StagedRequests(Vec<Option<StagingInitiator>>);

impl StagedRequests {
    /// Adds a request to an import that is staged.
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

    /// The number of requests that were added and are not completed.
    pub(crate) fn requests(&self) -> usize {
        self.0.iter().flatten().map(StagingInitiator::requests).sum()
    }

    /// Moves bytes as far as slots allow, and completes requests. Calls `blocked` with each peer whose message ring
    /// has no room, and with the kind of the request that waits for room.
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

    /// Fails the requests to `peer` with `kind`. Those whose slots the target has taken fail when the target is done.
    pub(crate) fn stop(&mut self, peer: PeerSlot, kind: ErrorKind, completions: &mut CompletionQueue) {
        if let Some(Some(initiator)) = self.0.get_mut(peer.0 as usize) {
            initiator.stop(kind, completions);
        }
    }

    /// Does the same as [`StagedRequests::stop`] for all peers.
    pub(crate) fn stop_all(&mut self, kind: ErrorKind, completions: &mut CompletionQueue) {
        self.0.iter_mut().flatten().for_each(|initiator| initiator.stop(kind, completions));
    }

    /// Fails all requests to a peer that leaves, at once.
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
