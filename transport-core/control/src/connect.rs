//! The way in for the side that connects.

use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::bootstrap::Bootstrap;
use crate::errors::closed;
use crate::handshake::authenticate::authenticate;
use crate::handshake::proof::Role;
use crate::handshake::{UnacceptedPeer, establish, upgrade};
use crate::host::SessionHost;
use crate::runtime::{ControlThread, Spawner};
use multirail_spi::{Error, ErrorKind, Result};

/// Connects to the fabric that listens at `address`.
///
/// The work is done on the control thread; any executor may poll the future, and
/// dropping it gives up.
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
        on_thread(&spawner, async move { attempt(host, &tasks, &*bootstrap, &address, limit).await })
            .await?
            .claim()
    }
}

/// Runs `work` on the control thread and hands its result over. Ends early, and
/// ends `work`, if the caller stops waiting or the thread shuts down.
pub(crate) async fn on_thread<T: Send + 'static>(
    spawner: &Spawner,
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let (mut answer, outcome) = oneshot::channel();
    let thread = spawner.clone();
    spawner.spawn(async move {
        let result = tokio::select! {
            result = work => result,
            () = thread.closing() => Err(closed("this fabric was closed")),
            () = answer.closed() => return,
        };
        // A result that nobody takes is dropped, and a peer in it disconnected.
        let _ = answer.send(result);
    });
    outcome.await.unwrap_or_else(|_| Err(spawner.ended()))
}

/// The longest that any bootstrap may take: more than the limit `TcpBootstrap`
/// has itself, whose message is better.
pub(crate) fn bootstrap_limit(host: &impl SessionHost) -> Duration {
    host.control_settings().handshake_limit.saturating_mul(2)
}

/// Waits for a bootstrap, for at most `limit`.
pub(crate) async fn bounded<T>(
    operation: &'static str,
    address: &str,
    limit: Duration,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    timeout(limit, work).await.unwrap_or_else(|_| {
        let why = format!(
            "{address}: the bootstrap gave nothing within {:.1} s; check the address",
            limit.as_secs_f64()
        );
        Err(Error::new(ErrorKind::DeadlineExceeded, operation, why))
    })
}

async fn attempt<H: SessionHost>(
    host: Weak<H>,
    spawner: &Spawner,
    bootstrap: &dyn Bootstrap,
    address: &str,
    limit: Duration,
) -> Result<UnacceptedPeer<H::Peer>> {
    let channel = bounded("connect", address, limit, bootstrap.connect(address)).await?;
    let limit = upgrade(&host)?.control_settings().handshake_limit;
    establish(authenticate(host, spawner, channel, Role::Connecting, limit).await?).await
}
