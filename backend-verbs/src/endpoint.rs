//! The endpoint: posts, polls, and says goodbye to peers.

use std::collections::VecDeque;
use std::sync::Arc;

use rdma_sys as ib;
use transport_core::spi::{
    Armed, Batch, Completions, Endpoint, EndpointConfig, Event, PeerSlot, PostResult, ReceiveRequest, Status,
    WorkRequest,
};
use transport_core::{ErrorKind, Result};

use crate::domain::Shared;
use crate::library::library;
use crate::peers::{Pairs, View};
use crate::posted::CHAIN;
use crate::queue_pair::QueuePair;
use crate::receives::Receives;
use crate::report::entries;
use crate::rings::Rings;
use crate::status::words;

/// The status of a request that is posted to a lost device.
const LOST: PostResult =
    PostResult { accepted: 0, error: Some(Status { kind: ErrorKind::DeviceLost, code: 0 }) };

/// A slot's connection.
#[derive(Default)]
pub(crate) struct Link {
    pub(crate) view: View,
    /// As posted to; it may not be the slot's any more.
    pub(crate) pairs: Option<Arc<Pairs>>,
    /// The queue pair that comes next.
    pub(crate) turn: usize,
    /// What is posted was given up: it is not posted again.
    pub(crate) is_aborted: bool,
}

/// Closed in order: connections before what they use.
pub(crate) struct VerbsEndpoint {
    pub(crate) links: Vec<Link>,
    /// Connections that ended, until nothing of theirs is posted.
    ending: Vec<(PeerSlot, Arc<Pairs>)>,
    /// Slots whose goodbye is said, and perhaps not heard yet.
    gone: Vec<PeerSlot>,
    pub(crate) rings: Rings,
    pub(crate) receives: Receives,
    pub(crate) shared: Arc<Shared>,
    seen: u64,
    views: Vec<View>,
    /// Connections that slots have no more, until they are taken over.
    retired: Vec<(PeerSlot, Arc<Pairs>)>,
    /// Whether there are slots that wait for their goodbye, or for their next connection.
    has_leaving: bool,
    has_broken: bool,
    /// The control side has changed a slot since the last poll: the caller may hold requests for the new connection.
    is_changed: bool,
    pub(crate) requests: usize,
    pub(crate) send_depth: usize,
    /// Requests that a failed connection has not executed: for the next one.
    pub(crate) replays: VecDeque<WorkRequest>,
    pub(crate) is_lost: bool,
    /// The loss of the device, until it is told.
    pub(crate) loss: Option<Status>,
    /// The last look at the completion queue left nothing there.
    pub(crate) is_drained: bool,
    /// Events that had no room.
    pub(crate) waiting: VecDeque<Event>,
    pub(crate) entries: Vec<ib::ibv_wc>,
}

impl VerbsEndpoint {
    pub(crate) fn open(shared: Arc<Shared>, config: EndpointConfig) -> Result<Self> {
        let depth = shared.capabilities.send_depth;
        Ok(Self {
            links: Vec::new(),
            ending: Vec::new(),
            gone: Vec::new(),
            rings: Rings::default(),
            receives: Receives::open(&shared.card)?,
            send_depth: config.send_depth.unwrap_or(depth).min(depth) as usize,
            shared,
            seen: u64::MAX,
            views: Vec::new(),
            retired: Vec::new(),
            has_leaving: false,
            has_broken: false,
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

    /// Takes over what the control side has changed.
    #[inline]
    pub(crate) fn refresh(&mut self) {
        if self.shared.peers.refresh(&mut self.seen, &mut self.views, &mut self.retired) {
            self.take_over();
        }
    }

    #[cold]
    fn take_over(&mut self) {
        self.is_changed = true;
        self.links.resize_with(self.views.len(), Link::default);
        self.has_leaving = self.views.iter().any(|view| matches!(view, View::Leaving));
        self.has_broken = self.views.iter().any(|view| matches!(view, View::Broken));
        for (slot, pairs) in self.retired.drain(..) {
            let link = self.links.get(slot.0 as usize).and_then(|link| link.pairs.as_ref());
            // One that came and went between two looks has arrivals perhaps, and no request.
            if !link.is_some_and(|link| Arc::ptr_eq(link, &pairs)) {
                for pair in pairs.all() {
                    self.rings.insert(pair.number(), slot);
                }
                pairs.fail();
                self.ending.push((slot, pairs));
            }
        }
        for (index, (link, view)) in self.links.iter_mut().zip(&self.views).enumerate() {
            let slot = PeerSlot(index as u32);
            let next = match view {
                View::Up(pairs) => Some(Arc::clone(pairs)),
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
                self.rings.insert(pair.number(), slot);
            }
            if let Some(old) = std::mem::replace(&mut link.pairs, next) {
                // What is posted comes back as flushed.
                old.fail();
                self.ending.push((slot, old));
            }
        }
    }

    /// Destroys every queue pair that a slot of the device has, which is lost: no slot gets any after that.
    pub(crate) fn destroy_queue_pairs(&mut self) {
        self.shared.peers.lose();
        // Those that a link has go to `ending`, which is then the last to hold them.
        self.refresh();
        self.ending.clear();
        self.rings = Rings::default();
    }

    /// Whether `slot` is a peer's, for what claims to come from it.
    pub(crate) fn knows(&self, slot: PeerSlot) -> bool {
        let link = self.links.get(slot.0 as usize);
        link.is_some_and(|link| matches!(link.view, View::Up(_) | View::Broken))
    }

    /// Lets go of connections that nothing is posted to any more, of the first `read` that ended: nothing of theirs is
    /// unread. Then says goodbye to peers.
    fn goodbyes(&mut self, read: usize) {
        let rings = &mut self.rings;
        let mut place = 0;
        self.ending.retain(|(_, pairs)| {
            place += 1;
            if place > read {
                return true;
            }
            let is_busy =
                |pair: &QueuePair| rings.get(pair.number()).is_some_and(|ring| ring.posted.len() > 0);
            if pairs.all().any(is_busy) {
                return true;
            }
            pairs.all().for_each(|pair| rings.remove(pair.number()));
            false
        });
        for (index, link) in self.links.iter_mut().enumerate() {
            let peer = PeerSlot(index as u32);
            let is_over = || {
                let has_pairs = self.ending.iter().any(|(slot, _)| *slot == peer);
                !has_pairs && self.replays.iter().all(|request| request.peer != peer)
            };
            if matches!(link.view, View::Leaving) && is_over() {
                link.view = View::Free;
                self.receives.forget(&self.shared.card, peer);
                self.waiting.push_back(Event::PeerGone { peer });
                self.shared.peers.end(peer);
                self.gone.push(peer);
            }
        }
    }

    /// Frees the slots of peers whose goodbye was heard: who polls again has acted on what it was told. Were
    /// one offered anew before, the goodbye would be taken for the next peer's.
    #[cold]
    fn free_slots(&mut self) {
        let Self { gone, waiting, shared, .. } = self;
        let was_heard = |peer: &mut PeerSlot| !waiting.contains(&Event::PeerGone { peer: *peer });
        gone.extract_if(.., was_heard).for_each(|peer| shared.peers.free(peer));
    }

    /// Reads the channel empty, so that its descriptor tells of what comes.
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
        self.receives.want(&self.shared.card, batch, most)
    }

    fn poll(&mut self, into: &mut Completions) {
        if !self.gone.is_empty() {
            self.free_slots();
        }
        self.refresh();
        self.is_changed = false;
        let stopped = self.ending.len();
        self.drain(into.spare());
        if !self.replays.is_empty() {
            self.replay();
        }
        // What a connection has brought is read, once it has stopped, before it is forgotten.
        let may_part = self.is_drained || self.is_lost;
        if may_part && (self.has_leaving || !self.ending.is_empty()) {
            self.refresh();
            self.goodbyes(stopped);
        }
        while into.spare() > 0
            && let Some(event) = self.waiting.pop_front()
        {
            let _ = into.push(event);
        }
        self.shared.card.device.fences.settle(into);
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
        // What came before it was asked for tells nobody.
        let is_idle = code == 0 && !self.drain(CHAIN) && self.waiting.is_empty() && self.ending.is_empty();
        // The caller has to poll for the next connection, to post what it holds for that one, and for a goodbye that is
        // due: nothing wakes it for these. A lost device sends no event at all.
        if !is_idle || self.is_changed || self.has_broken || self.has_leaving || self.is_lost {
            return Armed::Ready;
        }
        // SAFETY: the channel is open.
        #[cfg(unix)]
        return Armed::Fd(unsafe { (*card.channel.as_ptr()).fd });
        #[cfg(not(unix))]
        Armed::Unsupported
    }

    fn abort(&mut self, peer: PeerSlot) {
        self.refresh();
        // The connection ends with what is posted to it; the next one is another's matter.
        if let Some(link) = self.links.get_mut(peer.0 as usize) {
            link.is_aborted = true;
        }
        self.forget_replays(peer);
        self.breaks(peer, None);
    }

    fn cancel_recv(&mut self, id: u64) -> bool {
        if self.receives.cancel(id) {
            let status = Status { kind: ErrorKind::Cancelled, code: 0 };
            self.waiting.push_back(Event::ReceiveFailed { id, status });
        }
        true
    }

    fn describe(&self, status: Status) -> String {
        match (status.kind, status.code) {
            (ErrorKind::DeviceLost, code) => format!("{}: error {code}", self.shared.card.device.name),
            (_, 0) => String::new(),
            (_, code) => words(code),
        }
    }
}

impl Drop for VerbsEndpoint {
    fn drop(&mut self) {
        // The queue pairs go: nothing is touched after that.
        self.links.clear();
        self.ending.clear();
        self.retired.clear();
        self.shared.peers.clear();
        self.shared.closed();
    }
}
