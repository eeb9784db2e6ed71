//! What a directory keeps its members in: the part that differs between a folder, etcd and Redis.

use std::time::Duration;

use async_trait::async_trait;
use multirail::{Error, ErrorKind, Result};

use crate::Listing;

/// How long a store may take for one request.
pub const REQUEST_LIMIT: Duration = Duration::from_secs(2);

/// A store of records with leases. [`StoreDirectory`](crate::StoreDirectory) makes a directory of any store: it
/// watches, renews, and connects again.
///
/// All calls run on the thread of the directories, a current-thread runtime of tokio, each within [`REQUEST_LIMIT`]. So
/// they may use tokio, and must not block.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// The directory's URL, for messages: without passwords.
    fn url(&self) -> &str;

    /// How often a watch lists the members although no change is known.
    fn poll_interval(&self) -> Duration;

    /// The lease that a member gets who asks for `lease`. A store may count in whole seconds.
    fn granted(&self, lease: Duration) -> Duration {
        lease
    }

    /// All members.
    async fn list(&self) -> Result<Listing>;

    /// Begins to listen for changes. Changes after this call are told.
    async fn changes(&self) -> Result<Box<dyn Changes>> {
        Ok(Box::new(NoChanges))
    }

    /// Writes the record of a member. The store removes it `lease` after the last renewal. Returns `None` if `claim`
    /// does not allow that.
    async fn claim(
        &self,
        name: &str,
        record: &[u8],
        lease: Duration,
        claim: Claim,
    ) -> Result<Option<Box<dyn Lease>>> {
        let _ = (name, record, lease, claim);
        let why = format!("nobody can join {}: it lists what something else has put there", self.url());
        Err(Error::new(ErrorKind::Unsupported, "join", why))
    }
}

/// Says which former record a claim may replace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// Any: a restarted process takes the place of the former.
    Replace,
    /// None but the same record.
    Restore,
}

/// News of changes.
#[async_trait]
pub trait Changes: Send {
    /// Resolves when the members may have changed. Cancel-safe.
    ///
    /// # Errors
    /// The store does not answer any more.
    async fn next(&mut self) -> Result<()>;
}

/// A record that a member renews.
#[async_trait]
pub trait Lease: Send {
    /// Renews the lease.
    async fn renew(&mut self) -> Result<Renewal>;

    /// Removes the record, if it is still this member's.
    async fn release(&mut self) -> Result<()>;
}

/// What became of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renewal {
    /// The store keeps it for another lease.
    Kept,
    /// The store does not have it any more.
    Expired,
    /// Another process has joined with the name.
    Replaced,
}

/// No news: the store is listed at its interval alone.
pub struct NoChanges;

#[async_trait]
impl Changes for NoChanges {
    async fn next(&mut self) -> Result<()> {
        std::future::pending().await
    }
}

/// Awaits a request of a store, within [`REQUEST_LIMIT`].
pub(crate) async fn within_limit<T>(
    url: &str,
    operation: &'static str,
    request: impl Future<Output = Result<T>>,
) -> Result<T> {
    within(REQUEST_LIMIT, url, operation, request).await
}

/// Awaits a request of a store, within `limit`.
pub(crate) async fn within<T>(
    limit: Duration,
    url: &str,
    operation: &'static str,
    request: impl Future<Output = Result<T>>,
) -> Result<T> {
    tokio::time::timeout(limit, request).await.unwrap_or_else(|_| {
        let why = format!("{url} did not answer within {limit:?}");
        Err(Error::new(ErrorKind::DeadlineExceeded, operation, why))
    })
}
