//! How many peers a fabric shakes hands with at once.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// Handshakes at once, of peers that are no strangers any more.
pub(crate) const HANDSHAKES: usize = 64;
/// Peers that may wait for a handshake of theirs to begin.
const WAITING: usize = 256;

/// Each fabric and tenant has its own, on whichever listener its peers come: those
/// that have the token of one and then say nothing shut no other's door.
pub(crate) struct Room {
    places: Arc<Semaphore>,
    handshakes: Arc<Semaphore>,
}

/// A place in the room, until it is dropped.
pub(crate) struct Place {
    handshakes: Arc<Semaphore>,
    _place: OwnedSemaphorePermit,
}

impl Default for Room {
    fn default() -> Self {
        let semaphore = |permits| Arc::new(Semaphore::new(permits));
        Self { places: semaphore(HANDSHAKES + WAITING), handshakes: semaphore(HANDSHAKES) }
    }
}

impl Room {
    /// A place to wait and to shake hands in, if there is one left.
    pub fn enter(&self) -> Option<Place> {
        let place = Arc::clone(&self.places).try_acquire_owned().ok()?;
        Some(Place { handshakes: Arc::clone(&self.handshakes), _place: place })
    }
}

impl Place {
    /// Waits for its turn, for at most `limit`; the turn lasts until what this gives is dropped.
    pub async fn turn(&self, limit: Duration) -> Option<OwnedSemaphorePermit> {
        timeout(limit, Arc::clone(&self.handshakes).acquire_owned()).await.ok()?.ok()
    }
}
