//! The connected members between two changes.

use std::sync::Arc;

use multirail::{PeerGroup, Result};

use super::ConnectedMember;

/// The connected members of an [`ElasticGroup`](super::ElasticGroup) between two changes. It never changes itself.
pub struct Epoch {
    number: u64,
    id: u64,
    members: Vec<Arc<ConnectedMember>>,
}

impl Epoch {
    pub(super) fn new(number: u64, own: u64, members: Vec<Arc<ConnectedMember>>) -> Self {
        let mut incarnations: Vec<_> = members.iter().map(|member| member.peer().incarnation()).collect();
        incarnations.push(own);
        incarnations.sort_unstable();
        let bytes: Vec<_> = incarnations.into_iter().flat_map(u64::to_le_bytes).collect();
        Self { number, id: crate::hash::fnv(&bytes), members }
    }

    /// The epoch's number on this side. Each change of the connected members makes a larger one, beginning with 0.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// A number of the set of processes: the members' incarnations and this side's. Processes that are connected to the
    /// same others have epochs of the same `id`, whatever their numbers.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The members, sorted by their names.
    pub fn members(&self) -> &[Arc<ConnectedMember>] {
        &self.members
    }

    /// The member of this name.
    pub fn member(&self, name: &str) -> Option<&Arc<ConnectedMember>> {
        self.members.iter().find(|member| member.name() == name)
    }

    /// The members' peers as a group: for scatter, imms and barriers.
    ///
    /// # Errors
    /// `InvalidRequest` if the epoch has no members.
    pub fn peers(&self) -> Result<PeerGroup> {
        PeerGroup::new(self.members.iter().map(|member| member.peer().clone()))
    }
}
