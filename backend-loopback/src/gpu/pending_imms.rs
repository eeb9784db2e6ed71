//! Imms that wait for room in the message ring of their peer. The bytes of their requests have moved already.

use std::collections::VecDeque;
use std::sync::Arc;

use multirail_spi::{ErrorKind, PeerSlot};

use crate::completions::CompletionQueue;
use crate::outbound::Outbound;
use crate::status::status;

/// The imms that wait, with a queue for each peer that has no room. Imms to other peers do not wait, and no lease is
/// held.
#[derive(Default)]
pub(crate) struct PendingImms {
    queues: Vec<PeerImms>,
}

struct PeerImms {
    target: Arc<Outbound>,
    /// The ids of the requests that complete with their imms, and the imms.
    waiting: VecDeque<(u64, u32)>,
}

impl PendingImms {
    /// Sends the imm of request `id` and completes the request: now, or after the imms that wait for the same peer.
    /// If there is no room and the imm may not wait, the request is cancelled.
    pub(crate) fn send(
        &mut self,
        target: &Arc<Outbound>,
        id: u64,
        imm: u32,
        completions: &mut CompletionQueue,
        may_wait: bool,
    ) {
        match self.queues.iter_mut().find(|queue| Arc::ptr_eq(&queue.target, target)) {
            Some(queue) => queue.waiting.push_back((id, imm)),
            None if !target.is_alive() => completions.request(id, Err(status(ErrorKind::PeerDied))),
            None if target.send_imm(imm) => completions.done(id, 1),
            None if !may_wait => completions.request(id, Err(status(ErrorKind::Cancelled))),
            None => self.queues.push(PeerImms { target: Arc::clone(target), waiting: [(id, imm)].into() }),
        }
    }

    /// Sends the imms for which there is room now.
    #[inline]
    pub(crate) fn advance(&mut self, completions: &mut CompletionQueue) {
        self.queues.retain_mut(|queue| !queue.advance(completions));
    }

    /// Returns true if an imm waits for that peer.
    pub(crate) fn has(&self, peer: PeerSlot) -> bool {
        self.blocked_peers().any(|blocked| blocked == peer)
    }

    /// The peers for which imms wait.
    pub(crate) fn blocked_peers(&self) -> impl Iterator<Item = PeerSlot> {
        self.queues.iter().map(|queue| queue.target.peer)
    }

    /// Fails all requests that wait for a peer.
    pub(crate) fn stop(&mut self, peer: PeerSlot, kind: ErrorKind, completions: &mut CompletionQueue) {
        self.queues.retain_mut(|queue| {
            let stays = queue.target.peer != peer;
            if !stays {
                queue.fail(kind, completions);
            }
            stays
        });
    }

    /// Fails all requests.
    pub(crate) fn stop_all(&mut self, kind: ErrorKind, completions: &mut CompletionQueue) {
        self.queues.drain(..).for_each(|mut queue| queue.fail(kind, completions));
    }

    /// The number of requests that wait.
    #[inline]
    pub(crate) fn requests(&self) -> usize {
        self.queues.iter().map(|queue| queue.waiting.len()).sum()
    }
}

impl PeerImms {
    /// Sends the imms for which there is room. Returns true if the queue is empty.
    fn advance(&mut self, completions: &mut CompletionQueue) -> bool {
        if !self.target.is_alive() {
            self.fail(ErrorKind::PeerDied, completions);
        }
        while let Some(&(id, imm)) = self.waiting.front() {
            if !self.target.send_imm(imm) {
                return false;
            }
            completions.done(id, 1);
            self.waiting.pop_front();
        }
        true
    }

    fn fail(&mut self, kind: ErrorKind, completions: &mut CompletionQueue) {
        self.waiting.drain(..).for_each(|(id, _)| completions.request(id, Err(status(kind))));
    }
}
