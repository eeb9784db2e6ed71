//! The way in for the side that connects.

use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::timeout;

use super::bootstrap::Bootstrap;
use super::ending::closed;
use super::greeting::greet;
use super::handshake::{Unclaimed, establish, upgrade};
use super::proof::Role;
use super::thread::{ControlThread, Spawner};
use crate::fabric::FabricInner;
use crate::{Error, ErrorKind, Peer, Result};

/// Connects to the fabric that listens at `address`.
///
/// The work is done on the control thread; any executor may poll the future, and
/// dropping it gives up.
pub(crate) fn connect(
    fabric: Arc<FabricInner>,
    thread: &ControlThread,
    address: String,
) -> impl Future<Output = Result<Peer>> + Send + use<> {
    let spawner = thread.spawner();
    let (bootstrap, limit) = (fabric.bootstrap(), bootstrap_limit(&fabric));
    let fabric = Arc::downgrade(&fabric);
    async move {
        let tasks = spawner.clone();
        on_thread(&spawner, async move { attempt(fabric, &tasks, &*bootstrap, &address, limit).await })
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
pub(crate) fn bootstrap_limit(fabric: &FabricInner) -> Duration {
    fabric.control_settings().handshake_limit.saturating_mul(2)
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

async fn attempt(
    fabric: Weak<FabricInner>,
    spawner: &Spawner,
    bootstrap: &dyn Bootstrap,
    address: &str,
    limit: Duration,
) -> Result<Unclaimed> {
    let channel = bounded("connect", address, limit, bootstrap.connect(address)).await?;
    let limit = upgrade(&fabric)?.control_settings().handshake_limit;
    establish(greet(fabric, spawner, channel, Role::Connecting, limit).await?).await
}
