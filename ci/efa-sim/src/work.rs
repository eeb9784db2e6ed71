//! The execution of the requests that are posted to a queue pair.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use rdma_sys as ib;

use crate::completions::{Completion, SimCompletionQueue};
use crate::host::SimHost;
use crate::page::ReceiveQueue;
use crate::queue_pair::{SimQueuePair, lock};
use crate::request::{RequestOperation, SendRequest};
use crate::status::CompletionStatus;

/// The requests of a queue pair that have not ended.
pub(crate) struct ActiveRequests {
    pending: Vec<SendRequest>,
    random: fastrand::Rng,
    /// The time when the card is free again.
    free: Option<Instant>,
}

impl ActiveRequests {
    /// No requests. Later ones are executed in an order that `seed` chooses.
    pub(crate) fn new(seed: u64) -> Self {
        Self { pending: Vec::new(), random: fastrand::Rng::with_seed(seed), free: None }
    }
}

impl SimQueuePair {
    pub(crate) fn queue(&self) -> Option<&'static ReceiveQueue> {
        Some(&SimHost::get()?.card(self.card).queues[self.slot])
    }

    pub(crate) fn is_dead(&self) -> bool {
        SimHost::get().is_none_or(|host| host.card(self.card).is_dead.load(Ordering::Relaxed) != 0)
    }

    /// Posts all `requests` or none. Returns the errno of a refusal, or 0.
    pub(crate) fn post(&self, mut requests: Vec<SendRequest>) -> c_int {
        let Some(host) = SimHost::get() else { return libc::ENODEV };
        if self.is_dead() {
            return libc::EIO;
        }
        let mut active = lock(&self.active);
        if active.pending.len() + requests.len() > self.depth as usize || host.config.faults.is_full() {
            return libc::ENOMEM;
        }
        if host.config.faults.is_rolled_back(requests.len()) {
            if host.config.trace {
                eprintln!("efa-sim: card {}: a batch of {} is refused", self.card, requests.len());
            }
            return libc::ENOMEM;
        }
        for request in &mut requests {
            if let Some(busy) = host.config.occupancy(request.len()) {
                let due = active.free.unwrap_or_else(Instant::now).max(Instant::now()) + busy;
                (active.free, request.due) = (Some(due), Some(due));
            }
            request.fault = host.config.faults.status();
            request.finds_no_receive =
                request.operation == RequestOperation::Send && host.config.faults.finds_no_receive();
        }
        active.pending.append(&mut requests);
        if host.config.seed == 0 {
            self.execute(host, &mut active);
        }
        0
    }

    /// Executes some of the pending requests, as the card would do by itself.
    pub(crate) fn progress(&self) {
        let mut active = lock(&self.active);
        if !active.pending.is_empty()
            && let Some(host) = SimHost::get()
        {
            self.execute(host, &mut active);
        }
        drop(active);
        self.flush_receives();
    }

    /// Executes pending requests: all of them in order, or some of them in random order. A request that must wait does
    /// not delay others.
    fn execute(&self, host: &SimHost, active: &mut ActiveRequests) {
        if host.config.seed == 0 {
            return active.pending.retain(|request| !self.end(host, request));
        }
        for _ in 0..active.random.usize(1..=active.pending.len()) {
            let index = active.random.usize(0..active.pending.len());
            if self.end(host, &active.pending[index]) {
                active.pending.swap_remove(index);
            }
            if active.pending.is_empty() {
                break;
            }
        }
    }

    /// Executes a request. Returns true if it has ended.
    fn end(&self, host: &SimHost, request: &SendRequest) -> bool {
        if request.due.is_some_and(|due| due > Instant::now()) {
            return false;
        }
        let status =
            if self.is_dead() { Some(CompletionStatus::Flushed) } else { request.execute(host, self.card) };
        let Some(status) = status else { return false };
        self.count(host);
        if host.config.trace {
            request.trace(self.card, status);
        }
        if request.is_signaled || status != CompletionStatus::Ok {
            self.send_queue().push(Completion::of_request(request, self.ex.qp_base.qp_num, status));
        }
        true
    }

    /// Whether a receive may use the memory of `sge`.
    pub(crate) fn may_receive(&self, sge: &ib::ibv_sge) -> bool {
        let right = ib::IBV_ACCESS_LOCAL_WRITE;
        let (addr, len) = (sge.addr, sge.length.into());
        SimHost::get().is_some_and(|host| host.card(self.card).allows(sge.lkey, addr, len, right))
    }

    /// Counts an executed request. A fault may kill the card at this number.
    fn count(&self, host: &SimHost) {
        static EXECUTED: [AtomicU64; crate::p5::CARDS] = [const { AtomicU64::new(0) }; crate::p5::CARDS];
        let executed = EXECUTED[self.card].fetch_add(1, Ordering::Relaxed);
        if host.config.faults.kills(self.card, executed) {
            host.card(self.card).is_dead.store(1, Ordering::Relaxed);
        }
    }

    /// Ends the receives of a dead card.
    fn flush_receives(&self) {
        let Some(queue) = self.queue().filter(|_| self.is_dead()) else { return };
        let next = || queue.deliver(|receive| (receive.is_some(), None, receive)).flatten();
        while let Some(receive) = next() {
            let completion = Completion::flushed_receive(receive.id, self.ex.qp_base.qp_num);
            self.recv_queue().push(completion);
        }
    }

    pub(crate) fn send_queue(&self) -> &SimCompletionQueue {
        // SAFETY: the program destroys a completion queue after the pairs that use it.
        unsafe { &*self.ex.qp_base.send_cq.cast() }
    }

    pub(crate) fn recv_queue(&self) -> &SimCompletionQueue {
        // SAFETY: as above.
        unsafe { &*self.ex.qp_base.recv_cq.cast() }
    }
}
