//! Operations that block a thread of their own.

use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};
use std::thread::Builder;

use multirail::Error;
use pyo3::prelude::*;

use crate::operation::Operation;
use crate::value::Value;

/// What the thread has to say, and whom it wakes.
#[derive(Default)]
struct Answer {
    result: Option<Result<Value, Error>>,
    waker: Option<Waker>,
}

/// Runs `work` in a thread of its own: for calls that may block, and so must run neither in an event loop nor with the
/// GIL. The thread goes on if the operation is cancelled.
pub fn in_thread(
    name: &'static str,
    work: impl FnOnce() -> Result<Value, Error> + Send + 'static,
) -> PyResult<Operation> {
    let answer = Arc::new(Mutex::new(Answer::default()));
    let theirs = Arc::clone(&answer);
    let run = move || {
        let result = work();
        let waker = {
            let mut answer = theirs.lock().unwrap_or_else(PoisonError::into_inner);
            answer.result = Some(result);
            answer.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    };
    Builder::new().name(format!("multirail {name}")).spawn(run)?;
    Ok(Operation::of_task(std::future::poll_fn(move |context| {
        let mut answer = answer.lock().unwrap_or_else(PoisonError::into_inner);
        match answer.result.take() {
            Some(result) => Poll::Ready(result),
            None => {
                answer.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    })))
}
