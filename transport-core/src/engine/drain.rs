//! Waiting for operations that may have no waiter left.

use tokio::sync::oneshot;

use super::Engine;
use crate::op::OpId;
use crate::{Error, ErrorKind, PeerId, Result, Time};

/// Ends once all of these have ended, or nobody waits any more.
///
/// It takes no slot of the op table, which dropped operations may fill.
pub(super) struct Draining {
    ops: Vec<OpId>,
    deadline: Time,
    done: oneshot::Sender<Result<()>>,
}

impl Engine {
    /// Begins to wait for what is under way to `peer` at this moment.
    pub(super) fn drain(&mut self, peer: PeerId, deadline: Time, done: oneshot::Sender<Result<()>>) {
        // Controls overtake submissions: those that came before are activated first.
        for _ in 0..self.handle.submissions.len() {
            let Some(submission) = self.handle.submissions.pop() else { break };
            self.activate(submission, false);
        }
        let ops = self.active.iter().flatten().filter(|active| active.peer.id == peer);
        let ops = ops.map(|active| active.id).collect();
        self.next_deadline = self.next_deadline.min(deadline);
        self.draining.push(Draining { ops, deadline, done });
    }

    /// Forgets operations that ended, and answers for whom none is left.
    pub(super) fn advance_drains(&mut self) -> usize {
        let active = &self.active;
        let over = |draining: &mut Draining| {
            let under_way = |op: &OpId| active[op.index as usize].as_ref().is_some_and(|a| a.id == *op);
            draining.ops.retain(under_way);
            draining.ops.is_empty() || draining.done.is_closed()
        };
        let over: Vec<_> = self.draining.extract_if(.., over).collect();
        let count = over.len();
        over.into_iter().for_each(|draining| drop(draining.done.send(Ok(()))));
        count
    }

    /// Answers those that waited too long; lowers `next` to the deadline of the others.
    pub(super) fn expire_drains(&mut self, now: Time, next: &mut Time) -> usize {
        let late: Vec<_> = self.draining.extract_if(.., |draining| draining.deadline <= now).collect();
        *next = self.draining.iter().map(|draining| draining.deadline).fold(*next, Time::min);
        let count = late.len();
        for Draining { ops, done, .. } in late {
            let why = format!("{} operations are still under way; drain() again to wait on", ops.len());
            let _ = done.send(Err(Error::new(ErrorKind::DeadlineExceeded, "drain", why)));
        }
        count
    }
}
