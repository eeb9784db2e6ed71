//! Connecting to a listening fabric.

use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::bootstrap::Bootstrap;
use crate::handshake::authenticate::authenticate;
use crate::handshake::proof::Role;
use crate::handshake::{UnacceptedPeer, establish, upgrade};
use crate::host::SessionHost;
use crate::runtime::{ControlThread, Spawner, closed};
use multirail_spi::{Error, ErrorKind, Result};

/// Connects to the fabric that listens at `address`.
///
/// The control thread does the work. Any executor may poll the future; dropping the
/// future cancels the attempt.
pub fn connect<H: SessionHost>(
    host: Arc<H>,
    thread: &ControlThread,
    address: String,
) -> impl Future<Output = Result<H::Peer>> + Send + use<H> {
    let spawner = thread.spawner();
    let (bootstrap, limit) = (host.bootstrap(), bootstrap_limit(&*host));
    let host = Arc::downgrade(&host);
    async move {
        let tasks = spawner.clone();
        on_thread(&spawner, async move { connect_peer(host, &tasks, &*bootstrap, &address, limit).await })
            .await?
            .claim()
    }
}

/// Runs `work` on the control thread and returns its result. The task drops `work` if the caller
/// stops waiting or the thread shuts down.
pub(crate) async fn on_thread<T: Send + 'static>(
    spawner: &Spawner,
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let (mut sender, outcome) = oneshot::channel();
    let thread = spawner.clone();
    spawner.spawn(async move {
        let result = tokio::select! {
            result = work => result,
            () = thread.closing() => Err(closed("this fabric was closed")),
            () = sender.closed() => return,
        };
        // If the caller has stopped waiting, the result is dropped. A peer in it is then disconnected.
        let _ = sender.send(result);
    });
    outcome.await.unwrap_or_else(|_| Err(spawner.ended()))
}

/// The longest time that a call of a bootstrap may take. This is more than the limit of
/// `TcpBootstrap` itself, so that its more precise message is the one the user sees.
pub(crate) fn bootstrap_limit(host: &impl SessionHost) -> Duration {
    host.control_settings().handshake_limit.saturating_mul(2)
}

/// Waits for `work`, a call of a bootstrap, for at most `limit`.
pub(crate) async fn with_limit<T>(
    operation: &'static str,
    address: &str,
    limit: Duration,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    timeout(limit, work).await.unwrap_or_else(|_| {
        let why = format!(
            "{address}: the bootstrap did not answer within {:.1} s: check the address",
            limit.as_secs_f64()
        );
        Err(Error::new(ErrorKind::DeadlineExceeded, operation, why))
    })
}

async fn connect_peer<H: SessionHost>(
    host: Weak<H>,
    spawner: &Spawner,
    bootstrap: &dyn Bootstrap,
    address: &str,
    limit: Duration,
) -> Result<UnacceptedPeer<H::Peer>> {
    let channel = with_limit("connect", address, limit, bootstrap.connect(address)).await?;
    let limit = upgrade(&host)?.control_settings().handshake_limit;
    establish(authenticate(host, spawner, channel, Role::Connecting, limit).await?).await
}
