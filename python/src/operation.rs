//! What every asynchronous call returns: an operation to await, or to wait for.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use multirail::{Cancel, Error, ErrorKind, Op, Outcome as CoreOutcome};
use pyo3::exceptions::{PyResourceWarning, PyRuntimeError, PyStopIteration, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;
use pyo3::{PyTraverseError, PyVisit};

use crate::errors::{IntoPython, exception};
use crate::fork::ForkSafe;
use crate::reactor::Completions;
use crate::receipt::{Outcome, Receipt};

/// How long a blocked thread may go on before it looks for signals (Ctrl-C).
const SIGNAL_CHECK: Duration = Duration::from_millis(50);

type Make = Box<dyn FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send>;

/// What an operation resolves to.
pub enum Value {
    Outcome(CoreOutcome),
    /// Made into a Python object by the first who asks for it.
    Lazy(Make),
    Object(Py<PyAny>),
    /// `None`.
    Nothing,
}

impl Value {
    /// A value that is made into a Python object by `make`.
    pub fn lazy(make: impl FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send + 'static) -> Self {
        Self::Lazy(Box::new(make))
    }
}

type Task = Pin<Box<dyn Future<Output = Result<Value, Error>> + Send>>;

enum State {
    Op(Op),
    Task(Task),
    /// Until no byte can move any more.
    Cancelling(Cancel),
    Done {
        result: Result<Value, Error>,
        /// Has the receipt.
        op: Option<Op>,
    },
}

struct Inner {
    state: State,
    /// What the loop calls once the operation is over, and the context of each call.
    callbacks: Vec<(Py<PyAny>, Option<Py<PyAny>>)>,
    /// The loop that awaits the operation, and what stands for the operation there.
    bound: Option<Bond>,
    /// Wakes the thread that waits for the operation. If several do, the others look again after [`SIGNAL_CHECK`].
    waiter: Option<Waker>,
    /// Whether the task that awaits this operation was cancelled.
    task_cancelled: bool,
    /// The message of that cancel.
    cancel_message: Option<Py<PyAny>>,
    /// A part of asyncio's protocol of futures: an iterator that yields a future sets it, the task resets it.
    blocking: bool,
}

/// Wakes a loop and a thread.
struct BothWakers([Waker; 2]);

impl Wake for BothWakers {
    fn wake(self: Arc<Self>) {
        self.0.iter().for_each(Waker::wake_by_ref);
    }
}

/// Waits for the end of an operation. It holds the lock only while it polls, so that others may look or cancel.
struct End<'a>(&'a Mutex<Inner>);

impl Future for End<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        inner.waiter = Some(context.waker().clone());
        if !inner.poll() {
            return Poll::Pending;
        }
        inner.announce();
        Poll::Ready(())
    }
}

struct Bond {
    completions: Arc<Completions>,
    /// `None` once the operation is over.
    token: Option<(u32, Waker)>,
}

/// An operation under way: a transfer, or anything else that takes time.
///
/// `await` it in asyncio (or uvloop, or anyio on asyncio), or call `wait(timeout)`. It runs whether or not anybody
/// awaits it. Cancelling a task that awaits it cancels the operation, and the task ends only once no byte of it can move
/// any more. An operation that is dropped before it is over is cancelled, with a `ResourceWarning`; `detach()` lets it
/// run.
///
/// In a loop, the object is a future of asyncio: `asyncio.gather`, `wait`, `wait_for` and `shield` take it.
#[pyclass(frozen, weakref, generic, module = "multirail")]
pub struct Operation(ForkSafe<Mutex<Inner>>);

impl Operation {
    fn new(state: State) -> Self {
        let (callbacks, bound, waiter) = (Vec::new(), None, None);
        Self(ForkSafe::new(Mutex::new(Inner {
            state,
            callbacks,
            bound,
            waiter,
            task_cancelled: false,
            cancel_message: None,
            blocking: false,
        })))
    }

    /// A transfer.
    #[inline]
    pub fn of(op: Op) -> Self {
        Self::new(State::Op(op))
    }

    /// Anything else that takes time.
    pub fn of_task(task: impl Future<Output = Result<Value, Error>> + Send + 'static) -> Self {
        let mut task: Task = Box::pin(task);
        // A future does nothing until it is polled; an operation runs from here on.
        Self::new(match task.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Pending => State::Task(task),
            Poll::Ready(result) => State::Done { result, op: None },
        })
    }

    fn lock(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, Inner>> {
        let mutex = self.0.get()?;
        loop {
            match mutex.try_lock() {
                Ok(inner) => return Ok(inner),
                Err(TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
                // Another thread polls the operation, without the GIL.
                Err(TryLockError::WouldBlock) => py.detach(|| drop(mutex.lock())),
            }
        }
    }

    /// The loop calls it after the operation's waker has announced something.
    pub fn on_wake(
        this: &Bound<'_, Self>,
        call_soon: &Bound<'_, PyAny>,
        keywords: &Bound<'_, PyDict>,
    ) -> PyResult<()> {
        let py = this.py();
        let mut inner = this.get().lock(py)?;
        if !inner.poll() {
            return Ok(());
        }
        let callbacks = std::mem::take(&mut inner.callbacks);
        let bond =
            inner.bound.as_mut().and_then(|bond| Some((Arc::clone(&bond.completions), bond.token.take()?)));
        drop(inner);
        if let Some((completions, (token, _waker))) = bond {
            drop(completions.remove(token));
        }
        for (callback, context) in callbacks {
            match context {
                Some(context) => {
                    keywords.set_item(intern!(py, "context"), context)?;
                    call_soon.call((callback, this), Some(keywords))?;
                }
                None => drop(call_soon.call1((callback, this))?),
            }
        }
        Ok(())
    }

    /// Binds the operation to the running loop, which learns of its end from now on.
    fn bind(this: &Bound<'_, Self>, inner: &mut Inner) -> PyResult<()> {
        let py = this.py();
        if let Some(bond) = &inner.bound
            && bond.completions.is_open(py)?
        {
            return Ok(());
        }
        let Some(completions) = Completions::of_running_loop(py)? else {
            let why = "no event loop of asyncio runs in this thread: await the operation in a coroutine, or call wait()";
            return Err(PyRuntimeError::new_err(why));
        };
        let token = completions.add(this.clone().unbind());
        inner.bound = Some(Bond { completions, token: Some(token) });
        if inner.poll() {
            inner.announce();
        }
        Ok(())
    }

    /// The result, as the loop and `wait` return it.
    fn result_of(&self, py: Python<'_>, inner: &mut Inner) -> PyResult<Py<PyAny>> {
        if !matches!(inner.state, State::Done { .. }) {
            return Err(invalid_state(py));
        }
        if inner.task_cancelled {
            return Err(cancelled_error(py, inner.cancel_message.as_ref()));
        }
        let State::Done { result, .. } = &mut inner.state else { return Err(invalid_state(py)) };
        match result {
            Ok(Value::Outcome(outcome)) => Ok(Py::new(py, Outcome::new(*outcome))?.into_any()),
            Ok(Value::Object(object)) => Ok(object.clone_ref(py)),
            Ok(Value::Nothing) => Ok(py.None()),
            Ok(value @ Value::Lazy(_)) => {
                let Value::Lazy(make) = std::mem::replace(value, Value::Nothing) else {
                    return Ok(py.None());
                };
                let object = make(py)?;
                *value = Value::Object(object.clone_ref(py));
                Ok(object)
            }
            Err(error) => Err(exception(error)),
        }
    }
}

impl Inner {
    /// Polls the operation, for all who wait. Returns whether it is over.
    fn poll(&mut self) -> bool {
        let of_loop =
            self.bound.as_ref().and_then(|bond| bond.token.as_ref()).map(|(_, waker)| waker.clone());
        let waker = match (of_loop, &self.waiter) {
            (Some(of_loop), Some(waiter)) => {
                Some(Waker::from(Arc::new(BothWakers([of_loop, waiter.clone()]))))
            }
            (of_loop, waiter) => of_loop.or_else(|| waiter.clone()),
        };
        let result = match (&mut self.state, &waker) {
            (State::Done { .. }, _) => return true,
            (State::Op(op), None) => match op.try_result() {
                Some(result) => result.map(Value::Outcome),
                None => return false,
            },
            (State::Op(op), Some(waker)) => match Pin::new(op).poll(&mut Context::from_waker(waker)) {
                Poll::Ready(result) => result.map(Value::Outcome),
                Poll::Pending => return false,
            },
            (State::Task(task), waker) => {
                let waker = waker.as_ref().unwrap_or(Waker::noop());
                match task.as_mut().poll(&mut Context::from_waker(waker)) {
                    Poll::Ready(result) => result,
                    Poll::Pending => return false,
                }
            }
            (State::Cancelling(cancel), waker) => {
                let waker = waker.as_ref().unwrap_or(Waker::noop());
                match Pin::new(cancel).poll(&mut Context::from_waker(waker)) {
                    Poll::Ready(result) => result.map(Value::Outcome),
                    Poll::Pending => return false,
                }
            }
        };
        self.finish(result);
        true
    }

    fn finish(&mut self, result: Result<Value, Error>) {
        let placeholder = State::Done { result: Ok(Value::Nothing), op: None };
        let op = match std::mem::replace(&mut self.state, placeholder) {
            State::Op(op) => Some(op),
            _ => None,
        };
        self.state = State::Done { result, op };
    }

    /// Tells all who wait that the operation is over.
    fn announce(&mut self) {
        if let Some(waiter) = self.waiter.take() {
            waiter.wake();
        }
        if let Some(Bond { completions, token: Some((token, _)) }) = &self.bound {
            completions.announce(*token);
        }
    }

    /// Requests a cancel, if the operation is not over.
    fn cancel(&mut self) -> bool {
        if self.poll() {
            return false;
        }
        let placeholder = State::Done { result: Err(cancelled()), op: None };
        match std::mem::replace(&mut self.state, placeholder) {
            State::Op(op) => {
                self.state = State::Cancelling(op.cancel());
                if self.poll() {
                    self.announce();
                }
            }
            // Dropping the future ends it: none of them moves bytes.
            State::Task(task) => {
                drop(task);
                self.announce();
            }
            state => self.state = state,
        }
        true
    }
}

#[pymethods]
impl Operation {
    fn __await__(this: Bound<'_, Self>) -> PyResult<Bound<'_, PyAny>> {
        let py = this.py();
        let mut inner = this.get().lock(py)?;
        if inner.poll() || inner.bound.is_some() || Completions::of_running_loop(py)?.is_some() {
            drop(inner);
            return Ok(this.into_any());
        }
        drop(inner);
        static OTHER: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let other = OTHER.import(py, "multirail._trio", "wait")?.call1((this,))?;
        other.call_method0("__await__")
    }

    fn __next__(this: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        let py = this.py();
        let mut inner = this.get().lock(py)?;
        if inner.poll() {
            let value = this.get().result_of(py, &mut inner)?;
            return Err(PyStopIteration::new_err((value,)));
        }
        Self::bind(&this, &mut inner)?;
        inner.blocking = true;
        drop(inner);
        Ok(this)
    }

    /// Blocks until the operation is over, and returns its result. Releases the GIL. Ctrl-C interrupts it.
    ///
    /// `timeout` is in seconds; without one, the operation's own deadline decides. Raises `DeadlineExceeded` if there is
    /// no result by then; the operation goes on, and may be waited for again.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Py<PyAny>> {
        let limit = timeout.map(seconds).transpose()?;
        let mut inner = self.lock(py)?;
        if inner.poll() {
            return self.result_of(py, &mut inner);
        }
        drop(inner);
        let end = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mutex = self.0.get()?;
        loop {
            let left = end.map_or(SIGNAL_CHECK, |end| end.saturating_duration_since(Instant::now()));
            let limit = left.min(SIGNAL_CHECK);
            if py.detach(|| multirail::wait(End(mutex), limit)).is_ok() {
                let mut inner = self.lock(py)?;
                return self.result_of(py, &mut inner);
            }
            py.check_signals()?;
            if left <= limit && end.is_some() {
                let why = format!(
                    "there is no result after {} s; the operation goes on, wait again",
                    timeout.unwrap_or_default()
                );
                return Err(exception(&Error::new(ErrorKind::DeadlineExceeded, "wait", why)));
            }
        }
    }

    /// Whether the operation is over: it has a result, or has failed, or is cancelled.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        let mut inner = self.lock(py)?;
        Ok(inner.poll())
    }

    /// The result of an operation that is over. Raises what it has failed with; `asyncio.InvalidStateError` if it is not
    /// over.
    fn result(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let mut inner = self.lock(py)?;
        inner.poll();
        self.result_of(py, &mut inner)
    }

    /// What the operation has failed with, or `None`.
    fn exception(&self, py: Python<'_>) -> PyResult<Option<PyErr>> {
        let mut inner = self.lock(py)?;
        if inner.poll() && inner.task_cancelled {
            return Err(cancelled_error(py, inner.cancel_message.as_ref()));
        }
        match &inner.state {
            State::Done { result: Err(error), .. } => Ok(Some(exception(error))),
            State::Done { .. } => Ok(None),
            _ => Err(invalid_state(py)),
        }
    }

    /// Requests a cancel. Returns whether the operation was still under way. It is over once no byte of it can move any
    /// more: await it, or call `wait()`. It then raises `Cancelled`, or has its result if it ended before the cancel. In a
    /// task that awaits it, it raises `asyncio.CancelledError`.
    #[pyo3(signature = (msg=None))]
    fn cancel(&self, py: Python<'_>, msg: Option<Bound<'_, PyAny>>) -> PyResult<bool> {
        let mut inner = self.lock(py)?;
        let was_under_way = inner.cancel();
        if was_under_way && !inner.callbacks.is_empty() {
            inner.task_cancelled = true;
            inner.cancel_message = msg.map(Bound::unbind);
        }
        Ok(was_under_way)
    }

    /// Whether the operation was cancelled, and is over.
    fn cancelled(&self, py: Python<'_>) -> PyResult<bool> {
        let mut inner = self.lock(py)?;
        Ok(inner.poll()
            && (inner.task_cancelled
                || matches!(&inner.state, State::Done { result: Err(error), .. } if error.kind() == ErrorKind::Cancelled)))
    }

    /// A part of asyncio's protocol of futures: the exception of a cancelled task.
    fn _make_cancelled_error(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let inner = self.lock(py)?;
        Ok(cancelled_error(py, inner.cancel_message.as_ref()).into_value(py).into_any())
    }

    /// A part of asyncio's protocol of futures: the message of the cancel.
    #[getter]
    fn _cancel_message(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        Ok(self.lock(py)?.cancel_message.as_ref().map(|message| message.clone_ref(py)))
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        // While another thread holds the lock, nothing is known: then the collector keeps the object.
        let Ok(Ok(inner)) = self.0.get().map(Mutex::try_lock) else { return Ok(()) };
        for (callback, context) in &inner.callbacks {
            visit.call(callback)?;
            visit.call(context)?;
        }
        visit.call(&inner.cancel_message)?;
        match &inner.state {
            State::Done { result: Ok(Value::Object(object)), .. } => visit.call(object),
            _ => Ok(()),
        }
    }

    fn __clear__(&self) {
        let Ok(Ok(mut inner)) = self.0.get().map(Mutex::try_lock) else { return };
        let callbacks = std::mem::take(&mut inner.callbacks);
        drop(inner);
        drop(callbacks);
    }

    /// Lets the operation run to its end without a waiter.
    fn detach(&self, py: Python<'_>) -> PyResult<()> {
        let mut inner = self.lock(py)?;
        if !matches!(inner.state, State::Op(_)) {
            return Ok(());
        }
        let why = "the operation was detached: its result is not kept";
        let detached = State::Done { result: Err(Error::new(ErrorKind::Closed, "detach", why)), op: None };
        if let State::Op(op) = std::mem::replace(&mut inner.state, detached) {
            op.detach();
        }
        inner.announce();
        Ok(())
    }

    /// How the operation went: its times, and what each rail carried by which path. `None` before it has succeeded, and
    /// for receives, revocations and notifications alone.
    fn receipt(&self, py: Python<'_>) -> PyResult<Option<Receipt>> {
        let mut inner = self.lock(py)?;
        inner.poll();
        match &inner.state {
            State::Done { result: Ok(_), op: Some(op) } => Ok(op.receipt().map(Receipt::new)),
            _ => Ok(None),
        }
    }

    /// A part of asyncio's protocol of futures: calls `callback(self)` in the loop once the operation is over.
    #[pyo3(signature = (callback, *, context=None))]
    fn add_done_callback(
        this: Bound<'_, Self>,
        callback: Py<PyAny>,
        context: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        let py = this.py();
        let mut inner = this.get().lock(py)?;
        Self::bind(&this, &mut inner)?;
        let is_late = matches!(inner.bound, Some(Bond { token: None, .. }));
        if is_late {
            let event_loop = Self::loop_of(py, &inner)?;
            drop(inner);
            let keywords = PyDict::new(py);
            if let Some(context) = context {
                keywords.set_item("context", context)?;
            }
            event_loop.call_method("call_soon", (callback, &this), Some(&keywords))?;
            return Ok(());
        }
        inner.callbacks.push((callback, context));
        Ok(())
    }

    /// A part of asyncio's protocol of futures: removes a callback. Returns how many were removed.
    fn remove_done_callback(&self, py: Python<'_>, callback: Bound<'_, PyAny>) -> PyResult<usize> {
        let callbacks = std::mem::take(&mut self.lock(py)?.callbacks);
        let (mut kept, mut removed) = (Vec::new(), 0);
        for (known, context) in callbacks {
            match known.bind(py).eq(&callback)? {
                true => removed += 1,
                false => kept.push((known, context)),
            }
        }
        let mut inner = self.lock(py)?;
        kept.append(&mut inner.callbacks);
        inner.callbacks = kept;
        Ok(removed)
    }

    /// A part of asyncio's protocol of futures: the loop that awaits the operation.
    fn get_loop<'py>(this: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let py = this.py();
        let mut inner = this.get().lock(py)?;
        Self::bind(this, &mut inner)?;
        Self::loop_of(py, &inner)
    }

    #[getter(_asyncio_future_blocking)]
    fn blocking(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.lock(py)?.blocking)
    }

    #[setter(_asyncio_future_blocking)]
    fn set_blocking(&self, py: Python<'_>, blocking: bool) -> PyResult<()> {
        self.lock(py)?.blocking = blocking;
        Ok(())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let mut inner = self.lock(py)?;
        inner.poll();
        Ok(match &inner.state {
            State::Done { result: Ok(Value::Outcome(outcome)), .. } => {
                format!("<Operation done, {} bytes>", outcome.bytes)
            }
            State::Done { result: Ok(_), .. } => "<Operation done>".into(),
            State::Done { result: Err(error), .. } => format!("<Operation failed: {error}>"),
            State::Cancelling(_) => "<Operation cancelling>".into(),
            _ => "<Operation under way>".into(),
        })
    }
}

impl Operation {
    fn loop_of<'py>(py: Python<'py>, inner: &Inner) -> PyResult<Bound<'py, PyAny>> {
        match &inner.bound {
            Some(bond) => bond.completions.event_loop(py),
            None => Err(invalid_state(py)),
        }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        // In a forked child, or while another thread holds the lock, there is nothing to tell.
        let Ok(Ok(mut inner)) = self.0.get().map(Mutex::try_lock) else { return };
        if matches!(inner.state, State::Op(_)) && !inner.poll() {
            Python::attach(|py| {
                // The operation may be dropped because an exception leaves the frame that has it.
                let raised = PyErr::take(py);
                let text = c"an operation was dropped before it was over, and is cancelled: await it, or call wait() or detach()";
                // Only if warnings are errors, and then nobody could catch it here.
                if let Err(error) = PyErr::warn(py, &py.get_type::<PyResourceWarning>(), text, 1) {
                    error.write_unraisable(py, None);
                }
                if let Some(raised) = raised {
                    raised.restore(py);
                }
            });
        }
    }
}

/// A number of seconds that a user gave.
pub fn seconds(seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|_| {
        PyValueError::new_err(format!("{seconds} is no number of seconds: give a number from 0 on, or None"))
    })
}

fn cancelled() -> Error {
    Error::new(ErrorKind::Cancelled, "wait", "before it was complete")
}

#[cold]
fn cancelled_error(py: Python<'_>, message: Option<&Py<PyAny>>) -> PyErr {
    static CLASS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let made =
        CLASS.import(py, "asyncio", "CancelledError").and_then(|class: &Bound<'_, PyAny>| match message {
            Some(message) => class.call1((message,)),
            None => class.call0(),
        });
    made.map_or_else(|error| error, PyErr::from_value)
}

#[cold]
fn invalid_state(py: Python<'_>) -> PyErr {
    static CLASS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let why = ("the operation is not over: await it, or call wait()",);
    let made = CLASS
        .import(py, "asyncio", "InvalidStateError")
        .and_then(|class: &Bound<'_, PyAny>| class.call1(why));
    made.map_or_else(|error| error, PyErr::from_value)
}

/// Submits, and wraps the operation.
#[inline]
pub fn submitted(op: Result<Op, Error>) -> PyResult<Operation> {
    op.into_python().map(Operation::of)
}
