//! This process as a member of a directory.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use multirail::{Error, ErrorKind, Result};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep};

use crate::backoff::Backoff;
use crate::runtime::Runtime;
use crate::store::{REQUEST_LIMIT, within, within_limit};
use crate::{Claim, Lease, Member, Renewal, Store};

/// Whether this process is listed.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum MembershipState {
    /// The directory lists this process, as far as this side knows.
    Joined,
    /// The lease has ended, because the directory did not answer for so long or has lost the entry. The task tries to
    /// join again.
    Lost(Error),
    /// Another process has joined with the name, or the membership was given up. The task has ended.
    Ended(Error),
}

/// This process as a member of a directory. Dropping it removes the entry, in the background;
/// [`leave`](Membership::leave) waits for that.
pub struct Membership {
    member: Member,
    state: watch::Receiver<MembershipState>,
    /// Dropped to stop the task.
    stop: Option<oneshot::Sender<Infallible>>,
    ended: Option<oneshot::Receiver<Result<()>>>,
    /// Dropped last: the thread waits for members that leave.
    _runtime: Arc<Runtime>,
}

impl Membership {
    /// The entry. Its lease is the one that the directory grants.
    pub fn member(&self) -> &Member {
        &self.member
    }

    /// Whether this process is listed.
    pub fn state(&self) -> MembershipState {
        self.state.borrow().clone()
    }

    /// Resolves when the state has changed since the last call, to the new state. Does not resolve any more after
    /// `Ended`.
    pub async fn changed(&mut self) -> MembershipState {
        if self.state.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        self.state.borrow_and_update().clone()
    }

    /// Removes the entry, and waits until the directory has done that.
    ///
    /// # Errors
    /// The directory did not answer. It removes the entry when the lease ends.
    pub async fn leave(mut self) -> Result<()> {
        drop(self.stop.take());
        match self.ended.take() {
            Some(ended) => ended.await.unwrap_or(Ok(())),
            None => Ok(()),
        }
    }
}

/// Renews the entry.
pub(crate) struct MembershipTask {
    store: Arc<dyn Store>,
    member: Member,
    record: Vec<u8>,
    lease: Box<dyn Lease>,
    state: watch::Sender<MembershipState>,
    renewed: Instant,
}

impl MembershipTask {
    pub fn start(
        store: Arc<dyn Store>,
        runtime: Arc<Runtime>,
        member: Member,
        record: Vec<u8>,
        lease: Box<dyn Lease>,
    ) -> Membership {
        let (sender, state) = watch::channel(MembershipState::Joined);
        let (stop, stopped) = oneshot::channel();
        let (end, ended) = oneshot::channel();
        let task =
            Self { store, record, member: member.clone(), lease, state: sender, renewed: Instant::now() };
        // The thread waits for the task when it ends.
        let guard = runtime.leaving();
        runtime.spawn(async move {
            let _ = end.send(task.run(stopped).await);
            drop(guard);
        });
        Membership { member, state, stop: Some(stop), ended: Some(ended), _runtime: runtime }
    }

    async fn run(mut self, mut stop: oneshot::Receiver<Infallible>) -> Result<()> {
        let replaced = tokio::select! {
            _ = &mut stop => None,
            error = self.renew_until_replaced() => Some(error),
        };
        if let Some(error) = replaced {
            tracing::warn!(directory = self.store.url(), name = ?self.member.name, %error, "this process is no member any more");
            self.state.send_replace(MembershipState::Ended(error));
            return Ok(());
        }
        let released = within_limit(self.store.url(), "leave", self.lease.release()).await;
        let why = Error::new(ErrorKind::Closed, "membership", "this process has left the directory");
        self.state.send_replace(MembershipState::Ended(why));
        released
    }

    /// Returns once another process has the name.
    async fn renew_until_replaced(&mut self) -> Error {
        let interval = self.member.lease / 3;
        let mut backoff = Backoff::new(Duration::from_millis(50), interval.min(Duration::from_secs(1)));
        let mut delay = interval;
        loop {
            sleep(delay).await;
            delay = match self.renew().await {
                Ok(true) => {
                    self.renewed = Instant::now();
                    self.set_joined();
                    backoff.reset();
                    interval
                }
                Ok(false) => {
                    let why =
                        format!("another process has joined {} as {:?}", self.store.url(), self.member.name);
                    return Error::new(ErrorKind::Busy, "renew", why);
                }
                Err(error) => {
                    if self.renewed.elapsed() > self.member.lease {
                        self.set_lost(error);
                    }
                    backoff.next()
                }
            };
        }
    }

    /// Renews the lease, or joins again if it is lost. Returns false once another process has the name.
    async fn renew(&mut self) -> Result<bool> {
        // A request that takes longer than a third of the lease is worth less than the next.
        let limit = (self.member.lease / 3).clamp(Duration::from_millis(500), REQUEST_LIMIT);
        let url = self.store.url();
        // The store may have kept the lease for longer than this side knows.
        match within(limit, url, "renew", self.lease.renew()).await? {
            Renewal::Kept => return Ok(true),
            Renewal::Replaced => return Ok(false),
            Renewal::Expired => {}
        }
        let why = format!("{url} has lost the entry of {:?}", self.member.name);
        self.set_lost(Error::new(ErrorKind::NotFound, "renew", why));
        let claim = self.store.claim(&self.member.name, &self.record, self.member.lease, Claim::Restore);
        let Some(lease) = within_limit(url, "join", claim).await? else { return Ok(false) };
        self.lease = lease;
        Ok(true)
    }

    fn set_joined(&self) {
        self.state.send_if_modified(|state| {
            let was_lost = matches!(state, MembershipState::Lost(_));
            if was_lost {
                *state = MembershipState::Joined;
                tracing::info!(directory = self.store.url(), name = ?self.member.name, "this process is a member again");
            }
            was_lost
        });
    }

    fn set_lost(&self, error: Error) {
        self.state.send_if_modified(|state| {
            let was_joined = matches!(state, MembershipState::Joined);
            if was_joined {
                tracing::warn!(directory = self.store.url(), name = ?self.member.name, %error, "the lease of this process is lost; it joins again");
                *state = MembershipState::Lost(error);
            }
            was_joined
        });
    }
}
