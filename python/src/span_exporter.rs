//! The export of spans to OpenTelemetry.

use std::sync::Arc;

use multirail::opentelemetry::{OtlpExporter, link};
use multirail::{Error, ErrorKind};
use pyo3::prelude::*;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::closeable::Closeable;
use crate::errors::IntoPython;

/// Sends the spans of transfers to a collector of OpenTelemetry, by OTLP over HTTP, until it is closed or its last reference
/// goes. A process may have one in its life; make it after a fork.
///
/// Give each transfer the span that it is a part of: `trace=`, a W3C `traceparent`. Use the exporter as a context manager, or
/// call `close()`, which sends the spans that have ended.
#[pyclass(frozen, weakref, module = "multirail")]
pub struct SpanExporter {
    endpoint: String,
    exporter: Closeable<Arc<OtlpExporter>>,
}

#[pymethods]
impl SpanExporter {
    /// Exports to `endpoint`, usually "http://127.0.0.1:4318/v1/traces", as the service `service`.
    #[new]
    fn new(py: Python<'_>, endpoint: &str, service: &str) -> PyResult<Self> {
        let exporter = py.detach(|| OtlpExporter::start(endpoint, service)).into_python()?;
        let taken = |_| {
            let why = "this process has an exporter already, a closed one too, or was forked from one that has; make it \
                       once, after the fork";
            Error::new(ErrorKind::Busy, "export spans", why)
        };
        tracing_subscriber::registry().with(exporter.layer()).try_init().map_err(taken).into_python()?;
        link().into_python()?;
        Ok(Self { endpoint: endpoint.to_owned(), exporter: Closeable::new(Arc::new(exporter)) })
    }

    /// Sends the spans that have ended. Raises `Io` if the collector does not take them.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        // A clone, so that nothing is locked while the collector answers: a child that is forked meanwhile would find the lock
        // held for ever.
        let open = self.exporter.get("export spans")?;
        py.detach(|| open.flush()).into_python()
    }

    /// Sends the spans that have ended, and ends the export. May be called twice. Only `flush` tells that the collector does
    /// not take them.
    fn close(&self, py: Python<'_>) {
        self.exporter.close(py);
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, pyo3::types::PyTuple>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        format!("<multirail.SpanExporter {}>", self.endpoint)
    }
}
