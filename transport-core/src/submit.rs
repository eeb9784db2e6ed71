//! Handing checked operations to the engines: a place in the op table first, then the work.

use std::sync::Arc;
use std::time::Duration;

use crate::engine::peer::Link;
use crate::engine::{Submission, Work};
use crate::op::OpId;
use crate::peer::PeerInner;
use crate::spread::Places;
use crate::{Op, Result, Time, Trigger};

/// When an operation was submitted, what it waits for before it begins, and when it must have ended.
#[derive(Clone)]
pub(crate) struct Times {
    submitted_at: Time,
    trigger: Option<Trigger>,
    deadline: Time,
}

impl PeerInner {
    /// Hands an operation to the engine of `link`, or to those of the other rail groups of
    /// its transport that may carry it.
    pub(crate) fn submit(
        self: &Arc<Self>,
        link: &Link,
        work: Work,
        deadline: Option<Duration>,
        operation: &'static str,
    ) -> Result<Op> {
        self.submit_when(link, work, None, deadline, operation)
    }

    /// As [`PeerInner::submit`], to begin once `trigger` is due.
    #[inline]
    pub(crate) fn submit_when(
        self: &Arc<Self>,
        link: &Link,
        work: Work,
        trigger: Option<&Trigger>,
        deadline: Option<Duration>,
        operation: &'static str,
    ) -> Result<Op> {
        let times = self.times(trigger, deadline);
        let places = self.places(link, &work, operation)?;
        Ok(self.submit_at(places, work, times, operation))
    }

    /// The times of an operation that is submitted now.
    #[inline]
    pub(crate) fn times(&self, trigger: Option<&Trigger>, deadline: Option<Duration>) -> Times {
        let submitted_at = self.clock.now();
        let deadline = submitted_at.after(deadline.unwrap_or(self.default_deadline));
        Times { submitted_at, trigger: trigger.cloned(), deadline }
    }

    /// Hands an operation to the engines it has places with. Inlined, as the work is moved by each call
    /// that takes it.
    #[inline(always)]
    pub(crate) fn submit_at(
        self: &Arc<Self>,
        places: Places<'_>,
        work: Work,
        times: Times,
        operation: &'static str,
    ) -> Op {
        match places {
            Places::One(place) => self.submit_to(place, work, times, operation),
            Places::Many(parts, imm_countdown) => {
                let parts = parts.into_iter().map(|(place, pieces)| {
                    let work = Work { pieces, imm_countdown: imm_countdown.clone(), ..work.clone() };
                    self.submit_to(place, work, times.clone(), operation)
                });
                Op::all(parts.collect())
            }
        }
    }

    #[inline(always)]
    fn submit_to(
        self: &Arc<Self>,
        place: Place<'_>,
        work: Work,
        times: Times,
        operation: &'static str,
    ) -> Op {
        let link = place.link;
        let id = place.keep();
        let Times { submitted_at, trigger, deadline } = times;
        let is_only = trigger.is_none() && link.backlog.add(&work);
        let span = self.span(id, &link.engine.label, operation, &work);
        let submission =
            Submission { id, peer: Arc::clone(self), submitted_at, trigger, deadline, work, span };
        link.engine.submit(submission, is_only);
        Op::pending(Arc::clone(&link.engine), id)
    }

    /// What the events of an operation belong to; a child of the caller's span.
    #[inline]
    fn span(&self, id: OpId, transport: &str, operation: &'static str, work: &Work) -> tracing::Span {
        if !tracing::enabled!(tracing::Level::DEBUG) {
            return tracing::Span::none();
        }
        let (peer, bytes) = (self.id.0.get(), work.bytes());
        let span = tracing::debug_span!("operation", op = %id, transport, operation, peer, bytes);
        tracing::trace!(parent: &span, "submitted");
        span
    }
}

/// A slot of an engine's op table; given back unless something is submitted with it.
pub(crate) struct Place<'a> {
    link: &'a Link,
    id: OpId,
    kept: bool,
}

impl<'a> Place<'a> {
    /// `Busy` if all are taken.
    pub fn take(link: &'a Link, operation: &'static str) -> Result<Self> {
        Ok(Self { link, id: link.engine.insert(operation)?, kept: false })
    }

    fn keep(mut self) -> OpId {
        self.kept = true;
        self.id
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if !self.kept {
            self.link.engine.table.take_back(self.id);
        }
    }
}
