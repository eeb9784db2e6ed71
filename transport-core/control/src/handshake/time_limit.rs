//! A time limit for a peer. The limit may grow when this side learns more about the peer.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::time::timeout;

use multirail_spi::Time;

/// A time limit, in nanoseconds, that may grow while a future runs under it.
pub(super) struct TimeLimit(AtomicU64);

impl TimeLimit {
    pub fn new(span: Duration) -> Self {
        Self(AtomicU64::new(nanos(span)))
    }

    /// Raises the limit to `span`, if it is shorter.
    pub fn raise(&self, span: Duration) {
        self.0.fetch_max(nanos(span), Ordering::Relaxed);
    }

    /// The current limit.
    pub fn span(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }

    /// Awaits `work` for at most the limit. Returns `None` once the limit has passed.
    pub async fn enforce<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let (begun, mut work) = (Instant::now(), pin!(work));
        loop {
            let span = self.span();
            match timeout(span.saturating_sub(begun.elapsed()), &mut work).await {
                Ok(output) => return Some(output),
                // The limit has grown meanwhile.
                Err(_) if self.span() > span => {}
                Err(_) => return None,
            }
        }
    }
}

/// Converts to nanoseconds. A longer span becomes the largest `u64`, 584 years.
fn nanos(span: Duration) -> u64 {
    Time::ZERO.after(span).as_nanos()
}
