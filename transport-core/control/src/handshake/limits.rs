//! Limits the number of concurrent handshakes of a fabric, and the time of each.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use multirail_spi::Time;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// The most concurrent handshakes with authenticated peers.
pub const HANDSHAKES: usize = 64;
/// The most authenticated peers that wait for their handshake to start.
const MAX_WAITING: usize = 256;

/// Limits the handshakes of one fabric or tenant, on all listeners together. Each fabric and tenant
/// has its own limiter, so peers that authenticate to one and then stay silent do not block the
/// handshakes of another.
pub struct HandshakeLimiter {
    permits: Arc<Semaphore>,
    handshakes: Arc<Semaphore>,
}

/// The right to wait for a handshake and to run it. Dropping the permit returns it.
pub(crate) struct Permit {
    handshakes: Arc<Semaphore>,
    _permit: OwnedSemaphorePermit,
}

impl Default for HandshakeLimiter {
    fn default() -> Self {
        let semaphore = |permits| Arc::new(Semaphore::new(permits));
        Self { permits: semaphore(HANDSHAKES + MAX_WAITING), handshakes: semaphore(HANDSHAKES) }
    }
}

impl HandshakeLimiter {
    /// Takes a permit; `None` if no permit is left.
    pub(crate) fn try_acquire(&self) -> Option<Permit> {
        let permit = Arc::clone(&self.permits).try_acquire_owned().ok()?;
        Some(Permit { handshakes: Arc::clone(&self.handshakes), _permit: permit })
    }
}

impl Permit {
    /// Waits until the handshake may start, for at most `limit`. The handshake counts as running until the returned
    /// permit is dropped. Returns `None` after `limit`.
    pub async fn start(&self, limit: Duration) -> Option<OwnedSemaphorePermit> {
        timeout(limit, Arc::clone(&self.handshakes).acquire_owned()).await.ok()?.ok()
    }
}

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
