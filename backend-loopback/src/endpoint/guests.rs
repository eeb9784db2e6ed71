//! Peers of an endpoint that come and go.

use multirail_spi::{ErrorKind, Event, PeerSlot};

use super::LoopbackEndpoint;
use crate::attached::Attached;
use crate::status::status;

impl LoopbackEndpoint {
    #[inline]
    pub(super) fn refresh(&mut self) {
        if self.shared.core.peers.version() != self.seen {
            self.look_again();
        }
    }

    /// Learns who came and who is to go.
    #[cold]
    fn look_again(&mut self) {
        let core = self.shared.core.clone();
        self.seen = core.peers.version();
        for (slot, peer) in core.peers.all() {
            let at = slot.0 as usize;
            if self.peers.len() <= at {
                self.peers.resize_with(at + 1, || None);
            }
            if self.peers[at].is_none() {
                self.peers[at] = Attached::new(slot, peer.inbound);
            }
            let Some(attached) = &mut self.peers[at] else { continue };
            if attached.leaving {
                continue;
            }
            attached.outbound = peer.outbound;
            attached.leaving = peer.leaving;
            if peer.leaving {
                self.parting.push(slot);
            }
        }
    }

    /// Says goodbye to those who leave, once no GPU is at work for them.
    #[inline]
    pub(super) fn part(&mut self) {
        if self.parting.is_empty() {
            return;
        }
        for slot in std::mem::take(&mut self.parting) {
            match self.gpus.serves(slot) {
                true => self.parting.push(slot),
                false => self.say_goodbye(slot),
            }
        }
    }

    /// Files all that is left of a peer, and last that it is gone.
    fn say_goodbye(&mut self, slot: PeerSlot) {
        if let Some(model) = &mut self.model {
            model.abort(slot, |id| self.ended.request(id, Err(status(ErrorKind::PeerDied))));
        }
        self.outlets.remove(slot, &mut self.ended);
        self.gpus.stop(slot, ErrorKind::PeerDied, &mut self.ended);
        if let Some(Some(peer)) = self.peers.get_mut(slot.0 as usize) {
            peer.outbound = None;
            peer.last_words().for_each(|event| self.ended.event(event));
        }
        self.ended.event(Event::PeerGone { peer: slot });
    }

    /// Frees the slots of peers whose last event is handled: who polls again has
    /// handled it. Sooner, it could be taken for the end of the slot's next peer.
    pub(super) fn free_slots(&mut self) {
        for slot in self.gone.drain(..) {
            if let Some(gone) = self.peers.get_mut(slot.0 as usize).and_then(Option::take) {
                self.shared.core.peers.remove(slot, &gone.inbound);
            }
        }
    }
}
