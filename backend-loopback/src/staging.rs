//! The outlets of bytes that take the long way.
//!
//! Staged bytes go through a bounce segment of the target's, and the target's worker
//! moves them into its own region: neither process touches the other's memory, so
//! this asks nothing of the kernel but shared memory. Who may connect is decided
//! before, and by the same rule for every way: both processes have one effective user
//! id, as the kernel tells it (SO_PEERCRED). Unlike mapped memory, a staged region is
//! guarded by its owner: bounds, rights and revocation are not for the peer to skip.
//!
//! One promise is weaker than elsewhere: when *this* side ends the connection, what it
//! had staged ends with it, although the target may be moving one last slot (16 KiB) at
//! that moment. A cancel, and a revoke at the target, do wait for it.

use multirail_spi::{ErrorKind, PeerSlot, WorkRequest};

use crate::attached::Attached;
use crate::ended::Ended;
use crate::outlet::Outlet;
use crate::remote::Import;

/// An endpoint's outlets, by peer slot; none until a request is staged.
#[derive(Default)]
pub(crate) struct Outlets(Vec<Option<Outlet>>);

impl Outlets {
    /// Takes a request to an import that is staged.
    #[cold]
    pub(crate) fn push(&mut self, request: &WorkRequest, import: &Import) {
        let at = request.peer.0 as usize;
        if self.0.len() <= at {
            self.0.resize_with(at + 1, || None);
        }
        self.0[at].get_or_insert_with(|| Outlet::new(import.target.clone())).push(request, import.key);
    }

    /// Requests that were taken and have not ended.
    pub(crate) fn requests(&self) -> usize {
        self.0.iter().flatten().map(Outlet::requests).sum()
    }

    /// Moves what can be moved, and files what has ended.
    #[inline]
    pub(crate) fn advance(&mut self, peers: &mut [Option<Attached>], ended: &mut Ended) {
        if !self.0.is_empty() {
            self.advance_all(peers, ended);
        }
    }

    #[cold]
    fn advance_all(&mut self, peers: &mut [Option<Attached>], ended: &mut Ended) {
        for (outlet, peer) in self.0.iter_mut().zip(peers) {
            if let Some(outlet) = outlet
                && let Some(kind) = outlet.advance(ended)
                && let Some(peer) = peer
            {
                peer.starved = Some(kind);
            }
        }
    }

    /// Ends the requests to `peer` with `kind`; those that the target is at work on once it is done.
    pub(crate) fn stop(&mut self, peer: PeerSlot, kind: ErrorKind, ended: &mut Ended) {
        if let Some(Some(outlet)) = self.0.get_mut(peer.0 as usize) {
            outlet.stop(kind, ended);
        }
    }

    /// Ends all requests to all peers with `kind`, as [`Outlets::stop`].
    pub(crate) fn stop_all(&mut self, kind: ErrorKind, ended: &mut Ended) {
        self.0.iter_mut().flatten().for_each(|outlet| outlet.stop(kind, ended));
    }

    /// Ends all requests to a peer that leaves, at once.
    pub(crate) fn remove(&mut self, peer: PeerSlot, ended: &mut Ended) {
        if let Some(mut outlet) = self.0.get_mut(peer.0 as usize).and_then(Option::take) {
            outlet.fail(ErrorKind::PeerDied, ended);
        }
    }

    /// Asks to be rung when there is something to do. `false` if there is already.
    pub(crate) fn arm(&self) -> bool {
        self.0.iter().flatten().all(Outlet::arm)
    }
}
