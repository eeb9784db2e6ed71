//! A waker that counts, and a poll with it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// A waker that counts how often it is woken.
#[derive(Default)]
pub struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Woken {
    /// How often the waker was woken since the last call.
    pub fn take(&self) -> usize {
        self.0.swap(0, Ordering::Relaxed)
    }

    /// How many clones of the waker exist.
    pub fn kept(self: &Arc<Self>) -> usize {
        Arc::strong_count(self) - 1
    }
}

/// Polls once, with `waker`.
pub fn poll<F: Future + Unpin>(future: &mut F, waker: &Arc<Woken>) -> Poll<F::Output> {
    let waker = Waker::from(Arc::clone(waker));
    Pin::new(future).poll(&mut Context::from_waker(&waker))
}
