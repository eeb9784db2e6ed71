//! Waiting until a peer is gone.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::PeerInner;
use crate::Error;
use crate::engine::op::needs_steps;

/// The future of [`Peer::closed`](crate::Peer::closed).
#[must_use = "futures do nothing unless awaited"]
pub struct PeerClosed {
    peer: Arc<PeerInner>,
    /// The key of this future's waker in the peer's set of wakers.
    id: Option<u64>,
}

impl PeerClosed {
    pub(super) fn new(peer: Arc<PeerInner>) -> Self {
        Self { peer, id: None }
    }
}

impl Future for PeerClosed {
    type Output = Error;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Error> {
        let Self { peer, id } = self.get_mut();
        let mut wakers = peer.context.close_wakers();
        let reason = peer.close_reason();
        let old = match reason {
            Some(_) => wakers.unregister(id, ()),
            None => wakers.register(id, (), context.waker()),
        };
        drop(wakers);
        drop(old);
        if reason.is_none() {
            peer.links.iter().for_each(|link| needs_steps(&link.engine));
        }
        reason.map_or(Poll::Pending, Poll::Ready)
    }
}

impl Drop for PeerClosed {
    fn drop(&mut self) {
        if self.id.is_some() {
            let old = self.peer.context.close_wakers().unregister(&mut self.id, ());
            drop(old);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::wakers::Dropping;
    use crate::{ErrorKind, Peer};
    use limit::{Woken, poll};

    #[test]
    fn closed_resolves_and_leaves_nothing_behind() {
        let peer = Peer::alone();
        let (woken, dropped) = (Arc::<Woken>::default(), Arc::<Woken>::default());
        let mut closed = peer.closed();
        for _ in 0..100 {
            assert!(poll(&mut closed, &woken).is_pending());
            assert!(poll(&mut peer.closed(), &dropped).is_pending());
        }
        assert_eq!((woken.kept(), dropped.kept()), (1, 0));
        let dropping = Dropping::leave(peer.closed());
        peer.disconnect();
        assert!(dropping.is_done());
        assert_eq!((woken.take(), woken.kept(), dropped.take()), (1, 0, 0));
        assert!(matches!(poll(&mut closed, &woken), Poll::Ready(e) if e.kind() == ErrorKind::Closed));
    }
}
