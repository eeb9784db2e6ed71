//! Messages and notifications that arrive.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use multirail::{Error, Message as CoreMessage, Notification as CoreNotification};
use multirail::{Notifications as CoreNotifications, RecvPool as CoreRecvPool};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::IntoPython;
use crate::fork::ForkSafe;
use crate::imm::Taken;
use crate::operation::Operation;
use crate::returned::{NextItem, Returned};
use crate::value::Value;

/// Receives of equal size, posted on every transport. Dropping a message posts its buffer again.
#[pyclass(frozen, module = "multirail")]
pub struct RecvPool {
    pool: ForkSafe<Arc<CoreRecvPool>>,
    returned: Arc<Returned>,
}

impl RecvPool {
    pub fn new(pool: CoreRecvPool) -> Self {
        Self { pool: ForkSafe::new(Arc::new(pool)), returned: Arc::default() }
    }

    fn future(&self) -> PyResult<impl Future<Output = Result<Value, Error>> + Send + 'static> {
        let (pool, returned) = (Arc::clone(self.pool.get()?), Arc::clone(&self.returned));
        Ok(NextItem::new(&self.returned, async move {
            let message = pool.next().await?;
            Ok(Value::item(&returned, |py| Ok(Py::new(py, Message(ForkSafe::new(message)))?.into_any())))
        }))
    }
}

#[pymethods]
impl RecvPool {
    /// Waits for the next message, from any peer: an operation that returns a `Message`.
    fn next(&self) -> PyResult<Operation> {
        self.future().map(Operation::of_task)
    }

    /// The next message if one has arrived, or `None`.
    fn try_next(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        if let Some(object) = self.returned.pop() {
            return Ok(Some(object));
        }
        let message = self.pool.get()?.try_next().transpose().into_python()?;
        message.map(|message| Ok(Py::new(py, Message(ForkSafe::new(message)))?.into_any())).transpose()
    }

    fn __aiter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __anext__(&self) -> PyResult<Operation> {
        self.future().map(Operation::of_iteration)
    }
}

/// A message in a buffer of a pool. Drop it soon: its buffer is not posted while it lives.
#[pyclass(frozen, module = "multirail")]
pub struct Message(ForkSafe<CoreMessage>);

#[pymethods]
impl Message {
    /// The number of the sender.
    #[getter]
    fn peer(&self) -> PyResult<u64> {
        Ok(self.0.get()?.peer().number())
    }

    /// The message's immediate data.
    #[getter]
    fn imm(&self) -> PyResult<Option<u32>> {
        Ok(self.0.get()?.imm())
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.0.get()?.len())
    }

    /// A copy of the message's bytes.
    fn __bytes__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let message = self.0.get()?;
        PyBytes::new_with(py, message.len(), |into| {
            message.copy_out(into);
            Ok(())
        })
    }
}

/// The notifications that peers deliver to a fabric: call `next()`, or iterate by `async for`.
#[pyclass(frozen, module = "multirail")]
pub struct Notifications {
    stream: ForkSafe<Arc<Mutex<Option<CoreNotifications>>>>,
    returned: Arc<Returned>,
}

impl Notifications {
    pub fn new(notifications: CoreNotifications) -> Self {
        Self { stream: ForkSafe::new(Arc::new(Mutex::new(Some(notifications)))), returned: Arc::default() }
    }

    fn future(&self) -> PyResult<impl Future<Output = Result<Value, Error>> + Send + 'static> {
        let (mut stream, returned) = (Taken::of(self.stream.get()?)?, Arc::clone(&self.returned));
        Ok(NextItem::new(&self.returned, async move {
            let arrived = stream.get().next().await?;
            Ok(Value::item(&returned, |py| Ok(Py::new(py, Notification(arrived))?.into_any())))
        }))
    }
}

#[pymethods]
impl Notifications {
    /// Waits for the next notification, an operation that returns a `Notification`. `await`, `wait()` or `result()` takes
    /// it; one that nobody takes goes to the next `next`.
    fn next(&self) -> PyResult<Operation> {
        self.future().map(Operation::of_task)
    }

    /// The next notification if it has arrived, or `None`.
    fn try_next(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        if let Some(object) = self.returned.pop() {
            return Ok(Some(object));
        }
        // An operation that waits gets it.
        let next = match &mut *self.stream.get()?.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(stream) => stream.try_next(),
            None => None,
        };
        let arrived = next.transpose().into_python()?;
        arrived.map(|arrived| Ok(Py::new(py, Notification(arrived))?.into_any())).transpose()
    }

    fn __aiter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __anext__(&self) -> PyResult<Operation> {
        self.future().map(Operation::of_iteration)
    }
}

/// Bytes that a peer has delivered by `Peer.notify`, or with a transfer.
#[pyclass(frozen, module = "multirail")]
pub struct Notification(CoreNotification);

#[pymethods]
impl Notification {
    /// The number of the sender.
    #[getter]
    fn peer(&self) -> u64 {
        self.0.peer.number()
    }

    /// The bytes.
    #[getter]
    fn data<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.bytes)
    }

    /// The sender's span as a W3C `traceparent`, if the sender has made the operation a part of a trace.
    #[getter]
    fn trace(&self) -> Option<String> {
        self.0.trace.map(|trace| trace.to_string())
    }

    fn __repr__(&self) -> String {
        format!("<Notification of {} bytes from peer {}>", self.0.bytes.len(), self.0.peer.number())
    }
}
