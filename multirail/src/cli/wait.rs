//! Blocking on futures, never without a limit and never past the peer's death.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use multirail::{Fabric, Listener, Peer, Result};

use super::failure::{Done, Failure};

/// How long connecting may take: the fabric's own limits end it first.
const CONNECT: Duration = Duration::from_secs(30);

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Blocks until `future` is ready, at most `limit`; `None` if it was not.
pub fn within<F: Future>(limit: Duration, future: F) -> Option<F::Output> {
    let until = Instant::now() + limit;
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return Some(output);
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        std::thread::park_timeout(left);
    }
}

/// `wanted`, or the error that ended the connection to `peer`, whichever comes first.
pub async fn unless_gone<T>(peer: &Peer, wanted: impl Future<Output = Result<T>>) -> Result<T> {
    let mut gone = pin!(peer.closed());
    let mut wanted = pin!(wanted);
    poll_fn(|context| match wanted.as_mut().poll(context) {
        Poll::Ready(result) => Poll::Ready(result),
        Poll::Pending => gone.as_mut().poll(context).map(Err),
    })
    .await
}

/// How long a peer may take to leave once all is said.
const LEAVE: Duration = Duration::from_secs(2);

/// Gives a peer time to read our last message and leave: whoever closes first
/// makes the other's unread messages worthless. Says why the peer is gone.
pub fn let_go(peer: &Peer) -> Option<multirail::Error> {
    within(LEAVE, peer.closed())
}

/// Connects to a server.
pub fn connect(fabric: &Fabric, address: &str) -> Done<Peer> {
    match within(CONNECT, fabric.connect(address)) {
        Some(peer) => Ok(peer?),
        None => Err(Failure::new(format!("{address} did not answer within {} s", CONNECT.as_secs()))),
    }
}

/// Listens for peers.
pub fn listen(fabric: &Fabric, address: &str) -> Done<Listener> {
    match within(CONNECT, fabric.listen(address)) {
        Some(listener) => Ok(listener?),
        None => {
            Err(Failure::new(format!("{address} could not be listened on within {} s", CONNECT.as_secs())))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_pending_and_woken() {
        assert_eq!(within(Duration::ZERO, async { 1 }), Some(1));
        assert_eq!(within(Duration::from_millis(1), std::future::pending::<()>()), None);
        let mut polled = false;
        let woken = poll_fn(|context| {
            if std::mem::replace(&mut polled, true) {
                return Poll::Ready(2);
            }
            let waker = context.waker().clone();
            std::thread::spawn(move || waker.wake());
            Poll::Pending
        });
        assert_eq!(within(Duration::from_secs(60), woken), Some(2));
    }
}
