//! The task that watches a handle's connection, and connects again.

use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use super::handle_state::{self, fabric_closed};
use super::named_regions::ImportCount;
use super::{HandleState, ReconnectLimit};
use crate::control::Spawner;
use crate::{Error, ErrorKind, Peer, Result};

/// The task of one handle, on the fabric's control thread.
pub(super) struct ReconnectTask {
    state: Arc<HandleState>,
    spawner: Spawner,
    random: fastrand::Rng,
}

/// The attempts since the last loss of the connection.
#[derive(Default)]
struct Attempts {
    count: u32,
    last_error: Option<Error>,
}

/// A new connection that is not given out yet. Dropping it ends the connection.
struct NewPeer {
    peer: Peer,
    is_given_out: bool,
}

impl ReconnectTask {
    pub fn new(state: Arc<HandleState>, spawner: Spawner, random: fastrand::Rng) -> Self {
        Self { state, spawner, random }
    }

    /// Runs until `stop` resolves, the fabric closes, or there will be no other connection.
    pub async fn run(mut self, stop: oneshot::Receiver<Infallible>) {
        let spawner = self.spawner.clone();
        let why = tokio::select! {
            // A closing fabric also ends the connection, which is no loss then.
            biased;
            _ = stop => None,
            () = spawner.closing() => Some(spawner.ended()),
            why = self.watch() => why,
        };
        self.state.end(why);
    }

    /// Connects again after each loss. Returns once there will be no other connection; the error says why, if it is
    /// not only that the connection ended.
    async fn watch(&mut self) -> Option<Error> {
        loop {
            let lost = self.state.last_peer();
            let reason = lost.closed().await;
            if lost.is_disconnected_here() {
                return None;
            }
            let is_open = self.state.fabric.upgrade().is_some_and(|fabric| fabric.check_open("peer").is_ok());
            if !is_open {
                return Some(fabric_closed());
            }
            let (address, number) = (self.state.source.name(), lost.id().number());
            tracing::warn!(peer = number, %address, error = %reason, "the connection to a peer is lost; this side connects again");
            match self.restore(&lost).await {
                Ok(()) => self.call_hook().await,
                Err(error) => {
                    let address = self.state.source.name();
                    tracing::warn!(peer = number, %address, %error, "this side does not connect again to a peer");
                    return Some(error);
                }
            }
        }
    }

    /// Connects again within the policy's limit, and gives the new peer out.
    async fn restore(&mut self, lost: &Peer) -> Result<()> {
        let (begun, mut attempts) = (Instant::now(), Attempts::default());
        let (most, span) = match self.state.policy.limit() {
            ReconnectLimit::Off => (0, Duration::ZERO),
            ReconnectLimit::Attempts(most) => (most, Duration::MAX),
            ReconnectLimit::Time(span) => (u32::MAX, span),
        };
        let (mut new, ImportCount { imported, missing }) =
            match timeout(span, self.try_until(lost, most, &mut attempts)).await {
                Ok(Some(tried)) => tried?,
                // At a limit.
                Ok(None) | Err(_) => return Err(self.gave_up(attempts, begun.elapsed())),
            };
        let reconnects = self.state.publish(&new.peer);
        new.is_given_out = true;
        tracing::info!(
            peer = new.peer.id().number(),
            address = self.state.source.name(),
            attempts = attempts.count,
            reconnects,
            imported,
            missing,
            "connected again to a peer"
        );
        Ok(())
    }

    /// Attempts to connect, at most `most` times. Returns `None` if none has succeeded, and an error if another attempt
    /// would fail in the same way.
    async fn try_until(
        &mut self,
        lost: &Peer,
        most: u32,
        attempts: &mut Attempts,
    ) -> Option<Result<(NewPeer, ImportCount)>> {
        let (state, spawner) = (&self.state, &self.spawner);
        let mut delays = state.policy.delays(&mut self.random);
        while attempts.count < most {
            sleep(delays.next()).await;
            attempts.count = attempts.count.saturating_add(1);
            match connect(state, spawner, lost).await {
                Ok(connected) => return Some(Ok(connected)),
                Err(error) if is_final(error.kind()) => return Some(Err(error)),
                Err(error) => {
                    tracing::debug!(address = state.source.name(), attempt = attempts.count, %error, "cannot connect again yet");
                    attempts.last_error = Some(error);
                }
            }
        }
        None
    }

    #[cold]
    fn gave_up(&self, attempts: Attempts, took: Duration) -> Error {
        let (address, count, took) = (self.state.source.name(), attempts.count, took.as_secs_f64());
        let why = format!(
            "{address} was not back at the limit of reconnecting, after {took:.1} s and {count} attempts; restart the \
             peer, then connect anew"
        );
        let error = Error::new(ErrorKind::PeerDied, "reconnect", why);
        match attempts.last_error {
            Some(last) => error.with_source(last),
            None => error,
        }
    }

    /// Calls the user's function with the new peer, if there is one.
    async fn call_hook(&self) {
        let (Some(hook), peer) = (self.state.hook(), self.state.last_peer()) else { return };
        let call = move || catch_unwind(AssertUnwindSafe(|| hook(&peer))).is_err();
        if let Ok(true) = self.spawner.blocking(call).await {
            tracing::error!(
                address = self.state.source.name(),
                "the function of PeerHandle::on_reconnect panicked"
            );
        }
    }
}

impl Drop for ReconnectTask {
    /// Ends the waits for the task, also if the control thread drops it before its end.
    fn drop(&mut self) {
        self.state.end(None);
    }
}

/// Connects again, and imports for the new connection what is known by name.
async fn connect(state: &HandleState, spawner: &Spawner, lost: &Peer) -> Result<(NewPeer, ImportCount)> {
    let peer = handle_state::connect(&state.fabric, &*state.source).await?;
    let new = NewPeer { peer, is_given_out: false };
    // What the program has refused stays refused.
    new.peer.set_path_policy(lost.path_policy());
    let imports = state.names.import_again(&new.peer, spawner).await?;
    Ok((new, imports))
}

/// Whether another attempt would fail in the same way.
fn is_final(kind: ErrorKind) -> bool {
    use ErrorKind::{InvalidRequest, Permission, Unsupported, Version};
    matches!(kind, Permission | Version | InvalidRequest | Unsupported)
}

impl Drop for NewPeer {
    fn drop(&mut self) {
        if !self.is_given_out {
            self.peer.disconnect();
        }
    }
}
