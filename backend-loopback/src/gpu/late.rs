//! Imms whose bytes have landed, and whose peers had no room for them.

use std::collections::VecDeque;
use std::sync::Arc;

use multirail_spi::{ErrorKind, PeerSlot};

use crate::ended::Ended;
use crate::peer::Outbound;
use crate::runner::send_imm;
use crate::status::status;

/// What waits, a queue for each peer that has no room: nobody else waits for it, no lease is held.
#[derive(Default)]
pub(crate) struct Late {
    queues: Vec<Queue>,
}

struct Queue {
    target: Arc<Outbound>,
    /// The request that ends with it, and the imm.
    waiting: VecDeque<(u64, u32)>,
}

impl Late {
    /// Sends the imm of request `id`, which ends with that, now or behind those that wait for the same peer; it is
    /// cancelled if it may not wait.
    pub(crate) fn send(
        &mut self,
        target: &Arc<Outbound>,
        id: u64,
        imm: u32,
        ended: &mut Ended,
        may_wait: bool,
    ) {
        match self.queues.iter_mut().find(|queue| Arc::ptr_eq(&queue.target, target)) {
            Some(queue) => queue.waiting.push_back((id, imm)),
            None if !target.is_alive() => ended.request(id, Err(status(ErrorKind::PeerDied))),
            None if send_imm(target, imm) => ended.done(id, 1),
            None if !may_wait => ended.request(id, Err(status(ErrorKind::Cancelled))),
            None => self.queues.push(Queue { target: Arc::clone(target), waiting: [(id, imm)].into() }),
        }
    }

    /// Sends what there is room for by now.
    #[inline]
    pub(crate) fn advance(&mut self, ended: &mut Ended) {
        self.queues.retain_mut(|queue| !queue.advance(ended));
    }

    /// Whether something waits for that peer.
    pub(crate) fn has(&self, peer: PeerSlot) -> bool {
        self.starved().any(|starved| starved == peer)
    }

    /// The peers that something waits for.
    pub(crate) fn starved(&self) -> impl Iterator<Item = PeerSlot> {
        self.queues.iter().map(|queue| queue.target.peer)
    }

    /// Ends all that waits for a peer.
    pub(crate) fn stop(&mut self, peer: PeerSlot, kind: ErrorKind, ended: &mut Ended) {
        self.queues.retain_mut(|queue| {
            let stays = queue.target.peer != peer;
            if !stays {
                queue.fail(kind, ended);
            }
            stays
        });
    }

    /// Ends everything.
    pub(crate) fn stop_all(&mut self, kind: ErrorKind, ended: &mut Ended) {
        self.queues.drain(..).for_each(|mut queue| queue.fail(kind, ended));
    }

    /// Requests that wait.
    #[inline]
    pub(crate) fn requests(&self) -> usize {
        self.queues.iter().map(|queue| queue.waiting.len()).sum()
    }
}

impl Queue {
    /// Whether nothing is left to wait for.
    fn advance(&mut self, ended: &mut Ended) -> bool {
        if !self.target.is_alive() {
            self.fail(ErrorKind::PeerDied, ended);
        }
        while let Some(&(id, imm)) = self.waiting.front() {
            if !send_imm(&self.target, imm) {
                return false;
            }
            ended.done(id, 1);
            self.waiting.pop_front();
        }
        true
    }

    fn fail(&mut self, kind: ErrorKind, ended: &mut Ended) {
        self.waiting.drain(..).for_each(|(id, _)| ended.request(id, Err(status(kind))));
    }
}
