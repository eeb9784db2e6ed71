//! Handing checked operations to the engines.

use std::sync::Arc;
use std::time::Duration;

use crate::engine::{Submission, Work};
use crate::link::Link;
use crate::op::OpId;
use crate::peer::PeerInner;
use crate::{Error, ErrorKind, Op, Result, Time};

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
        let fabric = self
            .fabric
            .upgrade()
            .ok_or_else(|| Error::new(ErrorKind::Closed, operation, "the fabric is closed"))?;
        let begun = fabric.now();
        let times = (begun, fabric.deadline(begun, deadline));
        let links = self.route(link.engine.transport);
        if links.len() > 1 && work.remote.is_some() {
            return self.submit_over(links, work, times, operation);
        }
        let id = link.engine.insert(operation)?;
        Ok(self.submit_to(link, id, work, times, operation))
    }

    /// Hands an operation to one engine; `id` is of its table.
    pub(crate) fn submit_to(
        self: &Arc<Self>,
        link: &Link,
        id: OpId,
        work: Work,
        (begun, deadline): (Time, Time),
        operation: &'static str,
    ) -> Op {
        link.operation_begins();
        let span = self.span(id, &link.engine.label, operation, &work);
        link.engine.submit(Submission { id, peer: Arc::clone(self), begun, deadline, work, span });
        Op::pending(Arc::clone(&link.engine), id)
    }
}

impl PeerInner {
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
