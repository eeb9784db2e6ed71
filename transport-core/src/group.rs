//! Groups of peers: scatter, imms to all members, barriers.

mod barrier;
mod scatter;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

pub use barrier::Barrier;
pub use scatter::ScatterPart;

use crate::{Error, ErrorKind, Peer, PeerId, Result};

/// Peers of one fabric, in a fixed order, for operations on all of them. Clones share the group.
///
/// A group keeps no connection alive. A peer that dies stays a member, and operations on the group fail. Make a new
/// group of the remaining peers.
///
/// ```
/// # use std::time::Duration;
/// # use multirail_core::{Peer, PeerGroup, Region, RemoteRegion, Result, WriteOptions};
/// # fn spread(peers: Vec<Peer>, weights: &Region, shards: &[RemoteRegion]) -> Result<()> {
/// let group = PeerGroup::new(peers)?;
/// // The i-th peer gets the i-th share, and then imm 7.
/// let options = WriteOptions::new().imm(7);
/// group.scatter_evenly(weights, 0..weights.len(), shards, 0, &options)?.wait(Duration::from_secs(1))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct PeerGroup(Arc<Members>);

struct Members {
    peers: Vec<Peer>,
    /// The position of each peer in `peers`, sorted by the peers' numbers.
    by_id: Vec<(PeerId, usize)>,
}

impl PeerGroup {
    /// Makes a group of a list of peers, in this order.
    ///
    /// # Errors
    /// `InvalidRequest` if the list is empty, has a peer twice, or has peers of several fabrics.
    pub fn new(peers: impl IntoIterator<Item = Peer>) -> Result<Self> {
        let peers: Vec<_> = peers.into_iter().collect();
        let Some(first) = peers.first() else {
            return Err(refused("group", "the list has no peers; name at least one".into()));
        };
        if let Some(other) = peers.iter().find(|peer| peer.0.context.fabric_id != first.0.context.fabric_id) {
            return Err(refused(
                "group",
                format!("{} and {} are connected to different fabrics", first.id(), other.id()),
            ));
        }
        let mut by_id: Vec<_> = peers.iter().enumerate().map(|(place, peer)| (peer.id(), place)).collect();
        by_id.sort_unstable();
        if let Some(twice) = by_id.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(refused("group", format!("{} is in the list twice", twice[0].0)));
        }
        Ok(Self(Arc::new(Members { peers, by_id })))
    }

    /// The peers, in the group's order.
    pub fn peers(&self) -> &[Peer] {
        &self.0.peers
    }

    /// The number of peers; never 0.
    #[expect(clippy::len_without_is_empty, reason = "a group is never empty")]
    pub fn len(&self) -> usize {
        self.0.peers.len()
    }

    /// The position of a peer in the group.
    pub fn position(&self, peer: PeerId) -> Option<usize> {
        let found = self.0.by_id.binary_search_by_key(&peer, |(id, _)| *id);
        found.ok().map(|place| self.0.by_id[place].1)
    }

    /// The share of the peer at `position` when `range` is split evenly. The shares follow each other in the order of
    /// the group, and their lengths differ by one byte at most. Empty for a position outside the group.
    pub fn share(&self, position: usize, range: Range<usize>) -> Range<usize> {
        let (len, count) = (range.len() as u128, self.len() as u128);
        let at = |position: usize| range.start + (len * (position as u128).min(count) / count) as usize;
        at(position)..at(position.saturating_add(1))
    }
}

impl fmt::Debug for PeerGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.peers().iter().map(Peer::id)).finish()
    }
}

#[cold]
fn refused(operation: &'static str, why: String) -> Error {
    Error::new(ErrorKind::InvalidRequest, operation, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(peers: impl IntoIterator<Item = Peer>) -> ErrorKind {
        PeerGroup::new(peers).unwrap_err().kind()
    }

    #[test]
    fn holds_each_peer_once_and_in_order() {
        let peers: Vec<_> = (0..5).map(|_| Peer::alone()).rev().collect();
        let group = PeerGroup::new(peers.iter().rev().cloned()).unwrap();
        assert_eq!(group.len(), 5);
        for (place, peer) in peers.iter().rev().enumerate() {
            assert_eq!(group.position(peer.id()), Some(place));
            assert_eq!(group.peers()[place].id(), peer.id());
        }
        assert_eq!(group.position(PeerId::next()), None);
        assert_eq!(kind([]), ErrorKind::InvalidRequest);
        assert_eq!(kind([peers[1].clone(), peers[0].clone(), peers[1].clone()]), ErrorKind::InvalidRequest);
    }

    #[test]
    fn shares_cover_every_byte_once() {
        for count in 1..9 {
            let group = PeerGroup::new((0..count).map(|_| Peer::alone())).unwrap();
            for len in [0, 1, 5, 8, 1000, 4097] {
                let mut next = 3;
                for place in 0..count {
                    let share = group.share(place, 3..3 + len);
                    assert_eq!(share.start, next);
                    assert!((len / count..=len / count + 1).contains(&share.len()));
                    next = share.end;
                }
                assert_eq!(next, 3 + len);
                assert!(group.share(count, 3..3 + len).is_empty());
                assert!(group.share(usize::MAX, 3..3 + len).is_empty());
            }
        }
        assert_eq!(PeerGroup::new([Peer::alone()]).unwrap().share(0, 0..usize::MAX), 0..usize::MAX);
    }
}
