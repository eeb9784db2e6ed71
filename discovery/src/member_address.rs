//! A member as a peer that is connected again.

use std::sync::Arc;

use async_trait::async_trait;
use multirail::{AddressSource, Result};

use crate::Directory;

/// Where a member of a directory listens: a [`PeerHandle`](multirail::PeerHandle) looks it up before each attempt to
/// connect, so it finds a member that was restarted elsewhere.
///
/// ```no_run
/// # use std::sync::Arc;
/// # use std::time::Duration;
/// # use multirail::{Fabric, PeerHandle, ReconnectPolicy, Result};
/// # use multirail_discovery::{MemberAddress, open};
/// # async fn find(fabric: &Fabric) -> Result<()> {
/// let decoder = MemberAddress::new(open("etcd://etcd-0:2379/fleet")?, "decode-7");
/// let policy = ReconnectPolicy::within(Duration::from_secs(600));
/// let handle = PeerHandle::find(fabric, Arc::new(decoder), policy).await?;
/// # Ok(())
/// # }
/// ```
pub struct MemberAddress {
    directory: Arc<dyn Directory>,
    name: String,
}

impl MemberAddress {
    /// The member `name` of `directory`.
    pub fn new(directory: Arc<dyn Directory>, name: impl Into<String>) -> Self {
        Self { directory, name: name.into() }
    }
}

#[async_trait]
impl AddressSource for MemberAddress {
    fn name(&self) -> &str {
        &self.name
    }

    async fn addresses(&self) -> Result<Vec<String>> {
        Ok(self.directory.lookup(&self.name).await?.addresses)
    }
}
