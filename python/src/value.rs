//! The result of an operation, until somebody takes it.

use std::sync::Arc;

use multirail::Outcome;
use pyo3::prelude::*;

use crate::returned::Returned;

/// Makes a Python object.
pub type Make = Box<dyn FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send>;

/// The result of an operation.
pub enum Value {
    Outcome(Outcome),
    /// Made into a Python object by the first who asks for it.
    Lazy(Make),
    /// An item of a stream. If nobody takes it, it goes back there.
    Item(Make, Arc<Returned>),
    /// `None`.
    Nothing,
    /// The object is in the other cell.
    Made,
}

impl Value {
    /// A value that is made into a Python object by `make`.
    pub fn lazy(make: impl FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send + 'static) -> Self {
        Self::Lazy(Box::new(make))
    }

    /// An item that `make` makes into a Python object.
    pub fn item(
        home: &Arc<Returned>,
        make: impl FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send + 'static,
    ) -> Self {
        Self::Item(Box::new(make), Arc::clone(home))
    }
}
