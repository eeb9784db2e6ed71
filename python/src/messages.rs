//! Messages and notifications that arrive.

use std::sync::{Arc, Mutex, PoisonError};

use multirail::{Message as CoreMessage, Notification as CoreNotification};
use multirail::{Notifications as CoreNotifications, RecvPool as CoreRecvPool};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::IntoPython;
use crate::fork::ForkSafe;
use crate::imm::Taken;
use crate::operation::{Operation, Value};

/// Receives of equal size, posted on every transport. Dropping a message posts its buffer again.
#[pyclass(frozen, module = "multirail")]
pub struct RecvPool(ForkSafe<Arc<CoreRecvPool>>);

impl RecvPool {
    pub fn new(pool: CoreRecvPool) -> Self {
        Self(ForkSafe::new(Arc::new(pool)))
    }
}

#[pymethods]
impl RecvPool {
    /// Waits for the next message, from any peer: an operation that returns a `Message`.
    fn next(&self) -> PyResult<Operation> {
        let pool = Arc::clone(self.0.get()?);
        Ok(Operation::of_task(async move {
            let message = pool.next().await?;
            Ok(Value::lazy(|py| Ok(Py::new(py, Message(ForkSafe::new(message)))?.into_any())))
        }))
    }

    /// The next message if one has arrived, or `None`.
    fn try_next(&self) -> PyResult<Option<Message>> {
        let message = self.0.get()?.try_next().transpose().into_python()?;
        Ok(message.map(|message| Message(ForkSafe::new(message))))
    }

    fn __aiter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __anext__(&self) -> PyResult<Operation> {
        self.next()
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
pub struct Notifications(ForkSafe<Arc<Mutex<Option<CoreNotifications>>>>);

impl Notifications {
    pub fn new(notifications: CoreNotifications) -> Self {
        Self(ForkSafe::new(Arc::new(Mutex::new(Some(notifications)))))
    }
}

#[pymethods]
impl Notifications {
    /// Waits for the next notification, an operation that returns a `Notification`.
    fn next(&self) -> PyResult<Operation> {
        let mut stream = Taken::of(self.0.get()?)?;
        Ok(Operation::of_task(async move {
            let arrived = stream.get().next().await?;
            Ok(Value::lazy(|py| Ok(Py::new(py, Notification(arrived))?.into_any())))
        }))
    }

    /// The next notification if it has arrived, or `None`.
    fn try_next(&self) -> PyResult<Option<Notification>> {
        let mut home = self.0.get()?.lock().unwrap_or_else(PoisonError::into_inner);
        // An operation that waits gets it.
        let Some(stream) = &mut *home else { return Ok(None) };
        Ok(stream.try_next().transpose().into_python()?.map(Notification))
    }

    fn __aiter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __anext__(&self) -> PyResult<Operation> {
        self.next()
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

    fn __repr__(&self) -> String {
        format!("<Notification of {} bytes from peer {}>", self.0.bytes.len(), self.0.peer.number())
    }
}
