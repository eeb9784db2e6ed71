//! The ends of peers, and of the endpoint where one cannot end alone.

use std::time::Duration;

use transport_core::ErrorKind;
use transport_core::spi::{Event, Status};

use crate::context::Posted;
use crate::endpoint::EfaEndpoint;
use crate::peers::Slot;

/// How long requests of a peer that is given up may take to fail by themselves. libfabric
/// cannot call a single write back: then the whole endpoint ends.
pub(crate) const GRACE: Duration = Duration::from_secs(2);

impl EfaEndpoint {
    /// Says goodbye to peers that nothing is posted to any more.
    pub(crate) fn goodbyes(&mut self) {
        self.leaving.retain(|peer| {
            let index = peer.0 as usize;
            if self.outstanding[index] > 0 {
                return true;
            }
            if let Slot::Leaving(Some(remote)) = std::mem::take(&mut self.slots[index]) {
                self.shared.addresses.remove(remote.address);
            }
            self.waiting.push_back(Event::PeerGone { peer: *peer });
            self.shared.peers.free(*peer);
            false
        });
    }

    /// Ends the endpoint where requests of a peer that was given up do not end.
    pub(crate) fn overdue(&mut self) {
        let now = self.shared.setup.clock.now();
        self.aborted.retain(|(peer, _)| self.outstanding[peer.0 as usize] > 0);
        if !self.aborted.iter().any(|(_, until)| *until <= now) || self.queues.is_none() {
            return;
        }
        tracing::warn!("requests to a peer that is gone do not end: the endpoint is closed");
        self.aborted.clear();
        let turn = self.shared.addresses.turn();
        self.queues = None;
        drop(turn);
        let lost = Status { kind: ErrorKind::DeviceLost, code: 0 };
        for posted in self.contexts.end_all() {
            self.ended(posted);
            self.waiting.push_back(match posted {
                Posted::Request { id, .. } => Event::Failed { id, status: lost },
                Posted::Receive { id } => Event::ReceiveFailed { id, status: lost },
            });
        }
        self.waiting.push_back(Event::DeviceLost { status: lost });
    }
}
