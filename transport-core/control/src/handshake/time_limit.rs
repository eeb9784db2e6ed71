//! How long a peer may take, where that grows once more is known of it.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::time::timeout;

use multirail_spi::Time;

/// A limit that may grow while somebody is held to it.
pub(super) struct Limit(AtomicU64);

impl Limit {
    pub fn new(span: Duration) -> Self {
        Self(AtomicU64::new(nanos(span)))
    }

    /// Makes it at least so long.
    pub fn raise(&self, span: Duration) {
        self.0.fetch_max(nanos(span), Ordering::Relaxed);
    }

    /// As it is now.
    pub fn span(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }

    /// Awaits `work` until the limit has passed; then gives `None`.
    pub async fn hold<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let (begun, mut work) = (Instant::now(), pin!(work));
        loop {
            let span = self.span();
            match timeout(span.saturating_sub(begun.elapsed()), &mut work).await {
                Ok(output) => return Some(output),
                // It has grown meanwhile.
                Err(_) if self.span() > span => {}
                Err(_) => return None,
            }
        }
    }
}

/// So many at most, which is 584 years.
fn nanos(span: Duration) -> u64 {
    Time::ZERO.after(span).as_nanos()
}
