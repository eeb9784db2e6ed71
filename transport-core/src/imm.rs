//! Counting immediate data as it arrives.
//!
//! Counts accumulate from the moment a peer is connected, so an imm that arrives
//! before anyone waits for it is never lost.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::op::block_on;
use crate::peer::PeerInner;
use crate::{Error, ErrorKind, Result};

/// Distinct imm values that may have a count above zero per peer. More means that
/// nobody takes them: further new values are counted in `lost` instead.
const MAX_VALUES: usize = 1 << 20;

/// All counts of one peer.
#[derive(Default)]
pub(crate) struct ImmCounts(Mutex<Counts>);

#[derive(Default)]
struct Counts {
    values: HashMap<u32, u64>,
    waiting: Vec<(u32, u64, Waker)>,
    lost: u64,
}

impl ImmCounts {
    pub fn arrived(&self, imm: u32) {
        let mut counts = self.lock();
        if counts.values.len() >= MAX_VALUES && !counts.values.contains_key(&imm) {
            if counts.lost == 0 {
                tracing::error!(
                    imm,
                    "over {MAX_VALUES} distinct imm values are untaken; new values are dropped: take() what has arrived"
                );
            }
            counts.lost += 1;
            return;
        }
        let count = counts.values.entry(imm).or_default();
        *count += 1;
        let count = *count;
        if !counts.waiting.is_empty() {
            let due =
                counts.waiting.extract_if(.., |(value, at_least, _)| *value == imm && *at_least <= count);
            due.for_each(|(_, _, waker)| waker.wake());
        }
    }

    /// Wakes everyone: the peer is gone.
    pub fn wake_all(&self) {
        self.lock().waiting.drain(..).for_each(|(_, _, waker)| waker.wake());
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        // Nothing in here panics half way through a change.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The count of one imm value from one peer.
#[derive(Clone)]
pub struct ImmCounter {
    pub(crate) peer: Arc<PeerInner>,
    pub(crate) imm: u32,
}

impl ImmCounter {
    /// How many have arrived and were not taken.
    pub fn count(&self) -> u64 {
        self.peer.imms.lock().values.get(&self.imm).copied().unwrap_or(0)
    }

    /// Waits until at least `n` have arrived. `PeerDied` if the peer goes first.
    pub fn expect(&self, n: u64) -> Expect {
        Expect { counter: self.clone(), n }
    }

    /// Takes `n` off the count, if it is that high.
    pub fn take(&self, n: u64) -> bool {
        let mut counts = self.peer.imms.lock();
        let Some(count) = counts.values.get_mut(&self.imm).filter(|count| **count >= n) else {
            return n == 0;
        };
        *count -= n;
        if *count == 0 {
            counts.values.remove(&self.imm);
        }
        true
    }
}

/// The future of [`ImmCounter::expect`].
#[must_use = "futures do nothing unless awaited"]
pub struct Expect {
    counter: ImmCounter,
    n: u64,
}

impl Expect {
    /// Blocks until the count is reached, at most `limit`: then `DeadlineExceeded`.
    pub fn wait(mut self, limit: Duration) -> Result<()> {
        let fabric = self.counter.peer.fabric.clone();
        let drive = || fabric.upgrade().is_some_and(|fabric| fabric.drive());
        block_on(&mut self, limit, drive).unwrap_or_else(|| {
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
        let (peer, imm) = (&self.counter.peer, self.counter.imm);
        let mut counts = peer.imms.lock();
        if counts.values.get(&imm).copied().unwrap_or(0) >= self.n {
            return Poll::Ready(Ok(()));
        }
        if let Some(error) = peer.death() {
            return Poll::Ready(Err(error));
        }
        if !counts
            .waiting
            .iter()
            .any(|(value, n, waker)| (*value, *n) == (imm, self.n) && waker.will_wake(context.waker()))
        {
            counts.waiting.push((imm, self.n, context.waker().clone()));
        }
        Poll::Pending
    }
}
