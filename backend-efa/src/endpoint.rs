//! The endpoint: posts and polls, and reports peers that have left.

use std::collections::{HashSet, VecDeque};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

use libfabric_sys as sys;
use multirail_spi::{
    Armed, Batch, ClosedSlots, Completions, Endpoint, EndpointConfig, ErrorKind, Event, PeerSlot, Piece,
    PostResult, ReceiveRequest, Status, TakeMessage, Time, WorkRequest,
};

use crate::completion_queue::{Arrival, Entries, MAX_READ};
use crate::context::{Contexts, Posted};
use crate::deferred_failures::DeferredFailures;
use crate::domain::DomainState;
use crate::endpoint_replacement::{RetiringEndpoint, grace, is_last_request};
use crate::fabric_endpoint::{EndpointGuard, FabricEndpoint, Queues};
use crate::internal_receives::InternalReceives;
use crate::peers::{Destination, FencedSlot, SlotView};
use crate::reaper;
use crate::status::{ErrorText, card_error, kind, provider_text, status};
use crate::submit::{PostConfig, submit};
use crate::tag::PeerTag;

/// The code for a post to a peer that has left.
const PEER_CLOSED: isize = -(sys::FI_ENOTCONN as isize);

/// libfabric's code for a post to a full queue.
pub(crate) const QUEUE_FULL: isize = -(sys::FI_EAGAIN as isize);
/// The code for a post to a lost device.
pub(crate) const DEVICE_LOST: isize = -(sys::FI_ENODEV as isize);

/// How often in a row the endpoint tries to post a request to a full queue.
const POST_ATTEMPTS: usize = 16;
/// The number of polls between two checks of the event queue. The event queue stays empty as long as the device works.
const POLLS_PER_EVENT_CHECK: u32 = 256;

/// The backend's endpoint. It posts to one libfabric endpoint, or to two while it replaces one by the next.
pub(crate) struct EfaEndpoint {
    /// The current libfabric endpoint; `None` once the device is lost. Methods take it out while they use it, which the
    /// box makes cheap.
    pub(crate) endpoint: Option<Box<FabricEndpoint>>,
    /// The previous libfabric endpoint, until no peer needs it any more.
    pub(crate) retiring: Option<Box<RetiringEndpoint>>,
    pub(crate) domain: Arc<DomainState>,
    pub(crate) post_config: PostConfig,
    /// The state of the domain's peer slots at the last [`EfaEndpoint::refresh_slots`].
    pub(crate) slots: Vec<SlotView>,
    /// The peer tag of each slot: the number that this side has given the peer. The peer sends it with each request, so
    /// that an arrival names its sender.
    pub(crate) peer_tags: Vec<PeerTag>,
    /// The domain's count of changes at the last [`EfaEndpoint::refresh_slots`].
    seen_changes: u64,
    /// Whether a slot has changed since the last poll. The endpoint may now accept requests that it did not accept
    /// before.
    slots_changed: bool,
    /// Disconnected slots whose `PeerGone` the endpoint has not queued yet. It does so once the slot's last request has
    /// ended.
    pub(crate) leaving: Vec<PeerSlot>,
    /// Slots whose `PeerGone` is reported or queued. A slot is free once the engine has acted on that event.
    pub(crate) closed_slots: ClosedSlots,
    /// The number of posted requests for each slot.
    pub(crate) outstanding: Vec<u32>,
    pub(crate) send_depth: usize,
    pub(crate) recv_depth: usize,
    /// Aborted slots with posted requests, and the moment at which the backend replaces the libfabric endpoint if these
    /// requests have not ended by themselves.
    pub(crate) aborted: Vec<(PeerSlot, Time)>,
    /// Slots with a failed request while the provider emulates writes. The backend never removes the addresses of these
    /// slots from the address vector.
    ///
    /// The reason is a fault of 1.17 (`rxr_cq_write_tx_error`): the provider removes a failed request from its list
    /// once for each packet of the request. This can put another request, which has ended, back on the list. If the
    /// address of that request's peer were removed, the provider's progress would follow a null pointer. The backend
    /// cannot tell which request that is, so this covers only the peers whose own requests have failed. (1.17 also
    /// reports one error for each packet. So the backend does not use the context of a failed request for a while:
    /// [`EfaEndpoint::retire`].)
    pub(crate) pinned_addresses: HashSet<PeerSlot>,
    /// Failures that the endpoint keeps for a while, so that the provider can connect to the peer again.
    pub(crate) deferred: DeferredFailures,
    /// The number of polls until the next check of the event queue.
    pub(crate) polls_until_event_check: u32,
    /// The provider's text for the latest error.
    pub(crate) last_error: ErrorText,
    /// The buffer into which completions are read. Taken out while it is in use.
    pub(crate) entries: Option<Box<Entries>>,
    /// The slots whose peers have lost their device.
    pub(crate) fences: Vec<FencedSlot>,
    /// Whether a fence needs another libfabric endpoint.
    pub(crate) is_fence_due: bool,
    /// Whether the device is lost. If it is a card, the next poll reports that. The requests of a software provider
    /// fail one by one.
    pub(crate) is_lost: bool,
    /// Events to be reported.
    pub(crate) events: VecDeque<Event>,
    /// Receives that the backend posts itself on cards where a write with an imm consumes a receive. The user's
    /// receives wait in here, and the backend copies the messages into them. `None` on other devices.
    pub(crate) internal_receives: Option<InternalReceives>,
    /// Arrivals whose sender is no connected peer of `slots`. A newer state of the slots may have the sender.
    pub(crate) unmatched: Vec<Arrival>,
}

impl EfaEndpoint {
    pub(crate) fn new(
        endpoint: FabricEndpoint,
        domain: Arc<DomainState>,
        config: EndpointConfig,
        internal_receives: Option<InternalReceives>,
    ) -> Self {
        let (send, recv) = (domain.capabilities.send_depth, domain.capabilities.recv_depth);
        // Peers may know an earlier endpoint of this domain.
        let changed = (endpoint.number > 0).then_some(Event::EndpointChanged);
        Self {
            post_config: PostConfig::new(&endpoint.queues, domain.empty_source()),
            endpoint: Some(Box::new(endpoint)),
            retiring: None,
            domain,
            slots: Vec::new(),
            peer_tags: Vec::new(),
            seen_changes: u64::MAX,
            slots_changed: false,
            leaving: Vec::new(),
            closed_slots: ClosedSlots::default(),
            outstanding: Vec::new(),
            send_depth: config.send_depth.unwrap_or(send).min(send) as usize,
            recv_depth: recv as usize,
            aborted: Vec::new(),
            pinned_addresses: HashSet::new(),
            deferred: DeferredFailures::default(),
            polls_until_event_check: 0,
            last_error: ErrorText::default(),
            fences: Vec::new(),
            is_fence_due: false,
            is_lost: false,
            entries: Some(Box::new(Entries::new())),
            events: changed.into_iter().collect(),
            internal_receives,
            unmatched: Vec::new(),
        }
    }

    /// Reads the domain's peer slots, if they have changed.
    pub(crate) fn refresh_slots(&mut self) {
        let Self { seen_changes, slots, peer_tags, fences, .. } = self;
        if self.domain.peers.refresh(seen_changes, slots, peer_tags, fences) {
            self.slots_changed = true;
            self.outstanding.resize(self.slots.len(), 0);
            let leaving = (0_u32..).zip(&self.slots).filter(|(_, slot)| **slot == SlotView::Leaving);
            self.leaving = leaving.map(|(index, _)| PeerSlot(index)).collect();
            let newest = self.endpoint.as_ref().map(|endpoint| endpoint.number);
            let is_due =
                |fence: &FencedSlot| !fence.is_refused && newest.is_some_and(|newest| newest <= fence.last);
            self.is_fence_due = self.fences.iter().any(is_due);
        }
    }

    /// Frees the context of a request or receive that has ended, and counts it as ended. Returns what was posted.
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

    /// Polls one of the two libfabric endpoints.
    #[inline(always)]
    pub(crate) fn poll_endpoint(&mut self, endpoint: &mut FabricEndpoint, into: &mut Completions) {
        self.read_completions(&mut endpoint.guard(), into.spare());
        if endpoint.made_progress() {
            into.note_progress();
        }
    }

    /// Posts a run to a peer that knows this libfabric endpoint. Returns the number of posted requests, and libfabric's
    /// code for the next one.
    ///
    /// # Safety
    /// As `Endpoint::post`.
    pub(crate) unsafe fn post_run(
        &mut self,
        guard: &mut EndpointGuard<'_>,
        run: &WorkRequest,
        pieces: &[Piece],
        destination: &Destination,
    ) -> (usize, isize) {
        let (mut taken, mut tries) = (0, 0);
        loop {
            let EndpointGuard { queues, posted, .. } = guard;
            let room = (self.send_depth - posted.requests).min(posted.free_count()).min(pieces.len() - taken);
            let next = (taken, &pieces[taken..taken + room]);
            // SAFETY: by the caller; contexts stay where they are until the completion.
            let (more, code) = unsafe { submit(queues, posted, run, next, destination, &self.post_config) };
            self.outstanding[run.peer.0 as usize] += more as u32;
            posted.requests += more;
            taken += more;
            tries = if more > 0 { 0 } else { tries + 1 };
            match code {
                0 if taken == pieces.len() => return (taken, 0),
                0 => return (taken, QUEUE_FULL),
                // A full queue may have room again before the engine posts the next time.
                code if code == QUEUE_FULL && tries < POST_ATTEMPTS => self.read_completions(guard, MAX_READ),
                code => return (taken, self.post_error(guard.queues, code)),
            }
        }
    }

    /// Maps the code of a refused post. Notes if the device is lost.
    fn post_error(&mut self, queues: &Queues, code: isize) -> isize {
        match queues.device.post_error(code) {
            // `Event::DeviceLost` follows for cards only.
            DEVICE_LOST if !queues.device.info.is_card() => -(sys::FI_EIO as isize),
            code => {
                self.is_lost |= code == DEVICE_LOST;
                code
            }
        }
    }

    /// Delivers the messages that have arrived in internal receives, and posts these receives again.
    #[cold]
    pub(crate) fn post_internal_receives(&mut self) {
        let Some(mut internal_receives) = self.internal_receives.take() else { return };
        internal_receives.deliver(&mut self.events);
        if !internal_receives.unposted.is_empty()
            && let Some(mut endpoint) = self.endpoint.take()
        {
            // SAFETY: the memory is registered, and kept until the endpoint is closed.
            let posted = unsafe { self.post_receives(&mut endpoint.guard(), &internal_receives.unposted) };
            internal_receives.unposted.drain(..posted.accepted);
            self.endpoint = Some(endpoint);
        }
        self.internal_receives = Some(internal_receives);
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
        // The length of a card's receive has 16 bits (`efa_io_rx_desc` of rdma-core). No packet is longer, so a longer
        // receive is posted with this length.
        let longest = if queues.device.info.is_efa_direct() { u64::from(u16::MAX) } else { u64::MAX };
        for (accepted, receive) in batch.iter().enumerate() {
            if posted.receives == self.recv_depth {
                return refused_post(accepted, QUEUE_FULL);
            }
            let Some(context) = posted.take_for_receive(receive) else {
                return refused_post(accepted, QUEUE_FULL);
            };
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
                if code != QUEUE_FULL && queues.device.info.uses_efa_protocols() {
                    // The receive was matched to a message that had arrived before. libfabric will report the same
                    // error once more by a completion (2.1, `efa_rdm_srx_start`).
                    self.retire(posted, context);
                }
                return refused_post(accepted, self.post_error(queues, code));
            }
            posted.receives += 1;
        }
        PostResult { accepted: batch.len(), error: None }
    }

    /// Reports the disconnected peers whose last request has ended.
    #[cold]
    pub(crate) fn report_closed_peers(&mut self) {
        let is_over = |peer: &mut PeerSlot| self.outstanding[peer.0 as usize] == 0;
        for peer in self.leaving.extract_if(.., is_over) {
            self.events.push_back(Event::PeerGone { peer });
            self.domain.peers.end(peer, self.pinned_addresses.remove(&peer));
            if let Some(internal_receives) = &mut self.internal_receives {
                internal_receives.drop_messages_of(peer);
            }
            self.closed_slots.push(peer);
        }
    }

    /// Frees the slots on whose `PeerGone` the engine has acted: those whose event an earlier poll has taken.
    #[cold]
    pub(crate) fn free_slots(&mut self) {
        self.closed_slots.take_free(&self.events).for_each(|peer| self.domain.peers.free(peer));
    }

    /// For a card: checks the event queue once in [`POLLS_PER_EVENT_CHECK`] polls, and reports the loss of the device
    /// if it is lost.
    pub(crate) fn check_event_queue(&mut self) {
        let Some(endpoint) =
            self.endpoint.as_deref_mut().filter(|endpoint| endpoint.queues.device.info.is_card())
        else {
            return;
        };
        let queues = &endpoint.queues;
        if self.polls_until_event_check == 0 {
            self.polls_until_event_check = POLLS_PER_EVENT_CHECK;
            endpoint.posted.free_retired(self.domain.setup.clock.now());
            if let Some(status) = queues.device.next_event_error() {
                // A packet of the provider's own protocol has failed. This is harmless if the packet's peer is gone.
                // Any other failure may mean that a request of ours is lost.
                let code = card_error(status, sys::FI_ENODEV as i32);
                let text = provider_text(queues, status, null_mut());
                tracing::warn!(status, text, "libfabric reports a failure of its own protocol");
                self.is_lost |= kind(code) != ErrorKind::PeerDied;
                self.last_error = ErrorText::new(sys::FI_ENODEV as i32, text);
            }
        }
        self.polls_until_event_check -= 1;
        if self.is_lost {
            self.report_device_loss(sys::FI_ENODEV as i32);
        }
    }

    /// Takes the open libfabric endpoints out. Nothing is posted to them any more.
    fn take_endpoints(&mut self) -> impl Iterator<Item = Box<FabricEndpoint>> + use<> {
        let endpoints = [self.retiring.take().map(|retiring| retiring.endpoint), self.endpoint.take()];
        endpoints.iter().flatten().for_each(|endpoint| self.domain.peers.close_endpoint(endpoint.number));
        endpoints.into_iter().flatten()
    }

    /// Closes the open libfabric endpoints.
    pub(crate) fn close(&mut self) {
        for endpoint in self.take_endpoints() {
            // If libfabric does not close an endpoint, a reaper thread keeps all memory that it may touch.
            let _ = reaper::close(&self.domain, endpoint, self.is_lost);
        }
    }

    /// Closes the libfabric endpoints, and reports that the device is lost with the error `code`.
    pub(crate) fn report_device_loss(&mut self, code: i32) {
        self.aborted.clear();
        self.is_lost = true;
        let lost = Status { kind: ErrorKind::DeviceLost, code };
        for mut endpoint in self.take_endpoints() {
            // Peers may know of what has arrived.
            self.read_whole_receive_queue(&mut endpoint);
            let ended = endpoint.posted.end_all();
            // Closes the endpoint before the loss is reported. If libfabric does not close it, a reaper keeps all
            // memory that it may touch.
            let _ = reaper::close(&self.domain, endpoint, true);
            self.events.retain(|event| match event {
                Event::Failed { id, .. } | Event::FailedUnconfirmed { id, .. } => !is_last_request(*id),
                _ => true,
            });
            ended.into_iter().for_each(|ended| self.report_failure(ended, lost));
        }
        let user_receives = self.internal_receives.iter_mut().flat_map(InternalReceives::take_user_receives);
        self.events
            .extend(user_receives.map(|receive| Event::ReceiveFailed { id: receive.id, status: lost }));
        self.events.push_back(Event::DeviceLost { status: lost });
    }

    /// Reports that a posted request or receive has failed with `status`. An internal receive is posted again instead.
    pub(crate) fn report_failure(&mut self, ended: Posted, status: Status) {
        self.events.push_back(match ended {
            Posted::Request { id, peer } => {
                self.outstanding[peer.0 as usize] -= 1;
                if is_last_request(id) {
                    return;
                }
                Event::Failed { id, status }
            }
            Posted::Receive { receive, .. } => {
                if let Some(internal_receives) =
                    self.internal_receives.as_mut().filter(|internal| internal.contains(&receive))
                {
                    return internal_receives.unposted.push(receive);
                }
                Event::ReceiveFailed { id: receive.id, status }
            }
        });
    }
}

impl Endpoint for EfaEndpoint {
    unsafe fn post(&mut self, batch: &Batch) -> PostResult {
        self.refresh_slots();
        let Some(mut endpoint) = self.endpoint.take() else { return lost_device() };
        let number = endpoint.number;
        let mut guard = endpoint.guard();
        let (mut accepted, mut code) = (0, 0);
        for (run, pieces) in batch.runs() {
            let taken;
            (taken, code) = match self.slots.get(run.peer.0 as usize).copied() {
                // SAFETY: by the caller.
                Some(SlotView::Up(destination)) if destination.endpoint == number => unsafe {
                    self.post_run(&mut guard, run, pieces, &destination)
                },
                // SAFETY: by the caller.
                Some(SlotView::Up(destination)) => unsafe { self.post_retiring(run, pieces, &destination) },
                // The peer has not confirmed the address of the current libfabric endpoint yet: the engine tries
                // again later.
                Some(SlotView::AwaitingConfirmation) => (0, QUEUE_FULL),
                _ => (0, PEER_CLOSED),
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
            code => refused_post(accepted, code),
        }
    }

    unsafe fn post_recv(&mut self, batch: &[ReceiveRequest]) -> PostResult {
        if let (Some(internal_receives), true) = (&mut self.internal_receives, self.endpoint.is_some()) {
            // SAFETY: by the caller.
            let accepted = unsafe { internal_receives.add_user_receives(batch, self.recv_depth) };
            internal_receives.deliver(&mut self.events);
            return PostResult { accepted, error: None };
        }
        let Some(mut endpoint) = self.endpoint.take() else { return lost_device() };
        // SAFETY: by the caller.
        let result = unsafe { self.post_receives(&mut endpoint.guard(), batch) };
        self.endpoint = Some(endpoint);
        result
    }

    fn poll(&mut self, into: &mut Completions) {
        if !self.closed_slots.is_empty() {
            self.free_slots();
        }
        self.refresh_slots();
        self.slots_changed = false;
        if let Some(mut endpoint) = self.endpoint.take() {
            self.poll_endpoint(&mut endpoint, into);
            self.endpoint = Some(endpoint);
        }
        if self.retiring.is_some() || !self.aborted.is_empty() || self.is_fence_due {
            self.advance_replacement(into);
        }
        if !self.unmatched.is_empty() {
            self.retry_unmatched();
            into.note_progress();
        }
        if self.internal_receives.is_some() {
            self.post_internal_receives();
        }
        let (domain, slots) = (&self.domain, &self.slots);
        let has_left = |peer: PeerSlot| {
            !matches!(slots.get(peer.0 as usize), Some(SlotView::Up(_) | SlotView::AwaitingConfirmation))
        };
        self.deferred.report_due(|| domain.setup.clock.now(), has_left, &mut self.events);
        if !self.leaving.is_empty() {
            self.report_closed_peers();
        }
        self.check_event_queue();
        while into.spare() > 0
            && let Some(event) = self.events.pop_front()
        {
            let _ = into.push(event);
        }
        // The local flushes: bytes in a GPU's memory have to be visible to its readers before the engine sees their
        // arrival.
        self.domain.device.flushes.flush_if_arrivals(into);
    }

    fn arm(&mut self) -> Armed {
        self.refresh_slots();
        let is_over = |peer: &PeerSlot| self.outstanding[peer.0 as usize] == 0;
        let has_more =
            !self.events.is_empty() || !self.unmatched.is_empty() || self.leaving.iter().any(is_over);
        // No event wakes the engine when a peer confirms the new address. So the engine must try again to post to that
        // peer.
        if has_more
            || self.slots_changed
            || self.retiring.is_some()
            || self.slots.contains(&SlotView::AwaitingConfirmation)
        {
            return Armed::Ready;
        }
        let Some(FabricEndpoint { queues, .. }) = self.endpoint.as_deref() else { return Armed::Unsupported };
        let Some(wait_fd) = queues.wait_fd else { return Armed::Unsupported };
        let mut fid = queues.cq.fid();
        // SAFETY: both are open; the list has one entry.
        match unsafe { sys::fi_trywait(queues.device.fabric.as_ptr(), &raw mut fid, 1) } {
            0 => Armed::Fd(wait_fd),
            _ => Armed::Ready,
        }
    }

    fn due(&self) -> Time {
        self.aborted.iter().map(|(_, until)| *until).fold(self.deferred.due(), Time::min)
    }

    fn abort(&mut self, peer: PeerSlot) {
        self.refresh_slots();
        if self.outstanding.get(peer.0 as usize).is_some_and(|posted| *posted > 0) {
            let until = self.domain.setup.clock.now().after(grace(&self.domain.device.info));
            self.aborted.push((peer, until));
        }
    }

    fn is_lost(&self) -> bool {
        self.is_lost
    }

    fn cancel_recv(&mut self, id: u64) -> bool {
        if let Some(internal_receives) = &mut self.internal_receives {
            if internal_receives.cancel(id) {
                let status = Status { kind: ErrorKind::Cancelled, code: sys::FI_ECANCELED as i32 };
                self.events.push_back(Event::ReceiveFailed { id, status });
            }
            return true;
        }
        let mut is_cancelled = true;
        self.unmatched.iter_mut().for_each(|arrival| arrival.mark_cancelled(id));
        let retiring = self.retiring.iter_mut().map(|retiring| &mut retiring.endpoint);
        for endpoint in self.endpoint.iter_mut().chain(retiring) {
            let Some(context) = endpoint.posted.cancel_receive(id) else { continue };
            let _guard = endpoint.queues.av.lock_for_endpoint();
            // SAFETY: the endpoint is open and the context posted.
            let code = unsafe { sys::fi_cancel(endpoint.queues.ep.as_ptr(), context) };
            if code != 0 {
                // efa-direct never cancels a receive.
                tracing::debug!(code, "libfabric does not cancel a receive");
                is_cancelled = false;
            }
        }
        is_cancelled
    }

    fn take_unclaimed(&mut self, peer: Option<PeerSlot>, take: &mut TakeMessage<'_>) {
        if let Some(internal_receives) = &mut self.internal_receives {
            internal_receives.take_unclaimed(peer, take);
        }
    }

    fn describe(&self, status: Status) -> String {
        self.last_error.describe(status, &self.domain.device)
    }
}

impl Drop for EfaEndpoint {
    fn drop(&mut self) {
        // First, because libfabric may touch memory until its endpoints are closed.
        self.close();
        // The engine does not poll again, so it will not see the `PeerGone` of these slots.
        self.closed_slots.take_all().for_each(|slot| self.domain.peers.free(slot));
        self.domain.on_endpoint_closed();
    }
}

/// The result of a post: `accepted` requests are posted, and libfabric refused the next one with `code`.
pub(crate) fn refused_post(accepted: usize, code: isize) -> PostResult {
    PostResult { accepted, error: (code != QUEUE_FULL).then(|| status(code as i32)) }
}

/// The result of a post to a lost device.
pub(crate) fn lost_device() -> PostResult {
    refused_post(0, DEVICE_LOST)
}
