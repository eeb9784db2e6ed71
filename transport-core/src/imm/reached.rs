//! Callbacks for a count that is reached.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use super::Expect;
use crate::Result;

/// A wait, and the function to call after it. The callback is its own waker, so the set of wakers keeps it alive.
struct Callback<F>(Mutex<Option<(Expect, F)>>);

/// Calls `run` once `expect` is ready.
pub(super) fn call_when_ready(expect: Expect, run: impl FnOnce(Result<()>) + Send + 'static) {
    check(&Arc::new(Callback(Mutex::new(Some((expect, run))))));
}

impl<F: FnOnce(Result<()>) + Send + 'static> Wake for Callback<F> {
    fn wake(self: Arc<Self>) {
        check(&self);
    }
}

/// Polls the wait, and calls the function if the wait is over.
fn check<F: FnOnce(Result<()>) + Send + 'static>(callback: &Arc<Callback<F>>) {
    let waker = Waker::from(Arc::clone(callback));
    // Held during the poll, so that a wake in the meantime polls after this poll.
    let mut slot = callback.0.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((expect, _)) = slot.as_mut() else { return };
    let Poll::Ready(result) = Pin::new(expect).poll(&mut Context::from_waker(&waker)) else { return };
    let due = slot.take();
    drop(slot);
    if let Some((expect, run)) = due {
        drop(expect);
        run(result);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use crate::{ErrorKind, Peer};

    #[test]
    fn is_called_once_when_reached_also_before() {
        let peer = Peer::alone();
        let (told, calls) = channel();
        let tell = |number: u32| {
            let told = told.clone();
            move |result: crate::Result<()>| {
                told.send((number, result.map_err(|error| error.kind()))).unwrap()
            }
        };
        peer.imm(7).on_reached(0, tell(0));
        assert_eq!(calls.try_recv(), Ok((0, Ok(()))));
        peer.imm(7).on_reached(2, tell(2));
        peer.imm(7).on_reached(1, tell(1));
        peer.0.imms.arrived(8);
        assert!(calls.try_recv().is_err());
        peer.0.imms.arrived(7);
        assert_eq!(calls.try_recv(), Ok((1, Ok(()))));
        peer.0.imms.arrived(7);
        assert_eq!(calls.try_recv(), Ok((2, Ok(()))));
        peer.imm(7).on_reached(2, tell(3));
        assert_eq!(calls.try_recv(), Ok((3, Ok(()))));
        peer.imm(7).on_reached(3, tell(4));
        peer.disconnect();
        assert_eq!(calls.try_recv(), Ok((4, Err(ErrorKind::Closed))));
        peer.imm(7).on_reached(3, tell(5));
        assert_eq!(calls.try_recv(), Ok((5, Err(ErrorKind::Closed))));
        assert_eq!(peer.imm(7).count(), 2);
        // No one keeps a function that was called.
        drop(told);
        assert!(calls.recv().is_err());
    }

    /// No lock is held: the callback may wait again, and take.
    #[test]
    fn may_use_the_counter() {
        let peer = Peer::alone();
        let (told, calls) = channel();
        let again = peer.imm(7);
        peer.imm(7).on_reached(1, move |result| {
            result.unwrap();
            assert!(again.try_take(1));
            again.clone().on_reached(1, move |_| told.send(again.count()).unwrap());
        });
        peer.0.imms.arrived(7);
        assert!(calls.try_recv().is_err());
        peer.0.imms.arrived(7);
        assert_eq!(calls.try_recv(), Ok(1));
    }

    #[test]
    fn is_called_once_whoever_comes_at_once() {
        for _ in 0..if cfg!(miri) { 5 } else { 200 } {
            let (peer, (told, calls)) = (Peer::alone(), channel());
            std::thread::scope(|scope| {
                scope.spawn(|| peer.0.imms.arrived(7));
                scope.spawn(|| peer.0.imms.arrived(7));
                let told = told.clone();
                peer.imm(7).on_reached(2, move |_| told.send(()).unwrap());
            });
            drop(told);
            assert_eq!(calls.iter().count(), 1);
        }
    }
}
