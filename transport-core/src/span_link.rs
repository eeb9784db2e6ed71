//! The link from spans of `tracing` to those of a distributed trace.

use std::cell::RefCell;
use std::sync::OnceLock;

use tracing::Span;

use crate::{Error, ErrorKind, Result, TraceContext};

/// Ties spans of `tracing` to a distributed trace. `multirail::opentelemetry` has an implementation for OpenTelemetry.
pub trait SpanLink: Send + Sync {
    /// The trace context of a span, if it is part of a trace.
    fn context_of(&self, span: &Span) -> Option<TraceContext>;

    /// Makes `span` a child of `parent`. The caller has just made the span, and does not enter it.
    fn set_parent(&self, span: &Span, parent: TraceContext);
}

static LINK: OnceLock<Box<dyn SpanLink>> = OnceLock::new();

thread_local! {
    /// The span of the transfer that this thread submits now.
    static TRANSFER: RefCell<Option<Span>> = const { RefCell::new(None) };
}

/// Uses `link` for all fabrics of this process. With it, notifications take the current span's trace context along
/// where the caller gives none.
///
/// # Errors
/// `Busy` if the process has a link already.
pub fn set_span_link(link: Box<dyn SpanLink>) -> Result<()> {
    let taken = |_| {
        let why = "this process has a link between spans and traces already; set it once, where the subscriber is made";
        Error::new(ErrorKind::Busy, "set_span_link", why)
    };
    LINK.set(link).map_err(taken)
}

/// A transfer that the caller may have made part of a trace, while this thread submits it. Then it has a span, the parent
/// of its operations' spans: these keep it open until they end. No code enters it, because subscribers may take the last
/// exit for the end.
pub(crate) struct TracedTransfer {
    trace: Option<TraceContext>,
    span: Option<Span>,
    /// What [`TRANSFER`] was before: a waker that this thread calls during the submission may submit, too.
    former: Option<Span>,
}

impl TracedTransfer {
    #[inline]
    pub fn begin(trace: Option<TraceContext>, operation: &'static str, peer: Option<u64>) -> Self {
        match trace {
            None => Self { trace: None, span: None, former: None },
            Some(trace) => Self::begin_traced(trace, operation, peer),
        }
    }

    #[cold]
    fn begin_traced(trace: TraceContext, operation: &'static str, peer: Option<u64>) -> Self {
        let span = tracing::debug_span!("transfer", operation, peer, %trace);
        if let Some(link) = LINK.get() {
            link.set_parent(&span, trace);
        }
        Self { trace: Some(trace), former: replace(Some(span.clone())), span: Some(span) }
    }

    /// The trace context that a notification takes along: of the transfer's span, or of the current one, if a link knows it;
    /// else what the caller gave.
    #[inline]
    pub fn context(&self) -> Option<TraceContext> {
        if self.trace.is_none() && LINK.get().is_none() { None } else { self.traced_context() }
    }

    #[cold]
    fn traced_context(&self) -> Option<TraceContext> {
        let of_span = LINK.get().and_then(|link| match &self.span {
            Some(span) => link.context_of(span),
            None => link.context_of(&Span::current()),
        });
        of_span.or(self.trace)
    }
}

impl Drop for TracedTransfer {
    #[inline]
    fn drop(&mut self) {
        if self.span.is_some() {
            replace(self.former.take());
        }
    }
}

/// Changes the transfer that this thread submits. Returns the former one. A thread that ends has none.
fn replace(transfer: Option<Span>) -> Option<Span> {
    TRANSFER.try_with(|current| current.replace(transfer)).ok().flatten()
}

/// The parent of an operation's span: the transfer that this thread submits, or the current span.
pub(crate) fn parent() -> Option<tracing::span::Id> {
    let of_transfer = TRANSFER.try_with(|transfer| transfer.borrow().as_ref().and_then(Span::id));
    of_transfer.ok().flatten().or_else(|| Span::current().id())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transfer_within_another_leaves_it_current() {
        let trace = TraceContext::new([1; 16], [2; 8], 1).unwrap();
        let current = || TRANSFER.with_borrow(Option::is_some);
        let outer = TracedTransfer::begin(Some(trace), "write", None);
        drop(TracedTransfer::begin(Some(trace), "notify", None));
        drop(TracedTransfer::begin(None, "notify", None));
        assert!(current());
        assert_eq!(outer.context(), Some(trace));
        drop(outer);
        assert!(!current());
    }
}
