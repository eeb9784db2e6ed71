//! What is posted to a queue pair, in order: chains of requests, of which the last one tells.

use std::collections::VecDeque;

use multirail_spi::{Piece, WorkRequest};

/// Requests of a chain, at most: it has one doorbell and one completion. Beyond 4 a chain gave
/// fabric-lib nothing more on mlx5; a completion per 16 is what they cost less by.
pub(crate) const CHAIN: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Chain {
    /// The engine's number of the first one; the others follow.
    first: u64,
    count: u8,
    /// How many have ended, one by one, which only happens in error.
    ended: u8,
}

/// Requests that ended together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ended {
    pub first: u64,
    pub count: u32,
}

/// The chains of one queue pair that are posted and not over.
#[derive(Default)]
pub(crate) struct PostedChains {
    chains: VecDeque<Chain>,
    /// The number of `chains[0]`.
    head: u64,
    /// Requests in them that have not ended, in order.
    requests: VecDeque<WorkRequest>,
}

impl PostedChains {
    /// Requests that have not ended.
    pub(crate) fn len(&self) -> u32 {
        self.requests.len() as u32
    }

    /// The `wr_id` of request `place` of the next chain: the chain's number, and that.
    #[inline]
    pub(crate) fn id(&self, place: usize) -> u64 {
        (self.head + self.chains.len() as u64) << 8 | place as u64
    }

    /// The next chain has so many of a run's requests, from its `first`-th on.
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

    /// The request `id` is done, and so is all that was posted before it: tells each run.
    #[inline]
    pub(crate) fn done(&mut self, id: u64, mut tell: impl FnMut(Ended)) {
        let (number, place) = (id >> 8, (id & 0xff) as u8);
        while self.head < number {
            let Some(chain) = self.chains.pop_front() else { return };
            self.head += 1;
            self.tell(chain, chain.count, &mut tell);
        }
        let Some(chain) = self.chains.front_mut().filter(|_| self.head == number) else { return };
        let (before, upto) = (*chain, (place + 1).min(chain.count));
        chain.ended = chain.ended.max(upto);
        if chain.ended == chain.count {
            self.chains.pop_front();
            self.head += 1;
        }
        self.tell(before, upto, &mut tell);
    }

    /// Tells of a chain's requests up to `upto` that have not ended before.
    fn tell(&mut self, chain: Chain, upto: u8, tell: &mut impl FnMut(Ended)) {
        let count = u32::from(upto.saturating_sub(chain.ended));
        if count > 0 {
            self.requests.drain(..count as usize);
            tell(Ended { first: chain.first + u64::from(chain.ended), count });
        }
    }

    /// The request `id` failed: what was posted before it is done. The request, if it had not ended.
    pub(crate) fn failed(&mut self, id: u64, tell: impl FnMut(Ended)) -> Option<WorkRequest> {
        let (number, place) = (id >> 8, (id & 0xff) as u8);
        if place > 0 {
            self.done(id - 1, tell);
        } else if let Some(before) = number.checked_sub(1).filter(|before| *before >= self.head) {
            self.done(before << 8 | 0xff, tell);
        }
        let request = self.requests.front().copied();
        let mut failed = None;
        self.done(id, |ended| failed = request.filter(|request| request.id == ended.first));
        failed
    }

    /// Everything that has not ended.
    pub(crate) fn take_all(&mut self) -> Vec<Ended> {
        let mut ended = Vec::new();
        while let Some(chain) = self.chains.pop_front() {
            self.head += 1;
            self.tell(chain, chain.count, &mut |run| ended.push(run));
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use multirail_spi::{PeerSlot, WorkKind, copy::CopyStrategy};

    use super::*;

    fn push(posted: &mut PostedChains, id: u64, count: usize) {
        let run = WorkRequest {
            id,
            peer: PeerSlot(0),
            kind: WorkKind::Write,
            local: std::ptr::null_mut(),
            lkey: 0,
            len: 0,
            remote: 0,
            rkey: 0,
            imm: None,
            strategy: CopyStrategy::Plain,
        };
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
        assert_eq!(posted.take_all(), [Ended { first: 204, count: 12 }, Ended { first: 300, count: 1 }]);
        assert_eq!(posted.len(), 0);
        push(&mut posted, 400, 2);
        assert_eq!(posted.id(0), 4 << 8);
        assert_eq!(id(posted.failed(3 << 8, |_| panic!("nothing is before it"))), Some((400, 0)));
    }
}
