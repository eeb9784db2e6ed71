//! Cancelling an operation, and waiting until no byte of it can move any more.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use super::joint::Sum;
use super::{Outcome, Pending, block_on, needs_steps, taken};
use crate::EngineHandle;
use crate::{Error, ErrorKind, Result};

/// The future of [`Op::cancel`](super::Op::cancel).
#[must_use = "the cancel is requested, but only the awaited future says when no byte can move"]
pub struct Cancel {
    /// The result, once it is known.
    early: Option<Result<Outcome>>,
    pending: Option<Pending>,
    /// The parts of a joint operation that are not quiesced. The flag says whether a part's result is still to be added
    /// to `sum`.
    parts: Vec<(Self, bool)>,
    sum: Sum,
}

impl Cancel {
    /// The cancel of an operation that has ended.
    pub(super) fn over(early: Option<Result<Outcome>>) -> Self {
        Self { early, pending: None, parts: Vec::new(), sum: Sum::default() }
    }

    /// Requests the cancel of an operation that an engine has.
    pub(super) fn of(early: Option<Result<Outcome>>, pending: Pending) -> Self {
        pending.engine.cancel(pending.id);
        Self { pending: Some(pending), ..Self::over(early) }
    }

    /// The cancel of a joint operation. `sum` has the results of the parts that are not in `parts`.
    pub(super) fn joint(early: Option<Result<Outcome>>, parts: Vec<(Self, bool)>, sum: Sum) -> Self {
        Self { early, pending: None, parts, sum }
    }

    /// Blocks until no byte can move any more, at most `limit`. Then it returns `DeadlineExceeded`, and may be called
    /// again.
    pub fn wait(&mut self, limit: Duration) -> Result<Outcome> {
        let mut engines = Vec::new();
        self.engines(&mut engines);
        let drive = || engines.iter().filter(|engine| engine.drive()).count() > 0;
        block_on(&mut *self, limit, Self::has_news, drive).unwrap_or_else(|| {
            Err(Error::new(
                ErrorKind::DeadlineExceeded,
                "cancel",
                format!("bytes may still move after {limit:?}; wait again"),
            ))
        })
    }

    /// Whether a poll would find something new. Writes no memory.
    fn has_news(&self) -> bool {
        let is_quiesced = |pending: &Pending| pending.engine.table.is_quiesced(pending.id);
        match self.parts.is_empty() {
            true => self.pending.as_ref().is_none_or(is_quiesced),
            false => self.parts.iter().any(|(part, _)| part.has_news()),
        }
    }

    fn engines(&self, into: &mut Vec<Arc<EngineHandle>>) {
        into.extend(self.pending.iter().map(|pending| Arc::clone(&pending.engine)));
        self.parts.iter().for_each(|(part, _)| part.engines(into));
        into.sort_unstable_by_key(Arc::as_ptr);
        into.dedup_by(|a, b| Arc::ptr_eq(a, b));
    }

    fn poll_parts(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let Self { parts, sum, .. } = self;
        parts.retain_mut(|(part, counts)| match Pin::new(part).poll(context) {
            Poll::Pending => true,
            Poll::Ready(result) => {
                sum.add_part(result, *counts);
                false
            }
        });
        if !parts.is_empty() {
            return Poll::Pending;
        }
        self.early = self.early.take().or_else(|| self.sum.take());
        Poll::Ready(())
    }
}

impl Future for Cancel {
    type Output = Result<Outcome>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(pending) = &self.pending {
            if pending.engine.table.poll_quiesced(pending.id, context).is_pending() {
                needs_steps(&pending.engine);
                return Poll::Pending;
            }
            if self.early.is_none() {
                self.early = pending.engine.table.try_result(pending.id);
            }
            self.pending = None;
        }
        if !self.parts.is_empty() && self.poll_parts(context).is_pending() {
            return Poll::Pending;
        }
        Poll::Ready(self.early.take().unwrap_or_else(|| Err(taken())))
    }
}
