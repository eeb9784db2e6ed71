//! A member that this side is connected to.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use multirail::{Peer, RemoteRegion, Result};

use crate::Member;

/// A member of a directory, and the connection to it. Another connection to the same member is another
/// `ConnectedMember`.
pub struct ConnectedMember {
    member: Member,
    peer: Peer,
    /// The regions that this side has imported over this connection, by the names that the member gave them.
    regions: Mutex<HashMap<String, RemoteRegion>>,
}

impl ConnectedMember {
    pub(super) fn new(member: Member, peer: Peer) -> Self {
        Self { member, peer, regions: Mutex::default() }
    }

    /// The member, as the directory listed it when the connection was made.
    pub fn member(&self) -> &Member {
        &self.member
    }

    /// The member's name.
    pub fn name(&self) -> &str {
        &self.member.name
    }

    /// The connection.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// The region that the member has published as `name`. It is looked up once per connection.
    ///
    /// # Errors
    /// Those of [`Peer::region`].
    pub async fn region(&self, name: &str) -> Result<RemoteRegion> {
        if let Some(known) = self.known(name) {
            return Ok(known);
        }
        let region = self.peer.region(name).await?;
        self.regions.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned(), region.clone());
        Ok(region)
    }

    fn known(&self, name: &str) -> Option<RemoteRegion> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }
}
