//! The endpoint: posts, polls, and says goodbye to peers.

use std::ffi::c_void;
use std::sync::Arc;

use libfabric_sys as sys;
use transport_core::Time;
use transport_core::spi::{
    Armed, Batch, Completions, Endpoint, EndpointConfig, Event, PeerSlot, Piece, PostResult, ReceiveRequest,
    Status, WorkRequest,
};

use crate::context::{Contexts, Posted};
use crate::domain::Shared;
use crate::ending::GRACE;
use crate::peers::{Remote, Slot};
use crate::queues::Queues;
use crate::report::{AT_ONCE, Entries};
use crate::status::status;
use crate::submit::{Local, submit};
use crate::verdicts::Verdicts;
use crate::words::Words;

/// Attempts in a row at a request that libfabric has no room for.
const TRIES: usize = 16;

/// Closed in order: libfabric's endpoint first, after which no context is in use.
pub(crate) struct EfaEndpoint {
    /// Taken out while it is worked with, which a box makes cheap.
    pub(crate) queues: Option<Box<Queues>>,
    pub(crate) contexts: Contexts,
    pub(crate) shared: Arc<Shared>,
    pub(crate) local: Local,
    pub(crate) slots: Vec<Slot>,
    seen: u64,
    /// Slots that wait for their goodbye.
    pub(crate) leaving: Vec<PeerSlot>,
    /// Requests posted to each slot.
    pub(crate) outstanding: Vec<u32>,
    pub(crate) requests: usize,
    receives: usize,
    send_depth: usize,
    recv_depth: usize,
    /// Slots that were given up with requests posted, and until when these may end.
    pub(crate) aborted: Vec<(PeerSlot, Time)>,
    /// Failures whose meaning is not known yet.
    pub(crate) verdicts: Verdicts,
    /// Turns until the next look at libfabric's events.
    pub(crate) until_look: u32,
    /// Peers' writes and reads counted so far.
    visits: u64,
    pub(crate) words: Words,
    /// Where completions are read into; taken out meanwhile.
    pub(crate) entries: Option<Box<Entries>>,
    /// The device does not work any more, which is told by the next poll.
    pub(crate) is_lost: bool,
    /// Events that had no room.
    pub(crate) waiting: std::collections::VecDeque<Event>,
}

impl EfaEndpoint {
    pub(crate) fn new(queues: Queues, shared: Arc<Shared>, config: EndpointConfig) -> Self {
        let (send, recv) = (shared.capabilities.send_depth, shared.capabilities.recv_depth);
        let send = config.send_depth.unwrap_or(send).min(send);
        Self {
            local: Local::new(&queues, shared.place()),
            queues: Some(Box::new(queues)),
            contexts: Contexts::new(send + recv),
            shared,
            slots: Vec::new(),
            seen: u64::MAX,
            leaving: Vec::new(),
            outstanding: Vec::new(),
            requests: 0,
            receives: 0,
            send_depth: send as usize,
            recv_depth: recv as usize,
            aborted: Vec::new(),
            verdicts: Verdicts::default(),
            until_look: 0,
            visits: 0,
            words: Words::default(),
            is_lost: false,
            entries: Some(Box::new(Entries::new())),
            waiting: std::collections::VecDeque::new(),
        }
    }

    fn refresh(&mut self) {
        if self.shared.peers.refresh(&mut self.seen, &mut self.slots) {
            self.outstanding.resize(self.slots.len(), 0);
            let leaving = (0_u32..).zip(&self.slots).filter(|(_, slot)| matches!(slot, Slot::Leaving(_)));
            self.leaving = leaving.map(|(index, _)| PeerSlot(index)).collect();
        }
    }

    /// What is known of a peer that requests may still go to.
    fn remote(&self, slot: PeerSlot) -> Option<Remote> {
        match self.slots.get(slot.0 as usize) {
            Some(Slot::Up(remote)) => Some(*remote),
            _ => None,
        }
    }

    /// Whether `slot` is a peer's, for what claims to come from it.
    pub(crate) fn knows(&self, slot: u32) -> bool {
        self.remote(PeerSlot(slot)).is_some()
    }

    /// The slot of an address, where the provider tells that instead.
    pub(crate) fn slot_of(&self, address: sys::fi_addr_t) -> Option<u32> {
        let is_it = |slot: &Slot| matches!(slot, Slot::Up(remote) if remote.address == address);
        self.slots.iter().position(is_it).map(|slot| slot as u32)
    }

    /// Posts a run from its piece `first` on: how many were taken, and libfabric's answer to
    /// the next.
    ///
    /// # Safety
    /// As [`Endpoint::post`].
    unsafe fn post_run(&mut self, queues: &Queues, run: &WorkRequest, pieces: &[Piece]) -> (usize, isize) {
        let full = -(sys::FI_EAGAIN as isize);
        let Some(remote) = self.remote(run.peer) else { return (0, -(sys::FI_ENOTCONN as isize)) };
        let (mut taken, mut tries) = (0, 0);
        loop {
            let room = (self.send_depth - self.requests).min(pieces.len() - taken);
            let next = (taken, &pieces[taken..taken + room]);
            // SAFETY: by the caller; contexts stay where they are until the completion.
            let (more, code) = unsafe { submit(queues, &mut self.contexts, run, next, &remote, &self.local) };
            self.outstanding[run.peer.0 as usize] += more as u32;
            self.requests += more;
            taken += more;
            tries = if more > 0 { 0 } else { tries + 1 };
            match code {
                0 if taken == pieces.len() => return (taken, 0),
                0 => return (taken, full),
                // What is full may be so for less than a turn of the engine takes.
                code if code == full && tries < TRIES => self.drain(queues, AT_ONCE),
                code => return (taken, code),
            }
        }
    }

    /// What a context stood for is over.
    pub(crate) fn end(&mut self, context: *mut c_void) -> Option<Posted> {
        let posted = self.contexts.end(context)?;
        self.ended(posted);
        Some(posted)
    }

    pub(crate) fn ended(&mut self, posted: Posted) {
        match posted {
            Posted::Request { peer, .. } => {
                self.requests -= 1;
                self.outstanding[peer.0 as usize] -= 1;
            }
            Posted::Receive { .. } => self.receives -= 1,
        }
    }
}

/// What a post of `accepted` requests comes to, the next of which got `code`.
fn refused(accepted: usize, code: isize) -> PostResult {
    let is_full = code == -(sys::FI_EAGAIN as isize);
    PostResult { accepted, error: (!is_full).then(|| status(code as i32)) }
}

impl Endpoint for EfaEndpoint {
    unsafe fn post(&mut self, batch: &Batch) -> PostResult {
        self.refresh();
        let Some(queues) = self.queues.take() else { return refused(0, -(sys::FI_ENODEV as isize)) };
        let turn = queues.addresses.turn();
        let mut result = PostResult { accepted: 0, error: None };
        for (run, pieces) in batch.runs() {
            // SAFETY: by the caller.
            let (taken, code) = unsafe { self.post_run(&queues, run, pieces) };
            result.accepted += taken;
            if code != 0 {
                let code = queues.device.refusal(code);
                self.is_lost |= code == -(sys::FI_ENODEV as isize);
                result = refused(result.accepted, code);
                break;
            }
        }
        drop(turn);
        self.queues = Some(queues);
        result
    }

    unsafe fn post_recv(&mut self, batch: &[ReceiveRequest]) -> PostResult {
        let Some(queues) = &self.queues else { return refused(0, -(sys::FI_ENODEV as isize)) };
        let _turn = self.shared.addresses.turn();
        for (accepted, receive) in batch.iter().enumerate() {
            if self.receives == self.recv_depth {
                return PostResult { accepted, error: None };
            }
            let Some(context) = self.contexts.take_receive(receive.id) else {
                return PostResult { accepted, error: None };
            };
            let iovec = sys::iovec { iov_base: receive.local.cast(), iov_len: receive.len as usize };
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
                self.contexts.end(context);
                let code = queues.device.refusal(code);
                self.is_lost |= code == -(sys::FI_ENODEV as isize);
                return refused(accepted, code);
            }
            self.receives += 1;
        }
        PostResult { accepted: batch.len(), error: None }
    }

    fn poll(&mut self, into: &mut Completions) {
        self.refresh();
        if let Some(queues) = self.queues.take() {
            let turn = queues.addresses.turn();
            self.drain(&queues, into.spare());
            drop(turn);
            let visits = queues.visits();
            if visits != self.visits {
                self.visits = visits;
                into.stir();
            }
            self.queues = Some(queues);
        }
        let (shared, slots) = (&self.shared, &self.slots);
        let has_left = |peer: PeerSlot| !matches!(slots.get(peer.0 as usize), Some(Slot::Up(_)));
        self.verdicts.tell(|| shared.setup.clock.now(), has_left, &mut self.waiting);
        self.goodbyes();
        if !self.aborted.is_empty() {
            self.overdue();
        }
        self.look_at_events();
        while into.spare() > 0
            && let Some(event) = self.waiting.pop_front()
        {
            let _ = into.push(event);
        }
    }

    fn arm(&mut self) -> Armed {
        self.refresh();
        if !self.waiting.is_empty() {
            return Armed::Ready;
        }
        let Some(queues) = &self.queues else { return Armed::Unsupported };
        let Some(descriptor) = queues.descriptor else { return Armed::Unsupported };
        let mut fid = queues.cq.fid();
        // SAFETY: both are open; the list has one entry.
        match unsafe { sys::fi_trywait(queues.device.fabric.as_ptr(), &raw mut fid, 1) } {
            0 => Armed::Fd(descriptor),
            _ => Armed::Ready,
        }
    }

    fn due(&self) -> Time {
        self.aborted.iter().map(|(_, until)| *until).fold(self.verdicts.due(), Time::min)
    }

    fn abort(&mut self, peer: PeerSlot) {
        self.refresh();
        if self.outstanding.get(peer.0 as usize).is_some_and(|posted| *posted > 0) {
            self.aborted.push((peer, self.shared.setup.clock.now().after(GRACE)));
        }
    }

    fn cancel_recv(&mut self, id: u64) {
        let (Some(queues), Some(context)) = (&self.queues, self.contexts.receive(id)) else { return };
        let _turn = self.shared.addresses.turn();
        // SAFETY: the endpoint is open and the context posted.
        let code = unsafe { sys::fi_cancel(queues.ep.as_ptr(), context) };
        if code != 0 {
            tracing::warn!(code, "libfabric does not cancel a receive");
        }
    }

    fn describe(&self, status: Status) -> String {
        self.words.describe(status, &self.shared.device)
    }
}

impl Drop for EfaEndpoint {
    fn drop(&mut self) {
        // First of all: after it nothing is touched.
        self.close();
        self.shared.closed();
    }
}
