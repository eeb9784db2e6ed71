//! Every asynchronous call returns an [`Operation`], to await or to wait for.
//!
//! An operation has two cells. `core` is what a thread without the GIL may use: the operation itself, and whom its end
//! wakes. `python` has the objects of Python. It is locked only with the GIL, and neither is locked while Python code
//! runs: that code may use the same operation, and so may the garbage collector.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use multirail::{Cancel, Error, ErrorKind, Op, Outcome as CoreOutcome, Receipt as CoreReceipt};
use pyo3::exceptions::{
    PyResourceWarning, PyRuntimeError, PyStopAsyncIteration, PyStopIteration, PyValueError,
};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;
use pyo3::{PyTraverseError, PyVisit};

use crate::errors::{IntoPython, exception};
use crate::fork::ForkSafe;
use crate::reactor::Completions;
use crate::receipt::{Outcome, Receipt};
use crate::spin::{self, Spins};
use crate::value::{Make, Value};

/// How long a blocked thread goes on before it looks for signals (Ctrl-C).
const SIGNAL_CHECK: Duration = Duration::from_millis(50);

type Task = Pin<Box<dyn Future<Output = Result<Value, Error>> + Send>>;

enum State {
    Op(Op),
    Task(Task),
    /// Until no byte can move any more.
    Cancelling(Cancel),
    Done {
        result: Result<Value, Error>,
        receipt: KeptReceipt,
    },
}

/// Where the receipt of an operation is.
enum KeptReceipt {
    /// The operation has none, or has failed.
    None,
    /// The calling thread has carried the operation out, so that it holds nothing of the fabric.
    OfCallingThread(Op),
    Taken(CoreReceipt),
}

/// The cell for threads with and without the GIL.
struct Core {
    state: State,
    /// The threads that wait for the operation.
    waiters: Vec<Waker>,
    /// The loop that awaits the operation, and what stands for the operation there.
    bond: Option<Bond>,
    /// Wakes all of them. `None` until somebody waits, and after that has changed.
    waker: Option<Waker>,
    /// Whether a closed stream ends an iteration.
    is_iteration: bool,
    /// Whether the loop itself polls, and need not be told.
    loop_looks: bool,
}

#[derive(Clone)]
struct Bond {
    completions: Arc<Completions>,
    /// `None` once the loop knows that the operation is over.
    token: Option<(u32, Waker)>,
}

/// The cell for threads with the GIL.
#[derive(Default)]
struct PythonSide {
    /// What the loop calls once the operation is over, and the context of each call.
    callbacks: Vec<(Py<PyAny>, Option<Py<PyAny>>)>,
    /// The result as an object.
    object: Option<Py<PyAny>>,
    /// Whether the task that awaits this operation was cancelled.
    task_cancelled: bool,
    /// The message of that cancel.
    cancel_message: Option<Py<PyAny>>,
    /// A part of asyncio's protocol of futures: an iterator that yields a future sets it, the task resets it.
    blocking: bool,
}

/// An operation under way: a transfer, or anything else that takes time.
///
/// `await` it in asyncio (or uvloop, anyio, trio), or call `wait(timeout)`. It begins with the call that has returned it,
/// not when it is awaited. Cancelling a task that awaits it cancels the operation, and the task ends only once no byte of
/// it can move any more. A transfer that is dropped before it is over is cancelled, with a `ResourceWarning`; `detach()`
/// lets it run.
///
/// In a loop, the object is a future of asyncio: `asyncio.gather`, `wait`, `wait_for` and `shield` take it.
#[pyclass(frozen, weakref, generic, module = "multirail")]
pub struct Operation {
    core: ForkSafe<Mutex<Core>>,
    python: Mutex<PythonSide>,
}

/// Wakes several.
struct AllWakers(Vec<Waker>);

impl Wake for AllWakers {
    fn wake(self: Arc<Self>) {
        self.0.iter().for_each(Waker::wake_by_ref);
    }
}

/// Waits for the end of an operation. It locks the core only while it polls, so that others may look or cancel.
struct End<'a> {
    core: &'a Mutex<Core>,
    waker: Option<Waker>,
}

impl Future for End<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        if self.waker.is_none() {
            core.waiters.push(context.waker().clone());
            core.waker = None;
        }
        let is_over = core.poll();
        drop(core);
        self.waker.get_or_insert_with(|| context.waker().clone());
        if is_over { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        let Some(mine) = &self.waker else { return };
        let mut core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = core.waiters.iter().position(|waiter| waiter.will_wake(mine)) {
            core.waiters.swap_remove(at);
            core.waker = None;
        }
    }
}

impl Core {
    /// Polls the operation, for all who wait. Returns whether it is over.
    fn poll(&mut self) -> bool {
        if matches!(self.state, State::Done { .. }) {
            return true;
        }
        if self.waker.is_none() {
            self.waker = self.waker_of_all();
        }
        let context = &mut Context::from_waker(self.waker.as_ref().unwrap_or(Waker::noop()));
        let polled = match &mut self.state {
            State::Op(op) => Pin::new(op).poll(context).map(|result| result.map(Value::Outcome)),
            State::Task(task) => task.as_mut().poll(context),
            State::Cancelling(cancel) => {
                Pin::new(cancel).poll(context).map(|result| result.map(Value::Outcome))
            }
            State::Done { .. } => return true,
        };
        match polled {
            Poll::Ready(result) => self.finish(result),
            Poll::Pending => return false,
        }
        true
    }

    fn waker_of_all(&self) -> Option<Waker> {
        let of_loop = self.bond.as_ref().and_then(|bond| bond.token.as_ref()).map(|(_, waker)| waker);
        match (of_loop, &self.waiters[..]) {
            (None, []) => None,
            (Some(one), []) | (None, [one]) => Some(one.clone()),
            (of_loop, waiters) => {
                let all = of_loop.into_iter().chain(waiters).cloned().collect();
                Some(Waker::from(Arc::new(AllWakers(all))))
            }
        }
    }

    /// The operation is over. Whoever finds it tells all who wait: the worker may find nobody to wake by now.
    fn finish(&mut self, result: Result<Value, Error>) {
        let done = State::Done { result, receipt: KeptReceipt::None };
        if let State::Op(op) = std::mem::replace(&mut self.state, done)
            && let State::Done { result: Ok(_), receipt } = &mut self.state
        {
            // An operation of an engine would keep its place in the engine's table.
            *receipt = match op.id() {
                None => KeptReceipt::OfCallingThread(op),
                Some(_) => op.receipt().map_or(KeptReceipt::None, KeptReceipt::Taken),
            };
        }
        if self.loop_looks {
            self.waiters.iter().for_each(Waker::wake_by_ref);
        } else if let Some(waker) = self.waker.take().or_else(|| self.waker_of_all()) {
            waker.wake();
        }
    }

    /// Requests a cancel, if the operation is not over.
    fn cancel(&mut self) -> bool {
        // A task is not polled, because it could take an item that nobody would get. None of them moves bytes.
        if matches!(self.state, State::Task(_)) {
            self.finish(Err(cancelled()));
            return true;
        }
        if self.poll() {
            return false;
        }
        let placeholder = State::Done { result: Ok(Value::Nothing), receipt: KeptReceipt::None };
        self.state = match std::mem::replace(&mut self.state, placeholder) {
            State::Op(op) => State::Cancelling(op.cancel()),
            state => state,
        };
        self.poll();
        true
    }
}

impl Operation {
    fn new(state: State, is_iteration: bool) -> Self {
        let core =
            Core { state, waiters: Vec::new(), bond: None, waker: None, is_iteration, loop_looks: false };
        Self { core: ForkSafe::new(Mutex::new(core)), python: Mutex::default() }
    }

    /// A transfer.
    #[inline]
    pub fn of(mut op: Op) -> Self {
        // The usual case of a small write: the calling thread has carried it out.
        if op.has_succeeded_at_once()
            && let Some(result) = op.try_result()
        {
            let receipt = KeptReceipt::OfCallingThread(op);
            return Self::new(State::Done { result: result.map(Value::Outcome), receipt }, false);
        }
        Self::new(State::Op(op), false)
    }

    /// Anything else that takes time.
    pub fn of_task(task: impl Future<Output = Result<Value, Error>> + Send + 'static) -> Self {
        Self::begun(Box::pin(task), false)
    }

    /// The next item of an iteration, which ends when the stream is closed.
    pub fn of_iteration(task: impl Future<Output = Result<Value, Error>> + Send + 'static) -> Self {
        Self::begun(Box::pin(task), true)
    }

    /// A future does nothing until it is polled; an operation runs from here on.
    fn begun(mut task: Task, is_iteration: bool) -> Self {
        let state = match task.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Pending => State::Task(task),
            Poll::Ready(result) => State::Done { result, receipt: KeptReceipt::None },
        };
        Self::new(state, is_iteration)
    }

    fn core(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, Core>> {
        let mutex = self.core.get()?;
        loop {
            match mutex.try_lock() {
                Ok(core) => return Ok(core),
                Err(TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
                // A thread without the GIL polls the operation.
                Err(TryLockError::WouldBlock) => py.detach(|| drop(mutex.lock())),
            }
        }
    }

    fn python(&self) -> MutexGuard<'_, PythonSide> {
        self.python.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the operation is over.
    fn is_over(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.core(py)?.poll())
    }

    /// Waits for a transfer for a moment, if the last transfers ended that soon. Returns whether it is over.
    fn ends_soon(&self, py: Python<'_>) -> PyResult<bool> {
        static SPINS: Spins = Spins::new();
        let is_transfer = matches!(self.core(py)?.state, State::Op(_));
        if !is_transfer || !SPINS.may() {
            return Ok(false);
        }
        let core = self.core.get()?;
        let ended = py.detach(|| multirail::wait(End { core, waker: None }, spin::LIMIT)).is_ok();
        SPINS.learn(ended);
        Ok(ended)
    }

    /// The loop calls it after the operation's waker has announced something.
    pub fn on_wake(
        this: &Bound<'_, Self>,
        call_soon: &Bound<'_, PyAny>,
        keywords: &Bound<'_, PyDict>,
    ) -> PyResult<()> {
        let py = this.py();
        let bond = {
            let mut core = this.get().core(py)?;
            core.loop_looks = true;
            let is_over = core.poll();
            core.loop_looks = false;
            if !is_over {
                return Ok(());
            }
            core.bond.as_mut().and_then(|bond| Some((Arc::clone(&bond.completions), bond.token.take()?)))
        };
        if let Some((completions, (token, _waker))) = bond {
            drop(completions.remove(token));
        }
        let callbacks = std::mem::take(&mut this.get().python().callbacks);
        let mut failed = None;
        for (callback, context) in callbacks {
            let called = match context {
                Some(context) => keywords
                    .set_item(intern!(py, "context"), context)
                    .and_then(|()| call_soon.call((callback, this), Some(keywords))),
                None => call_soon.call1((callback, this)),
            };
            if let Err(error) = called {
                failed.get_or_insert(error);
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Binds the operation to the running loop, which learns of its end from now on.
    fn bind(this: &Bound<'_, Self>) -> PyResult<()> {
        let py = this.py();
        let old = this.get().core(py)?.bond.clone();
        if let Some(bond) = &old
            && bond.completions.is_open(py)?
        {
            return Ok(());
        }
        let Some(completions) = Completions::of_running_loop(py)? else {
            let why = "no event loop of asyncio runs in this thread: await the operation in a coroutine, or call wait()";
            return Err(PyRuntimeError::new_err(why));
        };
        let token = completions.add(this.clone().unbind());
        let number = token.0;
        let is_first = |known: &Option<Bond>| match (known, &old) {
            (None, None) => true,
            (Some(known), Some(old)) => Arc::ptr_eq(&known.completions, &old.completions),
            _ => false,
        };
        let replaced = {
            let mut core = this.get().core(py)?;
            match is_first(&core.bond) {
                true => {
                    let new = Bond { completions: Arc::clone(&completions), token: Some(token) };
                    let replaced = core.bond.replace(new);
                    core.waker = None;
                    if core.poll() {
                        // The operation's waker did not know this loop yet.
                        completions.announce(number);
                    }
                    Ok(replaced)
                }
                false => Err(token),
            }
        };
        match replaced {
            Ok(Some(Bond { completions: gone, token })) => {
                // The tasks of a loop that is closed never run again.
                let callbacks = std::mem::take(&mut this.get().python().callbacks);
                drop(callbacks);
                drop(token.and_then(|(token, _)| gone.remove(token)));
            }
            Ok(None) => {}
            // Another thread was faster.
            Err((token, _)) => drop(completions.remove(token)),
        }
        Ok(())
    }

    /// The result, as the loop and `wait` return it.
    fn take_result(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        enum Found {
            Outcome(CoreOutcome),
            Make(Make),
            Made,
            Nothing,
            Failed(Error),
            EndOfIteration,
            UnderWay,
        }
        let found = {
            let mut core = self.core(py)?;
            let is_iteration = core.is_iteration;
            match &mut core.state {
                State::Op(_) | State::Task(_) | State::Cancelling(_) => Found::UnderWay,
                State::Done { result, .. } => match result {
                    Ok(Value::Outcome(outcome)) => Found::Outcome(*outcome),
                    Ok(Value::Nothing) => Found::Nothing,
                    Ok(Value::Made) => Found::Made,
                    Ok(value) => match std::mem::replace(value, Value::Made) {
                        Value::Lazy(make) | Value::Item(make, _) => Found::Make(make),
                        _ => Found::Nothing,
                    },
                    Err(error) if is_iteration && error.kind() == ErrorKind::Closed => Found::EndOfIteration,
                    Err(error) => Found::Failed(error.clone()),
                },
            }
        };
        if self.python().task_cancelled {
            return Err(self.cancelled_error(py));
        }
        match found {
            Found::Outcome(outcome) => Ok(Py::new(py, Outcome::new(outcome))?.into_any()),
            Found::Nothing => Ok(py.None()),
            Found::Make(make) => {
                let object = make(py)?;
                let old = self.python().object.replace(object.clone_ref(py));
                drop(old);
                Ok(object)
            }
            Found::Made => {
                let object = self.python().object.as_ref().map(|object| object.clone_ref(py));
                object
                    .ok_or_else(|| PyRuntimeError::new_err("another thread is taking the result; ask again"))
            }
            Found::Failed(error) => Err(exception(&error)),
            Found::EndOfIteration => Err(PyStopAsyncIteration::new_err(())),
            Found::UnderWay => Err(invalid_state(py)),
        }
    }

    #[cold]
    fn cancelled_error(&self, py: Python<'_>) -> PyErr {
        static CLASS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let message = self.python().cancel_message.as_ref().map(|message| message.clone_ref(py));
        let made =
            CLASS.import(py, "asyncio", "CancelledError").and_then(
                |class: &Bound<'_, PyAny>| match message {
                    Some(message) => class.call1((message,)),
                    None => class.call0(),
                },
            );
        made.map_or_else(|error| error, PyErr::from_value)
    }

    fn event_loop<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let completions = self.core(py)?.bond.as_ref().map(|bond| Arc::clone(&bond.completions));
        completions.ok_or_else(|| invalid_state(py))?.event_loop(py)
    }

    /// Gives an item that nobody has taken back to its stream. Returns whether there was one.
    fn give_back(&self, py: Python<'_>) -> PyResult<bool> {
        let item = {
            let mut core = self.core(py)?;
            match &mut core.state {
                State::Done { result: result @ Ok(Value::Item(..)), .. } => {
                    std::mem::replace(result, Err(cancelled()))
                }
                _ => return Ok(false),
            }
        };
        if let Ok(Value::Item(make, home)) = item {
            home.give_back(make(py)?);
        }
        Ok(true)
    }
}

#[pymethods]
impl Operation {
    fn __await__(this: Bound<'_, Self>) -> PyResult<Bound<'_, PyAny>> {
        static OTHER: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let py = this.py();
        if this.get().is_over(py)? || Completions::of_running_loop(py)?.is_some() {
            return Ok(this.into_any());
        }
        let other = OTHER.import(py, "multirail._trio", "wait")?.call1((this,))?;
        other.call_method0("__await__")
    }

    fn __next__(this: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        let py = this.py();
        if this.get().is_over(py)? {
            let value = this.get().take_result(py)?;
            return Err(PyStopIteration::new_err((value,)));
        }
        if this.get().ends_soon(py)? {
            let value = this.get().take_result(py)?;
            return Err(PyStopIteration::new_err((value,)));
        }
        Self::bind(&this)?;
        this.get().python().blocking = true;
        Ok(this)
    }

    /// Blocks until the operation is over, and returns its result. Releases the GIL. Ctrl-C interrupts it.
    ///
    /// `timeout` is in seconds; without one, the operation's own deadline decides. Raises `DeadlineExceeded` if there is
    /// no result by then; the operation goes on, and may be waited for again.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Py<PyAny>> {
        let limit = timeout.map(seconds).transpose()?;
        if self.is_over(py)? {
            return self.take_result(py);
        }
        let end = limit.and_then(|limit| Instant::now().checked_add(limit));
        let core = self.core.get()?;
        loop {
            let left = end.map_or(SIGNAL_CHECK, |end| end.saturating_duration_since(Instant::now()));
            let limit = left.min(SIGNAL_CHECK);
            if py.detach(|| multirail::wait(End { core, waker: None }, limit)).is_ok() {
                return self.take_result(py);
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
        self.is_over(py)
    }

    /// The result of an operation that is over. Raises what it has failed with; `asyncio.InvalidStateError` if it is not
    /// over.
    fn result(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.is_over(py)?;
        self.take_result(py)
    }

    /// What the operation has failed with, or `None`.
    fn exception(&self, py: Python<'_>) -> PyResult<Option<PyErr>> {
        self.is_over(py)?;
        let failed = match &self.core(py)?.state {
            State::Done { result, .. } => Some(result.as_ref().err().cloned()),
            _ => None,
        };
        let failed = failed.ok_or_else(|| invalid_state(py))?;
        if self.python().task_cancelled {
            return Err(self.cancelled_error(py));
        }
        Ok(failed.as_ref().map(exception))
    }

    /// Requests a cancel. Returns whether the operation was still under way. It is over once no byte of it can move any
    /// more: await it, or call `wait()`. It then raises `Cancelled`, or has its result if it ended before the cancel. In a
    /// task that awaits it, it raises `asyncio.CancelledError`. An item of a stream that nobody has taken goes back.
    #[pyo3(signature = (msg=None))]
    fn cancel(&self, py: Python<'_>, msg: Option<Bound<'_, PyAny>>) -> PyResult<bool> {
        let was_cancelled = self.core(py)?.cancel();
        let was_under_way = was_cancelled || self.give_back(py)?;
        if was_under_way && self.core(py)?.bond.is_some() {
            let old = {
                let mut python = self.python();
                python.task_cancelled = true;
                std::mem::replace(&mut python.cancel_message, msg.map(Bound::unbind))
            };
            drop(old);
        }
        Ok(was_under_way)
    }

    /// Whether the operation was cancelled, and is over.
    fn cancelled(&self, py: Python<'_>) -> PyResult<bool> {
        let mut core = self.core(py)?;
        let is_over = core.poll();
        let failed =
            matches!(&core.state, State::Done { result: Err(e), .. } if e.kind() == ErrorKind::Cancelled);
        drop(core);
        Ok(is_over && (failed || self.python().task_cancelled))
    }

    /// A part of asyncio's protocol of futures: the exception of a cancelled task.
    fn _make_cancelled_error(&self, py: Python<'_>) -> Py<PyAny> {
        self.cancelled_error(py).into_value(py).into_any()
    }

    /// A part of asyncio's protocol of futures: the message of the cancel.
    #[getter]
    fn _cancel_message(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.python().cancel_message.as_ref().map(|message| message.clone_ref(py))
    }

    /// Lets a transfer run to its end without a waiter. Raises `RuntimeError` for an operation that is no transfer: keep
    /// it until it is over.
    fn detach(&self, py: Python<'_>) -> PyResult<()> {
        let mut core = self.core(py)?;
        match core.state {
            State::Op(_) => {}
            State::Done { .. } => return Ok(()),
            State::Task(_) | State::Cancelling(_) => {
                let why = "only a transfer can be detached; keep this operation until it is over";
                return Err(PyRuntimeError::new_err(why));
            }
        }
        let why = "the operation was detached: its result is not kept";
        let error = Error::new(ErrorKind::Closed, "detach", why);
        let detached = State::Done { result: Err(error), receipt: KeptReceipt::None };
        if let State::Op(op) = std::mem::replace(&mut core.state, detached) {
            op.detach();
        }
        if let Some(waker) = core.waker_of_all() {
            waker.wake();
        }
        Ok(())
    }

    /// How the operation went: its times, and what each rail carried by which path. `None` before it has succeeded, and
    /// for receives, revocations and notifications alone.
    fn receipt(&self, py: Python<'_>) -> PyResult<Option<Receipt>> {
        let mut core = self.core(py)?;
        core.poll();
        let receipt = match &core.state {
            State::Done { receipt: KeptReceipt::OfCallingThread(op), .. } => op.receipt(),
            State::Done { receipt: KeptReceipt::Taken(receipt), .. } => Some(receipt.clone()),
            _ => None,
        };
        Ok(receipt.map(Receipt::new))
    }

    /// A part of asyncio's protocol of futures: calls `callback(self)` in the loop once the operation is over.
    #[pyo3(signature = (callback, *, context=None))]
    fn add_done_callback(
        this: Bound<'_, Self>,
        callback: Py<PyAny>,
        context: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        let py = this.py();
        Self::bind(&this)?;
        if !matches!(this.get().core(py)?.bond, Some(Bond { token: None, .. })) {
            this.get().python().callbacks.push((callback, context));
            return Ok(());
        }
        // The loop has been told already.
        let keywords = PyDict::new(py);
        if let Some(context) = context {
            keywords.set_item("context", context)?;
        }
        let event_loop = this.get().event_loop(py)?;
        event_loop.call_method("call_soon", (callback, &this), Some(&keywords))?;
        Ok(())
    }

    /// A part of asyncio's protocol of futures: removes a callback. Returns how many were removed.
    fn remove_done_callback(&self, py: Python<'_>, callback: &Bound<'_, PyAny>) -> PyResult<usize> {
        let known: Vec<_> = self.python().callbacks.iter().map(|(known, _)| known.clone_ref(py)).collect();
        let mut equal = Vec::new();
        for known in known {
            if known.bind(py).eq(callback)? {
                equal.push(known);
            }
        }
        let removed = {
            let mut python = self.python();
            let all = std::mem::take(&mut python.callbacks);
            let is_equal = |(known, _): &(Py<PyAny>, _)| equal.iter().any(|equal| equal.is(known));
            let (removed, kept): (Vec<_>, Vec<_>) = all.into_iter().partition(is_equal);
            python.callbacks = kept;
            removed
        };
        Ok(removed.len())
    }

    /// A part of asyncio's protocol of futures: the loop that awaits the operation.
    fn get_loop<'py>(this: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        Self::bind(this)?;
        this.get().event_loop(this.py())
    }

    #[getter(_asyncio_future_blocking)]
    fn blocking(&self) -> bool {
        self.python().blocking
    }

    #[setter(_asyncio_future_blocking)]
    fn set_blocking(&self, blocking: bool) {
        self.python().blocking = blocking;
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let mut core = self.core(py)?;
        core.poll();
        Ok(match &core.state {
            State::Done { result: Ok(Value::Outcome(outcome)), .. } => {
                format!("<Operation done, {} bytes>", outcome.bytes)
            }
            State::Done { result: Ok(_), .. } => "<Operation done>".into(),
            State::Done { result: Err(error), .. } => format!("<Operation failed: {error}>"),
            State::Cancelling(_) => "<Operation cancelling>".into(),
            State::Op(_) | State::Task(_) => "<Operation under way>".into(),
        })
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        // The lock is free: threads take it only with the GIL, and the collector has the GIL.
        let Ok(python) = self.python.try_lock() else { return Ok(()) };
        for (callback, context) in &python.callbacks {
            visit.call(callback)?;
            visit.call(context)?;
        }
        visit.call(&python.object)?;
        visit.call(&python.cancel_message)
    }

    fn __clear__(&self) {
        let callbacks = std::mem::take(&mut self.python().callbacks);
        drop(callbacks);
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        // In a forked child there is nothing to tell.
        let Ok(core) = self.core.get() else { return };
        let mut core = core.lock().unwrap_or_else(PoisonError::into_inner);
        let is_cancelled = matches!(core.state, State::Op(_)) && !core.poll();
        let has_item = matches!(core.state, State::Done { result: Ok(Value::Item(..)), .. });
        drop(core);
        if !is_cancelled && !has_item {
            return;
        }
        Python::attach(|py| {
            // The operation may be dropped because an exception leaves the frame that has it.
            let raised = PyErr::take(py);
            let text =
                c"an operation was dropped before it was over, and is cancelled: await it, or call wait() or detach()";
            let done = match is_cancelled {
                // It fails if warnings are errors, and nobody could catch it here.
                true => PyErr::warn(py, &py.get_type::<PyResourceWarning>(), text, 1),
                false => self.give_back(py).map(drop),
            };
            if let Err(error) = done {
                error.write_unraisable(py, None);
            }
            if let Some(raised) = raised {
                raised.restore(py);
            }
        });
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
