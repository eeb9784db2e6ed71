//! The arrivals of one imm value as a stream.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_core::Stream;

use super::ImmCounter;
use crate::{Result, wait};

/// The arrivals of an imm value, from [`ImmCounter::arrivals`]. It is a [`Stream`]; [`next`](Self::next) needs no
/// stream trait in scope.
///
/// The last item is the error with the reason why the peer is gone. Arrivals before the peer's end come before it.
#[must_use = "streams do nothing unless polled"]
pub struct Arrivals {
    counter: ImmCounter,
    /// The key of this stream's waker in the set of wakers.
    id: Option<u64>,
    /// Whether the stream has returned the error.
    has_ended: bool,
}

impl Arrivals {
    pub(super) fn new(counter: ImmCounter) -> Self {
        Self { counter, id: None, has_ended: false }
    }

    /// Takes all arrivals, once there is at least one. Returns their number.
    ///
    /// # Errors
    /// `PeerDied` or `Closed` if the peer is gone and no arrival is left. From then on every call returns it.
    #[expect(clippy::should_implement_trait, reason = "named as that of streams, and of `RecvPool`")]
    pub fn next(&mut self) -> NextArrivals<'_> {
        NextArrivals(self)
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<u64>> {
        let Self { counter, id, .. } = self;
        let imm = counter.imm;
        counter.poll(1, id, context, |values| values.take_all(imm))
    }
}

impl Stream for Arrivals {
    type Item = Result<u64>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        if this.has_ended {
            return Poll::Ready(None);
        }
        let polled = this.poll(context);
        this.has_ended = matches!(polled, Poll::Ready(Err(_)));
        polled.map(Some)
    }
}

impl Drop for Arrivals {
    fn drop(&mut self) {
        self.counter.forget(1, &mut self.id);
    }
}

/// The future of [`Arrivals::next`]. If it is dropped before it resolves, it has taken nothing.
#[must_use = "futures do nothing unless awaited"]
pub struct NextArrivals<'a>(&'a mut Arrivals);

impl NextArrivals<'_> {
    /// Blocks until there is an arrival, at most `limit`. Then it returns `DeadlineExceeded`.
    pub fn wait(self, limit: Duration) -> Result<u64> {
        wait(self, limit)?
    }
}

impl Future for NextArrivals<'_> {
    type Output = Result<u64>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.get_mut().0.poll(context)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{ErrorKind, Peer};
    use limit::{Woken, poll};

    fn next(arrivals: &mut Arrivals, woken: &Arc<Woken>) -> Option<Option<Result<u64, ErrorKind>>> {
        let waker = std::task::Waker::from(Arc::clone(woken));
        match Pin::new(arrivals).poll_next(&mut Context::from_waker(&waker)) {
            Poll::Ready(item) => Some(item.map(|item| item.map_err(|error| error.kind()))),
            Poll::Pending => None,
        }
    }

    #[test]
    fn takes_what_came_and_what_comes_and_ends() {
        let (peer, woken) = (Peer::alone(), Arc::<Woken>::default());
        (0..3).for_each(|_| peer.0.imms.arrived(7));
        peer.0.imms.arrived(8);
        let mut arrivals = peer.imm(7).arrivals();
        assert_eq!(next(&mut arrivals, &woken), Some(Some(Ok(3))));
        assert_eq!(peer.imm(7).count(), 0);
        assert_eq!(next(&mut arrivals, &woken), None);
        peer.0.imms.arrived(8);
        assert_eq!(woken.take(), 0);
        peer.0.imms.arrived(7);
        assert_eq!(woken.take(), 1);
        assert_eq!(next(&mut arrivals, &woken), Some(Some(Ok(1))));
        assert!(poll(&mut arrivals.next(), &woken).is_pending());
        peer.0.imms.arrived(7);
        peer.disconnect();
        assert_eq!(next(&mut arrivals, &woken), Some(Some(Ok(1))));
        assert_eq!(next(&mut arrivals, &woken), Some(Some(Err(ErrorKind::Closed))));
        assert_eq!(next(&mut arrivals, &woken), Some(None));
        let error = arrivals.next().wait(Duration::from_secs(9)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed);
    }

    #[test]
    fn leaves_nothing_behind() {
        let (peer, woken) = (Peer::alone(), Arc::<Woken>::default());
        let mut arrivals = peer.imm(7).arrivals();
        assert!(poll(&mut arrivals.next(), &woken).is_pending());
        assert_eq!(woken.kept(), 1);
        drop(arrivals);
        assert_eq!(woken.kept(), 0);
    }
}
