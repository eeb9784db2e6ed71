//! Where a handle finds its peer.

use async_trait::async_trait;

use crate::Result;

/// Says where a peer listens. A [`PeerHandle`](crate::PeerHandle) asks before each attempt to connect, so a peer may come
/// back at another address. `multirail_discovery::MemberAddress` is one over a directory.
///
/// Any executor may poll the futures.
#[async_trait]
pub trait AddressSource: Send + Sync {
    /// What messages call the peer.
    fn name(&self) -> &str;

    /// The peer's addresses at this moment, in the order in which to try them.
    ///
    /// # Errors
    /// Those of an attempt to connect: `Permission`, `Version`, `InvalidRequest` and `Unsupported` end the attempts of a
    /// handle, others, such as `NotFound`, do not.
    async fn addresses(&self) -> Result<Vec<String>>;
}

/// A peer that stays where it is.
#[async_trait]
impl AddressSource for String {
    fn name(&self) -> &str {
        self
    }

    async fn addresses(&self) -> Result<Vec<String>> {
        Ok(vec![self.clone()])
    }
}
