//! Posting: a run goes round a peer's queue pairs, chain by chain.

use std::sync::Arc;

use transport_core::ErrorKind;
use transport_core::spi::{Piece, Status, WorkKind, WorkRequest};

use crate::endpoint::VerbsEndpoint;
use crate::peers::View;
use crate::posted::CHAIN;
use crate::submit::submit;

/// What a request to somebody who is no peer any more gets.
pub(crate) const NOBODY: Status = Status { kind: ErrorKind::PeerDied, code: 0 };
/// The errno of a full queue.
const ENOMEM: i32 = 12;

impl VerbsEndpoint {
    /// Posts a run: how many were taken, and why the next was not; `None` where there is no room.
    ///
    /// # Safety
    /// As `Endpoint::post`.
    pub(crate) unsafe fn post_run(&mut self, run: &WorkRequest, pieces: &[Piece]) -> (usize, Option<Status>) {
        let Some(link) = self.links.get_mut(run.peer.0 as usize) else { return (0, Some(NOBODY)) };
        let pairs = match (&link.view, &link.pairs) {
            (View::Up(_), Some(pairs)) => Arc::clone(pairs),
            // Until the next connection is there.
            (View::Broken, _) => return (0, None),
            _ => return (0, Some(NOBODY)),
        };
        let choice = match run.kind {
            WorkKind::Send => std::slice::from_ref(&pairs.messages),
            _ => &pairs.accesses[..],
        };
        let (mut taken, mut full) = (0, 0);
        while taken < pieces.len() {
            if full == choice.len() {
                return (taken, None);
            }
            let pair = &choice[link.turn % choice.len()];
            link.turn = link.turn.wrapping_add(1);
            let Some(ring) = self.rings.get_mut(&pair.number()) else { return (taken, Some(NOBODY)) };
            let room = (self.shared.card.depth_of_pair - ring.posted.len()) as usize;
            let count = CHAIN.min(room).min(self.send_depth - self.requests).min(pieces.len() - taken);
            if count == 0 {
                full += 1;
                continue;
            }
            // SAFETY: by the caller.
            let (more, code) =
                unsafe { submit(pair, &mut ring.posted, run, (taken, &pieces[taken..taken + count])) };
            self.requests += more;
            taken += more;
            match code {
                0 => full = 0,
                ENOMEM => full += 1,
                // It has failed, and its completions say why.
                code => {
                    tracing::debug!(code, "a queue pair takes no requests");
                    self.breaks(run.peer);
                    return (taken, None);
                }
            }
        }
        (taken, None)
    }
}
