//! Requests on their way through the switch, by the moment they are in.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use multirail_spi::{PeerSlot, Time, WorkRequest};

/// The moment, the order of leaving, the request's id, its peer, its imm.
type Due = (Time, u64, u64, PeerSlot, Option<u32>);

/// What left this device's line and is not in at its target.
#[derive(Debug, Default)]
pub(super) struct Landing {
    heap: BinaryHeap<Reverse<Due>>,
    left: u64,
}

impl Landing {
    pub(super) fn push(&mut self, at: Time, request: &WorkRequest) {
        self.left += 1;
        self.heap.push(Reverse((at, self.left, request.id, request.peer, request.imm)));
    }

    pub(super) fn len(&self) -> usize {
        self.heap.len()
    }

    /// When the next one is in.
    pub(super) fn due(&self) -> Time {
        self.heap.peek().map_or(Time::NEVER, |Reverse((at, ..))| *at)
    }

    /// Id, peer and imm of the next one that is in by `now`.
    pub(super) fn next(&mut self, now: Time) -> Option<(u64, PeerSlot, Option<u32>)> {
        if self.due() > now {
            return None;
        }
        self.heap.pop().map(|Reverse((_, _, id, peer, imm))| (id, peer, imm))
    }

    /// Forgets the requests to `peer`, naming each.
    pub(super) fn abort(&mut self, peer: PeerSlot, mut each: impl FnMut(u64)) {
        self.heap.retain(|Reverse((_, _, id, of, _))| *of != peer || (each(*id), false).1);
    }
}
