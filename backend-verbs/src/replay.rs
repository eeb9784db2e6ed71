//! Requests that go on over the next connection, after one has failed under them.

use multirail_spi::{ErrorKind, Event, PeerSlot, Piece, Status, WorkKind, WorkRequest};
use rdma_sys as ib;

use crate::endpoint::VerbsEndpoint;
use crate::peers::View;
use crate::posting::NOBODY;

/// Whether a request that was flushed may be posted again.
///
/// Where its queue pair failed because the peer refused a request, nothing behind that one was
/// executed (IBTA 1.4, 9.9.2.4: the responder takes no more). Else nobody knows, and only what may
/// happen twice is repeated: bytes that nobody was told of.
fn may_repeat(request: &WorkRequest, cause: Option<Status>) -> bool {
    let was_refused = cause.is_some_and(|cause| cause.kind == ErrorKind::RemoteAccess);
    was_refused || (request.kind != WorkKind::Send && request.imm.is_none())
}

impl VerbsEndpoint {
    /// A request was flushed behind another's failure, `cause`.
    pub(crate) fn flushed(&mut self, request: WorkRequest, cause: Option<Status>) {
        let link = self.links.get(request.peer.0 as usize);
        let is_given_up = link.is_none_or(|link| link.is_aborted);
        if !is_given_up && may_repeat(&request, cause) {
            self.replays.push_back(request);
            return;
        }
        let flushed = Status { kind: ErrorKind::Unreachable, code: ib::IBV_WC_WR_FLUSH_ERR as i32 };
        let (id, peer) = (request.id, request.peer);
        self.waiting.push_back(Event::FailedUnconfirmed { id, peer, status: flushed });
    }

    /// Posts what waits for a connection that is there now.
    pub(crate) fn replay(&mut self) {
        for _ in 0..self.replays.len() {
            let Some(request) = self.replays.pop_front() else { break };
            let view = self.links.get(request.peer.0 as usize).map(|link| &link.view);
            match view {
                Some(View::Broken) => self.replays.push_back(request),
                Some(View::Up(_)) => {
                    let piece = Piece { local: request.local, remote: request.remote, len: request.len };
                    // SAFETY: accepted before, and never told to be over: it is still as promised.
                    let (taken, error) = unsafe { self.post_run(&request, &[piece]) };
                    match (taken, error) {
                        (0, Some(status)) => self.waiting.push_back(Event::Failed { id: request.id, status }),
                        (0, None) => self.replays.push_back(request),
                        _ => {}
                    }
                }
                _ => self.waiting.push_back(Event::Failed { id: request.id, status: NOBODY }),
            }
        }
    }

    /// What was to go on to a peer does not: it was given up.
    pub(crate) fn forget_replays(&mut self, peer: PeerSlot) {
        let status = Status { kind: ErrorKind::Cancelled, code: 0 };
        let (replays, waiting) = (&mut self.replays, &mut self.waiting);
        replays.retain(|request| {
            let stays = request.peer != peer;
            if !stays {
                waiting.push_back(Event::Failed { id: request.id, status });
            }
            stays
        });
    }
}
