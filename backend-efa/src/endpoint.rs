//! The endpoint: posts, polls, and says goodbye to peers.

use std::collections::{HashSet, VecDeque};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

use libfabric_sys as sys;
use multirail_spi::{
    Armed, Batch, ClosedSlots, Completions, Endpoint, EndpointConfig, ErrorKind, Event, PeerSlot, Piece,
    PostResult, ReceiveRequest, Status, Time, WorkRequest,
};

use crate::card;
use crate::completion_queue::{AT_ONCE, Arrival, Entries};
use crate::context::{Contexts, Posted};
use crate::deferred_failures::DeferredFailures;
use crate::domain::Shared;
use crate::endpoint_replacement::{RetiringEndpoint, grace};
use crate::error_text::{self, ErrorText};
use crate::fabric_endpoint::{EndpointGuard, FabricEndpoint};
use crate::own_receives::OwnReceives;
use crate::peers::{Remote, View};
use crate::queues::Queues;
use crate::reaper;
use crate::status::{kind, status};
use crate::submit::{Local, submit};
use crate::tag::PeerTag;

/// The answer to a request to a peer that has left.
const NOBODY: isize = -(sys::FI_ENOTCONN as isize);

/// libfabric's answer if a queue is full.
pub(crate) const FULL: isize = -(sys::FI_EAGAIN as isize);
/// The answer to a post to a lost device.
pub(crate) const NO_DEVICE: isize = -(sys::FI_ENODEV as isize);

/// The attempts in a row to post a request to a full queue.
const TRIES: usize = 16;
/// Polls between two looks at the event queue, which stays empty as long as the device works.
const TURNS_PER_LOOK: u32 = 256;

pub(crate) struct EfaEndpoint {
    /// Taken out while it is worked with, which a box makes cheap. None once the device is lost.
    pub(crate) endpoint: Option<Box<FabricEndpoint>>,
    /// The endpoint before, until no peer needs it.
    pub(crate) retiring: Option<Box<RetiringEndpoint>>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) local: Local,
    pub(crate) slots: Vec<View>,
    /// The peer tag of each slot.
    pub(crate) peer_tags: Vec<PeerTag>,
    seen: u64,
    /// The control side has changed a slot since the last poll: the engine may hold requests for the new address.
    is_changed: bool,
    /// Slots that wait for their `PeerGone`.
    pub(crate) leaving: Vec<PeerSlot>,
    /// Slots whose `PeerGone` is reported. They are free once the engine polls again.
    pub(crate) closed: ClosedSlots,
    /// The number of requests posted to each slot.
    pub(crate) outstanding: Vec<u32>,
    pub(crate) send_depth: usize,
    pub(crate) recv_depth: usize,
    /// Aborted slots with requests posted, and until when these may end by themselves.
    pub(crate) aborted: Vec<(PeerSlot, Time)>,
    /// Slots with requests that failed where the provider emulates writes. It then reports each
    /// packet of a request as an error, which is why contexts retire, and takes the request off its
    /// list as often, which may bring another back there (`rxr_cq_write_tx_error`; 1.17): with the
    /// address gone, its progress follows a null pointer.
    pub(crate) pinned_addresses: HashSet<PeerSlot>,
    /// Failures that the endpoint reports a little later.
    pub(crate) deferred: DeferredFailures,
    /// Polls until the next look at libfabric's event queue.
    pub(crate) until_look: u32,
    pub(crate) words: ErrorText,
    /// Where completions are read into; taken out meanwhile.
    pub(crate) entries: Option<Box<Entries>>,
    /// The device is lost. The next poll reports that.
    pub(crate) is_lost: bool,
    /// Events that the last poll had no room for.
    pub(crate) waiting: VecDeque<Event>,
    /// The receives of the backend itself, where imms take receives.
    pub(crate) own: Option<OwnReceives>,
    /// Arrivals from no peer of the slots as they were last read.
    pub(crate) doubtful: Vec<Arrival>,
}

impl EfaEndpoint {
    pub(crate) fn new(
        endpoint: FabricEndpoint,
        shared: Arc<Shared>,
        config: EndpointConfig,
        own: Option<OwnReceives>,
    ) -> Self {
        let (send, recv) = (shared.capabilities.send_depth, shared.capabilities.recv_depth);
        // Peers may know an earlier endpoint of the domain.
        let moved = (endpoint.number > 0).then_some(Event::EndpointChanged);
        Self {
            local: Local::new(&endpoint.queues, shared.place()),
            endpoint: Some(Box::new(endpoint)),
            retiring: None,
            shared,
            slots: Vec::new(),
            peer_tags: Vec::new(),
            seen: u64::MAX,
            is_changed: false,
            leaving: Vec::new(),
            closed: ClosedSlots::default(),
            outstanding: Vec::new(),
            send_depth: config.send_depth.unwrap_or(send).min(send) as usize,
            recv_depth: recv as usize,
            aborted: Vec::new(),
            pinned_addresses: HashSet::new(),
            deferred: DeferredFailures::default(),
            until_look: 0,
            words: ErrorText::default(),
            is_lost: false,
            entries: Some(Box::new(Entries::new())),
            waiting: moved.into_iter().collect(),
            own,
            doubtful: Vec::new(),
        }
    }

    pub(crate) fn refresh(&mut self) {
        if self.shared.peers.refresh(&mut self.seen, &mut self.slots, &mut self.peer_tags) {
            self.is_changed = true;
            self.outstanding.resize(self.slots.len(), 0);
            let leaving = (0_u32..).zip(&self.slots).filter(|(_, slot)| **slot == View::Leaving);
            self.leaving = leaving.map(|(index, _)| PeerSlot(index)).collect();
        }
    }

    /// Ends the request or receive of a context.
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

    /// Reads the completions of one of the two libfabric endpoints.
    #[inline(always)]
    pub(crate) fn visit(&mut self, endpoint: &mut FabricEndpoint, into: &mut Completions) {
        self.drain(&mut endpoint.guard(), into.spare());
        if endpoint.made_progress() {
            into.note_progress();
        }
    }

    /// Posts a run to a peer that knows this libfabric endpoint. Returns the number of requests taken, and libfabric's
    /// answer to the next.
    ///
    /// # Safety
    /// As `Endpoint::post`.
    pub(crate) unsafe fn post_run(
        &mut self,
        guard: &mut EndpointGuard<'_>,
        run: &WorkRequest,
        pieces: &[Piece],
        remote: &Remote,
    ) -> (usize, isize) {
        let (mut taken, mut tries) = (0, 0);
        loop {
            let EndpointGuard { queues, posted, .. } = guard;
            let room = (self.send_depth - posted.requests).min(posted.spare()).min(pieces.len() - taken);
            let next = (taken, &pieces[taken..taken + room]);
            // SAFETY: by the caller; contexts stay where they are until the completion.
            let (more, code) = unsafe { submit(queues, posted, run, next, remote, &self.local) };
            self.outstanding[run.peer.0 as usize] += more as u32;
            posted.requests += more;
            taken += more;
            tries = if more > 0 { 0 } else { tries + 1 };
            match code {
                0 if taken == pieces.len() => return (taken, 0),
                0 => return (taken, FULL),
                // A full queue may have room again sooner than the engine comes back.
                code if code == FULL && tries < TRIES => self.drain(guard, AT_ONCE),
                code => return (taken, self.refusal(guard.queues, code)),
            }
        }
    }

    /// The meaning of a refused post. Notes a lost device.
    fn refusal(&mut self, queues: &Queues, code: isize) -> isize {
        let code = queues.device.refusal(code);
        self.is_lost |= code == NO_DEVICE;
        code
    }

    /// Posts the idle receives of the backend itself, and hands on the messages that came into others.
    #[cold]
    pub(crate) fn post_own(&mut self) {
        let Some(mut own) = self.own.take() else { return };
        own.tell(&mut self.waiting);
        if !own.idle.is_empty()
            && let Some(mut endpoint) = self.endpoint.take()
        {
            // SAFETY: the memory is registered, and kept until the endpoint is closed.
            let posted = unsafe { self.post_receives(&mut endpoint.guard(), &own.idle) };
            own.idle.drain(..posted.accepted);
            self.endpoint = Some(endpoint);
        }
        self.own = Some(own);
    }

    /// Posts receives to one of the two libfabric endpoints.
    ///
    /// # Safety
    /// As `Endpoint::post_recv`.
    pub(crate) unsafe fn post_receives(
        &mut self,
        guard: &mut EndpointGuard<'_>,
        batch: &[ReceiveRequest],
    ) -> PostResult {
        let EndpointGuard { queues, posted, .. } = guard;
        // The length of a card's receive has 16 bits (`efa_io_rx_desc` of rdma-core). Packets are shorter than that.
        let longest = if queues.device.info.is_direct() { u64::from(u16::MAX) } else { u64::MAX };
        for (accepted, receive) in batch.iter().enumerate() {
            if posted.receives == self.recv_depth {
                return refused(accepted, FULL);
            }
            let Some(context) = posted.take_receive(receive) else { return refused(accepted, FULL) };
            let iovec =
                sys::iovec { iov_base: receive.local.cast(), iov_len: receive.len.min(longest) as usize };
            let mut desc = receive.lkey as *mut c_void;
            let msg = sys::fi_msg {
                msg_iov: &raw const iovec,
                desc: &raw mut desc,
                iov_count: 1,
                addr: sys::FI_ADDR_UNSPEC,
                context,
                data: 0,
            };
            let flags = u64::from(sys::FI_COMPLETION);
            // SAFETY: by the caller; the context stays where it is until the completion.
            let code = unsafe { sys::fi_recvmsg(queues.ep.as_ptr(), &raw const msg, flags) };
            if code != 0 {
                posted.end(context);
                if code != FULL && queues.device.info.has_states() {
                    // A message that had come before takes the receive, and libfabric reports its error once more (2.1,
                    // `efa_rdm_srx_start`).
                    self.retire(posted, context);
                }
                return refused(accepted, self.refusal(queues, code));
            }
            posted.receives += 1;
        }
        PostResult { accepted: batch.len(), error: None }
    }

    /// Reports the peers that have left and have no request posted any more.
    #[cold]
    pub(crate) fn report_closed_peers(&mut self) {
        let is_over = |peer: &mut PeerSlot| self.outstanding[peer.0 as usize] == 0;
        for peer in self.leaving.extract_if(.., is_over) {
            self.waiting.push_back(Event::PeerGone { peer });
            self.shared.peers.end(peer, self.pinned_addresses.remove(&peer));
            if let Some(own) = &mut self.own {
                own.forget(peer);
            }
            self.closed.push(peer);
        }
    }

    /// Frees the slots whose `PeerGone` the engine has acted on, as it polls again.
    #[cold]
    pub(crate) fn free_slots(&mut self) {
        self.closed.take_heard(&self.waiting).for_each(|peer| self.shared.peers.free(peer));
    }

    /// Looks now and then whether libfabric reports a broken device, and gives the device up then.
    pub(crate) fn look_at_events(&mut self) {
        let Some(endpoint) =
            self.endpoint.as_deref_mut().filter(|endpoint| endpoint.queues.device.info.card().is_some())
        else {
            return;
        };
        let queues = &endpoint.queues;
        if self.until_look == 0 {
            self.until_look = TURNS_PER_LOOK;
            endpoint.posted.readmit(self.shared.setup.clock.now());
            if let Some(status) = queues.device.failure() {
                // The failure of a packet of the provider itself. A packet to a peer that is gone fails as well; any
                // other failure may have lost one of our requests.
                let code = card::error(status, sys::FI_ENODEV as i32);
                let words = error_text::provider(queues, status, null_mut());
                tracing::warn!(status, words, "libfabric reports a failure of its own");
                self.is_lost |= kind(code) != ErrorKind::PeerDied;
                self.words = ErrorText::of(sys::FI_ENODEV as i32, words);
            }
        }
        self.until_look -= 1;
        if self.is_lost {
            self.lose(sys::FI_ENODEV as i32);
        }
    }

    /// Takes the open libfabric endpoints: peers are not reached over them any more.
    fn take_endpoints(&mut self) -> impl Iterator<Item = Box<FabricEndpoint>> + use<> {
        let endpoints = [self.retiring.take().map(|retiring| retiring.endpoint), self.endpoint.take()];
        endpoints.iter().flatten().for_each(|endpoint| self.shared.peers.close_endpoint(endpoint.number));
        endpoints.into_iter().flatten()
    }

    /// Closes the open libfabric endpoints.
    pub(crate) fn close(&mut self) {
        for endpoint in self.take_endpoints() {
            // If libfabric does not close an endpoint, a reaper thread keeps all memory that it may touch.
            let _ = reaper::close(&self.shared, endpoint, self.is_lost);
        }
    }

    /// Gives up the lost device, with the error `code`.
    pub(crate) fn lose(&mut self, code: i32) {
        self.aborted.clear();
        self.is_lost = true;
        let lost = Status { kind: ErrorKind::DeviceLost, code };
        for mut endpoint in self.take_endpoints() {
            let ended = endpoint.posted.end_all();
            // Before the loss is reported, the endpoint is closed, or a reaper keeps all memory that it may touch.
            let _ = reaper::close(&self.shared, endpoint, true);
            ended.into_iter().for_each(|ended| self.fail(ended, lost));
        }
        let wanted = self.own.iter_mut().flat_map(OwnReceives::recall_all);
        self.waiting.extend(wanted.map(|receive| Event::ReceiveFailed { id: receive.id, status: lost }));
        self.waiting.push_back(Event::DeviceLost { status: lost });
    }

    /// Reports that a posted request or receive has failed by `status`.
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

impl Endpoint for EfaEndpoint {
    unsafe fn post(&mut self, batch: &Batch) -> PostResult {
        self.refresh();
        let Some(mut endpoint) = self.endpoint.take() else { return lost() };
        let number = endpoint.number;
        let mut guard = endpoint.guard();
        let (mut accepted, mut code) = (0, 0);
        for (run, pieces) in batch.runs() {
            let taken;
            (taken, code) = match self.slots.get(run.peer.0 as usize).copied() {
                // SAFETY: by the caller.
                Some(View::Up(remote)) if remote.endpoint == number => unsafe {
                    self.post_run(&mut guard, run, pieces, &remote)
                },
                // SAFETY: by the caller.
                Some(View::Up(remote)) => unsafe { self.post_retiring(run, pieces, &remote) },
                Some(View::Waiting) => (0, FULL),
                _ => (0, NOBODY),
            };
            accepted += taken;
            if code != 0 {
                break;
            }
        }
        drop(guard);
        self.endpoint = Some(endpoint);
        match code {
            0 => PostResult { accepted, error: None },
            code => refused(accepted, code),
        }
    }

    unsafe fn post_recv(&mut self, batch: &[ReceiveRequest]) -> PostResult {
        if let (Some(own), true) = (&mut self.own, self.endpoint.is_some()) {
            // SAFETY: by the caller.
            let accepted = unsafe { own.want(batch, self.recv_depth) };
            own.tell(&mut self.waiting);
            return PostResult { accepted, error: None };
        }
        let Some(mut endpoint) = self.endpoint.take() else { return lost() };
        // SAFETY: by the caller.
        let result = unsafe { self.post_receives(&mut endpoint.guard(), batch) };
        self.endpoint = Some(endpoint);
        result
    }

    fn poll(&mut self, into: &mut Completions) {
        if !self.closed.is_empty() {
            self.free_slots();
        }
        self.refresh();
        self.is_changed = false;
        if let Some(mut endpoint) = self.endpoint.take() {
            self.visit(&mut endpoint, into);
            self.endpoint = Some(endpoint);
        }
        if self.retiring.is_some() || !self.aborted.is_empty() {
            self.proceed(into);
        }
        if !self.doubtful.is_empty() {
            self.settle();
            into.note_progress();
        }
        if self.own.is_some() {
            self.post_own();
        }
        let (shared, slots) = (&self.shared, &self.slots);
        let has_left =
            |peer: PeerSlot| !matches!(slots.get(peer.0 as usize), Some(View::Up(_) | View::Waiting));
        self.deferred.tell(|| shared.setup.clock.now(), has_left, &mut self.waiting);
        if !self.leaving.is_empty() {
            self.report_closed_peers();
        }
        self.look_at_events();
        while into.spare() > 0
            && let Some(event) = self.waiting.pop_front()
        {
            let _ = into.push(event);
        }
        self.shared.device.fences.flush_if_arrivals(into);
    }

    fn arm(&mut self) -> Armed {
        self.refresh();
        let is_over = |peer: &PeerSlot| self.outstanding[peer.0 as usize] == 0;
        let has_more =
            !self.waiting.is_empty() || !self.doubtful.is_empty() || self.leaving.iter().any(is_over);
        // Nothing wakes the caller when a peer has taken the new address. It then posts what it holds for that peer.
        if has_more || self.is_changed || self.retiring.is_some() || self.slots.contains(&View::Waiting) {
            return Armed::Ready;
        }
        let Some(FabricEndpoint { queues, .. }) = self.endpoint.as_deref() else { return Armed::Unsupported };
        let Some(descriptor) = queues.descriptor else { return Armed::Unsupported };
        let mut fid = queues.cq.fid();
        // SAFETY: both are open; the list has one entry.
        match unsafe { sys::fi_trywait(queues.device.fabric.as_ptr(), &raw mut fid, 1) } {
            0 => Armed::Fd(descriptor),
            _ => Armed::Ready,
        }
    }

    fn due(&self) -> Time {
        self.aborted.iter().map(|(_, until)| *until).fold(self.deferred.due(), Time::min)
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
        let retiring = self.retiring.iter_mut().map(|retiring| &mut retiring.endpoint);
        for endpoint in self.endpoint.iter_mut().chain(retiring) {
            let Some(context) = endpoint.posted.recall(id) else { continue };
            let _turn = endpoint.queues.addresses.guard();
            // SAFETY: the endpoint is open and the context posted.
            let code = unsafe { sys::fi_cancel(endpoint.queues.ep.as_ptr(), context) };
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

impl Drop for EfaEndpoint {
    fn drop(&mut self) {
        // First of all: libfabric touches no memory after that.
        self.close();
        // The engine does not see their `PeerGone` any more.
        self.closed.take_all().for_each(|slot| self.shared.peers.free(slot));
        self.shared.closed();
    }
}

/// The result of a post of `accepted` requests, the next of which got `code`.
pub(crate) fn refused(accepted: usize, code: isize) -> PostResult {
    PostResult { accepted, error: (code != FULL).then(|| status(code as i32)) }
}

/// The result of a post to a lost device.
pub(crate) fn lost() -> PostResult {
    refused(0, NO_DEVICE)
}
