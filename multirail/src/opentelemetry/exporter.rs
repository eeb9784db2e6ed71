//! The export of spans.

use std::time::Duration;

use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider, Tracer};
use tracing::Subscriber;
use tracing_opentelemetry::OpenTelemetryLayer;
use tracing_subscriber::filter::{Filtered, LevelFilter, Targets};
use tracing_subscriber::layer::Layer;
use tracing_subscriber::registry::LookupSpan;
use transport_core::{Error, ErrorKind, Result};

use super::http_client::PlainHttp;

/// How long a collector may take for a batch of spans.
const EXPORT_LIMIT: Duration = Duration::from_secs(5);

/// What [`OtlpExporter::layer`] returns.
pub type SpanLayer<S> = Filtered<OpenTelemetryLayer<S, Tracer>, Targets, S>;

/// Sends multirail's spans to a collector, by OTLP over HTTP: those of operations that are part of a sampled trace. A thread
/// of its own sends them in batches, and drops those that it has no room for.
///
/// Make the layer part of the *global* subscriber: workers end the spans.
///
/// ```no_run
/// use multirail::opentelemetry::{OtlpExporter, link};
/// use tracing_subscriber::layer::SubscriberExt;
/// use tracing_subscriber::util::SubscriberInitExt;
///
/// let exporter = OtlpExporter::start("http://127.0.0.1:4318/v1/traces", "prefill")?;
/// tracing_subscriber::registry().with(exporter.layer()).init();
/// link()?;
/// # Ok::<(), multirail::Error>(())
/// ```
///
/// # Cleanup
/// Dropping the exporter sends the spans that have ended, which may take 5 s, and ends the thread.
pub struct OtlpExporter(SdkTracerProvider);

impl OtlpExporter {
    /// Exports to `endpoint`, the whole URL, usually `http://HOST:4318/v1/traces`. TLS is not built in: send to an agent on
    /// the same host. `service` becomes the resource's `service.name`; variables of OpenTelemetry such as
    /// `OTEL_RESOURCE_ATTRIBUTES` and `OTEL_BSP_SCHEDULE_DELAY` apply, no proxy does.
    ///
    /// # Errors
    /// `InvalidRequest` if the endpoint is no `http://` URL, or a variable asks for what is not built in.
    pub fn start(endpoint: &str, service: &str) -> Result<Self> {
        let invalid = |why: String| {
            let why = format!(
                "cannot export to {endpoint:?}, which is to be like http://127.0.0.1:4318/v1/traces: {why}"
            );
            Error::new(ErrorKind::InvalidRequest, "export spans", why)
        };
        if !endpoint.starts_with("http://") {
            return Err(invalid("it does not begin with http://".to_owned()));
        }
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(PlainHttp::new(EXPORT_LIMIT))
            .with_endpoint(endpoint)
            .with_timeout(EXPORT_LIMIT)
            .build()
            .map_err(|error| invalid(error.to_string()))?;
        let resource = Resource::builder().with_service_name(service.to_owned()).build();
        // An operation that is part of no trace would be a trace of its own.
        let of_traces = Sampler::ParentBased(Box::new(Sampler::AlwaysOff));
        let provider = SdkTracerProvider::builder().with_sampler(of_traces);
        Ok(Self(provider.with_batch_exporter(exporter).with_resource(resource).build()))
    }

    /// The layer that makes multirail's spans OpenTelemetry's, for the program's subscriber.
    pub fn layer<S>(&self) -> SpanLayer<S>
    where
        S: Subscriber + for<'span> LookupSpan<'span>,
    {
        let ours = Targets::new().with_target("multirail", LevelFilter::DEBUG);
        tracing_opentelemetry::layer().with_tracer(self.0.tracer("multirail")).with_filter(ours)
    }

    /// Sends all spans that have ended.
    ///
    /// # Errors
    /// `Io` if the collector does not take them.
    pub fn flush(&self) -> Result<()> {
        let failed = |error: opentelemetry_sdk::error::OTelSdkError| {
            Error::new(ErrorKind::Io, "export spans", error.to_string())
        };
        self.0.force_flush().map_err(failed)
    }
}

impl Drop for OtlpExporter {
    fn drop(&mut self) {
        if let Err(error) = self.0.shutdown_with_timeout(EXPORT_LIMIT) {
            tracing::warn!(%error, "some spans were not exported");
        }
    }
}
