//! How completions reach an event loop of asyncio: one wakeup pipe and one queue per loop.
//!
//! The worker that completes an operation pushes the operation's token to the queue of its loop. It wakes the pipe only
//! if the loop has not been told since it last looked. The loop then takes all tokens in one call. No thread of the
//! library takes the GIL.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};

use crate::errors::IntoPython;
use crate::operation::Operation;
use crossbeam_queue::SegQueue;
use multirail::WakeupPipe;
use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyWeakrefMethods, PyWeakrefReference};
use pyo3::{PyTraverseError, PyVisit};

/// What a loop that awaits operations has to be told.
pub struct Completions {
    /// The tokens of operations that may be over.
    tokens: SegQueue<u32>,
    /// Whether the pipe was woken since the loop last emptied the queue.
    is_told: AtomicBool,
    pipe: WakeupPipe,
    /// The operations that the loop waits for, by token.
    waiting: Mutex<Waiting>,
    event_loop: Py<PyWeakrefReference>,
}

#[derive(Default)]
struct Waiting {
    operations: Vec<Option<Py<Operation>>>,
    free: Vec<u32>,
}

/// Tells the loop of one operation.
struct LoopWaker {
    completions: Arc<Completions>,
    token: u32,
}

impl Wake for LoopWaker {
    fn wake(self: Arc<Self>) {
        self.completions.announce(self.token);
    }
}

impl Completions {
    /// Those of the loop that runs in this thread; `None` if none runs.
    pub fn of_running_loop(py: Python<'_>) -> PyResult<Option<Arc<Self>>> {
        /// Those of the loop that awaited last.
        static LAST: Mutex<Option<Arc<Completions>>> = Mutex::new(None);
        static RUNNING: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let running = RUNNING.import(py, "asyncio", "_get_running_loop")?.call0()?;
        if running.is_none() {
            return Ok(None);
        }
        let last = LAST.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(last) = last
            && last.event_loop.bind(py).upgrade().is_some_and(|mine| mine.is(&running))
        {
            return Ok(Some(last));
        }
        let found = Reactor::of_loop(py, &running)?;
        let old = LAST.lock().unwrap_or_else(PoisonError::into_inner).replace(Arc::clone(&found));
        drop(old);
        Ok(Some(found))
    }

    /// The loop.
    pub fn event_loop<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let gone = || PyRuntimeError::new_err("the event loop that awaited this operation is gone");
        self.event_loop.bind(py).upgrade().ok_or_else(gone)
    }

    /// Whether the loop is there, and was not closed.
    pub fn is_open(&self, py: Python<'_>) -> PyResult<bool> {
        match self.event_loop.bind(py).upgrade() {
            Some(event_loop) => {
                event_loop.call_method0(intern!(py, "is_closed"))?.extract::<bool>().map(|closed| !closed)
            }
            None => Ok(false),
        }
    }

    /// Adds an operation that the loop waits for. Returns its token, and the waker that announces it.
    pub fn add(self: &Arc<Self>, operation: Py<Operation>) -> (u32, Waker) {
        let mut waiting = self.waiting();
        let token = match waiting.free.pop() {
            Some(token) => token,
            None => {
                waiting.operations.push(None);
                waiting.operations.len() as u32 - 1
            }
        };
        waiting.operations[token as usize] = Some(operation);
        (token, Waker::from(Arc::new(LoopWaker { completions: Arc::clone(self), token })))
    }

    /// Removes an operation that is over. A late wake for its token finds nothing, or another operation that is then
    /// polled once more than needed.
    pub fn remove(&self, token: u32) -> Option<Py<Operation>> {
        let mut waiting = self.waiting();
        let operation = waiting.operations.get_mut(token as usize)?.take()?;
        waiting.free.push(token);
        Some(operation)
    }

    /// Tells the loop that an operation may be over. Any thread calls it.
    pub fn announce(&self, token: u32) {
        self.tokens.push(token);
        if !self.is_told.swap(true, Ordering::AcqRel) {
            self.pipe.handle().wake();
        }
    }

    /// Must come before the queue is emptied: a token that is pushed after this call tells the loop again.
    fn reset(&self) {
        self.pipe.clear();
        self.is_told.swap(false, Ordering::AcqRel);
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Resolves operations in a loop. It lives as long as its loop, and only its loop owns it.
#[pyclass(frozen, module = "multirail._native")]
pub struct Reactor(Arc<Completions>);

impl Reactor {
    /// The completions of a loop. The loop gets its reactor at its first await.
    fn of_loop(py: Python<'_>, event_loop: &Bound<'_, PyAny>) -> PyResult<Arc<Completions>> {
        // Kept by the loop itself: a dictionary would keep the operations, their tasks, and so the loop.
        let name = intern!(py, "_multirail_reactor");
        if let Some(found) = event_loop.getattr_opt(name)?
            && let Ok(found) = found.cast::<Self>()
        {
            return Ok(Arc::clone(&found.get().0));
        }
        let completions = Arc::new(Completions {
            tokens: SegQueue::new(),
            is_told: AtomicBool::new(false),
            pipe: WakeupPipe::new().into_python()?,
            waiting: Mutex::default(),
            event_loop: PyWeakrefReference::new(event_loop)?.unbind(),
        });
        let reactor = Bound::new(py, Self(Arc::clone(&completions)))?;
        let number = completions.pipe.raw_fd();
        event_loop.setattr(name, &reactor)?;
        event_loop.call_method1("add_reader", (number, reactor.getattr("drain")?))?;
        Ok(completions)
    }
}

#[pymethods]
impl Reactor {
    /// Resolves all operations that were announced. The loop calls it when the pipe is readable.
    fn drain(&self, py: Python<'_>) -> PyResult<()> {
        self.0.reset();
        let call_soon = self.0.event_loop(py)?.getattr(intern!(py, "call_soon"))?;
        let keywords = PyDict::new(py);
        // One that fails does not keep the others.
        let mut failed = None;
        while let Some(token) = self.0.tokens.pop() {
            let operation = {
                let waiting = self.0.waiting();
                waiting.operations.get(token as usize).and_then(Option::as_ref).map(|op| op.clone_ref(py))
            };
            if let Some(operation) = operation
                && let Err(error) = Operation::on_wake(operation.bind(py), &call_soon, &keywords)
            {
                failed.get_or_insert(error);
            }
        }
        failed.map_or(Ok(()), Err)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        // The lock is free: threads take it only with the GIL, and the collector has the GIL.
        let Ok(waiting) = self.0.waiting.try_lock() else { return Ok(()) };
        waiting.operations.iter().try_for_each(|operation| visit.call(operation))
    }

    fn __clear__(&self) {
        let waiting = std::mem::take(&mut *self.0.waiting());
        drop(waiting);
    }
}

impl Drop for Reactor {
    /// The loop is gone: nobody will await its operations.
    fn drop(&mut self) {
        let waiting = std::mem::take(&mut *self.0.waiting());
        drop(waiting);
    }
}
