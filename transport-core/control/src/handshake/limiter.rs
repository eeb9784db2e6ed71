//! Limits the number of concurrent handshakes of a fabric.

use std::sync::Arc;
use std::time::Duration;

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
