//! The way in for the side that listens.

use std::fmt;
use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::bootstrap::{Acceptor, Incoming};
use crate::connect::{bootstrap_limit, bounded, on_thread};
use crate::errors::closed;
use crate::handshake::authenticate::{AuthenticatedPeer, authenticate};
use crate::handshake::limiter::{HANDSHAKES, Permit};
use crate::handshake::proof::Role;
use crate::handshake::unauthenticated::UnauthenticatedClients;
use crate::handshake::{UnacceptedPeer, establish, upgrade};
use crate::host::{SessionHost, SessionPeer};
use crate::runtime::{ControlThread, Spawner};
use multirail_spi::{Error, ErrorKind, Result};

/// Peers that wait for [`Listener::accept`]; further ones wait in their handshake.
const BACKLOG: usize = 64;
/// After a failed accept, such as for lack of descriptors, before the next.
const BACK_OFF: Duration = Duration::from_millis(100);

/// Waits for peers. Dropping it stops listening; accepted peers stay connected.
///
/// Handshakes run on the fabric's control thread (or the runtime it was given), whether or not
/// anyone waits in [`Listener::accept`]. A client that fails its handshake is logged and dropped. Up
/// to 256 clients that have said nothing yet, or nothing that lets them in, are borne
/// at once, for 5 s each; the oldest makes way for a newer one and is told nothing.
pub struct Listener<P: SessionPeer> {
    address: String,
    peers: Mutex<mpsc::Receiver<Result<UnacceptedPeer<P>>>>,
    /// Resolves when the socket is closed.
    stopped: oneshot::Receiver<()>,
}

impl<P: SessionPeer> Listener<P> {
    /// The address to connect to, with the port that was chosen if 0 was asked for.
    pub fn local_addr(&self) -> String {
        self.address.clone()
    }

    /// The next peer. Cancel-safe; needs no particular runtime.
    ///
    /// # Errors
    /// `Closed` once the fabric is closed, or the listener's bootstrap has ended.
    pub async fn accept(&self) -> Result<P> {
        let next = self.peers.lock().await.recv().await;
        next.unwrap_or_else(|| Err(closed("this listener has ended, or its fabric was closed")))?.claim()
    }

    /// Stops listening; the address is free again when this returns. Peers that
    /// nobody accepted are disconnected.
    pub async fn close(self) {
        let Self { peers, stopped, .. } = self;
        drop(peers);
        let _ = stopped.await;
    }
}

impl<P: SessionPeer> fmt::Debug for Listener<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Listens at `address`. The future may be polled by any executor.
pub fn listen<H: SessionHost>(
    host: Arc<H>,
    thread: &ControlThread,
    address: String,
) -> impl Future<Output = Result<Listener<H::Peer>>> + Send + use<H> {
    let spawner = thread.spawner();
    let (bootstrap, limit) = (host.bootstrap(), bootstrap_limit(&*host));
    let handshake_limit = host.control_settings().handshake_limit;
    let host = Arc::downgrade(&host);
    async move {
        let wanted = async move { bounded("listen", &address, limit, bootstrap.listen(&address)).await };
        let acceptor = on_thread(&spawner, wanted).await?;
        let (ready, peers) = mpsc::channel(BACKLOG);
        let (stop, stopped) = oneshot::channel();
        let address = acceptor.local_address();
        let accept_loop = AcceptLoop { host, spawner: spawner.clone(), ready, limit: handshake_limit };
        spawner.spawn(async move {
            accept_loop.serve(acceptor).await;
            let _ = stop.send(());
        });
        Ok(Listener { address, peers: Mutex::new(peers), stopped })
    }
}

/// What becomes of a client.
struct AcceptLoop<H: SessionHost> {
    host: Weak<H>,
    spawner: Spawner,
    ready: mpsc::Sender<Result<UnacceptedPeer<H::Peer>>>,
    limit: Duration,
}

// A derive would ask for a host that can be cloned.
impl<H: SessionHost> Clone for AcceptLoop<H> {
    fn clone(&self) -> Self {
        Self {
            host: Weak::clone(&self.host),
            spawner: self.spawner.clone(),
            ready: self.ready.clone(),
            limit: self.limit,
        }
    }
}

impl<H: SessionHost> AcceptLoop<H> {
    /// Accepts until the listener is dropped or the thread shuts down; then ends
    /// the handshakes under way and closes the socket.
    async fn serve(self, mut acceptor: Box<dyn Acceptor>) {
        let (mut strangers, mut handshakes) = (UnauthenticatedClients::new(), JoinSet::new());
        loop {
            tokio::select! {
                () = self.ready.closed() => return,
                () = self.spawner.closing() => return,
                Some(_) = handshakes.join_next() => {}
                Some(authenticated) = strangers.next() => if let Some(authenticated) = authenticated.flatten() {
                    match permit_for(&authenticated) {
                        Ok(permit) => drop(handshakes.spawn(self.clone().welcome(authenticated, permit))),
                        Err(error) => self.spawner.spawn(authenticated.refuse(&error)),
                    }
                },
                accepted = acceptor.accept() => match accepted {
                    Ok(incoming) => strangers.add(self.clone().authenticate(incoming)),
                    Err(error) if error.kind() == ErrorKind::Closed => {
                        let _ = self.ready.send(Err(error)).await;
                        return;
                    }
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept; trying again");
                        // If descriptors ran out, one of these gives its own back.
                        strangers.drop_oldest();
                        sleep(BACK_OFF).await;
                    }
                },
            }
        }
    }

    /// The stranger's part. Whoever does not get through is logged and gone.
    async fn authenticate(self, incoming: Incoming) -> Option<AuthenticatedPeer<H>> {
        let address = incoming.peer_address().to_owned();
        let authenticated = async {
            let channel = bounded("accept", &address, self.limit, incoming.open()).await?;
            authenticate(self.host, &self.spawner, channel, Role::Accepting, self.limit).await
        };
        authenticated.await.inspect_err(|error| turned_away(&address, error)).ok()
    }

    /// The part of a peer that may come in: the handshake, when it is its turn.
    async fn welcome(self, authenticated: AuthenticatedPeer<H>, permit: Permit) {
        let address = authenticated.address.clone();
        let Some(_turn) = permit.turn(self.limit).await else {
            turned_away(&address, &busy());
            return authenticated.refuse(&busy()).await;
        };
        match establish(authenticated).await {
            // If nobody takes the peer any more it is dropped, which disconnects it.
            Ok(peer) => drop(self.ready.send(Ok(peer)).await),
            Err(error) => turned_away(&address, &error),
        }
    }
}

/// In the room of the fabric that it may come to.
fn permit_for<H: SessionHost>(authenticated: &AuthenticatedPeer<H>) -> Result<Permit> {
    upgrade(&authenticated.host)?.handshakes().enter().ok_or_else(busy)
}

fn turned_away(address: &str, error: &Error) {
    tracing::warn!(%address, %error, "a client was turned away");
}

fn busy() -> Error {
    let why = format!("{HANDSHAKES} handshakes are under way already: try again, and accept peers faster");
    Error::new(ErrorKind::Busy, "accept", why)
}
