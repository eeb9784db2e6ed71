//! A joint operation: one future for several operations.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::{Cancel, Op, OpId, Outcome, Receipt, State, Waiting, taken};
use crate::EngineHandle;
use crate::{Error, Result};

/// A joint operation, as [`Op`] uses it.
pub(super) trait Joint: Send + Sync {
    fn id(&self) -> Option<OpId>;

    /// Lets every part run to its end without a waiter.
    fn detach(&mut self);

    /// The result if there is one. Returns it once only.
    fn try_result(&mut self) -> Option<Result<Outcome>>;

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Outcome>>;

    /// Whether a poll would find something new. Writes no memory.
    fn has_news(&self) -> bool;

    /// Whether all parts have succeeded, and the result was not taken.
    fn has_succeeded(&self) -> bool;

    /// The sum of the receipts of all parts that count, once all have succeeded.
    fn receipt(&self) -> Option<Receipt>;

    /// The engines that the parts wait for, each once.
    fn engines(&self) -> Vec<Arc<EngineHandle>>;

    /// Requests a cancel of the parts that are under way. `early` is the result if there is one.
    fn cancel(self: Box<Self>, early: Option<Result<Outcome>>) -> Cancel;
}

/// The parts of a joint operation. It resolves once every part has resolved, also if one has failed: until then bytes
/// of the other parts may still move.
struct Many {
    id: Option<OpId>,
    /// The parts without a result, each with whether its outcome counts.
    waiting: Vec<(Op, bool)>,
    /// The parts that ended with an error; their bytes may still move.
    failed: Vec<Op>,
    /// The parts that have succeeded and count: they have receipts. None once a part has failed.
    succeeded: Vec<Op>,
    sum: Sum,
}

/// The sum of the results of parts.
#[derive(Default)]
pub(super) struct Sum {
    outcome: Outcome,
    /// The error that arrived first.
    error: Option<Error>,
    /// The first error of a part whose outcome does not count: it matters if there is no other error.
    quiet_error: Option<Error>,
    was_taken: bool,
}

impl Op {
    /// One operation that consists of `parts`. It resolves once all parts have resolved, to the sum of their bytes and
    /// work requests, or to the error that arrived first.
    #[doc(hidden)]
    pub fn all(mut parts: Vec<Self>) -> Self {
        if parts.len() == 1
            && let Some(only) = parts.pop()
        {
            return only;
        }
        Self::joint(parts.into_iter().map(|part| (part, true)).collect())
    }

    /// An operation that resolves to the outcome of `first` once `others` have resolved too, or to an error: that of
    /// `first`, if it has one.
    #[doc(hidden)]
    pub fn and_then_quietly(first: Self, others: impl IntoIterator<Item = Self>) -> Self {
        let others = others.into_iter().map(|part| (part, false));
        Self::joint(std::iter::once((first, true)).chain(others).collect())
    }

    /// An operation that has succeeded at submission: the calling thread has let a GPU copy its bytes.
    #[doc(hidden)]
    #[cold]
    pub fn copied_by_gpu(bytes: u64) -> Self {
        Self::succeeded_with(bytes, vec![Self(State::CopiedByGpu(bytes))])
    }

    /// An operation that has succeeded at submission, without a receipt.
    #[doc(hidden)]
    #[cold]
    pub fn without_receipt(bytes: u64) -> Self {
        Self::succeeded_with(bytes, Vec::new())
    }

    fn succeeded_with(bytes: u64, succeeded: Vec<Self>) -> Self {
        let sum = Sum { outcome: Outcome::of_bytes(bytes), ..Sum::default() };
        let many = Many { id: None, waiting: Vec::new(), failed: Vec::new(), succeeded, sum };
        Self(State::Waiting(Waiting::Many(Box::new(many))))
    }

    fn joint(parts: Vec<(Self, bool)>) -> Self {
        let id = parts.iter().find_map(|(part, _)| part.id());
        let (failed, succeeded) = (Vec::new(), Vec::with_capacity(parts.len()));
        let mut many = Many { id, waiting: parts, failed, succeeded, sum: Sum::default() };
        many.collect_results(Self::try_result);
        let was_copied = |part: &Self| matches!(part.0, State::Copied(_));
        if many.waiting.is_empty() && many.failed.is_empty() && many.succeeded.iter().all(was_copied) {
            let result = many.sum.take().unwrap_or_else(|| Err(taken()));
            return match result {
                Ok(outcome) if many.succeeded.is_empty() => Self::without_receipt(outcome.bytes),
                result => Self::ready(result),
            };
        }
        Self(State::Waiting(Waiting::Many(Box::new(many))))
    }
}

impl Many {
    /// Takes the results of the parts for which `result_of` returns one.
    fn collect_results(&mut self, mut result_of: impl FnMut(&mut Op) -> Option<Result<Outcome>>) {
        let Self { waiting, failed, succeeded, sum, .. } = self;
        waiting.retain_mut(|(part, counts)| {
            let Some(result) = result_of(part) else { return true };
            let mut take_part = || Op(std::mem::replace(&mut part.0, State::Taken));
            match &result {
                Ok(_) if *counts && failed.is_empty() => succeeded.push(take_part()),
                // The part is quiesced, and nobody will ask for its receipt: it gives its slot back at once.
                Ok(_) => {}
                Err(_) => {
                    failed.push(take_part());
                    succeeded.clear();
                }
            }
            sum.add_part(result, *counts);
            false
        });
    }
}

impl Joint for Many {
    fn id(&self) -> Option<OpId> {
        self.id
    }

    fn detach(&mut self) {
        self.waiting.drain(..).for_each(|(part, _)| part.detach());
    }

    fn try_result(&mut self) -> Option<Result<Outcome>> {
        self.collect_results(Op::try_result);
        if self.waiting.is_empty() { self.sum.take() } else { None }
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Outcome>> {
        self.collect_results(|part| match Pin::new(part).poll(context) {
            Poll::Ready(result) => Some(result),
            Poll::Pending => None,
        });
        if !self.waiting.is_empty() {
            return Poll::Pending;
        }
        Poll::Ready(self.sum.take().unwrap_or_else(|| Err(taken())))
    }

    fn has_news(&self) -> bool {
        self.waiting.is_empty() || self.waiting.iter().any(|(part, _)| part.has_news())
    }

    fn receipt(&self) -> Option<Receipt> {
        if !self.waiting.is_empty() || !self.failed.is_empty() {
            return None;
        }
        let mut sum = Receipt::default();
        for part in &self.succeeded {
            sum.add(part.receipt()?);
        }
        // A notification alone has no receipt.
        (!sum.rails.is_empty()).then_some(sum)
    }

    fn has_succeeded(&self) -> bool {
        self.waiting.is_empty() && self.sum.has_succeeded()
    }

    fn engines(&self) -> Vec<Arc<EngineHandle>> {
        let mut engines = Vec::new();
        for (part, _) in &self.waiting {
            match &part.0 {
                State::Waiting(Waiting::One(pending)) => engines.push(Arc::clone(&pending.engine)),
                State::Waiting(Waiting::Many(many)) => engines.append(&mut many.engines()),
                _ => {}
            }
        }
        engines.sort_unstable_by_key(Arc::as_ptr);
        engines.dedup_by(|a, b| Arc::ptr_eq(a, b));
        engines
    }

    fn cancel(self: Box<Self>, early: Option<Result<Outcome>>) -> Cancel {
        let waiting = self.waiting.into_iter().map(|(part, counts)| (part.cancel(), counts));
        let failed = self.failed.into_iter().map(|part| (part.cancel(), false));
        Cancel::joint(early, waiting.chain(failed).collect(), self.sum)
    }
}

impl Sum {
    /// Adds the result of a part, whose outcome may not count.
    pub fn add_part(&mut self, result: Result<Outcome>, counts: bool) {
        match result {
            result if counts => self.add(result),
            Ok(_) => {}
            Err(error) => self.quiet_error = self.quiet_error.take().or(Some(error)),
        }
    }

    fn has_succeeded(&self) -> bool {
        !self.was_taken && self.error.is_none() && self.quiet_error.is_none()
    }

    fn add(&mut self, result: Result<Outcome>) {
        match result {
            Ok(outcome) => {
                self.outcome.bytes += outcome.bytes;
                self.outcome.work_requests = self.outcome.work_requests.saturating_add(outcome.work_requests);
                self.outcome.merged = self.outcome.merged.saturating_add(outcome.merged);
            }
            Err(error) => self.error = self.error.take().or(Some(error)),
        }
    }

    /// Takes the result. Returns it once only.
    pub fn take(&mut self) -> Option<Result<Outcome>> {
        if std::mem::replace(&mut self.was_taken, true) {
            return None;
        }
        Some(self.error.take().or(self.quiet_error.take()).map_or(Ok(self.outcome), Err))
    }
}

#[cfg(all(test, not(multirail_loom)))]
mod tests;
