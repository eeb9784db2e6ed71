//! The peers at whose message rings the endpoint looks in each poll.
//!
//! A peer is *watched* from the moment that it may have written. If it then stays silent, and many peers are watched,
//! the endpoint arms the peer's ring and watches the peer no longer. The peer's next entry takes the arming back and
//! marks the peer in the domain's ready set, and the endpoint watches it again. So the cost of a poll depends on the
//! number of peers that are active.
//!
//! Peers in other processes can clear each other's marks. So the endpoint does not rely on marks alone: it also looks,
//! now and then, at the arming of the peers that it does not watch.

use std::collections::VecDeque;

use multirail_spi::{Completions, ReceiveRequest};

use super::peer_state::PeerState;
use crate::regions::Regions;
use crate::segment::ready_set::READY_SLOTS;
use crate::wakeup::Wakeup;

/// Peers that are watched even if they are silent. To look at a silent ring takes a few ns; to write into an armed one
/// takes a system call.
const ALWAYS_WATCHED: usize = 8;

/// Polls between two looks for silent peers: some 100 µs.
const POLLS_PER_LOOK: u32 = 1024;

/// Polls between two looks at the next few peers that are not watched, and the number of those: an eighth of a peer per
/// poll, which takes about one ns.
const POLLS_PER_STEP: u32 = 64;
const PEERS_PER_STEP: usize = 8;

/// The slots of the watched peers, in the order in which the endpoint looks at their rings.
#[derive(Default)]
pub(super) struct WatchedPeers {
    slots: Vec<u32>,
    /// The position in `slots` at which the rotation stopped.
    last: usize,
    /// Polls since the last look for silent peers.
    polls: u32,
    /// The slot of the next peer to look at although it may not be watched.
    next_unwatched: usize,
}

impl WatchedPeers {
    /// Watches a peer, unless it is watched.
    pub(super) fn watch(&mut self, peer: &mut PeerState) {
        if !std::mem::replace(&mut peer.is_watched, true) {
            peer.has_written = true;
            peer.disarm();
            self.slots.push(peer.slot().0);
        }
    }

    /// Forgets the peer in `slot`, which has left.
    pub(super) fn remove(&mut self, slot: u32) {
        self.slots.retain(|watched| *watched != slot);
    }

    /// Calls `run` with each watched peer.
    pub(super) fn for_each(&self, peers: &mut [Option<PeerState>], mut run: impl FnMut(&mut PeerState)) {
        for slot in &self.slots {
            if let Some(Some(peer)) = peers.get_mut(*slot as usize) {
                run(peer);
            }
        }
    }

    /// Takes events from the message rings of the watched peers, in rotation.
    #[inline]
    pub(super) fn receive_from_all(
        &mut self,
        peers: &mut [Option<PeerState>],
        receives: &mut VecDeque<ReceiveRequest>,
        regions: &Regions,
        into: &mut Completions,
    ) {
        let mut silent = 0;
        while silent < self.slots.len() && into.spare() > 0 {
            self.last = if self.last + 1 < self.slots.len() { self.last + 1 } else { 0 };
            let slot = self.slots[self.last] as usize;
            let received = peers[slot].as_mut().is_some_and(|peer| peer.receive(receives, regions, into));
            silent = if received { 0 } else { silent + 1 };
        }
    }

    /// Returns true if all of `peers` are watched.
    #[inline]
    pub(super) fn are_all(&self, peers: &[Option<PeerState>]) -> bool {
        self.slots.len() >= peers.len()
    }

    /// Watches the peers that have written although they are not watched.
    #[cold]
    pub(super) fn watch_written(&mut self, peers: &mut [Option<PeerState>]) {
        peers
            .iter_mut()
            .flatten()
            .filter(|peer| peer.has_written_unwatched())
            .for_each(|peer| self.watch(peer));
    }

    /// Now and then, stops to watch the peers that are silent, and looks at some of those that are not watched.
    #[inline]
    pub(super) fn after_poll(&mut self, peers: &mut [Option<PeerState>], wakeup: &Wakeup) {
        self.polls += 1;
        if self.polls.is_multiple_of(POLLS_PER_STEP) && !self.are_all(peers) && wakeup.is_shared() {
            self.look_at_some(peers);
        }
        if self.polls >= POLLS_PER_LOOK {
            self.polls = 0;
            if self.slots.len() > ALWAYS_WATCHED {
                self.leave_silent_peers(peers);
            }
        }
    }

    /// Looks at the next few peers. An endpoint that never sleeps so finds each peer whose mark was cleared.
    #[cold]
    fn look_at_some(&mut self, peers: &mut [Option<PeerState>]) {
        if self.next_unwatched >= peers.len() {
            self.next_unwatched = 0;
        }
        let end = (self.next_unwatched + PEERS_PER_STEP).min(peers.len());
        self.watch_written(&mut peers[self.next_unwatched..end]);
        self.next_unwatched = end;
    }

    /// Arms the rings of the peers that have not written since the last look, and watches these peers no longer.
    #[cold]
    fn leave_silent_peers(&mut self, peers: &mut [Option<PeerState>]) {
        self.slots.retain(|slot| {
            let Some(peer) = &mut peers[*slot as usize] else { return false };
            let is_silent = !std::mem::take(&mut peer.has_written) && *slot < READY_SLOTS;
            peer.is_watched = !(is_silent && peer.may_be_left());
            peer.is_watched
        });
    }
}
