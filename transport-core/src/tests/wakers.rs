//! A waker that drops the future it holds.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};

/// A waker that drops the future it holds, as a task does if it is woken after its executor is gone.
pub struct Dropping<F>(Mutex<Option<F>>);

impl<F: Future + Unpin + Send + 'static> Dropping<F> {
    /// Polls `future` once, and then moves it into its own waker.
    pub fn leave(mut future: F) -> Arc<Self> {
        let holder = Arc::new(Self(Mutex::new(None)));
        let waker = Waker::from(Arc::clone(&holder));
        assert!(Pin::new(&mut future).poll(&mut Context::from_waker(&waker)).is_pending());
        *holder.0.lock().unwrap() = Some(future);
        holder
    }

    /// Whether the future was dropped.
    pub fn is_done(&self) -> bool {
        self.0.lock().unwrap().is_none()
    }
}

impl<F: Send + 'static> Wake for Dropping<F> {
    fn wake(self: Arc<Self>) {
        let future = self.0.lock().unwrap().take();
        drop(future);
    }
}
