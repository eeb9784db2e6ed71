//! Requests that a device does not end, because their peer does not answer.
//!
//! They take places of the send queue, and of the window, and a rail has no more of them than
//! its line needs. When it is full and nothing has ended for long, they are set aside: they
//! keep their places in the queue, but other peers' requests follow; those to the same peers wait
//! until one of them is answered.

use std::time::Duration;

use super::{Engine, Rail};
use crate::Time;

/// So many round trips without an answer to anybody are long. A line that is only slow pays with a
/// pause of one round trip in a hundred.
const ROUND_TRIPS: u32 = 100;

/// A rail that had no room when it was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Blocked {
    since: Time,
    /// Requests that had ended by then.
    ended: u64,
}

impl Rail {
    fn patience(&self) -> Duration {
        self.domain.capabilities().round_trip * ROUND_TRIPS
    }
}

impl Engine {
    /// A rail has no room for what wants to go over it. Whether there is some now, because what was
    /// unanswered for long was set aside.
    #[cold]
    pub(super) fn makes_room(&mut self, rail: usize) -> bool {
        let (now, ended) = (self.now(), self.handle.counts[rail].ended());
        let this = &mut self.rails[rail];
        let since = match this.blocked {
            Some(blocked) if blocked.ended == ended => blocked.since,
            _ => now,
        };
        this.blocked = Some(Blocked { since, ended });
        if now < since.after(this.patience()) {
            return false;
        }
        this.blocked = None;
        let ops = this.posted.set_aside();
        this.window.settles();
        for op in &ops {
            let Some(active) = &self.active[*op as usize] else { continue };
            self.rails[rail].rotation.hold(active.link);
        }
        if let Some(op) = ops.first() {
            self.note(14, u64::from(*op));
            tracing::debug!(rail, runs = ops.len(), "nothing is answered: what is posted is set aside");
        }
        !ops.is_empty()
    }

    /// The end of a request that may have been set aside: its operation and how many there are.
    #[cold]
    pub(super) fn answered(&mut self, rail: usize, id: u64, count: u32) -> Option<(u32, u32)> {
        let this = &mut self.rails[rail];
        let (op, pieces) = this.posted.acknowledge_aside(id, count)?;
        if let Some(active) = &self.active[op as usize] {
            this.rotation.release(active.link);
        }
        Some((op, pieces))
    }

    /// When something happens on a rail by itself: what a modelled device has under way, or that what
    /// is posted is set aside.
    pub(super) fn due_on(&self, rail: usize) -> Time {
        let this = &self.rails[rail];
        let still = |blocked: &Blocked| {
            blocked.ended == self.handle.counts[rail].ended() && this.rotation.front().is_some()
        };
        let patient = this.blocked.filter(still).map(|blocked| blocked.since.after(this.patience()));
        patient.into_iter().fold(this.endpoint.due(), Time::min)
    }
}
