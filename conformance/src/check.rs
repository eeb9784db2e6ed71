//! Assertions of trials: each failure is a sentence with its source line.

use std::fmt;
use std::future::Future;
use std::panic::Location;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

use limit::Limit;
use transport_core::{Error, ErrorKind};

/// The reason why a trial failed, and the source line.
#[derive(Debug, Clone)]
pub struct TrialFailure {
    what: String,
    at: &'static Location<'static>,
}

impl TrialFailure {
    /// A failure at the caller's source line.
    #[track_caller]
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), at: Location::caller() }
    }
}

impl fmt::Display for TrialFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (at {}:{})", self.what, self.at.file(), self.at.line())
    }
}

impl From<Error> for TrialFailure {
    #[track_caller]
    fn from(error: Error) -> Self {
        Self::new(format!("unexpected error: {error}"))
    }
}

impl From<std::io::Error> for TrialFailure {
    #[track_caller]
    fn from(error: std::io::Error) -> Self {
        Self::new(format!("unexpected system error: {error}"))
    }
}

/// The result of a trial.
pub(crate) type TestResult<T = ()> = Result<T, TrialFailure>;

/// Fails unless `got` equals `want`.
#[track_caller]
pub(crate) fn ensure_eq<T: PartialEq + fmt::Debug>(what: &str, got: T, want: T) -> TestResult {
    if got == want { Ok(()) } else { Err(TrialFailure::new(format!("{what}: got {got:?}, want {want:?}"))) }
}

/// Fails unless `holds` is true.
#[track_caller]
pub(crate) fn ensure(holds: bool, what: impl Into<String>) -> TestResult {
    if holds { Ok(()) } else { Err(TrialFailure::new(what)) }
}

/// Fails unless `result` is an error of one of these kinds. The error's context must not repeat the kind.
#[track_caller]
pub(crate) fn ensure_err<T>(what: &str, result: Result<T, Error>, kinds: &[ErrorKind]) -> TestResult<Error> {
    match result {
        Ok(_) => Err(TrialFailure::new(format!("{what}: succeeded, want an error of {kinds:?}"))),
        Err(error) if error.context().starts_with(&error.kind().to_string()) => {
            Err(TrialFailure::new(format!("{what}: the error names its kind twice: {error}")))
        }
        Err(error) if kinds.contains(&error.kind()) => Ok(error),
        Err(error) => Err(TrialFailure::new(format!("{what}: got {error}, want one of {kinds:?}"))),
    }
}

/// Polls `future` once. Returns its output if it is ready.
pub(crate) fn poll_once<F: Future>(future: Pin<&mut F>) -> Option<F::Output> {
    match future.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

/// Polls `future` from this thread. Fails after `span`, which is scaled to how busy the machine is.
#[track_caller]
pub(crate) fn within<F: Future>(span: Duration, what: &str, future: F) -> TestResult<F::Output> {
    let late = TrialFailure::new(format!("{what}: still waiting after {span:?}"));
    let mut future = std::pin::pin!(future);
    let waker = Waker::from(Arc::new(ThreadWaker(std::thread::current())));
    let mut limit = Limit::of(span);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return Ok(output);
        }
        match limit.slice() {
            Some(slice) => std::thread::park_timeout(slice),
            None => return Err(late),
        }
    }
}

struct ThreadWaker(Thread);

impl Wake for ThreadWaker {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
