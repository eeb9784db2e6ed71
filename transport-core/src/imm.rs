//! What users do with the counts of the immediate data that arrives. The counts themselves are the engine's.
//!
//! Counting begins when a peer is connected. So an imm that arrives before anyone waits for it is never lost.

mod arrivals;
mod mirror;
mod reached;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

pub use arrivals::{Arrivals, NextArrivals};
pub use mirror::{Mirror, OnPeerClosed};

use crate::engine::imm::Values;
use crate::engine::op::{block_on, needs_steps};
use crate::peer::PeerInner;
use crate::{Error, ErrorKind, Result, Signal};

/// The count of one imm value from one peer.
///
/// There are four ways to use it: wait until a count is reached ([`expect`](Self::expect)), have a function called
/// then ([`on_reached`](Self::on_reached)), take arrivals as a stream ([`arrivals`](Self::arrivals)), or have the count
/// stored where a GPU reads it ([`mirror`](Self::mirror)).
#[derive(Clone)]
pub struct ImmCounter {
    pub(crate) peer: Arc<PeerInner>,
    pub(crate) imm: u32,
}

impl ImmCounter {
    /// The number of arrivals that were not taken.
    pub fn count(&self) -> u64 {
        self.peer.imms.count(self.imm)
    }

    /// Waits until the count is at least `n`.
    ///
    /// # Errors
    /// The future returns `PeerDied` or `Closed` if the peer ends first.
    pub fn expect(&self, n: u64) -> Expect {
        Expect { counter: self.clone(), n, id: None }
    }

    /// Takes `n` off the count if it is at least `n`. Returns whether it did.
    pub fn try_take(&self, n: u64) -> bool {
        self.peer.imms.take(self.imm, n)
    }

    /// Calls `run` once: with `Ok` when the count is at least `n`, or with the reason why the peer is gone. The call
    /// comes at once if the count is that high already. It takes nothing off the count.
    ///
    /// `run` is called in the thread that finds the count reached, which may be a worker that moves the bytes of all
    /// operations. So it must not block or panic; for longer work it should wake another thread. No lock is held, so it
    /// may use the library, and may call `on_reached` again. A fabric without workers must be driven for the call to
    /// happen.
    ///
    /// ```
    /// # use multirail_core::Peer;
    /// # fn layers(peer: &Peer) {
    /// let (done, landed) = std::sync::mpsc::channel();
    /// peer.imm(3).on_reached(1, move |result| drop(done.send(result)));
    /// # drop(landed);
    /// # }
    /// ```
    pub fn on_reached(&self, n: u64, run: impl FnOnce(Result<()>) + Send + 'static) {
        reached::call_when_ready(self.expect(n), run);
    }

    /// Takes all arrivals off the count as they come, those that arrived before included. Each item is the number that
    /// was taken at once, one or more. Do not mix it with [`try_take`](Self::try_take) or [`expect`](Self::expect),
    /// which see only what is left of the count.
    ///
    /// ```
    /// # use multirail_core::{Peer, Result};
    /// # async fn pages(peer: &Peer) -> Result<()> {
    /// let (mut arrivals, mut landed) = (peer.imm(1).arrivals(), 0);
    /// while landed < 512 {
    ///     landed += arrivals.next().await?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn arrivals(&self) -> Arrivals {
        Arrivals::new(self.clone())
    }

    /// From now on stores the number of arrivals into `signal`. The number includes the arrivals so far that were not
    /// taken. It only grows, because taking arrivals does not lower it, and it wraps around after 2^32 - 1.
    ///
    /// A store follows once the bytes that the arrival announces are visible to the processor, and releases them: a
    /// reader that sees the new value sees the bytes. The thread that polls the transport makes the store, so a fabric
    /// without workers must be driven. Use each signal for one mirror only.
    ///
    /// ```
    /// # use std::sync::{Arc, atomic::AtomicU32};
    /// # use multirail_core::{OnPeerClosed, Peer};
    /// # fn decode(peer: &Peer) {
    /// let signal = Arc::new(AtomicU32::new(0)); // Or a `CudaSignal`, which a stream can wait for.
    /// let landed = peer.imm(1).mirror(signal.clone(), OnPeerClosed::Pass);
    /// let next = landed.total() + 512; // The value once the next 512 pages have landed.
    /// # drop(next);
    /// # }
    /// ```
    pub fn mirror(&self, signal: Arc<dyn Signal>, on_peer_closed: OnPeerClosed) -> Mirror {
        Mirror::new(self.clone(), signal, on_peer_closed)
    }

    /// Ready once the count is at least `n`, with the result of `found`, or once the peer is gone, with the reason.
    /// Otherwise the task is woken when either may have changed.
    fn poll<T>(
        &self,
        n: u64,
        id: &mut Option<u64>,
        context: &mut Context<'_>,
        found: impl FnOnce(&mut Values) -> T,
    ) -> Poll<Result<T>> {
        let Self { peer, imm } = self;
        let output = peer.imms.poll(*imm, n, id, context.waker(), || peer.close_reason(), found);
        if output.is_none() {
            peer.links.iter().for_each(|link| needs_steps(&link.engine));
        }
        output.map_or(Poll::Pending, Poll::Ready)
    }

    /// Removes the waker of a wait that is dropped.
    fn forget(&self, n: u64, id: &mut Option<u64>) {
        self.peer.imms.forget(self.imm, n, id);
    }
}

/// The future of [`ImmCounter::expect`].
#[must_use = "futures do nothing unless awaited"]
pub struct Expect {
    counter: ImmCounter,
    n: u64,
    /// The key of this future's waker in the set of wakers.
    id: Option<u64>,
}

impl Expect {
    /// Blocks until the count is reached, at most `limit`. Then it returns `DeadlineExceeded`.
    pub fn wait(mut self, limit: Duration) -> Result<()> {
        let fabric = self.counter.peer.context.fabric.clone();
        let drive = || fabric.upgrade().is_some_and(|fabric| fabric.drive());
        block_on(&mut self, limit, |_| true, drive).unwrap_or_else(|| {
            let (have, want) = (self.counter.count(), self.n);
            Err(Error::new(
                ErrorKind::DeadlineExceeded,
                "expect",
                format!("{have} of {want} arrived within {limit:?}"),
            ))
        })
    }
}

impl Future for Expect {
    type Output = Result<(), Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { counter, n, id } = self.get_mut();
        counter.poll(*n, id, context, |_| ())
    }
}

impl Drop for Expect {
    fn drop(&mut self) {
        self.counter.forget(self.n, &mut self.id);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::Peer;
    use crate::tests::wakers::Dropping;
    use limit::{Woken, poll};

    #[test]
    fn an_arrival_wakes_only_those_due() {
        let peer = Peer::alone();
        let woken = Arc::<Woken>::default();
        let mut expect = peer.imm(7).expect(2);
        let mut others = [peer.imm(7).expect(3), peer.imm(8).expect(1), peer.imm(6).expect(1)];
        assert!(poll(&mut expect, &woken).is_pending());
        let idle = Arc::<Woken>::default();
        assert!(others.iter_mut().all(|other| poll(other, &idle).is_pending()));
        peer.0.imms.arrived(7);
        assert_eq!(woken.take(), 0);
        assert!(poll(&mut expect, &woken).is_pending());
        peer.0.imms.arrived(7);
        assert_eq!((woken.take(), idle.take()), (1, 0));
        assert!(matches!(poll(&mut expect, &woken), Poll::Ready(Ok(()))));
        peer.0.imms.arrived(7);
        assert_eq!((woken.take(), idle.take()), (0, 1));
    }

    #[test]
    fn a_wake_may_find_the_count_taken() {
        let peer = Peer::alone();
        let (woken, counter) = (Arc::<Woken>::default(), peer.imm(1));
        let mut expect = counter.expect(1);
        assert!(poll(&mut expect, &woken).is_pending());
        peer.0.imms.arrived(1);
        assert!(counter.try_take(1));
        assert!(poll(&mut expect, &woken).is_pending());
        peer.0.imms.arrived(1);
        assert_eq!(woken.take(), 2);
    }

    #[test]
    fn the_end_of_the_peer_wakes() {
        let peer = Peer::alone();
        let woken = Arc::<Woken>::default();
        let mut expect = peer.imm(7).expect(1);
        assert!(poll(&mut expect, &woken).is_pending());
        peer.disconnect();
        assert_eq!(woken.take(), 1);
        assert!(matches!(poll(&mut expect, &woken), Poll::Ready(Err(e)) if e.kind() == ErrorKind::Closed));
    }

    #[test]
    fn leaves_nothing_behind() {
        let peer = Peer::alone();
        for _ in 0..100 {
            let woken = Arc::<Woken>::default();
            let mut expect = peer.imm(7).expect(1);
            assert!(poll(&mut expect, &woken).is_pending());
            assert_eq!(woken.kept(), 1);
            drop(expect);
            assert_eq!(woken.kept(), 0);
        }
        let late = peer.imm(7).expect(1).wait(Duration::from_millis(1));
        assert_eq!(late.unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    }

    #[test]
    fn a_waker_may_drop_the_future() {
        let peer = Peer::alone();
        let (one, two) = (Dropping::leave(peer.imm(1).expect(1)), Dropping::leave(peer.imm(2).expect(1)));
        peer.0.imms.arrived(1);
        assert_eq!((one.is_done(), two.is_done()), (true, false));
        peer.disconnect();
        assert!(two.is_done());
    }
}
