//! Blocking on futures, never without a limit and never past the peer's death.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use multirail::{Fabric, Listener, Peer, Result, wait};

use crate::failure::{Done, Failure};
use crate::meeting;

/// How long connecting may take: the fabric's own limits end it first.
const CONNECT: Duration = Duration::from_secs(30);

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
pub const LEAVE: Duration = Duration::from_secs(2);

/// Gives a peer time to read our last message and leave: whoever closes first
/// makes the other's unread messages worthless. Says why the peer is gone.
pub fn let_go(peer: &Peer) -> Option<multirail::Error> {
    wait(peer.closed(), LEAVE).ok()
}

/// Connects to a server.
pub fn connect(fabric: &Fabric, address: &str) -> Done<Peer> {
    match wait(fabric.connect(address), CONNECT) {
        Ok(peer) => peer.map_err(meeting::failure),
        Err(_) => Err(Failure::new(format!("{address} did not answer within {} s", CONNECT.as_secs()))),
    }
}

/// Listens for peers.
pub fn listen(fabric: &Fabric, address: &str) -> Done<Listener> {
    match wait(fabric.listen(address), CONNECT) {
        Ok(listener) => Ok(listener?),
        Err(_) => {
            Err(Failure::new(format!("{address} could not be listened on within {} s", CONNECT.as_secs())))
        }
    }
}
