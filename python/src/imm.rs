//! Imms that arrive from a peer.

use std::future::Future;
use std::sync::{Arc, Mutex};

use multirail::{Arrivals as CoreArrivals, Error, ImmCounter as CoreImmCounter};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;

use crate::fork::ForkSafe;
use crate::operation::Operation;
use crate::returned::{NextItem, Returned};
use crate::value::Value;

/// Counts the arrivals of one imm from one peer.
#[pyclass(frozen, module = "multirail")]
pub struct ImmCounter(ForkSafe<CoreImmCounter>);

impl ImmCounter {
    pub fn new(counter: CoreImmCounter) -> Self {
        Self(ForkSafe::new(counter))
    }
}

#[pymethods]
impl ImmCounter {
    /// The number of arrivals that were not taken.
    #[getter]
    fn count(&self) -> PyResult<u64> {
        Ok(self.0.get()?.count())
    }

    /// Waits until the count is at least `count`, an operation that returns `None`. It takes nothing off the count.
    #[pyo3(signature = (count=1))]
    fn expect(&self, count: u64) -> PyResult<Operation> {
        let expect = self.0.get()?.expect(count);
        Ok(Operation::of_task(async move { expect.await.map(|()| Value::Nothing) }))
    }

    /// Takes `count` off the count if it is at least that. Returns whether it was.
    #[pyo3(signature = (count=1))]
    fn try_take(&self, count: u64) -> PyResult<bool> {
        Ok(self.0.get()?.try_take(count))
    }

    /// Takes all arrivals off the count as they come, those before included: call `next()` of it, or iterate by
    /// `async for`. Do not mix it with `expect` and `try_take`.
    fn arrivals(&self) -> PyResult<Arrivals> {
        let stream = ForkSafe::new(Arc::new(Mutex::new(Some(self.0.get()?.arrivals()))));
        Ok(Arrivals { stream, returned: Arc::default() })
    }
}

type SharedArrivals = Arc<Mutex<Option<CoreArrivals>>>;

/// The arrivals of an imm, as a stream of numbers: how many were taken at once.
#[pyclass(frozen, module = "multirail")]
pub struct Arrivals {
    stream: ForkSafe<SharedArrivals>,
    returned: Arc<Returned>,
}

impl Arrivals {
    fn future(&self) -> PyResult<impl Future<Output = Result<Value, Error>> + Send + 'static> {
        let (mut stream, returned) = (Taken::of(self.stream.get()?)?, Arc::clone(&self.returned));
        Ok(NextItem::new(&self.returned, async move {
            let arrived = stream.get().next().await?;
            Ok(Value::item(&returned, move |py| arrived.into_py_any(py)))
        }))
    }
}

#[pymethods]
impl Arrivals {
    /// Waits for arrivals, an operation that returns how many were taken.
    fn next(&self) -> PyResult<Operation> {
        self.future().map(Operation::of_task)
    }

    fn __aiter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __anext__(&self) -> PyResult<Operation> {
        self.future().map(Operation::of_iteration)
    }
}

/// A stream that one operation uses. It goes back when the operation is over or dropped.
pub struct Taken<T> {
    home: Arc<Mutex<Option<T>>>,
    stream: Option<T>,
}

impl<T> Taken<T> {
    /// Takes the stream.
    ///
    /// # Errors
    /// `RuntimeError` if another operation uses it.
    pub fn of(home: &Arc<Mutex<Option<T>>>) -> PyResult<Self> {
        let stream = home.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        match stream {
            Some(stream) => Ok(Self { home: Arc::clone(home), stream: Some(stream) }),
            None => Err(pyo3::exceptions::PyRuntimeError::new_err(
                "another operation waits for the next item of this stream; await it first, or cancel it",
            )),
        }
    }

    pub fn get(&mut self) -> &mut T {
        match &mut self.stream {
            Some(stream) => stream,
            None => unreachable!("the stream is there until this value is dropped"),
        }
    }
}

impl<T> Drop for Taken<T> {
    fn drop(&mut self) {
        *self.home.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = self.stream.take();
    }
}
