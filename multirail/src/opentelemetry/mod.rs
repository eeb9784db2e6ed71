//! Operations as spans of OpenTelemetry's traces (cargo feature `opentelemetry`), and their export by OTLP (feature `otlp`).
//!
//! multirail's spans are `tracing`'s: with a layer of `tracing-opentelemetry` in the program's subscriber they are
//! OpenTelemetry's, too, as children of the span that submits. [`link`] adds what crosses processes: an operation whose
//! options have a [`TraceContext`] becomes a child of that span, and a notification takes the current span along, so that
//! the peer's work becomes part of the same trace:
//!
//! ```no_run
//! # async fn decode(mut arriving: multirail::Notifications) -> multirail::Result<()> {
//! multirail::opentelemetry::link()?; // once, where the subscriber is made
//! let handover = arriving.next().await?;
//! let span = tracing::info_span!("decode");
//! if let Some(prefill) = handover.trace {
//!     multirail::opentelemetry::set_parent(&span, prefill);
//! }
//! # Ok(())
//! # }
//! ```

#[cfg(feature = "otlp")]
mod exporter;
#[cfg(feature = "otlp")]
mod http_client;

#[cfg(feature = "otlp")]
pub use exporter::{OtlpExporter, SpanLayer};
use opentelemetry::Context;
use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;
use transport_core::{Result, SpanLink, TraceContext, set_span_link};

/// Ties spans to OpenTelemetry's traces, for all fabrics of this process.
///
/// # Errors
/// `Busy` if this process has a link already.
pub fn link() -> Result<()> {
    set_span_link(Box::new(OpenTelemetryLink))
}

/// Makes `span` a child of `parent`, which may be a span of another process. Call it before the span is entered: afterwards
/// it has no effect.
pub fn set_parent(span: &Span, parent: TraceContext) {
    let (trace, id) = (TraceId::from_bytes(parent.trace_id()), SpanId::from_bytes(parent.span_id()));
    let flags = TraceFlags::new(parent.flags());
    let remote = SpanContext::new(trace, id, flags, true, TraceState::NONE);
    if let Err(error) = span.set_parent(Context::new().with_remote_span_context(remote)) {
        tracing::debug!(%error, "a span is no child of the trace that it was given");
    }
}

/// The trace context of the current span. `None` without a span, or without a layer of `tracing-opentelemetry`.
pub fn current() -> Option<TraceContext> {
    context_of(&Span::current())
}

/// The trace context of a span. As [`current`].
pub fn context_of(span: &Span) -> Option<TraceContext> {
    let context = span.context();
    let of_span = context.span().span_context().clone();
    let (trace, id) = (of_span.trace_id().to_bytes(), of_span.span_id().to_bytes());
    TraceContext::new(trace, id, of_span.trace_flags().to_u8()).ok()
}

struct OpenTelemetryLink;

impl SpanLink for OpenTelemetryLink {
    fn context_of(&self, span: &Span) -> Option<TraceContext> {
        context_of(span)
    }

    fn set_parent(&self, span: &Span, parent: TraceContext) {
        set_parent(span, parent);
    }
}
