//! A directory over a store.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use multirail::{Error, ErrorKind, Result};

use crate::membership::MembershipTask;
use crate::runtime::Runtime;
use crate::store::within_limit;
use crate::watch::WatchTask;
use crate::{Claim, Directory, Listing, MAX_LEASE, Member, Membership, Store, Watch};

/// The shortest lease: a busy process is late by some hundred milliseconds.
const MIN_LEASE: Duration = Duration::from_secs(1);

/// A [`Directory`] over any [`Store`].
pub struct StoreDirectory<S> {
    store: Arc<S>,
    runtime: Arc<Runtime>,
}

impl<S: Store> StoreDirectory<S> {
    /// Makes a directory. Asks nothing of the store yet.
    ///
    /// # Errors
    /// `Exhausted` if the thread of the directories does not start.
    pub fn new(store: S) -> Result<Self> {
        Ok(Self { store: Arc::new(store), runtime: Runtime::shared()? })
    }

    async fn list(&self) -> Result<Listing> {
        let store = Arc::clone(&self.store);
        let request = async move {
            let listing = within_limit(store.url(), "list", store.list()).await?;
            listing.warn(store.url());
            Ok(listing)
        };
        self.runtime.run(request).await
    }
}

#[async_trait]
impl<S: Store> Directory for StoreDirectory<S> {
    fn url(&self) -> &str {
        self.store.url()
    }

    async fn join(&self, mut member: Member, lease: Duration) -> Result<Membership> {
        if lease < MIN_LEASE || lease > MAX_LEASE {
            let why = format!("a lease of {lease:?}; {MIN_LEASE:?} to {MAX_LEASE:?} are allowed");
            return Err(Error::new(ErrorKind::InvalidRequest, "join", why));
        }
        member.lease = self.store.granted(lease);
        member.check()?;
        let (store, joining) = (Arc::clone(&self.store), member.clone());
        let request = async move {
            let record = joining.to_record(fastrand::u64(..));
            let claim = store.claim(&joining.name, &record, joining.lease, Claim::Replace);
            let lease = within_limit(store.url(), "join", claim).await?;
            Ok(lease.map(|lease| (record, lease)))
        };
        let claimed = self.runtime.run(request).await?;
        let (record, lease) = claimed.ok_or_else(|| {
            let why = format!("{} did not replace the former entry of {:?}", self.url(), member.name);
            Error::new(ErrorKind::Busy, "join", why)
        })?;
        let store = Arc::clone(&self.store) as Arc<dyn Store>;
        Ok(MembershipTask::start(store, Arc::clone(&self.runtime), member, record, lease))
    }

    async fn lookup(&self, name: &str) -> Result<Member> {
        let found = self.list().await?.into_members().remove(name);
        found.ok_or_else(|| {
            Error::new(ErrorKind::NotFound, "lookup", format!("{} lists no member {name:?}", self.url()))
        })
    }

    async fn members(&self) -> Result<Vec<Member>> {
        Ok(self.list().await?.into_members().into_values().collect())
    }

    fn watch(&self) -> Watch {
        let store = Arc::clone(&self.store) as Arc<dyn Store>;
        WatchTask::start(store, Arc::clone(&self.runtime))
    }
}
