//! Posting: a run goes round a peer's queue pairs, chain by chain.

use multirail_spi::{ErrorKind, Piece, Status, WorkKind, WorkRequest};

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
        if run.kind == WorkKind::Read && pieces.first().is_some_and(|piece| piece.len == 0) {
            return self.flush(run, pieces.len());
        }
        let Self { links, rings, shared, requests, send_depth, .. } = self;
        let Some(link) = links.get_mut(run.peer.0 as usize) else { return (0, Some(NOBODY)) };
        let pairs = match (&link.view, &link.pairs) {
            (View::Up(_), Some(pairs)) => pairs,
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
            let pair = match choice {
                [only] => only,
                all => {
                    // Without a division: chips take long for one.
                    let turn = if link.turn < all.len() { link.turn } else { 0 };
                    link.turn = turn + 1;
                    &all[turn]
                }
            };
            let Some(ring) = rings.get_mut(pair.number()) else { return (taken, Some(NOBODY)) };
            let room = (shared.card.depth_of_pair - ring.posted.len()) as usize;
            let count = CHAIN.min(room).min(*send_depth - *requests).min(pieces.len() - taken);
            if count == 0 {
                full += 1;
                continue;
            }
            // SAFETY: by the caller.
            let (more, code) =
                unsafe { submit(pair, &mut ring.posted, run, (taken, &pieces[taken..taken + count])) };
            *requests += more;
            taken += more;
            match code {
                0 => full = 0,
                ENOMEM => full += 1,
                // It has failed, and its completions say why.
                code => {
                    tracing::debug!(code, "a queue pair takes no requests");
                    let number = pair.number();
                    self.breaks(run.peer, Some(number));
                    return (taken, None);
                }
            }
        }
        (taken, None)
    }
    /// Posts `count` flushes of a run: how many were taken, and why the next was not.
    #[cold]
    fn flush(&mut self, run: &WorkRequest, count: usize) -> (usize, Option<Status>) {
        let Some(link) = self.links.get(run.peer.0 as usize) else { return (0, Some(NOBODY)) };
        let Some(target) = link.pairs.as_ref().and_then(|pairs| pairs.flush) else {
            // A broken link has a target again with the next connection.
            let is_broken = matches!(link.view, View::Broken);
            return (0, (!is_broken).then_some(NOBODY));
        };
        let (read, piece) = self.shared.flush_page.read(run, target);
        // SAFETY: the landing place lives as long as the domain, and nobody reads what lands there.
        unsafe { self.post_run(&read, &vec![piece; count]) }
    }
}
