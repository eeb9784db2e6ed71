//! The endpoint: posts, polls, and says goodbye to peers.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use libfabric_sys as sys;
use transport_core::spi::{
    Armed, Batch, Completions, Endpoint, EndpointConfig, Event, PeerSlot, PostResult, ReceiveRequest, Status,
};
use transport_core::{ErrorKind, Time};

use crate::arriving::Arrival;
use crate::context::{Contexts, Posted};
use crate::domain::Shared;
use crate::lane::Lane;
use crate::moving::{Former, grace};
use crate::own_receives::OwnReceives;
use crate::peers::View;
use crate::posting::{FULL, lost, refused};
use crate::report::Entries;
use crate::settling::Settling;
use crate::submit::Local;
use crate::tag::Seat;
use crate::words::Words;

/// What a request to somebody who is no peer any more gets.
const NOBODY: isize = -(sys::FI_ENOTCONN as isize);

pub(crate) struct EfaEndpoint {
    /// Taken out while it is worked with, which a box makes cheap. None once the device is lost.
    pub(crate) lane: Option<Box<Lane>>,
    /// The lane before, until nothing of others' goes over it.
    pub(crate) former: Option<Box<Former>>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) local: Local,
    pub(crate) slots: Vec<View>,
    /// Whose those slots are.
    pub(crate) seats: Vec<Seat>,
    seen: u64,
    /// The control side has changed a slot since the last poll: the caller may hold requests for the new address.
    is_changed: bool,
    /// Slots that wait for their goodbye.
    pub(crate) leaving: Vec<PeerSlot>,
    /// Slots whose goodbye is said, and perhaps not heard yet.
    pub(crate) gone: Vec<PeerSlot>,
    /// Requests posted to each slot.
    pub(crate) outstanding: Vec<u32>,
    pub(crate) send_depth: usize,
    pub(crate) recv_depth: usize,
    /// Slots that were given up with requests posted, and until when these may end.
    pub(crate) aborted: Vec<(PeerSlot, Time)>,
    /// Slots with requests that failed where the provider emulates writes. It then reports each
    /// packet of a request as an error, which is why contexts retire, and takes the request off its
    /// list as often, which may bring another back there (`rxr_cq_write_tx_error`; 1.17): with the
    /// address gone, its progress follows a null pointer.
    pub(crate) haunted: HashSet<PeerSlot>,
    /// Failures that are told a little later.
    pub(crate) settling: Settling,
    /// Turns until the next look at libfabric's events.
    pub(crate) until_look: u32,
    pub(crate) words: Words,
    /// Where completions are read into; taken out meanwhile.
    pub(crate) entries: Option<Box<Entries>>,
    /// The device does not work any more, which is told by the next poll.
    pub(crate) is_lost: bool,
    /// Events that had no room.
    pub(crate) waiting: VecDeque<Event>,
    /// Where imms take receives.
    pub(crate) own: Option<OwnReceives>,
    /// What came from nobody who was known when the slots were last looked at.
    pub(crate) doubtful: Vec<Arrival>,
}

impl EfaEndpoint {
    pub(crate) fn new(
        lane: Lane,
        shared: Arc<Shared>,
        config: EndpointConfig,
        own: Option<OwnReceives>,
    ) -> Self {
        let (send, recv) = (shared.capabilities.send_depth, shared.capabilities.recv_depth);
        // Peers may know the lane of an endpoint before this one.
        let moved = (lane.number > 0).then_some(Event::Moved);
        Self {
            local: Local::new(&lane.queues, shared.place()),
            lane: Some(Box::new(lane)),
            former: None,
            shared,
            slots: Vec::new(),
            seats: Vec::new(),
            seen: u64::MAX,
            is_changed: false,
            leaving: Vec::new(),
            gone: Vec::new(),
            outstanding: Vec::new(),
            send_depth: config.send_depth.unwrap_or(send).min(send) as usize,
            recv_depth: recv as usize,
            aborted: Vec::new(),
            haunted: HashSet::new(),
            settling: Settling::default(),
            until_look: 0,
            words: Words::default(),
            is_lost: false,
            entries: Some(Box::new(Entries::new())),
            waiting: moved.into_iter().collect(),
            own,
            doubtful: Vec::new(),
        }
    }

    pub(crate) fn refresh(&mut self) {
        if self.shared.peers.refresh(&mut self.seen, &mut self.slots, &mut self.seats) {
            self.is_changed = true;
            self.outstanding.resize(self.slots.len(), 0);
            let leaving = (0_u32..).zip(&self.slots).filter(|(_, slot)| **slot == View::Leaving);
            self.leaving = leaving.map(|(index, _)| PeerSlot(index)).collect();
        }
    }

    /// What a context stood for is over.
    pub(crate) fn end(&mut self, posted: &mut Contexts, context: *mut std::ffi::c_void) -> Option<Posted> {
        let ended = posted.end(context)?;
        match ended {
            Posted::Request { peer, .. } => {
                posted.requests -= 1;
                self.outstanding[peer.0 as usize] -= 1;
            }
            Posted::Receive { .. } => posted.receives -= 1,
        }
        Some(ended)
    }
}

impl Endpoint for EfaEndpoint {
    unsafe fn post(&mut self, batch: &Batch) -> PostResult {
        self.refresh();
        let Some(mut lane) = self.lane.take() else { return lost() };
        let number = lane.number;
        let mut turn = lane.turn();
        let (mut accepted, mut code) = (0, 0);
        for (run, pieces) in batch.runs() {
            let taken;
            (taken, code) = match self.slots.get(run.peer.0 as usize).copied() {
                // SAFETY: by the caller.
                Some(View::Up(remote)) if remote.lane == number => unsafe {
                    self.post_run(&mut turn, run, pieces, &remote)
                },
                // SAFETY: by the caller.
                Some(View::Up(remote)) => unsafe { self.post_former(run, pieces, &remote) },
                Some(View::Waiting) => (0, FULL),
                _ => (0, NOBODY),
            };
            accepted += taken;
            if code != 0 {
                break;
            }
        }
        drop(turn);
        self.lane = Some(lane);
        match code {
            0 => PostResult { accepted, error: None },
            code => refused(accepted, code),
        }
    }

    unsafe fn post_recv(&mut self, batch: &[ReceiveRequest]) -> PostResult {
        if let (Some(own), true) = (&mut self.own, self.lane.is_some()) {
            // SAFETY: by the caller.
            let accepted = unsafe { own.want(batch, self.recv_depth) };
            own.tell(&mut self.waiting);
            return PostResult { accepted, error: None };
        }
        let Some(mut lane) = self.lane.take() else { return lost() };
        // SAFETY: by the caller.
        let result = unsafe { self.post_receives(&mut lane.turn(), batch) };
        self.lane = Some(lane);
        result
    }

    fn poll(&mut self, into: &mut Completions) {
        if !self.gone.is_empty() {
            self.free_slots();
        }
        self.refresh();
        self.is_changed = false;
        if let Some(mut lane) = self.lane.take() {
            self.visit(&mut lane, into);
            self.lane = Some(lane);
        }
        if self.former.is_some() || !self.aborted.is_empty() {
            self.move_on(into);
        }
        if !self.doubtful.is_empty() {
            self.settle();
            into.stir();
        }
        if self.own.is_some() {
            self.post_own();
        }
        let (shared, slots) = (&self.shared, &self.slots);
        let has_left =
            |peer: PeerSlot| !matches!(slots.get(peer.0 as usize), Some(View::Up(_) | View::Waiting));
        self.settling.tell(|| shared.setup.clock.now(), has_left, &mut self.waiting);
        if !self.leaving.is_empty() {
            self.goodbyes();
        }
        self.look_at_events();
        while into.spare() > 0
            && let Some(event) = self.waiting.pop_front()
        {
            let _ = into.push(event);
        }
        self.shared.device.fences.settle(into);
    }

    fn arm(&mut self) -> Armed {
        self.refresh();
        let is_over = |peer: &PeerSlot| self.outstanding[peer.0 as usize] == 0;
        let has_more =
            !self.waiting.is_empty() || !self.doubtful.is_empty() || self.leaving.iter().any(is_over);
        // Nothing wakes the caller when a peer has taken the new address. The caller then posts the requests that it
        // holds for that peer.
        if has_more || self.is_changed || self.former.is_some() || self.slots.contains(&View::Waiting) {
            return Armed::Ready;
        }
        let Some(Lane { queues, .. }) = self.lane.as_deref() else { return Armed::Unsupported };
        let Some(descriptor) = queues.descriptor else { return Armed::Unsupported };
        let mut fid = queues.cq.fid();
        // SAFETY: both are open; the list has one entry.
        match unsafe { sys::fi_trywait(queues.device.fabric.as_ptr(), &raw mut fid, 1) } {
            0 => Armed::Fd(descriptor),
            _ => Armed::Ready,
        }
    }

    fn due(&self) -> Time {
        self.aborted.iter().map(|(_, until)| *until).fold(self.settling.due(), Time::min)
    }

    fn abort(&mut self, peer: PeerSlot) {
        self.refresh();
        if self.outstanding.get(peer.0 as usize).is_some_and(|posted| *posted > 0) {
            let until = self.shared.setup.clock.now().after(grace(&self.shared.device.info));
            self.aborted.push((peer, until));
        }
    }

    fn cancel_recv(&mut self, id: u64) -> bool {
        if let Some(own) = &mut self.own {
            if own.recall(id) {
                let status = Status { kind: ErrorKind::Cancelled, code: sys::FI_ECANCELED as i32 };
                self.waiting.push_back(Event::ReceiveFailed { id, status });
            }
            return true;
        }
        let mut is_taken_back = true;
        self.doubtful.iter_mut().for_each(|arrival| arrival.recall(id));
        let former = self.former.iter_mut().map(|former| &mut former.lane);
        for lane in self.lane.iter_mut().chain(former) {
            let Some(context) = lane.posted.recall(id) else { continue };
            let _turn = lane.queues.addresses.turn();
            // SAFETY: the endpoint is open and the context posted.
            let code = unsafe { sys::fi_cancel(lane.queues.ep.as_ptr(), context) };
            if code != 0 {
                // efa-direct never does.
                tracing::debug!(code, "libfabric does not cancel a receive");
                is_taken_back = false;
            }
        }
        is_taken_back
    }

    fn describe(&self, status: Status) -> String {
        self.words.describe(status, &self.shared.device)
    }
}

impl EfaEndpoint {
    /// Reads what happened on a lane.
    #[inline(always)]
    pub(crate) fn visit(&mut self, lane: &mut Lane, into: &mut Completions) {
        self.drain(&mut lane.turn(), into.spare());
        if lane.is_stirred() {
            into.stir();
        }
    }
}

impl Drop for EfaEndpoint {
    fn drop(&mut self) {
        // First of all: after it nothing is touched.
        self.close();
        // What was said of them is heard by nobody any more.
        self.gone.drain(..).for_each(|slot| self.shared.peers.free(slot));
        self.shared.closed();
    }
}
