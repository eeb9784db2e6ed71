//! The metrics of a fabric over HTTP.

use std::sync::{Mutex, PoisonError};

use multirail::metrics::MetricsServer as CoreServer;
use pyo3::prelude::*;

use crate::fork::ForkSafe;

/// Serves the metrics of a fabric to Prometheus, at `http://ADDRESS/metrics`, until it is closed or its last reference goes.
///
/// Use it as a context manager, or call `close()`.
#[pyclass(frozen, weakref, module = "multirail")]
pub struct MetricsServer {
    address: String,
    server: Mutex<ForkSafe<CoreServer>>,
}

impl MetricsServer {
    pub fn new(server: CoreServer) -> Self {
        Self { address: server.local_addr().to_string(), server: Mutex::new(ForkSafe::new(server)) }
    }

    /// The server to drop, unless it is closed already or belongs to the process that this one was forked from.
    fn take(&self) -> Option<CoreServer> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner).take()
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
        py.detach(|| drop(self.take()));
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

impl Drop for MetricsServer {
    fn drop(&mut self) {
        // Closing joins a thread.
        if let Some(server) = self.take() {
            Python::attach(|py| py.detach(|| drop(server)));
        }
    }
}
