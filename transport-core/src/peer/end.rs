//! How a peer ends: once, for one reason, and everyone who waits is told.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use super::Peer;
use crate::engine::Control;
use crate::op::needs_turns;
use crate::{Error, ErrorKind};

impl Peer {
    /// Resolves when the peer is gone, to the reason.
    pub fn closed(&self) -> PeerClosed {
        PeerClosed { peer: self.clone(), id: None }
    }

    /// Ends the connection. Operations in flight end with `Closed`.
    pub fn disconnect(&self) {
        self.0.session.goodbye();
        self.part(Error::new(ErrorKind::Closed, "disconnect", "this side ended the connection"));
    }

    /// Marks the peer as gone, ends its operations and wakes whoever waits. The
    /// first reason stays.
    pub(crate) fn fail(&self, error: Error) {
        if self.mark(error.clone()) {
            self.tear_down(&error);
        }
    }

    /// Ends it from this side. Within one process both sides learn the reason before
    /// either's links go down, or one might take that for the other's death.
    pub(crate) fn part(&self, ours: Error) {
        let theirs = Error::new(ErrorKind::Closed, "peer", "the peer closed the connection");
        let twin = self.twin().filter(|twin| twin.mark(theirs.clone()));
        self.fail(ours);
        if let Some(twin) = twin {
            twin.tear_down(&theirs);
        }
    }

    /// Sets the reason; `false` if there is one already.
    fn mark(&self, error: Error) -> bool {
        let first = self.0.end.set(error).is_ok();
        if first {
            self.0.alive.store(false, Ordering::Release);
        }
        first
    }

    /// What follows from the end, once.
    fn tear_down(&self, error: &Error) {
        tracing::debug!(peer = self.0.id.0.get(), %error, "peer is gone");
        for link in self.0.links.iter().filter(|link| link.is_up()) {
            link.engine.control(Control::Unlink { peer: self.0.id, error: error.clone() });
            for (_, rail) in link.pairs() {
                rail.disconnect();
            }
        }
        self.0.imms.wake_all();
        self.0.barriers.wake_all();
        let due = self.0.wakers().take_all();
        due.wake();
        if let Some(fabric) = self.0.fabric.upgrade() {
            fabric.forget(self.0.id);
        }
    }
}

/// The future of [`Peer::closed`].
#[must_use = "futures do nothing unless awaited"]
pub struct PeerClosed {
    peer: Peer,
    /// In the set of wakers.
    id: Option<u64>,
}

impl Future for PeerClosed {
    type Output = Error;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Error> {
        let Self { peer: Peer(peer), id } = self.get_mut();
        let mut wakers = peer.wakers();
        let end = peer.death();
        let old = match end {
            Some(_) => wakers.unregister(id, ()),
            None => wakers.register(id, (), context.waker()),
        };
        drop(wakers);
        drop(old);
        if end.is_none() {
            peer.links.iter().for_each(|link| needs_turns(&link.engine));
        }
        end.map_or(Poll::Pending, Poll::Ready)
    }
}

impl Drop for PeerClosed {
    fn drop(&mut self) {
        if self.id.is_some() {
            let old = self.peer.0.wakers().unregister(&mut self.id, ());
            drop(old);
        }
    }
}
