//! Replaces the libfabric endpoint, for one of two reasons. Requests to an aborted peer do not end: libfabric cannot
//! cancel a single request, only close the endpoint that it was posted to. Or a peer has lost its device: nothing that
//! the device has sent may arrive any more.
//!
//! Other peers must not lose requests. So the backend first opens the next endpoint, and the engine sends its address
//! to the peers (`Event::EndpointChanged`). One peer after the other confirms the new address; from then on both sides
//! use the new endpoint. Once no peer needs the old one, the *retiring* endpoint, the backend closes it, with the
//! requests that do not end.
//!
//! With EFA's own protocols (2.1), a message to a peer whose device is lost may never end: the card has delivered it, and
//! the peer's provider never sends its receipt. libfabric closes an endpoint with such a message at once. But it waits,
//! under a lock, for requests that the card has, and does not tell the two apart. So the backend posts one write without
//! bytes to such a peer, the *last request*. Once the card has failed it, the card has failed everything that was posted to
//! the peer before.

use std::sync::atomic::Ordering;
use std::time::Duration;

use libfabric_sys as sys;
use multirail_spi::{
    Completions, Error, ErrorKind, Event, FenceKind, PeerSlot, Piece, Result, Status, Time, WorkRequest,
};

use crate::context::Posted;
use crate::endpoint::{DEVICE_LOST, EfaEndpoint, QUEUE_FULL};
use crate::fabric_endpoint::FabricEndpoint;
use crate::library::Info;
use crate::peers::{Destination, FencedSlot, SlotView};
use crate::reaper;

/// How long requests to an aborted peer may take to end before the backend replaces the endpoint. This is for providers
/// without EFA's own protocols: there, closing the endpoint ends the requests at once.
const GRACE: Duration = Duration::from_secs(2);
/// The same time for EFA's own protocols. With these, closing an endpoint waits for the requests that the card has,
/// under a lock that the next endpoint needs (`efa_rdm_ep_wait_send`). After this time the card itself has failed them.
/// Requests that the provider never gave to the card never end, but closing does not wait for those
/// (`EFA_RDM_OPE_QUEUED_BEFORE_HANDSHAKE`).
pub(crate) const EFA_GRACE: Duration = Duration::from_secs(30);
/// How long the retiring endpoint stays open after the last peer has confirmed the new address. Peers may have posted
/// requests to it, and no event reports when these have ended. The time is a hundred times what a deep queue takes.
pub(crate) const MIN_RETIREMENT: Duration = Duration::from_millis(500);
/// The longest time that the retiring endpoint stays open for other peers: for requests to them, and until they confirm
/// the new address.
const MAX_RETIREMENT: Duration = Duration::from_secs(5);

/// The most endpoints of a domain that are left open (`reaper.rs`) before the backend refuses fences: each keeps the
/// buffers of its receives, 72 MB with the 8192 receives of a p5's card, and peers may ask for a fence again and again.
const MAX_LEFT_OPEN: usize = 16;

/// How long requests to an aborted peer may take to fail by themselves.
pub(crate) fn grace(info: &Info) -> Duration {
    if info.uses_efa_protocols() { EFA_GRACE } else { GRACE }
}

/// The endpoint before the current one.
pub(crate) struct RetiringEndpoint {
    pub(crate) endpoint: Box<FabricEndpoint>,
    since: Time,
    /// Since when no peer needs it, aborted and fenced ones not counted. `None` as soon as one does.
    unused_since: Option<Time>,
    last_requests: Vec<LastRequest>,
}

/// A write without bytes, posted behind everything else to a peer whose device is lost.
struct LastRequest {
    peer: PeerSlot,
    /// The requests to the peer that were posted with it and before it.
    posted: u32,
    /// Whether the card has failed it.
    has_failed: bool,
}

/// The id of the last request to slot 0; the other slots follow. The engine does not know these ids: those of its
/// operations and of its probes are smaller.
const LAST_REQUEST_IDS: u64 = 3 << 62;

/// Whether a request is the last one to its peer.
pub(crate) fn is_last_request(id: u64) -> bool {
    id >= LAST_REQUEST_IDS
}

impl EfaEndpoint {
    /// Continues the replacement, or begins one if requests to an aborted peer have not ended in time.
    #[cold]
    pub(crate) fn advance_replacement(&mut self, into: &mut Completions) {
        let mut is_read = true;
        if let Some(mut retiring) = self.retiring.take() {
            self.poll_endpoint(&mut retiring.endpoint, into);
            // If the poll has filled all room, there may be more arrivals, which would be lost if the endpoint were
            // closed.
            is_read = self.events.len() < into.spare();
            self.take_last_requests(&mut retiring);
            self.retiring = Some(retiring);
        }
        self.aborted.retain(|(peer, _)| self.outstanding[peer.0 as usize] > 0);
        let now = self.domain.setup.clock.now();
        if self.retiring.is_some() {
            if is_read {
                self.close_retiring(now);
            }
        } else if self.endpoint.is_some() {
            let aborts = self.aborted.iter().any(|(_, until)| *until <= now);
            if aborts || self.is_fence_due {
                self.replace_endpoint(now, aborts);
            }
        }
    }

    /// Opens the next endpoint, and keeps the old one for peers that do not know the next one yet.
    fn replace_endpoint(&mut self, now: Time, aborts: bool) {
        match aborts {
            true => tracing::warn!(
                "requests to a peer that is gone do not end: the backend replaces the endpoint to end them"
            ),
            false => tracing::info!(
                "a peer has lost its device or its path: the backend replaces the endpoint, so that nothing of it arrives any more"
            ),
        }
        let endpoint = match self.open_next_endpoint(aborts) {
            Ok(endpoint) => endpoint,
            // A lost card opens none either, and its loss is a fence, too.
            Err(error) if !aborts && error.kind() != ErrorKind::Io => {
                tracing::warn!(%error, "no other endpoint can be opened, so the peer is not fenced");
                self.is_fence_due = false;
                return self.domain.peers.refuse_fences();
            }
            Err(error) => {
                tracing::warn!(%error, "no other endpoint can be opened, so the device is lost");
                return self.report_device_loss(0);
            }
        };
        if let Some(endpoint) = self.endpoint.replace(Box::new(endpoint)) {
            let mut retiring =
                RetiringEndpoint { endpoint, since: now, unused_since: None, last_requests: Vec::new() };
            self.post_last_requests(&mut retiring);
            // Posting reads completions while the queue is full.
            self.take_last_requests(&mut retiring);
            self.retiring = Some(Box::new(retiring));
        }
        self.is_fence_due = false;
        self.events.push_back(Event::EndpointChanged);
    }

    /// Opens the next endpoint. For a fence, only if the domain has not left too many endpoints open.
    fn open_next_endpoint(&self, aborts: bool) -> Result<FabricEndpoint> {
        if !aborts && self.domain.left_open.load(Ordering::Relaxed) >= MAX_LEFT_OPEN {
            let why = format!(
                "libfabric cannot close {MAX_LEFT_OPEN} endpoints of this device: open the fabric anew"
            );
            return Err(Error::new(ErrorKind::Exhausted, "open endpoint", why));
        }
        self.domain.open_endpoint()
    }

    /// Posts the last request to each peer whose device is lost and to which requests are posted. Where it cannot be
    /// posted, closing waits for [`EFA_GRACE`].
    fn post_last_requests(&mut self, retiring: &mut RetiringEndpoint) {
        if !self.domain.device.info.uses_efa_protocols() || retiring.endpoint.queues.close_may_hang() {
            return;
        }
        for FencedSlot { slot: peer, kind, .. } in self.fences.clone() {
            let (slot, posted) = (self.slots.get(peer.0 as usize), self.outstanding.get(peer.0 as usize));
            let (Some(SlotView::Up(destination)), Some(1..)) = (slot.copied(), posted) else { continue };
            if kind != FenceKind::DeviceLost || destination.endpoint != retiring.endpoint.number {
                continue;
            }
            let run = WorkRequest::warm_up(LAST_REQUEST_IDS + u64::from(peer.0), peer);
            let piece = Piece { local: run.local, remote: 0, len: 0 };
            // SAFETY: a request without bytes touches only the backend's own memory (`PostConfig::empty_source`).
            let (posted, _) =
                unsafe { self.post_run(&mut retiring.endpoint.guard(), &run, &[piece], &destination) };
            if posted == 1 {
                let posted = self.outstanding[peer.0 as usize];
                retiring.last_requests.push(LastRequest { peer, posted, has_failed: false });
            }
        }
    }

    /// Takes the ends of last requests, which the engine does not know, out of the events.
    fn take_last_requests(&mut self, retiring: &mut RetiringEndpoint) {
        if retiring.last_requests.is_empty() {
            return;
        }
        self.events.retain(|event| {
            let (id, has_failed) = match *event {
                Event::Done { first, .. } => (first, false),
                Event::Failed { id, .. } | Event::FailedUnconfirmed { id, .. } => (id, true),
                _ => return true,
            };
            let of_peer = |last: &&mut LastRequest| LAST_REQUEST_IDS + u64::from(last.peer.0) == id;
            retiring.last_requests.iter_mut().filter(of_peer).for_each(|last| last.has_failed = has_failed);
            !is_last_request(id)
        });
    }

    /// Closes the retiring endpoint once no other peer needs it, and at the latest after [`MAX_RETIREMENT`], unless
    /// closing would wait for the card.
    fn close_retiring(&mut self, now: Time) {
        let Some(retiring) = &self.retiring else { return };
        let (number, age) = (retiring.endpoint.number, now.since(retiring.since));
        let is_fenced = |slot: u32| self.fences.iter().any(|fence| fence.slot.0 == slot);
        let uses_it = |(slot, view): (u32, &SlotView)| {
            matches!(view, SlotView::Up(destination) if destination.endpoint == number) && !is_fenced(slot)
        };
        let aborted: u32 = self.aborted.iter().map(|(peer, _)| self.outstanding[peer.0 as usize]).sum();
        let is_needed =
            retiring.endpoint.posted.requests > aborted as usize || (0..).zip(&self.slots).any(uses_it);
        let is_lost = |peer: &PeerSlot| {
            let mut fences = self.fences.iter();
            fences.any(|fence| fence.slot == *peer && fence.kind == FenceKind::DeviceLost)
        };
        let lost = self.aborted.iter().filter(|(peer, _)| is_lost(peer));
        let unanswered = lost.map(|(peer, _)| self.outstanding[peer.0 as usize] as usize).sum::<usize>();
        let is_busy = self.domain.device.info.uses_efa_protocols() && retiring.endpoint.posted.requests > 0;
        let waits_for_card = match retiring.endpoint.queues.close_may_hang() {
            // The endpoint stays open. The card may still read into memory of this side, unless the peer's device is
            // lost, and nobody answers the reads.
            true => self.domain.peers.card_may_write() && retiring.endpoint.posted.requests > unanswered,
            // With EFA's own protocols, closing waits for the requests that the card has. If the grace period of an
            // aborted peer is over, the card has failed these by now. If the endpoint is replaced for a fence, the card
            // may have requests to the fenced peer for up to [`EFA_GRACE`], unless their last request has failed.
            false => {
                let failed = retiring.last_requests.iter().filter(|last| last.has_failed);
                // The card may still have what was posted behind the last request.
                let left =
                    |last: &LastRequest| last.posted.min(self.outstanding[last.peer.0 as usize]) as usize;
                let never_end: usize = failed.map(left).sum();
                retiring.endpoint.posted.requests > never_end
                    && self.aborted.iter().all(|(_, until)| *until > now)
            }
        };
        let blocks = is_busy && waits_for_card && age < EFA_GRACE;
        let Some(retiring) = &mut self.retiring else { return };
        retiring.unused_since = (!is_needed).then(|| retiring.unused_since.unwrap_or(now));
        let is_quiet = retiring.unused_since.is_some_and(|since| now.since(since) >= MIN_RETIREMENT);
        if blocks || !is_quiet && age < MAX_RETIREMENT {
            return;
        }
        let Some(mut retiring) = self.retiring.take() else { return };
        self.read_whole_receive_queue(&mut retiring.endpoint);
        self.take_last_requests(&mut retiring);
        let mut endpoint = retiring.endpoint;
        self.domain.peers.close_endpoint(number);
        let ended = endpoint.posted.end_all();
        // Closes the endpoint before it reports the ends. If libfabric does not close it, a reaper keeps all memory
        // that it may touch.
        let is_closed = reaper::close(&self.domain, endpoint, !ended.is_empty());
        let status = Status { kind: ErrorKind::Unreachable, code: sys::FI_ECANCELED as i32 };
        let mut receives = Vec::new();
        for ended in ended {
            match ended {
                Posted::Request { .. } => self.report_failure(ended, status),
                Posted::Receive { is_cancelled: true, .. } => {
                    self.report_failure(ended, Status { kind: ErrorKind::Cancelled, ..status });
                }
                // These are the backend's own receives, not the user's.
                Posted::Receive { .. } if self.internal_receives.is_some() => {
                    self.report_failure(ended, status)
                }
                Posted::Receive { receive, .. } => receives.push(receive),
            }
        }
        if !is_closed {
            // Calls on the current endpoint would wait for the lock that the reaper's call holds.
            // They are posted on another device.
            let status = Status { kind: ErrorKind::DeviceLost, ..status };
            for receive in receives {
                self.events.push_back(Event::ReceiveFailed { id: receive.id, status });
            }
            return self.report_device_loss(sys::FI_ENODEV as i32);
        }
        let Some(mut endpoint) = self.endpoint.take() else { return };
        // SAFETY: the receives were posted until now, and no event has given them back to the engine yet: their buffers
        // are valid.
        let result = unsafe { self.post_receives(&mut endpoint.guard(), &receives) };
        self.endpoint = Some(endpoint);
        for receive in &receives[result.accepted..] {
            self.events.push_back(Event::ReceiveFailed { id: receive.id, status });
        }
    }

    /// Posts to a peer that knows only the retiring endpoint.
    ///
    /// # Safety
    /// As `Endpoint::post`.
    #[cold]
    pub(crate) unsafe fn post_retiring(
        &mut self,
        run: &WorkRequest,
        pieces: &[Piece],
        destination: &Destination,
    ) -> (usize, isize) {
        let Some(mut retiring) = self.retiring.take() else { return (0, DEVICE_LOST) };
        // The endpoint that the peer knows may have been closed since the slots were read.
        let result = match retiring.endpoint.number == destination.endpoint {
            // SAFETY: by the caller.
            true => unsafe { self.post_run(&mut retiring.endpoint.guard(), run, pieces, destination) },
            false => (0, QUEUE_FULL),
        };
        self.retiring = Some(retiring);
        result
    }
}
