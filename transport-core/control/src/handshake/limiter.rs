//! How many peers a fabric shakes hands with at once.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// Handshakes at once, of peers that are no strangers any more.
pub const HANDSHAKES: usize = 64;
/// Peers that may wait for a handshake of theirs to begin.
const WAITING: usize = 256;

/// Each fabric and tenant has its own, on whichever listener its peers come: those
/// that have the token of one and then say nothing shut no other's door.
pub struct HandshakeLimiter {
    permits: Arc<Semaphore>,
    handshakes: Arc<Semaphore>,
}

/// A permit in the room, until it is dropped.
pub(crate) struct Permit {
    handshakes: Arc<Semaphore>,
    _permit: OwnedSemaphorePermit,
}

impl Default for HandshakeLimiter {
    fn default() -> Self {
        let semaphore = |permits| Arc::new(Semaphore::new(permits));
        Self { permits: semaphore(HANDSHAKES + WAITING), handshakes: semaphore(HANDSHAKES) }
    }
}

impl HandshakeLimiter {
    /// A permit to wait and to shake hands in, if there is one left.
    pub(crate) fn enter(&self) -> Option<Permit> {
        let permit = Arc::clone(&self.permits).try_acquire_owned().ok()?;
        Some(Permit { handshakes: Arc::clone(&self.handshakes), _permit: permit })
    }
}

impl Permit {
    /// Waits for its turn, for at most `limit`; the turn lasts until what this gives is dropped.
    pub async fn turn(&self, limit: Duration) -> Option<OwnedSemaphorePermit> {
        timeout(limit, Arc::clone(&self.handshakes).acquire_owned()).await.ok()?.ok()
    }
}
