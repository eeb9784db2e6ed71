//! The way in for the side that listens.

use std::fmt;
use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::bootstrap::{Acceptor, Channel};
use super::connect::{bootstrap_limit, bounded, on_thread};
use super::ending::closed;
use super::handshake::{Unclaimed, establish};
use super::thread::{ControlThread, Spawner};
use crate::fabric::FabricInner;
use crate::{ErrorKind, Peer, Result};

/// Handshakes at once: a client that says nothing blocks nobody but a 64th of the room.
const HANDSHAKES: usize = 64;
/// Peers that wait for [`Listener::accept`]; further ones wait in their handshake.
const BACKLOG: usize = 64;
/// After a failed accept, such as for lack of descriptors, before the next.
const BACK_OFF: Duration = Duration::from_millis(100);

/// Waits for peers. Dropping it stops listening; accepted peers stay connected.
///
/// Handshakes run on the fabric's control thread, whether or not anyone waits in
/// [`Listener::accept`]. A client that fails its handshake is logged and dropped.
pub struct Listener {
    address: String,
    peers: Mutex<mpsc::Receiver<Result<Unclaimed>>>,
    /// Resolves when the socket is closed.
    stopped: oneshot::Receiver<()>,
}

impl Listener {
    /// The address to connect to, with the port that was chosen if 0 was asked for.
    pub fn local_addr(&self) -> String {
        self.address.clone()
    }

    /// The next peer. Cancel-safe; needs no particular runtime.
    ///
    /// # Errors
    /// `Closed` once the fabric is closed, or the listener's bootstrap has ended.
    pub async fn accept(&self) -> Result<Peer> {
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

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Listens at `address`. The future may be polled by any executor.
pub(crate) fn listen(
    fabric: Arc<FabricInner>,
    thread: &ControlThread,
    address: String,
) -> impl Future<Output = Result<Listener>> + Send + use<> {
    let spawner = thread.spawner();
    let (bootstrap, limit) = (fabric.bootstrap(), bootstrap_limit(&fabric));
    let fabric = Arc::downgrade(&fabric);
    async move {
        let wanted = async move { bounded("listen", &address, limit, bootstrap.listen(&address)).await };
        let acceptor = on_thread(&spawner, wanted).await?;
        let (ready, peers) = mpsc::channel(BACKLOG);
        let (stop, stopped) = oneshot::channel();
        let address = acceptor.local_address();
        let incoming = Incoming { fabric, spawner: spawner.clone(), ready };
        spawner.spawn(async move {
            incoming.serve(acceptor).await;
            let _ = stop.send(());
        });
        Ok(Listener { address, peers: Mutex::new(peers), stopped })
    }
}

/// What a handshake of an incoming channel needs.
#[derive(Clone)]
struct Incoming {
    fabric: Weak<FabricInner>,
    spawner: Spawner,
    ready: mpsc::Sender<Result<Unclaimed>>,
}

impl Incoming {
    /// Accepts until the listener is dropped or the thread shuts down; then ends
    /// the handshakes under way and closes the socket.
    async fn serve(self, mut acceptor: Box<dyn Acceptor>) {
        let mut handshakes = JoinSet::new();
        loop {
            tokio::select! {
                () = self.ready.closed() => return,
                () = self.spawner.closing() => return,
                Some(_) = handshakes.join_next() => {}
                accepted = acceptor.accept(), if handshakes.len() < HANDSHAKES => match accepted {
                    Ok(channel) => { handshakes.spawn(self.clone().welcome(channel)); }
                    Err(error) if error.kind() == ErrorKind::Closed => {
                        let _ = self.ready.send(Err(error)).await;
                        return;
                    }
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept; trying again");
                        sleep(BACK_OFF).await;
                    }
                },
            }
        }
    }

    async fn welcome(self, channel: Channel) {
        let address = channel.peer_address().to_owned();
        match establish(self.fabric, &self.spawner, channel).await {
            // If nobody takes the peer any more it is dropped, which disconnects it.
            Ok(peer) => drop(self.ready.send(Ok(peer)).await),
            Err(error) => tracing::warn!(%address, %error, "a client was turned away"),
        }
    }
}
