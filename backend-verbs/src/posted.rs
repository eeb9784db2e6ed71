//! The posted requests of a queue pair, in order. They are posted in chains, and only the last request of a chain has a
//! completion.

use std::collections::VecDeque;

use multirail_spi::{Piece, WorkRequest};

/// The most requests of a chain, which has one doorbell and one completion. fabric-lib gained nothing from chains
/// longer than 4 on mlx5; the longer chain saves completions: one per 16 requests.
pub(crate) const CHAIN: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Chain {
    /// The engine's id of the first request. The ids of the others follow.
    first: u64,
    count: u8,
    /// The number of requests that have ended before the chain's completion, which happens only after an error.
    ended: u8,
}

/// Requests with consecutive ids that ended together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EndedRun {
    pub first: u64,
    pub count: u32,
}

/// The posted chains of one queue pair that have not ended.
#[derive(Default)]
pub(crate) struct PostedChains {
    chains: VecDeque<Chain>,
    /// The number of `chains[0]`.
    head: u64,
    /// The requests of the chains that have not ended, in order.
    requests: VecDeque<WorkRequest>,
}

impl PostedChains {
    /// The number of requests that have not ended.
    pub(crate) fn len(&self) -> u32 {
        self.requests.len() as u32
    }

    /// The `wr_id` of request `place` of the next chain: the number of the chain, and `place` in the lower 8 bits.
    #[inline]
    pub(crate) fn id(&self, place: usize) -> u64 {
        (self.head + self.chains.len() as u64) << 8 | place as u64
    }

    /// Adds the next chain. It has the requests `pieces` of a run, of which the first is the `first`-th of the run.
    #[inline]
    pub(crate) fn push(&mut self, run: &WorkRequest, first: usize, pieces: &[Piece]) {
        debug_assert!((1..=CHAIN).contains(&pieces.len()));
        let id = run.id + first as u64;
        self.chains.push_back(Chain { first: id, count: pieces.len() as u8, ended: 0 });
        let request = |(id, piece): (u64, &Piece)| WorkRequest {
            id,
            local: piece.local,
            remote: piece.remote,
            len: piece.len,
            ..*run
        };
        self.requests.extend((id..).zip(pieces).map(request));
    }

    /// Ends the request `id` and all requests that were posted before it. Reports each run.
    #[inline]
    pub(crate) fn done(&mut self, id: u64, mut report: impl FnMut(EndedRun)) {
        let (number, place) = (id >> 8, (id & 0xff) as u8);
        while self.head < number {
            let Some(chain) = self.chains.pop_front() else { return };
            self.head += 1;
            self.report(chain, chain.count, &mut report);
        }
        let Some(chain) = self.chains.front_mut().filter(|_| self.head == number) else { return };
        let (before, upto) = (*chain, (place + 1).min(chain.count));
        chain.ended = chain.ended.max(upto);
        if chain.ended == chain.count {
            self.chains.pop_front();
            self.head += 1;
        }
        self.report(before, upto, &mut report);
    }

    /// Reports the requests of a chain below `upto` that have not ended before.
    fn report(&mut self, chain: Chain, upto: u8, report: &mut impl FnMut(EndedRun)) {
        let count = u32::from(upto.saturating_sub(chain.ended));
        if count > 0 {
            self.requests.drain(..count as usize);
            report(EndedRun { first: chain.first + u64::from(chain.ended), count });
        }
    }

    /// Ends the request `id`, which failed, and reports the requests before it, which succeeded. Returns the failed
    /// request, if it had not ended before.
    pub(crate) fn failed(&mut self, id: u64, report: impl FnMut(EndedRun)) -> Option<WorkRequest> {
        let (number, place) = (id >> 8, (id & 0xff) as u8);
        if place > 0 {
            self.done(id - 1, report);
        } else if let Some(before) = number.checked_sub(1).filter(|before| *before >= self.head) {
            self.done(before << 8 | 0xff, report);
        }
        let request = self.requests.front().copied();
        let mut failed = None;
        self.done(id, |ended| failed = request.filter(|request| request.id == ended.first));
        failed
    }

    /// Ends all requests. Returns those that had not ended.
    pub(crate) fn take_all(&mut self) -> Vec<EndedRun> {
        let mut ended = Vec::new();
        while let Some(chain) = self.chains.pop_front() {
            self.head += 1;
            self.report(chain, chain.count, &mut |run| ended.push(run));
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use multirail_spi::PeerSlot;

    use super::*;

    fn push(posted: &mut PostedChains, id: u64, count: usize) {
        let run = WorkRequest::warm_up(id, PeerSlot(0));
        let piece = |at: usize| Piece { local: std::ptr::null_mut(), remote: at as u64, len: 1 };
        posted.push(&run, 0, &(0..count).map(piece).collect::<Vec<_>>());
    }

    fn posted() -> PostedChains {
        let mut posted = PostedChains::default();
        assert_eq!(posted.id(3), 3);
        push(&mut posted, 100, 4);
        push(&mut posted, 200, 16);
        push(&mut posted, 300, 1);
        posted
    }

    fn id(request: Option<WorkRequest>) -> Option<(u64, u64)> {
        request.map(|request| (request.id, request.remote))
    }

    #[test]
    fn a_completion_ends_all_before_it() {
        let mut posted = posted();
        let mut told = Vec::new();
        posted.done(1 << 8 | 15, |run| told.push((run.first, run.count)));
        assert_eq!((told, posted.len()), (vec![(100, 4), (200, 16)], 1));
        posted.done(1 << 8 | 15, |_| panic!("it has ended before"));
        posted.done(7 << 8, |run| assert_eq!((run.first, run.count), (300, 1)));
        assert_eq!((posted.len(), posted.take_all()), (0, vec![]));
    }

    #[test]
    fn a_failure_ends_what_is_before_it_well_and_leaves_the_rest() {
        let mut posted = posted();
        let mut told = Vec::new();
        let failed = posted.failed(1 << 8 | 2, |run| told.push((run.first, run.count)));
        assert_eq!((id(failed), told), (Some((202, 2)), vec![(100, 4), (200, 2)]));
        let next = posted.failed(1 << 8 | 3, |_| panic!("nothing is before it"));
        assert_eq!(id(next), Some((203, 3)));
        assert_eq!(id(posted.failed(1 << 8 | 3, |_| ())), None);
        assert_eq!(
            posted.take_all(),
            [EndedRun { first: 204, count: 12 }, EndedRun { first: 300, count: 1 }]
        );
        assert_eq!(posted.len(), 0);
        push(&mut posted, 400, 2);
        assert_eq!(posted.id(0), 4 << 8);
        assert_eq!(id(posted.failed(3 << 8, |_| panic!("nothing is before it"))), Some((400, 0)));
    }
}
