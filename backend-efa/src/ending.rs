//! The ends of peers, and of the endpoint where one cannot end alone.

use std::ptr::null_mut;
use std::time::Duration;

use libfabric_sys as sys;
use transport_core::ErrorKind;
use transport_core::spi::{Event, Status};

use crate::card;
use crate::context::Posted;
use crate::endpoint::EfaEndpoint;
use crate::peers::Slot;
use crate::status::kind;
use crate::words::{self, Words};

/// How long requests of a peer that is given up may take to fail by themselves. libfabric
/// cannot call a single write back: then the whole endpoint ends.
pub(crate) const GRACE: Duration = Duration::from_secs(2);

/// Turns between two looks at the event queue, which is empty as long as all is well.
const TURNS_PER_LOOK: u32 = 256;

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
        self.lose(0);
    }

    /// Looks now and then whether libfabric says that the endpoint is broken, and ends it then.
    pub(crate) fn look_at_events(&mut self) {
        let Some(queues) = self.queues.as_ref().filter(|queues| queues.device.info.card().is_some()) else {
            return;
        };
        if self.until_look == 0 {
            self.until_look = TURNS_PER_LOOK;
            if let Some(status) = queues.device.failure() {
                // Of what the provider itself sent or received. When a peer is gone, what we send to
                // it fails as well; all else may have taken something of ours with it.
                let code = card::error(status, sys::FI_ENODEV as i32);
                let words = words::provider(queues, status, null_mut());
                tracing::warn!(status, words, "libfabric reports a failure of its own");
                self.is_lost |= kind(code) != ErrorKind::PeerDied;
                self.words = Words::of(sys::FI_ENODEV as i32, words);
            }
        }
        self.until_look -= 1;
        if self.is_lost {
            self.lose(sys::FI_ENODEV as i32);
        }
    }

    /// Closes libfabric's endpoint, or leaves it open where that would never return: what is posted
    /// there may then still read its memory.
    pub(crate) fn close(&mut self) {
        let _turn = self.shared.addresses.turn();
        let queues = self.queues.take();
        let has_posted = self.is_lost || self.requests > 0;
        if queues.as_ref().is_some_and(|queues| has_posted && queues.close_may_hang()) {
            tracing::warn!("libfabric would wait forever for the endpoint to end: it is left as it is");
            std::mem::forget(queues);
        }
    }

    /// Ends the endpoint, which does not work any more, by the error `code`.
    pub(crate) fn lose(&mut self, code: i32) {
        self.aborted.clear();
        self.is_lost = true;
        self.close();
        let lost = Status { kind: ErrorKind::DeviceLost, code };
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
