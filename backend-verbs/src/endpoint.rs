//! The endpoint: posts requests, polls completions, and reports peers that have left.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

use multirail_spi::{
    Armed, Batch, ClosedSlots, Completions, Endpoint, EndpointConfig, ErrorKind, Event, PeerSlot, Piece,
    PostResult, ReceiveRequest, Result, Status, TakeMessage, Time, WorkKind, WorkRequest,
};
use rdma_sys as ib;

use crate::destroyer::Destroyer;
use crate::domain::DomainState;
use crate::objects::library;
use crate::peers::{QueuePairs, SlotView};
use crate::posted::{CHAIN, EndedRun};
use crate::queue_pair::QueuePair;
use crate::receives::{IMM, RECEIVE, Receives};
use crate::send_queues::SendQueues;
use crate::status::{error_text, of_completion};
use crate::submit::submit;

/// The status of a request to a peer that has left.
pub(crate) const PEER_CLOSED: Status = Status { kind: ErrorKind::PeerDied, code: 0 };
/// The errno of a full queue.
const ENOMEM: i32 = 12;
/// The most completions that one call reads.
const AT_ONCE: usize = 64;

/// A flag of `wc_flags`: the completion has an imm (`IBV_WC_WITH_IMM`).
const WITH_IMM: u32 = 2;
/// A worker does not sleep while a slot waits for its next connection, but for no longer than this: while a link is
/// down, there is none.
const BROKEN_FOR_LONG: Duration = Duration::from_millis(100);
/// The status of a request that is posted to a lost device.
const LOST: PostResult =
    PostResult { accepted: 0, error: Some(Status { kind: ErrorKind::DeviceLost, code: 0 }) };

/// The connection of a slot.
#[derive(Default)]
pub(crate) struct SlotConnection {
    pub(crate) view: SlotView,
    /// The queue pairs that requests are posted to. The slot may have given them up.
    pub(crate) pairs: Option<Arc<QueuePairs>>,
    /// The queue pair that the next chain goes to.
    pub(crate) next_pair: usize,
    /// The engine has aborted what is posted: it is not posted again.
    pub(crate) is_aborted: bool,
}

/// The fields are dropped in order: connections before what they use.
pub(crate) struct VerbsEndpoint {
    pub(crate) links: Vec<SlotConnection>,
    /// Connections that have ended and still have requests posted.
    draining: Vec<(PeerSlot, Arc<QueuePairs>)>,
    destroyer: Destroyer,
    /// Slots whose `PeerGone` is reported. They are free once the engine polls again.
    closed: ClosedSlots,
    pub(crate) send_queues: SendQueues,
    pub(crate) receives: Receives,
    pub(crate) shared: Arc<DomainState>,
    seen: u64,
    views: Vec<SlotView>,
    /// Connections that slots have given up, until `take_over`.
    retired: Vec<(PeerSlot, Arc<QueuePairs>)>,
    /// Whether a slot waits for its `PeerGone`, or for its next connection.
    has_leaving: bool,
    has_broken: bool,
    /// Since when there has been a slot without its next connection.
    broken_since: Option<Time>,
    /// The control side has changed a slot since the last poll: the engine may hold requests for the new connection.
    is_changed: bool,
    pub(crate) requests: usize,
    pub(crate) send_depth: usize,
    /// Requests that a failed connection has not executed, to be posted to the next one.
    pub(crate) replays: VecDeque<WorkRequest>,
    pub(crate) is_lost: bool,
    /// The loss of the device, until it is reported.
    pub(crate) loss: Option<Status>,
    /// The last poll has read the completion queue empty.
    pub(crate) is_drained: bool,
    /// Events that the last poll had no room for.
    pub(crate) waiting: VecDeque<Event>,
    pub(crate) entries: Vec<ib::ibv_wc>,
}

impl VerbsEndpoint {
    pub(crate) fn open(shared: Arc<DomainState>, config: EndpointConfig) -> Result<Self> {
        let depth = shared.capabilities.send_depth;
        Ok(Self {
            links: Vec::new(),
            draining: Vec::new(),
            destroyer: Destroyer::default(),
            closed: ClosedSlots::default(),
            send_queues: SendQueues::default(),
            receives: Receives::open(&shared.card)?,
            send_depth: config.send_depth.unwrap_or(depth).min(depth) as usize,
            shared,
            seen: u64::MAX,
            views: Vec::new(),
            retired: Vec::new(),
            has_leaving: false,
            has_broken: false,
            broken_since: None,
            is_changed: false,
            requests: 0,
            replays: VecDeque::new(),
            is_lost: false,
            loss: None,
            is_drained: false,
            waiting: VecDeque::new(),
            entries: entries(),
        })
    }

    /// Takes over the changes of the control side, if there are any.
    #[inline]
    pub(crate) fn refresh(&mut self) {
        if self.shared.peers.refresh(&mut self.seen, &mut self.views, &mut self.retired) {
            self.take_over();
        }
    }

    #[cold]
    fn take_over(&mut self) {
        self.is_changed = true;
        self.links.resize_with(self.views.len(), SlotConnection::default);
        self.has_leaving = self.views.iter().any(|view| matches!(view, SlotView::Leaving));
        self.has_broken = self.views.iter().any(|view| matches!(view, SlotView::Broken));
        let since = self.has_broken.then(|| self.broken_since.unwrap_or_else(|| self.shared.clock.now()));
        self.broken_since = since;
        for (slot, pairs) in self.retired.drain(..) {
            let link = self.links.get(slot.0 as usize).and_then(|link| link.pairs.as_ref());
            // A connection that was made and given up between two polls has no request, but may have arrivals.
            if !link.is_some_and(|link| Arc::ptr_eq(link, &pairs)) {
                for pair in pairs.all() {
                    self.send_queues.insert(pair.number(), slot);
                }
                pairs.fail();
                self.draining.push((slot, pairs));
            }
        }
        for (index, (link, view)) in self.links.iter_mut().zip(&self.views).enumerate() {
            let slot = PeerSlot(index as u32);
            let next = match view {
                SlotView::Up(pairs) => Some(Arc::clone(pairs)),
                _ => None,
            };
            link.view = view.clone();
            let is_same = match (&link.pairs, &next) {
                (Some(old), Some(new)) => Arc::ptr_eq(old, new),
                (None, None) => true,
                _ => false,
            };
            if is_same {
                continue;
            }
            link.is_aborted &= next.is_none();
            for pair in next.iter().flat_map(|pairs| pairs.all()) {
                self.send_queues.insert(pair.number(), slot);
            }
            if let Some(old) = std::mem::replace(&mut link.pairs, next) {
                // Its requests come back as flushed.
                old.fail();
                self.draining.push((slot, old));
            }
        }
    }

    /// Destroys all queue pairs of the lost device. No slot gets any after that.
    pub(crate) fn destroy_queue_pairs(&mut self) {
        self.shared.peers.lose();
        // `refresh` moves the queue pairs of links to `draining`, which is then their last holder.
        self.refresh();
        self.draining.clear();
        self.destroyer.finish();
        self.send_queues = SendQueues::default();
    }

    /// Whether `slot` has a peer, so that arrivals from it count.
    pub(crate) fn is_connected(&self, slot: PeerSlot) -> bool {
        let link = self.links.get(slot.0 as usize);
        link.is_some_and(|link| matches!(link.view, SlotView::Up(_) | SlotView::Broken | SlotView::Fenced))
    }

    /// Drops those of the first `read` ended connections that have no request posted any more: their completions are
    /// all read. Then reports the peers that have left.
    fn report_closed_peers(&mut self, read: usize) {
        let send_queues = &mut self.send_queues;
        let is_over = |(_, pairs): &mut (PeerSlot, Arc<QueuePairs>)| {
            let is_busy =
                |pair: &QueuePair| send_queues.get(pair.number()).is_some_and(|queue| queue.posted.len() > 0);
            let is_over = !pairs.all().any(is_busy);
            if is_over {
                pairs.all().for_each(|pair| send_queues.remove(pair.number()));
            }
            is_over
        };
        for (slot, pairs) in self.draining.extract_if(..read.min(self.draining.len()), is_over) {
            // Once a peer has left, its queue pairs are free for the next one.
            match self.links.get(slot.0 as usize).map(|link| &link.view) {
                Some(SlotView::Leaving) | None => drop(pairs),
                Some(_) => self.destroyer.destroy(pairs),
            }
        }
        for (index, link) in self.links.iter_mut().enumerate() {
            let peer = PeerSlot(index as u32);
            let is_over = || {
                let has_pairs = self.draining.iter().any(|(slot, _)| *slot == peer);
                !has_pairs && self.replays.iter().all(|request| request.peer != peer)
            };
            if matches!(link.view, SlotView::Leaving) && is_over() {
                link.view = SlotView::Free;
                self.receives.forget(&self.shared.card, peer);
                self.waiting.push_back(Event::PeerGone { peer });
                self.shared.peers.end(peer);
                self.closed.push(peer);
            }
        }
    }

    /// Frees the slots whose `PeerGone` the engine has acted on, as it polls again.
    #[cold]
    fn free_slots(&mut self) {
        self.closed.take_free(&self.waiting).for_each(|peer| self.shared.peers.free(peer));
    }

    /// Reads all events of the channel, so that its descriptor becomes readable with the next one.
    fn clear_channel(&self) {
        let Ok(library) = library() else { return };
        let card = &self.shared.card;
        let (mut cq, mut user) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the channel is open and does not wait; each event is acknowledged once.
        unsafe {
            while library.get_cq_event(card.channel.as_ptr(), &raw mut cq, &raw mut user) == 0 {
                library.ack_cq_events(cq, 1);
            }
        }
    }

    /// Posts a run. Returns the number of requests taken, and why the next one was refused; `None` means no room.
    ///
    /// # Safety
    /// As `Endpoint::post`.
    pub(crate) unsafe fn post_run(&mut self, run: &WorkRequest, pieces: &[Piece]) -> (usize, Option<Status>) {
        if run.kind == WorkKind::Read && pieces.first().is_some_and(|piece| piece.len == 0) {
            return self.flush(run, pieces.len());
        }
        let Self { links, send_queues, shared, requests, send_depth, .. } = self;
        let Some(link) = links.get_mut(run.peer.0 as usize) else { return (0, Some(PEER_CLOSED)) };
        let pairs = match (&link.view, &link.pairs) {
            (SlotView::Up(_), Some(pairs)) => pairs,
            // The caller posts again once there is the next connection.
            (SlotView::Broken, _) => return (0, None),
            _ => return (0, Some(PEER_CLOSED)),
        };
        let choice = match run.kind {
            WorkKind::Send => std::slice::from_ref(&pairs.messages),
            _ => &pairs.accesses[..],
        };
        let (mut taken, mut full) = (0, 0);
        while taken < pieces.len() {
            if full == choice.len() {
                return (taken, None);
            }
            let pair = match choice {
                [only] => only,
                all => {
                    // Avoids a division, which takes many cycles.
                    let next = if link.next_pair < all.len() { link.next_pair } else { 0 };
                    link.next_pair = next + 1;
                    &all[next]
                }
            };
            let Some(queue) = send_queues.get_mut(pair.number()) else { return (taken, Some(PEER_CLOSED)) };
            let room = (shared.card.depth_of_pair - queue.posted.len()) as usize;
            let count = CHAIN.min(room).min(*send_depth - *requests).min(pieces.len() - taken);
            if count == 0 {
                full += 1;
                continue;
            }
            // SAFETY: by the caller.
            let (more, code) =
                unsafe { submit(pair, &mut queue.posted, run, (taken, &pieces[taken..taken + count])) };
            *requests += more;
            taken += more;
            match code {
                0 => full = 0,
                ENOMEM => full += 1,
                // The queue pair has failed, and its completions say why.
                code => {
                    tracing::debug!(code, "a queue pair takes no requests");
                    let number = pair.number();
                    self.mark_broken(run.peer, Some(number));
                    return (taken, None);
                }
            }
        }
        (taken, None)
    }
    /// Posts `count` flushes of a run. Returns as `post_run` does.
    #[cold]
    fn flush(&mut self, run: &WorkRequest, count: usize) -> (usize, Option<Status>) {
        let Some(link) = self.links.get(run.peer.0 as usize) else { return (0, Some(PEER_CLOSED)) };
        let Some(target) = link.pairs.as_ref().and_then(|pairs| pairs.flush) else {
            // The next connection of a broken link has a flush target.
            let is_broken = matches!(link.view, SlotView::Broken);
            return (0, (!is_broken).then_some(PEER_CLOSED));
        };
        let (read, piece) = self.shared.flush_page.read(run, target);
        // SAFETY: the flush page lives as long as the domain, and no code reads the bytes that a flush writes there.
        unsafe { self.post_run(&read, &vec![piece; count]) }
    }

    /// Reads about `room` completions and queues their events. Returns true if there were any.
    #[inline]
    pub(crate) fn drain(&mut self, room: usize) -> bool {
        let mut any = false;
        self.is_drained = false;
        if self.is_lost {
            self.report_loss();
            return false;
        }
        while self.waiting.len() < room {
            let most = self.entries.len().min(room - self.waiting.len()) as c_int;
            let into = self.entries.as_mut_ptr();
            // SAFETY: the queue is open, and there is room for so many.
            let count = unsafe { ib::ibv_poll_cq(self.shared.card.cq.as_ptr(), most, into) };
            if count != 0 {
                self.queue_events(count);
                any |= count > 0;
            }
            if count < most {
                self.is_drained = count >= 0;
                break;
            }
        }
        any | self.deliver()
    }

    /// Queues the events of `count` completions that were read; a negative `count` is an error of the card.
    fn queue_events(&mut self, count: c_int) {
        let entries = std::mem::take(&mut self.entries);
        for entry in entries.iter().take(count.max(0) as usize) {
            match entry.wr_id & RECEIVE {
                0 => self.on_completion(entry),
                _ => self.received(entry),
            }
        }
        self.entries = entries;
        if count < 0 {
            self.lose(count);
        }
    }

    /// Hands messages to posted receives. Returns true if there were any.
    #[inline]
    fn deliver(&mut self) -> bool {
        let mut any = false;
        while let Some(delivered) = self.receives.next(&self.shared.card) {
            let id = delivered.id;
            self.waiting.push_back(match delivered.failed {
                None => Event::Received { id, peer: delivered.from, len: delivered.len, imm: delivered.imm },
                Some(status) => Event::ReceiveFailed { id, status },
            });
            any = true;
        }
        any
    }

    /// Acts on the completion of one of our requests.
    fn on_completion(&mut self, entry: &ib::ibv_wc) {
        // A completion of a queue pair that was dropped.
        let Some(queue) = self.send_queues.get_mut(entry.qp_num) else { return };
        let (waiting, requests) = (&mut self.waiting, &mut self.requests);
        let report = |EndedRun { first, count }| {
            *requests -= count as usize;
            waiting.push_back(Event::Done { first, count });
        };
        if entry.status == ib::IBV_WC_SUCCESS {
            return queue.posted.done(entry.wr_id, report);
        }
        let failed = queue.posted.failed(entry.wr_id, report);
        let (slot, is_flushed) = (queue.slot, entry.status == ib::IBV_WC_WR_FLUSH_ERR);
        let status = of_completion(entry.status, self.shared.card.device.is_software());
        if !is_flushed {
            queue.cause = Some(status);
        }
        let cause = queue.cause;
        tracing::debug!(qp = entry.qp_num, status.code, vendor = entry.vendor_err, "a request failed");
        if let Some(request) = failed {
            self.requests -= 1;
            match status.kind {
                _ if is_flushed => self.flushed(request, cause),
                // The kernel takes the keys of a killed process before its queue pairs, so that its death looks the
                // same. A peer that does not answer may have died, too; but not if it was this side that had no route.
                ErrorKind::RemoteAccess | ErrorKind::Unreachable
                    if entry.status != ib::IBV_WC_LOC_QP_OP_ERR =>
                {
                    self.waiting.push_back(Event::FailedUnconfirmed { id: request.id, peer: slot, status });
                }
                _ => self.waiting.push_back(Event::Failed { id: request.id, status }),
            }
        }
        if status.kind == ErrorKind::DeviceLost {
            return self.lose(status.code);
        }
        self.mark_broken(slot, Some(entry.qp_num));
    }

    /// Marks the connection of `slot` as broken, if the queue pair `number`, which has failed, belongs to it. The peer
    /// then gets the offer of the next connection.
    pub(crate) fn mark_broken(&mut self, slot: PeerSlot, number: Option<u32>) {
        if self.shared.peers.mark_broken(slot, number) {
            self.waiting.push_back(Event::EndpointChanged);
            // All queue pairs stop before the peer gets the offer: a late packet of this connection must not land on
            // bytes that come over the next one.
            self.refresh();
        }
    }

    /// The peer of a queue pair.
    fn owner(&self, number: u32) -> Option<PeerSlot> {
        self.send_queues.get(number).map(|queue| queue.slot).filter(|slot| self.is_connected(*slot))
    }

    /// The peer of a queue pair that the endpoint does not know: the control side has connected the queue pair since
    /// the last refresh of the slots, or is connecting it now. A peer that has connected its own side may send before
    /// this side has finished, and the card acknowledges that. So a slot names its queue pairs while they are being
    /// connected.
    #[cold]
    fn new_owner(&mut self, number: u32) -> Option<PeerSlot> {
        self.refresh();
        self.owner(number).or_else(|| self.shared.peers.owner(number))
    }

    /// Acts on an imm or a message of a peer, which has taken a receive.
    fn received(&mut self, entry: &ib::ibv_wc) {
        let from = match entry.status {
            ib::IBV_WC_SUCCESS => self.owner(entry.qp_num).or_else(|| self.new_owner(entry.qp_num)),
            _ => None,
        };
        // SAFETY: the union holds an imm if the flag says so, or if the receive is one of imms.
        let imm = u32::from_be(unsafe { entry.__bindgen_anon_1.imm_data });
        if entry.wr_id & IMM == IMM {
            self.receives.took_imm(&self.shared.card);
            match from {
                Some(peer) => self.waiting.push_back(Event::Imm { peer, imm }),
                None => tracing::debug!(imm, "an imm came from no connected peer"),
            }
            return;
        }
        let buffer = (entry.wr_id & !RECEIVE) as u32;
        match from {
            Some(peer) => {
                let imm = (entry.wc_flags & WITH_IMM != 0).then_some(imm);
                self.receives.arrived(buffer, peer, entry.byte_len, imm);
            }
            None => self.receives.post_buffer(&self.shared.card, buffer),
        }
    }

    /// Gives up the card, which does not work any more. Destroys its queue pairs before it reports the loss: from then
    /// on the card writes no byte of a peer and sends no byte of ours.
    fn lose(&mut self, code: c_int) {
        if std::mem::replace(&mut self.is_lost, true) {
            return;
        }
        let status = Status { kind: ErrorKind::DeviceLost, code };
        for queue in self.send_queues.all() {
            for EndedRun { first, count } in queue.posted.take_all() {
                let failed = (first..first + u64::from(count)).map(|id| Event::Failed { id, status });
                self.waiting.extend(failed);
            }
        }
        self.requests = 0;
        let replays = self.replays.drain(..).map(|request| Event::Failed { id: request.id, status });
        self.waiting.extend(replays);
        let receives = self.receives.take_all();
        self.waiting.extend(receives.into_iter().map(|id| Event::ReceiveFailed { id, status }));
        self.destroy_queue_pairs();
        self.loss = Some(status);
        self.report_loss();
    }

    /// Reports the loss of the device once, when no join is under way: until the control side has destroyed the queue
    /// pairs that it was connecting, bytes may come over them.
    fn report_loss(&mut self) {
        if let Some(status) = self.loss.take_if(|_| !self.shared.peers.is_joining()) {
            self.waiting.push_back(Event::DeviceLost { status });
        }
    }

    /// Keeps a request that was flushed, to post it again, or reports it as failed. `cause` is the failure before it.
    pub(crate) fn flushed(&mut self, request: WorkRequest, cause: Option<Status>) {
        let link = self.links.get(request.peer.0 as usize);
        let is_given_up = link.is_none_or(|link| link.is_aborted);
        if !is_given_up && may_repeat(&request, cause) {
            self.replays.push_back(request);
            return;
        }
        let flushed = Status { kind: ErrorKind::Unreachable, code: ib::IBV_WC_WR_FLUSH_ERR as i32 };
        let (id, peer) = (request.id, request.peer);
        self.waiting.push_back(Event::FailedUnconfirmed { id, peer, status: flushed });
    }

    /// Posts the kept requests of links that have their next connection.
    pub(crate) fn replay(&mut self) {
        for _ in 0..self.replays.len() {
            let Some(request) = self.replays.pop_front() else { break };
            let view = self.links.get(request.peer.0 as usize).map(|link| &link.view);
            match view {
                Some(SlotView::Broken) => self.replays.push_back(request),
                Some(SlotView::Up(_)) => {
                    let piece = Piece { local: request.local, remote: request.remote, len: request.len };
                    // SAFETY: the request was accepted and its end not reported, so that its memory is still valid.
                    let (taken, error) = unsafe { self.post_run(&request, &[piece]) };
                    match (taken, error) {
                        (0, Some(status)) => self.waiting.push_back(Event::Failed { id: request.id, status }),
                        (0, None) => self.replays.push_back(request),
                        _ => {}
                    }
                }
                _ => self.waiting.push_back(Event::Failed { id: request.id, status: PEER_CLOSED }),
            }
        }
    }

    /// Fails the kept requests of a peer, as the engine has aborted them.
    pub(crate) fn forget_replays(&mut self, peer: PeerSlot) {
        let status = Status { kind: ErrorKind::Cancelled, code: 0 };
        let (replays, waiting) = (&mut self.replays, &mut self.waiting);
        replays.retain(|request| {
            let stays = request.peer != peer;
            if !stays {
                waiting.push_back(Event::Failed { id: request.id, status });
            }
            stays
        });
    }
}

impl Endpoint for VerbsEndpoint {
    unsafe fn post(&mut self, batch: &Batch) -> PostResult {
        self.refresh();
        if self.is_lost {
            return LOST;
        }
        let mut accepted = 0;
        for (run, pieces) in batch.runs() {
            // SAFETY: by the caller.
            let (taken, error) = unsafe { self.post_run(run, pieces) };
            accepted += taken;
            if taken < pieces.len() {
                return PostResult { accepted, error };
            }
        }
        PostResult { accepted, error: None }
    }

    unsafe fn post_recv(&mut self, batch: &[ReceiveRequest]) -> PostResult {
        if self.is_lost {
            return LOST;
        }
        let most = self.shared.capabilities.recv_depth as usize;
        self.receives.add(&self.shared.card, batch, most)
    }

    fn poll(&mut self, into: &mut Completions) {
        if !self.closed.is_empty() {
            self.free_slots();
        }
        self.refresh();
        self.is_changed = false;
        if self.has_broken && self.shared.retries.take_due(self.shared.clock.now()) {
            self.waiting.push_back(Event::EndpointChanged);
        }
        let stopped = self.draining.len();
        self.drain(into.spare());
        if !self.replays.is_empty() {
            self.replay();
        }
        // A connection is dropped only after all completions that came before its end are read.
        let may_close = self.is_drained || self.is_lost;
        if may_close && (self.has_leaving || !self.draining.is_empty()) {
            self.refresh();
            self.report_closed_peers(stopped);
        }
        while into.spare() > 0
            && let Some(event) = self.waiting.pop_front()
        {
            let _ = into.push(event);
        }
        self.shared.card.device.flushes.flush_if_arrivals(into);
    }

    fn arm(&mut self) -> Armed {
        self.refresh();
        if self.is_lost {
            // The channel of a lost device sends no event, and nothing wakes the caller when the last join ends.
            let is_idle = self.waiting.is_empty() && !self.has_leaving;
            return if is_idle { Armed::Unsupported } else { Armed::Ready };
        }
        self.clear_channel();
        let card = Arc::clone(&self.shared.card);
        // SAFETY: the queue is open.
        let code = unsafe { ib::ibv_req_notify_cq(card.cq.as_ptr(), 0) };
        // The card sends no event for a completion that came before the request for one.
        let is_idle = code == 0 && !self.drain(CHAIN) && self.waiting.is_empty() && self.draining.is_empty();
        // The caller has to poll for the next connection, to post what it holds for that one, and for a `PeerGone` that
        // is due: nothing wakes it for these. A lost device sends no event at all.
        if !is_idle || self.is_changed || self.has_leaving || self.is_lost {
            return Armed::Ready;
        }
        let now = || self.shared.clock.now();
        if self.broken_since.is_some_and(|since| now().since(since) < BROKEN_FOR_LONG) {
            return Armed::Ready;
        }
        // SAFETY: the channel is open.
        #[cfg(unix)]
        return match unsafe { (*card.channel.as_ptr()).fd } {
            fd if self.has_broken => Armed::FdOrTimeout(fd),
            fd => Armed::Fd(fd),
        };
        #[cfg(not(unix))]
        Armed::Unsupported
    }

    fn abort(&mut self, peer: PeerSlot) {
        self.refresh();
        // The connection ends with its requests. Requests for the next connection are not affected.
        if let Some(link) = self.links.get_mut(peer.0 as usize) {
            link.is_aborted = true;
        }
        self.forget_replays(peer);
        self.mark_broken(peer, None);
    }

    fn is_lost(&self) -> bool {
        self.is_lost
    }

    fn cancel_recv(&mut self, id: u64) -> bool {
        if self.receives.cancel(id) {
            let status = Status { kind: ErrorKind::Cancelled, code: 0 };
            self.waiting.push_back(Event::ReceiveFailed { id, status });
        }
        true
    }

    fn take_unclaimed(&mut self, peer: Option<PeerSlot>, take: &mut TakeMessage<'_>) {
        self.receives.take_unclaimed(&self.shared.card, peer, take);
    }

    fn describe(&self, status: Status) -> String {
        match (status.kind, status.code) {
            (ErrorKind::DeviceLost, code) => format!("{}: error {code}", self.shared.card.device.name),
            (_, 0) => String::new(),
            (_, code) => error_text(code),
        }
    }
}

impl Drop for VerbsEndpoint {
    fn drop(&mut self) {
        // Destroys the queue pairs: the card touches no memory after that.
        self.links.clear();
        self.draining.clear();
        self.retired.clear();
        self.destroyer.finish();
        self.shared.peers.clear();
        self.shared.closed();
    }
}

/// A buffer for the completions of one call.
pub(crate) fn entries() -> Vec<ib::ibv_wc> {
    // SAFETY: zero is a value of the structure.
    vec![unsafe { std::mem::zeroed() }; AT_ONCE]
}

/// Whether a flushed request may be posted again.
///
/// If the queue pair failed because the peer refused a request, the peer has executed no later one (IBTA 1.4, 9.9.2.4:
/// the responder takes no more). In any other case the peer may have executed the request, so that only a write or read
/// without an imm is posted again: executing one twice changes nothing.
fn may_repeat(request: &WorkRequest, cause: Option<Status>) -> bool {
    let was_refused = cause.is_some_and(|cause| cause.kind == ErrorKind::RemoteAccess);
    was_refused || (request.kind != WorkKind::Send && request.imm.is_none())
}

/// A lost device: a soft-RoCE device whose completions cannot be read any more.
#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::ptr::null_mut;

    use multirail_spi::{Armed, Completions, Domain, ReceiveRequest};

    use super::*;
    use crate::soft_roce::{LEN, TestEndpoint};

    #[test]
    #[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
    fn nothing_lands_once_the_loss_of_the_device_is_reported() {
        let (mut near, mut far) = (TestEndpoint::open("rxe0"), TestEndpoint::open("rxe1"));
        near.complete(&far);
        far.complete(&near);
        assert!(matches!(far.write(1, &near), Event::Done { .. }));
        assert!(near.bytes() == [1; LEN]);
        let receive = |id| ReceiveRequest { id, local: null_mut(), lkey: 0, len: 0 };
        // SAFETY: no message arrives for the receive.
        assert_eq!(unsafe { near.endpoint.post_recv(&[receive(7)]) }.accepted, 1);

        near.lose();
        let mut events = Completions::with_room(16);
        near.endpoint.poll(&mut events);
        let status = Status { kind: ErrorKind::DeviceLost, code: -1 };
        assert_eq!(events.as_slice(), [Event::ReceiveFailed { id: 7, status }, Event::DeviceLost { status }]);

        // The user may use the memory for something else from now on.
        let late = far.write(2, &near);
        assert!(near.bytes() == [1; LEN], "a late byte has landed; its write ended as {late:?}");
        assert!(!matches!(late, Event::Done { .. }), "{late:?}");

        // The endpoint posts and connects nothing any more, and still reports the end of the peer.
        // SAFETY: the endpoint refuses the receive.
        let refused = unsafe { near.endpoint.post_recv(&[receive(8)]) };
        assert_eq!((refused.accepted, refused.error.map(|why| why.kind)), (0, Some(ErrorKind::DeviceLost)));
        let refused = near.domain.connector().prepare().err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::DeviceLost);
        assert!(matches!(near.endpoint.arm(), Armed::Unsupported));
        near.domain.connector().disconnect(near.slot);
        let gone = Event::PeerGone { peer: near.slot };
        assert_eq!(near.until(|event| *event == gone), gone);
    }
}
