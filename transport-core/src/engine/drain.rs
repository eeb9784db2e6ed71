//! Waiting for operations that may have no waiter left.

use super::Engine;
use crate::op::OpId;
use crate::{Error, ErrorKind, Outcome, PeerId, Time};

/// Ends once all of these have ended.
pub(super) struct Draining {
    id: OpId,
    ops: Vec<OpId>,
    deadline: Time,
}

impl Engine {
    /// Begins to wait for what is under way to `peer` at this moment.
    pub(super) fn drain(&mut self, id: OpId, peer: PeerId, deadline: Time) {
        // Controls overtake submissions: those that came before are activated first.
        for _ in 0..self.handle.submissions.len() {
            let Some(submission) = self.handle.submissions.pop() else { break };
            self.activate(submission);
        }
        let ops = self.active.iter().flatten().filter(|active| active.peer.id == peer);
        let ops = ops.map(|active| active.id).collect();
        self.next_deadline = self.next_deadline.min(deadline);
        self.draining.push(Draining { id, ops, deadline });
    }

    /// Forgets operations that ended, and answers for whom none is left.
    pub(super) fn advance_drains(&mut self) -> usize {
        if self.draining.is_empty() {
            return 0;
        }
        let before = self.draining.len();
        let (active, table) = (&self.active, &self.handle.table);
        self.draining.retain_mut(|draining| {
            let under_way = |op: &OpId| active[op.index as usize].as_ref().is_some_and(|a| a.id == *op);
            draining.ops.retain(under_way);
            if draining.ops.is_empty() {
                table.end(draining.id, Ok(Outcome::default()));
            }
            !draining.ops.is_empty()
        });
        before - self.draining.len()
    }

    /// The waiter wants no answer any more.
    pub(super) fn cancel_drain(&mut self, id: OpId) {
        let Some(place) = self.draining.iter().position(|draining| draining.id == id) else { return };
        self.draining.swap_remove(place);
        let why = "no longer awaited; the operations go on";
        self.handle.table.end(id, Err(Error::new(ErrorKind::Cancelled, "drain", why)));
    }

    /// Answers those that waited too long; lowers `next` to the deadline of the others.
    pub(super) fn expire_drains(&mut self, now: Time, next: &mut Time) -> usize {
        let before = self.draining.len();
        let table = &self.handle.table;
        self.draining.retain(|draining| {
            let over = draining.deadline <= now;
            if over {
                let why = format!(
                    "{} operations are still under way; drain() again to wait on",
                    draining.ops.len()
                );
                table.end(draining.id, Err(Error::new(ErrorKind::DeadlineExceeded, "drain", why)));
            } else {
                *next = (*next).min(draining.deadline);
            }
            !over
        });
        before - self.draining.len()
    }
}
