//! The senders with a session, and the delivery of messages to their sessions.

use std::collections::HashMap;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::files::WindowLayout;
use multirail::{Peer, PeerId};

/// The maximum number of senders served at once. Each has a region of `WindowLayout::OFFERED.total()` bytes.
pub const MOST: usize = 6;

/// The number of messages that a sender may have outstanding: one per window, and a few more.
pub const BACKLOG: usize = WindowLayout::OFFERED.windows as usize + 4;

/// How often a waiting session checks whether its own sender is alive.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The senders that have a session.
#[derive(Default)]
pub struct Senders {
    served: Mutex<HashMap<PeerId, Served>>,
    /// Notified when a session ends.
    left: Condvar,
}

struct Served {
    peer: Peer,
    /// The channel to its session, or `None` after it sent too many messages.
    incoming: Option<SyncSender<Vec<u8>>>,
}

impl Senders {
    /// Adds a sender. Returns the receiver of its messages, or `None` if too many senders are served.
    pub fn add(&self, peer: &Peer) -> Option<Receiver<Vec<u8>>> {
        let mut served = self.lock();
        if served.len() >= MOST {
            return None;
        }
        let (sender, receiver) = mpsc::sync_channel(BACKLOG);
        served.insert(peer.id(), Served { peer: peer.clone(), incoming: Some(sender) });
        Some(receiver)
    }

    /// Removes a sender whose session has ended.
    pub fn remove(&self, peer: PeerId) {
        self.lock().remove(&peer);
        self.left.notify_all();
    }

    /// Passes a message to its sender's session. Messages without a session are dropped. A sender with too many
    /// outstanding messages gets no more delivered, which ends its session.
    pub fn deliver(&self, peer: PeerId, message: Vec<u8>) {
        if let Some(served) = self.lock().get_mut(&peer)
            && served.incoming.as_ref().is_some_and(|incoming| incoming.try_send(message).is_err())
        {
            served.incoming = None;
        }
    }

    /// Waits until the sessions of dead senders have ended. Then their complete files have their names, and their
    /// partial files can be continued. Returns early if the caller's own sender is dead too.
    pub fn wait_for_dead_sessions(&self, own: &Peer) {
        let mut served = self.lock();
        let dead = served.values().filter(|served| !served.peer.is_alive());
        let dead: Vec<PeerId> = dead.map(|served| served.peer.id()).collect();
        while own.is_alive() && dead.iter().any(|peer| served.contains_key(peer)) {
            let waited = self.left.wait_timeout(served, POLL_INTERVAL);
            (served, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PeerId, Served>> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
