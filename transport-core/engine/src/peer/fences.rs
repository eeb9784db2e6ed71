//! Fences: what a lost device has posted is posted again over other rails only after the peer has made sure that
//! nothing of it arrives any more.
//!
//! An engine that has lost a device, or whose peer has, sends a [`FenceRequest`] to the peer over the control
//! connection. The peer's engine keeps the request in `Fences` until the backend has shut the pair of rails
//! ([`Connector::fence`](crate::spi::Connector::fence)). Then it takes what has arrived before, and answers with the
//! numbers of imms and messages among it. From these the asking engine finds out whether those that it had posted have
//! arrived (`LostArrivals`).

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use crate::spi::{Domain, FenceKind, FenceReply, FenceReport, PeerSlot};
use crate::{Control, EngineHandle, Error, ErrorKind, PeerId, Result, Time};

/// Asks a peer to fence a rail pair, because one of its devices is lost or the path between them; or to lift the fence.
/// Dropping the request sends the result to the engine that asks: the peer's answer, or the error `Closed` if there was
/// none.
pub struct FenceRequest {
    engine: Arc<EngineHandle>,
    rail: usize,
    slot: PeerSlot,
    link: u32,
    peer: PeerId,
    kind: FenceKind,
    result: Option<Result<FenceReport>>,
}

impl FenceRequest {
    pub(crate) fn new(
        engine: Arc<EngineHandle>,
        (rail, slot): (usize, PeerSlot),
        link: u32,
        peer: PeerId,
        kind: FenceKind,
    ) -> Self {
        Self { engine, rail, slot, link, peer, kind, result: None }
    }

    /// What the peer is asked for.
    pub fn kind(&self) -> FenceKind {
        self.kind
    }

    /// The engine's rail of the pair.
    pub fn rail(&self) -> usize {
        self.rail
    }

    /// The slot of the pair of rails.
    pub fn slot(&self) -> PeerSlot {
        self.slot
    }

    /// Gives the engine the peer's answer.
    pub fn answer(mut self, result: Result<FenceReport>) {
        self.result = Some(result);
    }
}

impl Drop for FenceRequest {
    fn drop(&mut self) {
        let ended = || Error::new(ErrorKind::Closed, "fence", "the peer did not answer");
        let result = self.result.take().unwrap_or_else(|| Err(ended()));
        let Self { rail, slot, link, peer, kind, .. } = *self;
        self.engine.control(Control::Fenced { rail, slot, link, peer, kind, result });
    }
}

/// The shortest time between two questions to a backend whether it has finished a fence.
const MIN_POLL: Duration = Duration::from_micros(50);

/// The fences that peers have asked this side for, and that it has not answered.
#[derive(Default)]
pub(crate) struct Fences {
    under_way: Vec<Fence>,
    /// Fences that peers want lifted. They wait until this side has settled what it had posted over the same pair.
    lifts: Vec<Fence>,
}

/// One of [`Fences`].
pub(crate) struct Fence {
    pub rail: usize,
    pub link: u32,
    pub slot: PeerSlot,
    pub kind: FenceKind,
    pub requested_at: Time,
    /// A peer that asks again and again waits until then.
    pub not_before: Time,
    pub reply: FenceReply,
}

impl Fences {
    /// The number of fences that the backend has not finished.
    #[inline]
    pub fn len(&self) -> usize {
        self.under_way.len()
    }

    pub fn add(&mut self, fence: Fence) {
        // The peer's path has broken again before this side has lifted the fence.
        for old in self.lifts.extract_if(.., |lift| (lift.rail, lift.slot) == (fence.rail, fence.slot)) {
            (old.reply)(Err(Error::new(ErrorKind::Busy, "lift a fence", "the pair is fenced again")));
        }
        self.under_way.push(fence);
    }

    /// Adds a fence to be lifted.
    pub fn add_lift(&mut self, lift: Fence) {
        self.lifts.push(lift);
    }

    /// Removes a fence that a peer wants lifted, for which `may_lift` is true.
    pub fn next_lift(&mut self, may_lift: impl Fn(&Fence) -> bool) -> Option<Fence> {
        let at = self.lifts.iter().position(may_lift)?;
        Some(self.lifts.swap_remove(at))
    }

    /// Removes the next fence that the backend has finished, with its result. `domain` is that of a rail.
    pub fn next_ready<'a>(
        &mut self,
        now: Time,
        domain: impl Fn(usize) -> &'a dyn Domain,
    ) -> Option<(Fence, Result<()>)> {
        for index in 0..self.under_way.len() {
            let fence = &self.under_way[index];
            if fence.not_before > now {
                continue;
            }
            if let Poll::Ready(result) = domain(fence.rail).connector().fence(fence.slot, fence.kind) {
                return Some((self.under_way.swap_remove(index), result));
            }
        }
        None
    }

    /// When to ask the backend again. No event tells that it has finished a fence.
    pub fn due(&self, now: Time) -> Time {
        let due = |fence: &Fence| match fence.not_before > now {
            true => fence.not_before,
            false => now.after(MIN_POLL.max(now.since(fence.requested_at) / 8)),
        };
        self.under_way.iter().map(due).fold(Time::NEVER, Time::min)
    }

    /// Drops the fences for a peer that is gone.
    pub fn remove_link(&mut self, link: u32) {
        self.under_way.retain(|fence| fence.link != link);
        self.lifts.retain(|lift| lift.link != link);
    }
}

/// Of the imms, or of the messages, that a lost device had posted to a peer and that were not acknowledged: how many have
/// arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LostArrivals {
    pub unacknowledged: u64,
    /// `None` if nobody can tell.
    pub arrived: Option<u64>,
}

impl LostArrivals {
    /// `sent` is how many of these this side has posted over the pair of rails, or `None` if one of them has failed: it may
    /// have arrived. `counted` is how many the peer has counted.
    pub fn new(unacknowledged: u64, sent: Option<u64>, counted: Option<u64>) -> Self {
        let acknowledged = sent.and_then(|sent| sent.checked_sub(unacknowledged));
        let arrived = counted.zip(acknowledged).and_then(|(counted, acknowledged)| {
            counted.checked_sub(acknowledged).filter(|arrived| *arrived <= unacknowledged)
        });
        Self { unacknowledged, arrived }
    }

    /// Each call is about one of these: whether it has arrived, or `None` if nobody can tell. If `are_alike`, all
    /// are imms of the same value, and it does not matter which ones have arrived: the first calls return true, as many
    /// as have arrived, and later calls return false.
    pub fn take(&mut self, are_alike: bool) -> Option<bool> {
        match self.arrived? {
            0 => Some(false),
            arrived if arrived == self.unacknowledged || are_alike => {
                (self.unacknowledged, self.arrived) = (self.unacknowledged - 1, Some(arrived - 1));
                Some(true)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_tell_which_imms_have_arrived() {
        let lost = |unacknowledged, sent, counted| LostArrivals::new(unacknowledged, sent, Some(counted));
        let fates = |mut lost: LostArrivals, alike| [(); 3].map(|()| lost.take(alike));
        assert_eq!(fates(lost(3, Some(10), 7), false), [Some(false); 3]);
        assert_eq!(fates(lost(3, Some(10), 10), false), [Some(true); 3]);
        // One of three has arrived, and nobody knows which.
        assert_eq!(fates(lost(3, Some(10), 8), false), [None; 3]);
        assert_eq!(fates(lost(3, Some(10), 8), true), [Some(true), Some(false), Some(false)]);
        // The peer counts more or fewer than can be; a request had failed; the peer has not answered.
        for unknown in [lost(3, Some(10), 11), lost(3, Some(10), 6), lost(3, Some(2), 2), lost(3, None, 10)] {
            assert_eq!(fates(unknown, true), [None; 3]);
        }
        assert_eq!(fates(LostArrivals::new(3, Some(10), None), true), [None; 3]);
    }
}
