//! The ends of peers, and of the device.

use std::ptr::null_mut;

use libfabric_sys as sys;
use multirail_spi::{ErrorKind, Event, PeerSlot, Status};

use crate::card;
use crate::context::Posted;
use crate::endpoint::EfaEndpoint;
use crate::lane::Lane;
use crate::own_receives::OwnReceives;
use crate::reaper;
use crate::status::kind;
use crate::words::{self, Words};

/// Turns between two looks at the event queue, which is empty as long as all is well.
const TURNS_PER_LOOK: u32 = 256;

impl EfaEndpoint {
    /// Says goodbye to peers that nothing is posted to any more.
    #[cold]
    pub(crate) fn goodbyes(&mut self) {
        let is_over = |peer: &mut PeerSlot| self.outstanding[peer.0 as usize] == 0;
        for peer in self.leaving.extract_if(.., is_over) {
            self.waiting.push_back(Event::PeerGone { peer });
            self.shared.peers.end(peer, self.haunted.remove(&peer));
            if let Some(own) = &mut self.own {
                own.forget(peer);
            }
            self.gone.push(peer);
        }
    }

    /// Frees the slots of peers whose goodbye was heard: who polls again has acted on what it was told. Were
    /// one offered anew before, the goodbye would be taken for the next peer's.
    #[cold]
    pub(crate) fn free_slots(&mut self) {
        let Self { gone, waiting, shared, .. } = self;
        let was_heard = |peer: &mut PeerSlot| !waiting.contains(&Event::PeerGone { peer: *peer });
        gone.extract_if(.., was_heard).for_each(|peer| shared.peers.free(peer));
    }

    /// Looks now and then whether libfabric says that the endpoint is broken, and ends it then.
    pub(crate) fn look_at_events(&mut self) {
        let Some(lane) = self.lane.as_deref_mut().filter(|lane| lane.queues.device.info.card().is_some())
        else {
            return;
        };
        let queues = &lane.queues;
        if self.until_look == 0 {
            self.until_look = TURNS_PER_LOOK;
            lane.posted.readmit(self.shared.setup.clock.now());
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

    /// Takes the lanes that are open, over which peers are not reached any more.
    fn take_lanes(&mut self) -> impl Iterator<Item = Box<Lane>> + use<> {
        let lanes = [self.former.take().map(|former| former.lane), self.lane.take()];
        lanes.iter().flatten().for_each(|lane| self.shared.peers.close_lane(lane.number));
        lanes.into_iter().flatten()
    }

    /// Closes what is open.
    pub(crate) fn close(&mut self) {
        for lane in self.take_lanes() {
            // A reaper keeps all that a lane may touch which libfabric does not close.
            let _ = reaper::close(&self.shared, lane, self.is_lost);
        }
    }

    /// Ends the endpoint, which does not work any more, by the error `code`.
    pub(crate) fn lose(&mut self, code: i32) {
        self.aborted.clear();
        self.is_lost = true;
        let lost = Status { kind: ErrorKind::DeviceLost, code };
        for mut lane in self.take_lanes() {
            let ended = lane.posted.end_all();
            // Before it is told: closed, or with a reaper that keeps all that it may touch.
            let _ = reaper::close(&self.shared, lane, true);
            ended.into_iter().for_each(|ended| self.fail(ended, lost));
        }
        let wanted = self.own.iter_mut().flat_map(OwnReceives::recall_all);
        self.waiting.extend(wanted.map(|receive| Event::ReceiveFailed { id: receive.id, status: lost }));
        self.waiting.push_back(Event::DeviceLost { status: lost });
    }

    /// Something that was posted has ended by `status`.
    pub(crate) fn fail(&mut self, ended: Posted, status: Status) {
        self.waiting.push_back(match ended {
            Posted::Request { id, peer } => {
                self.outstanding[peer.0 as usize] -= 1;
                Event::Failed { id, status }
            }
            Posted::Receive { receive, .. } => {
                if let Some(own) = self.own.as_mut().filter(|own| own.has(&receive)) {
                    return own.idle.push(receive);
                }
                Event::ReceiveFailed { id: receive.id, status }
            }
        });
    }
}
