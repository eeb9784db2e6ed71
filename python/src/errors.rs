//! Errors of the library as Python exceptions: one class per kind, in `multirail.errors`.

use multirail::{Error, ErrorKind};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// Turns a result of the library into one of Python.
pub trait IntoPython<T> {
    fn into_python(self) -> PyResult<T>;
}

impl<T> IntoPython<T> for Result<T, Error> {
    fn into_python(self) -> PyResult<T> {
        self.map_err(|error| exception(&error))
    }
}

/// The exception for an error of the library.
#[cold]
pub fn exception(error: &Error) -> PyErr {
    Python::attach(|py| {
        let made = class(py, error.kind()).and_then(|class| {
            let exception = class.call1((error.to_string(),))?;
            exception.setattr("operation", error.operation())?;
            Ok(PyErr::from_value(exception))
        });
        made.unwrap_or_else(|failure| failure)
    })
}

/// The class of a kind. `multirail.errors` has a class for each name; a kind that it does not know is an `Error`.
fn class(py: Python<'_>, kind: ErrorKind) -> PyResult<Bound<'_, PyType>> {
    static BASE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let module = py.import("multirail.errors")?;
    match module.getattr(format!("{kind:?}")) {
        Ok(class) => Ok(class.cast_into::<PyType>()?),
        Err(_) => Ok(BASE.import(py, "multirail.errors", "Error")?.clone()),
    }
}
