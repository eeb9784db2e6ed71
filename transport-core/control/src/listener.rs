//! Listening for peers.

use std::fmt;
use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::bootstrap::{Acceptor, Incoming};
use crate::connect::{bootstrap_limit, on_thread, with_limit};
use crate::handshake::authenticate::{AuthenticatedPeer, authenticate};
use crate::handshake::limits::{HANDSHAKES, Permit};
use crate::handshake::proof::Role;
use crate::handshake::unauthenticated::UnauthenticatedClients;
use crate::handshake::{UnacceptedPeer, establish, upgrade};
use crate::host::{SessionHost, SessionPeer};
use crate::runtime::{ControlThread, Spawner, closed};
use multirail_spi::{Error, ErrorKind, Result};

/// The most peers that wait for [`Listener::accept`]. Further peers wait at the end of their handshake.
const BACKLOG: usize = 64;
/// The pause after a failed accept, for example when no file descriptor is left.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// Waits for peers. Dropping the listener stops listening; accepted peers stay connected.
///
/// Handshakes run on the fabric's control thread (or the runtime it was given), whether or not
/// a caller waits in [`Listener::accept`]. The listener logs and drops a client that fails its handshake.
/// The listener holds up to 256 unauthenticated clients at once, for 5 s each. When one more
/// client connects, the listener drops the oldest without a reply.
pub struct Listener<P: SessionPeer> {
    address: String,
    peers: Mutex<mpsc::Receiver<Result<UnacceptedPeer<P>>>>,
    /// Resolves when the socket is closed.
    stopped: oneshot::Receiver<()>,
}

impl<P: SessionPeer> Listener<P> {
    /// The address to connect to. If the listener was opened with port 0, the address contains the chosen port.
    pub fn local_addr(&self) -> String {
        self.address.clone()
    }

    /// Waits for the next peer. Cancel-safe; needs no particular runtime.
    ///
    /// # Errors
    /// `Closed` once the fabric is closed, or the listener's bootstrap has ended.
    pub async fn accept(&self) -> Result<P> {
        let next = self.peers.lock().await.recv().await;
        next.unwrap_or_else(|| Err(closed("this listener has ended, or its fabric was closed")))?.claim()
    }

    /// Stops listening. The address is free again when this returns. The listener disconnects
    /// the peers that were not accepted.
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

/// Listens at `address`. Any executor may poll the future.
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
        let listening =
            async move { with_limit("listen", &address, limit, bootstrap.listen(&address)).await };
        let acceptor = on_thread(&spawner, listening).await?;
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

/// Accepts clients and runs their handshakes.
struct AcceptLoop<H: SessionHost> {
    host: Weak<H>,
    spawner: Spawner,
    ready: mpsc::Sender<Result<UnacceptedPeer<H::Peer>>>,
    limit: Duration,
}

// `derive(Clone)` would require `H: Clone`.
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
    /// Accepts clients until the listener is dropped or the thread shuts down. Then cancels
    /// the handshakes in progress and closes the socket.
    async fn serve(self, mut acceptor: Box<dyn Acceptor>) {
        let (mut unauthenticated, mut handshakes) = (UnauthenticatedClients::new(), JoinSet::new());
        loop {
            tokio::select! {
                () = self.ready.closed() => return,
                () = self.spawner.closing() => return,
                Some(_) = handshakes.join_next() => {}
                Some(authenticated) = unauthenticated.next() => if let Some(authenticated) = authenticated.flatten() {
                    match permit_for(&authenticated) {
                        Ok(permit) => drop(handshakes.spawn(self.clone().complete_handshake(authenticated, permit))),
                        Err(error) => self.spawner.spawn(authenticated.refuse(&error)),
                    }
                },
                accepted = acceptor.accept() => match accepted {
                    Ok(incoming) => unauthenticated.add(self.clone().authenticate(incoming)),
                    Err(error) if error.kind() == ErrorKind::Closed => {
                        let _ = self.ready.send(Err(error)).await;
                        return;
                    }
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept a client; retrying");
                        // If no descriptor is left, dropping a client frees one.
                        unauthenticated.drop_oldest();
                        sleep(RETRY_DELAY).await;
                    }
                },
            }
        }
    }

    /// Authenticates a client. Logs and drops a client that fails.
    async fn authenticate(self, incoming: Incoming) -> Option<AuthenticatedPeer<H>> {
        let address = incoming.peer_address().to_owned();
        let authenticated = async {
            let channel = with_limit("accept", &address, self.limit, incoming.open()).await?;
            authenticate(self.host, &self.spawner, channel, Role::Accepting, self.limit).await
        };
        authenticated.await.inspect_err(|error| log_rejected(&address, error)).ok()
    }

    /// Completes the handshake of an authenticated peer, once the limiter lets it start.
    async fn complete_handshake(self, authenticated: AuthenticatedPeer<H>, permit: Permit) {
        let address = authenticated.address.clone();
        let Some(_running) = permit.start(self.limit).await else {
            log_rejected(&address, &busy());
            return authenticated.refuse(&busy()).await;
        };
        match establish(authenticated).await {
            // If the listener was dropped, the send fails and drops the peer, which disconnects it.
            Ok(peer) => drop(self.ready.send(Ok(peer)).await),
            Err(error) => log_rejected(&address, &error),
        }
    }
}

/// Takes a permit of the fabric that the peer has authenticated to.
fn permit_for<H: SessionHost>(authenticated: &AuthenticatedPeer<H>) -> Result<Permit> {
    upgrade(&authenticated.host)?.handshakes().try_acquire().ok_or_else(busy)
}

fn log_rejected(address: &str, error: &Error) {
    tracing::warn!(%address, %error, "rejected a client");
}

fn busy() -> Error {
    let why = format!("{HANDSHAKES} handshakes are in progress already: try again, and accept peers faster");
    Error::new(ErrorKind::Busy, "accept", why)
}
