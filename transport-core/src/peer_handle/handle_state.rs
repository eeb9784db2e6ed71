//! What the clones of a handle, its task and its transfers share.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::Poll;

use tokio::sync::watch;

use super::{AddressSource, NamedRegions, ReconnectPolicy};
use crate::control;
use crate::fabric::FabricInner;
use crate::notifications::InboxHost;
use crate::{Error, ErrorKind, Peer, Result};

/// The function that a user wants called after each reconnect.
pub(super) type ReconnectHook = Arc<dyn Fn(&Peer) + Send + Sync>;

/// What the clones of a handle, its task and its transfers share.
pub(super) struct HandleState {
    pub source: Arc<dyn AddressSource>,
    /// Weak, so that a handle keeps no fabric open.
    pub fabric: Weak<FabricInner>,
    pub policy: ReconnectPolicy,
    pub names: NamedRegions,
    connection: watch::Sender<Connection>,
    reconnects: AtomicU64,
    hook: Mutex<Option<ReconnectHook>>,
}

/// The last connection, and whether there will be another.
struct Connection {
    peer: Peer,
    phase: Phase,
}

enum Phase {
    /// The task watches the connection, and connects again.
    Watched,
    /// There will be no other connection. The error says why, if it is not only that this connection ended.
    Ended(Option<Error>),
}

impl Connection {
    /// Whether waits end: the peer is connected, or there will be no other connection.
    fn is_settled(&self) -> bool {
        self.peer.is_alive() || matches!(self.phase, Phase::Ended(_))
    }

    /// The error for a caller who wants the peer of this connection, if the peer is gone.
    fn error(&self, address: &str) -> Option<Error> {
        let reason = self.peer.0.check_alive().err()?;
        Some(match &self.phase {
            Phase::Ended(None) => reason,
            Phase::Ended(Some(why)) => why.clone(),
            Phase::Watched => {
                let why = format!(
                    "the connection to {address} is lost, and this side connects again; wait for it by \
                     PeerHandle::connected"
                );
                Error::new(reason.kind(), "peer", why).with_source(reason)
            }
        })
    }
}

impl HandleState {
    /// The state of a handle that has connected to `peer`.
    pub fn new(
        source: Arc<dyn AddressSource>,
        fabric: &Arc<FabricInner>,
        policy: ReconnectPolicy,
        peer: Peer,
    ) -> Self {
        let phase = if policy.is_on() { Phase::Watched } else { Phase::Ended(None) };
        Self {
            source,
            fabric: Arc::downgrade(fabric),
            policy,
            names: NamedRegions::default(),
            connection: watch::Sender::new(Connection { peer, phase }),
            reconnects: AtomicU64::new(0),
            hook: Mutex::default(),
        }
    }

    /// The peer, while it is connected.
    pub fn peer(&self) -> Result<Peer> {
        let now = self.connection.borrow();
        now.error(self.source.name()).map_or_else(|| Ok(now.peer.clone()), Err)
    }

    /// The peer of the last connection, connected or not.
    pub fn last_peer(&self) -> Peer {
        self.connection.borrow().peer.clone()
    }

    /// Waits until the peer is connected, or there will be no other connection.
    pub async fn connected(&self) -> Result<Peer> {
        loop {
            self.settled().await;
            let now = self.connection.borrow();
            if let Some(error) = now.error(self.source.name()) {
                if matches!(now.phase, Phase::Ended(_)) {
                    return Err(error);
                }
                // The peer has died since.
                continue;
            }
            return Ok(now.peer.clone());
        }
    }

    async fn settled(&self) {
        let mut changes = self.connection.subscribe();
        // The sender is in `self`, so the wait does not fail.
        let mut settled = pin!(changes.wait_for(Connection::is_settled));
        poll_fn(|context| {
            if settled.as_mut().poll(context).is_ready() {
                return Poll::Ready(());
            }
            // The catalogue of a peer that is back is read by the engines, which the caller may have to drive.
            if let Some(fabric) = self.fabric.upgrade() {
                fabric.needs_steps();
            }
            Poll::Pending
        })
        .await;
    }

    /// Notes a new connection. Returns how many there were after the first.
    pub fn publish(&self, peer: &Peer) -> u64 {
        // Counted first: a waiter that sees the peer sees its count.
        let reconnects = self.reconnects.fetch_add(1, Ordering::AcqRel) + 1;
        let former = self.connection.send_replace(Connection { peer: peer.clone(), phase: Phase::Watched });
        drop(former);
        reconnects
    }

    /// Notes that there will be no other connection. The first reason stays.
    pub fn end(&self, why: Option<Error>) {
        self.connection.send_if_modified(|connection| {
            let is_first = matches!(connection.phase, Phase::Watched);
            if is_first {
                connection.phase = Phase::Ended(why);
            }
            is_first
        });
    }

    pub fn reconnects(&self) -> u64 {
        self.reconnects.load(Ordering::Acquire)
    }

    pub fn set_hook(&self, hook: ReconnectHook) {
        let former = self.locked_hook().replace(hook);
        drop(former);
    }

    pub fn hook(&self) -> Option<ReconnectHook> {
        self.locked_hook().clone()
    }

    fn locked_hook(&self) -> std::sync::MutexGuard<'_, Option<ReconnectHook>> {
        // No holder panics half way through a change, so a poisoned lock holds good data.
        self.hook.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Connects to the first address of the source that answers. Returns the last error if none does.
pub(super) async fn connect(fabric: &Weak<FabricInner>, source: &dyn AddressSource) -> Result<Peer> {
    let mut last = None;
    for address in source.addresses().await? {
        let connecting = {
            // The fabric is not held while the peer answers.
            let fabric = fabric.upgrade().ok_or_else(fabric_closed)?;
            let thread = fabric.control_thread("connect")?;
            control::connect(fabric, &thread, address)
        };
        match connecting.await {
            Ok(peer) => return Ok(peer),
            Err(error) => last = Some(error),
        }
    }
    let none = || {
        let why = format!("{} has no address", source.name());
        Error::new(ErrorKind::Unreachable, "connect", why)
    };
    Err(last.unwrap_or_else(none))
}

/// The error of a handle whose fabric is closed.
#[cold]
pub(super) fn fabric_closed() -> Error {
    Error::new(ErrorKind::Closed, "peer", "the fabric was closed")
}
