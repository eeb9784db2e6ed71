//! The senders that are being served, and which of them a message is from.

use std::collections::HashMap;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::files::Layout;
use multirail::{Peer, PeerId};

/// Senders served at once; each has a region of `Layout::OFFERED.total()` bytes.
pub const MOST: usize = 6;

/// Messages a sender may have under way: every window, and one word more.
pub const BACKLOG: usize = Layout::OFFERED.windows as usize + 4;

/// How often a waiting session looks whether its own sender is alive.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The senders that have a session.
#[derive(Default)]
pub struct Senders {
    served: Mutex<HashMap<PeerId, Served>>,
    /// A session ended.
    left: Condvar,
}

struct Served {
    peer: Peer,
    /// To its session; `None` once it sent more than was agreed.
    incoming: Option<SyncSender<Vec<u8>>>,
}

impl Senders {
    /// A way for this peer's messages to a new session; `None` if there are enough senders.
    pub fn add(&self, peer: &Peer) -> Option<Receiver<Vec<u8>>> {
        let mut served = self.lock();
        if served.len() >= MOST {
            return None;
        }
        let (sender, receiver) = mpsc::sync_channel(BACKLOG);
        served.insert(peer.id(), Served { peer: peer.clone(), incoming: Some(sender) });
        Some(receiver)
    }

    /// Forgets a sender whose session has ended.
    pub fn remove(&self, peer: PeerId) {
        self.lock().remove(&peer);
        self.left.notify_all();
    }

    /// Hands a message to the session of its peer. The server stops listening to a peer with more
    /// messages under way than agreed, which ends the session, and to none without a session.
    pub fn deliver(&self, peer: PeerId, message: Vec<u8>) {
        if let Some(served) = self.lock().get_mut(&peer)
            && served.incoming.as_ref().is_some_and(|incoming| incoming.try_send(message).is_err())
        {
            served.incoming = None;
        }
    }

    /// Waits until the sessions of senders that are dead by now have ended: the whole files
    /// of these have their names, and their partial files can be continued. Returns early
    /// once the sender `own`, for which the caller waits, is dead too.
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
