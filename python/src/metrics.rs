//! The metrics of a fabric over HTTP.

use multirail::metrics::MetricsServer as CoreServer;
use pyo3::prelude::*;

use crate::closeable::Closeable;

/// Serves the metrics of a fabric to Prometheus, at `http://ADDRESS/metrics`, until it is closed or its last reference goes.
///
/// Use it as a context manager, or call `close()`.
#[pyclass(frozen, weakref, module = "multirail")]
pub struct MetricsServer {
    address: String,
    server: Closeable<CoreServer>,
}

impl MetricsServer {
    pub fn new(server: CoreServer) -> Self {
        Self { address: server.local_addr().to_string(), server: Closeable::new(server) }
    }
}

#[pymethods]
impl MetricsServer {
    /// HOST:PORT.
    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    /// Closes the address. May be called twice.
    fn close(&self, py: Python<'_>) {
        self.server.close(py);
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, pyo3::types::PyTuple>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        format!("<multirail.MetricsServer http://{}/metrics>", self.address)
    }
}
