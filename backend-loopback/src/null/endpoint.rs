//! The endpoint of a null device: what is posted is done.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use transport_core::ErrorKind;
use transport_core::spi::{
    Armed, Batch, Completions, Endpoint, Event, PeerSlot, PostResult, ReceiveRequest, Status,
};

use super::domain::Shared;
use crate::status::{describe, status};

pub(super) struct NullEndpoint {
    shared: Arc<Shared>,
    depth: usize,
    /// Requests done and not reported, as ranges of ids.
    done: VecDeque<(u64, u32)>,
    outstanding: usize,
    receives: VecDeque<u64>,
    cancelled: Vec<u64>,
    imms_per_poll: u32,
    /// The peer whose imms arrive.
    first: Option<PeerSlot>,
    gone: Vec<PeerSlot>,
}

impl NullEndpoint {
    pub(super) fn new(shared: Arc<Shared>, depth: usize, imms_per_poll: u32) -> Self {
        Self {
            shared,
            depth,
            done: VecDeque::with_capacity(64),
            outstanding: 0,
            receives: VecDeque::new(),
            cancelled: Vec::new(),
            imms_per_poll,
            first: None,
            gone: Vec::new(),
        }
    }

    #[cold]
    fn look_again(&mut self) {
        let mut peers = self.shared.peers.lock().unwrap_or_else(PoisonError::into_inner);
        self.first = peers.first;
        self.gone.append(&mut peers.gone);
    }
}

impl Endpoint for NullEndpoint {
    unsafe fn post(&mut self, batch: &Batch) -> PostResult {
        let mut room = self.depth - self.outstanding;
        let mut accepted = 0;
        for (template, pieces) in batch.runs() {
            let count = pieces.len().min(room);
            if count == 0 {
                break;
            }
            self.done.push_back((template.id, count as u32));
            room -= count;
            accepted += count;
        }
        self.outstanding += accepted;
        PostResult { accepted, error: None }
    }

    unsafe fn post_recv(&mut self, batch: &[ReceiveRequest]) -> PostResult {
        self.receives.extend(batch.iter().map(|receive| receive.id));
        PostResult { accepted: batch.len(), error: None }
    }

    fn poll(&mut self, into: &mut Completions) {
        if self.shared.changed.load(Ordering::Relaxed) && self.shared.changed.swap(false, Ordering::Acquire) {
            self.look_again();
        }
        while into.spare() > 0
            && let Some((first, count)) = self.done.pop_front()
        {
            self.outstanding -= count as usize;
            let _ = into.push(Event::Done { first, count });
        }
        while into.spare() > 0
            && let Some(id) = self.cancelled.pop()
        {
            let _ = into.push(Event::ReceiveFailed { id, status: status(ErrorKind::Cancelled) });
        }
        // Last of a peer: what was posted to it has been reported by now.
        while into.spare() > 0
            && self.done.is_empty()
            && let Some(peer) = self.gone.pop()
        {
            let _ = into.push(Event::PeerGone { peer });
        }
        if let Some(peer) = self.first {
            for imm in 0..self.imms_per_poll.min(into.spare() as u32) {
                let _ = into.push(Event::Imm { peer, imm });
            }
        }
    }

    fn arm(&mut self) -> Armed {
        let idle = self.done.is_empty() && self.gone.is_empty() && self.cancelled.is_empty();
        if idle && self.imms_per_poll == 0 { Armed::Unsupported } else { Armed::Ready }
    }

    fn abort(&mut self, _: PeerSlot) {}

    fn cancel_recv(&mut self, id: u64) {
        if let Some(place) = self.receives.iter().position(|posted| *posted == id) {
            self.receives.remove(place);
            self.cancelled.push(id);
        }
    }

    fn describe(&self, status: Status) -> String {
        describe(status)
    }
}

impl Drop for NullEndpoint {
    fn drop(&mut self) {
        self.shared.open.store(false, Ordering::Release);
    }
}
