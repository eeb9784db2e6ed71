//! Submits checked operations to the engines: first the slots in the op tables, then the work.

use std::sync::Arc;
use std::time::Duration;

use crate::engine::op::OpId;
use crate::engine::peer::Link;
use crate::engine::{Submission, Work};
use crate::striping::{OpSlot, OpSlots};
use crate::{Op, Peer, Result, Time, Trigger};

/// When an operation was submitted, its trigger, and its deadline.
#[derive(Clone)]
pub(crate) struct Times {
    submitted_at: Time,
    trigger: Option<Trigger>,
    deadline: Time,
}

impl Peer {
    /// Submits an operation to the engine of `link`, or to the engines of the rail groups of the same transport that
    /// are to carry it.
    pub(crate) fn submit(
        &self,
        link: &Link,
        work: Work,
        deadline: Option<Duration>,
        operation: &'static str,
    ) -> Result<Op> {
        self.submit_when(link, work, None, deadline, operation)
    }

    /// As [`Peer::submit`]. The operation begins once `trigger` is due.
    #[inline]
    pub(crate) fn submit_when(
        &self,
        link: &Link,
        work: Work,
        trigger: Option<&Trigger>,
        deadline: Option<Duration>,
        operation: &'static str,
    ) -> Result<Op> {
        let times = self.times(trigger, deadline);
        let slots = OpSlots::take(&self.0, link, &work, operation)?;
        Ok(self.submit_with(slots, work, times, operation))
    }

    /// The times of an operation that is submitted now.
    #[inline]
    pub(crate) fn times(&self, trigger: Option<&Trigger>, deadline: Option<Duration>) -> Times {
        let submitted_at = self.0.context.clock.now();
        let deadline = submitted_at.after(deadline.unwrap_or(self.0.context.default_deadline));
        Times { submitted_at, trigger: trigger.cloned(), deadline }
    }

    /// Submits an operation to the engines that it has slots of. Inlined, because each call that takes the work by
    /// value moves it.
    #[inline(always)]
    pub(crate) fn submit_with(
        &self,
        slots: OpSlots<'_>,
        work: Work,
        times: Times,
        operation: &'static str,
    ) -> Op {
        match slots {
            OpSlots::One(slot) => self.submit_to(slot, work, times, operation),
            OpSlots::Many(parts, imm_countdown) => {
                let parts = parts.into_iter().map(|(slot, pieces)| {
                    let work = Work { pieces, imm_countdown: imm_countdown.clone(), ..work.clone() };
                    self.submit_to(slot, work, times.clone(), operation)
                });
                Op::all(parts.collect())
            }
        }
    }

    #[inline(always)]
    fn submit_to(&self, slot: OpSlot<'_>, work: Work, times: Times, operation: &'static str) -> Op {
        let link = slot.link;
        let id = slot.keep();
        let Times { submitted_at, trigger, deadline } = times;
        let is_only = trigger.is_none() && link.backlog.add(work.weight());
        let span = self.span(id, &link.engine.label, operation, &work);
        let submission = Submission { id, peer: self.0.clone(), submitted_at, trigger, deadline, work, span };
        link.engine.submit(submission, is_only);
        Op::pending(Arc::clone(&link.engine), id)
    }

    /// The tracing span of the operation's events, a child of the caller's span.
    #[inline]
    fn span(&self, id: OpId, transport: &str, operation: &'static str, work: &Work) -> tracing::Span {
        if !tracing::enabled!(tracing::Level::DEBUG) {
            return tracing::Span::none();
        }
        let (peer, bytes) = (self.0.id.number(), work.bytes());
        let span = tracing::debug_span!("operation", op = %id, transport, operation, peer, bytes);
        tracing::trace!(parent: &span, "submitted");
        span
    }
}
