//! Receives: the engine posts them on its first rail, and the backend matches messages to them.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use foldhash::HashMap;

use super::{Message, PoolPart, Rail};
use crate::EngineHandle;
use crate::memory::{RegionInner, revoked};
use crate::op::OpId;
use crate::spi::ReceiveRequest;
use crate::{Error, ErrorKind, Outcome, PeerId, Time};

/// The rail of an engine on which messages arrive.
pub(crate) const RECEIVE_RAIL: usize = 0;

/// Who gets the message of a receive.
enum Recipient {
    Op(OpId),
    /// `part`: the pool's buffers of this engine.
    Pool {
        part: Arc<PoolPart>,
        buffer: u32,
    },
}

struct Receive {
    recipient: Recipient,
    /// Kept alive until the device can no longer write to it.
    region: Arc<RegionInner>,
    offset: u64,
    len: u64,
    posted: bool,
    /// When the user submitted it; zero for a pool's buffer.
    submitted_at: Time,
}

/// All receives that have not ended.
#[derive(Default)]
pub(crate) struct Receives {
    /// By the id of their receive request.
    receives: HashMap<u64, Receive>,
    /// Receives that the endpoint has had no room for, oldest first.
    unposted: VecDeque<u64>,
    next_id: u64,
    /// All pools that have had a buffer here. The engine closes them when it closes.
    pools: Vec<Weak<PoolPart>>,
    /// Messages that arrived for pools that were dropped, on a device that cannot cancel a receive. The next receive
    /// takes the oldest of them.
    unclaimed: VecDeque<Message>,
    /// Why the engine posts no more receives.
    closed: Option<Error>,
}

impl Receives {
    /// The number of receives that the endpoint holds.
    pub fn posted(&self) -> usize {
        self.receives.values().filter(|receive| receive.posted).count()
    }

    /// The receives that users submitted: the operation, the size of the buffer in bytes, whether it is posted, and
    /// when it was submitted.
    pub fn operations(&self) -> impl Iterator<Item = (OpId, u64, bool, Time)> {
        self.receives.values().filter_map(|receive| match receive.recipient {
            Recipient::Op(id) => Some((id, receive.len, receive.posted, receive.submitted_at)),
            Recipient::Pool { .. } => None,
        })
    }

    /// Adds a receive that a user submitted. An unclaimed message completes it at once.
    pub fn add(
        &mut self,
        id: OpId,
        submitted_at: Time,
        (region, offset, len): (Arc<RegionInner>, u64, u64),
        handle: &EngineHandle,
    ) {
        match self.unclaimed.pop_front() {
            Some(message) => handle.table.finish(id, message.receive_into(region, offset, len)),
            None => self.insert(Receive {
                recipient: Recipient::Op(id),
                region,
                offset,
                len,
                posted: false,
                submitted_at,
            }),
        }
    }

    /// Adds a receive into a buffer of a pool. The pool takes all unclaimed messages.
    pub fn add_pooled(&mut self, part: Arc<PoolPart>, buffer: u32) {
        if !self.pools.iter().any(|known| Weak::as_ptr(known) == Arc::as_ptr(&part)) {
            self.pools.retain(|known| known.strong_count() > 0);
            self.pools.push(Arc::downgrade(&part));
        }
        self.unclaimed.drain(..).for_each(|message| part.deliver(message));
        let (region, offset, len) = part.buffer(buffer);
        let recipient = Recipient::Pool { part, buffer };
        self.insert(Receive { recipient, region, offset, len, posted: false, submitted_at: Time::ZERO });
    }

    fn insert(&mut self, receive: Receive) {
        self.receives.insert(self.next_id, receive);
        self.unposted.push_back(self.next_id);
        self.next_id += 1;
    }

    /// Posts receives until the endpoint has no more room.
    pub fn post(&mut self, rails: &mut [Rail], handle: &EngineHandle) {
        if let Some(error) = self.closed.clone() {
            self.end_unposted(handle, &error);
            return;
        }
        while let Some(id) = self.unposted.front().copied() {
            let Some(receive) = self.receives.get_mut(&id) else {
                self.unposted.pop_front();
                continue;
            };
            let region = &receive.region;
            if region.is_revoked() {
                self.unposted.pop_front();
                self.end(id, Err(revoked("recv")), handle);
                continue;
            }
            let request = ReceiveRequest {
                id,
                local: region.start().wrapping_add(receive.offset as usize),
                lkey: region.regions[handle.transport][handle.first_rail + RECEIVE_RAIL]
                    .as_ref()
                    .map_or(0, |region| region.lkey()),
                len: receive.len,
            };
            // SAFETY: the range was checked when the receive was made, and
            // `self.receives` holds its region until the endpoint has ended it.
            let result = unsafe { rails[RECEIVE_RAIL].endpoint.post_recv(&[request]) };
            match (result.accepted, result.error) {
                (0, None) => return,
                (0, Some(status)) => {
                    self.unposted.pop_front();
                    let text = rails[RECEIVE_RAIL].endpoint.describe(status);
                    self.end(id, Err(Error::new(status.kind, "recv", text)), handle);
                }
                _ => {
                    receive.posted = true;
                    self.unposted.pop_front();
                }
            }
        }
    }

    /// Completes a receive: a message arrived.
    pub fn received(
        &mut self,
        id: u64,
        peer: Option<PeerId>,
        len: u64,
        imm: Option<u32>,
        rails: &mut [Rail],
        handle: &EngineHandle,
    ) {
        // The endpoint has room for the next receive now.
        self.post(rails, handle);
        self.end(id, Ok(Outcome { bytes: len, peer, imm, ..Outcome::default() }), handle);
    }

    /// Fails a receive.
    pub fn failed(&mut self, id: u64, error: Error, rails: &mut [Rail], handle: &EngineHandle) {
        // The endpoint reports `Cancelled` for every receive that the engine took back. The user's error says why the
        // engine did so: the fabric was closed, or the region was revoked.
        let is_revoked = || self.receives.get(&id).is_some_and(|receive| receive.region.is_revoked());
        let error = match &self.closed {
            _ if error.kind() != ErrorKind::Cancelled => error,
            Some(closed) => closed.clone(),
            None if is_revoked() => revoked("recv"),
            None => error,
        };
        // The endpoint has room for the next receive now.
        self.post(rails, handle);
        self.end(id, Err(error), handle);
    }

    /// Cancels the receive of an operation. Returns false if the operation is not a receive.
    pub fn cancel(&mut self, op: OpId, rails: &mut [Rail], handle: &EngineHandle) -> bool {
        let is_of_op = |receive: &Receive| matches!(receive.recipient, Recipient::Op(id) if id == op);
        let found = self.receives.iter().find(|(_, receive)| is_of_op(receive));
        let Some((&id, receive)) = found else { return false };
        let is_posted = receive.posted;
        self.take_back(id, is_posted, cancelled(), rails, handle);
        true
    }

    /// Cancels the receives of a pool that was dropped.
    pub fn close_pool(&mut self, part: &Arc<PoolPart>, rails: &mut [Rail], handle: &EngineHandle) {
        let of_pool = |receive: &Receive| matches!(&receive.recipient, Recipient::Pool { part: of, .. } if Arc::ptr_eq(of, part));
        let ids: Vec<_> =
            self.receives.iter().filter(|(_, receive)| of_pool(receive)).map(|(id, _)| *id).collect();
        for id in ids {
            let is_posted = self.receives[&id].posted;
            self.take_back(id, is_posted, cancelled(), rails, handle);
        }
    }

    /// Cancels all receives into a revoked region.
    pub fn revoke(&mut self, region: &Arc<RegionInner>, rails: &mut [Rail], handle: &EngineHandle) {
        let into = self.receives.iter().filter(|(_, receive)| Arc::ptr_eq(&receive.region, region));
        for (id, is_posted) in into.map(|(id, receive)| (*id, receive.posted)).collect::<Vec<_>>() {
            self.take_back(id, is_posted, revoked("recv"), rails, handle);
        }
    }

    /// Ends an unposted receive with `error`. A posted one ends later, by an event, once the device no longer uses
    /// the buffer.
    fn take_back(
        &mut self,
        id: u64,
        is_posted: bool,
        error: Error,
        rails: &mut [Rail],
        handle: &EngineHandle,
    ) {
        if is_posted {
            rails[RECEIVE_RAIL].endpoint.cancel_recv(id);
        } else {
            self.end(id, Err(error), handle);
        }
    }

    /// Whether any receive writes into a region.
    pub fn has_receive_into(&self, region: &Arc<RegionInner>) -> bool {
        self.receives.values().any(|receive| Arc::ptr_eq(&receive.region, region))
    }

    /// Cancels all receives. Unposted ones end at once, posted ones by their events or with the endpoint.
    pub fn close(&mut self, error: &Error, rails: &mut [Rail], handle: &EngineHandle) {
        self.closed.get_or_insert_with(|| error.clone());
        self.end_unposted(handle, error);
        for (id, receive) in &mut self.receives {
            // A device that cannot cancel the receive keeps it until a message arrives or the endpoint is closed. So
            // the engine does not wait for it.
            receive.posted &= rails[RECEIVE_RAIL].endpoint.cancel_recv(*id);
        }
    }

    /// Ends all receives if the lost device is the one that messages arrive on.
    pub fn on_device_lost(&mut self, rail: usize, error: &Error, handle: &EngineHandle) {
        if rail == RECEIVE_RAIL {
            self.closed.get_or_insert_with(|| error.clone());
            self.end_all(error, handle);
        }
    }

    /// Ends all receives and closes all pools: no endpoint holds a receive any more.
    pub fn end_all(&mut self, error: &Error, handle: &EngineHandle) {
        for id in self.receives.keys().copied().collect::<Vec<_>>() {
            self.end(id, Err(error.clone()), handle);
        }
        self.unclaimed.clear();
        for pool in self.pools.drain(..).filter_map(|pool| pool.upgrade()) {
            pool.close(error.clone());
        }
    }

    fn end_unposted(&mut self, handle: &EngineHandle, error: &Error) {
        for id in std::mem::take(&mut self.unposted) {
            self.end(id, Err(error.clone()), handle);
        }
    }

    fn end(&mut self, id: u64, result: crate::Result<Outcome>, handle: &EngineHandle) {
        let Some(receive) = self.receives.remove(&id) else { return };
        drop(receive.region);
        match receive.recipient {
            Recipient::Op(op) => handle.table.finish(op, result),
            Recipient::Pool { part, buffer } => {
                if let Some(message) = part.arrived(buffer, result) {
                    self.keep_unclaimed(message);
                }
            }
        }
    }

    /// Gives the message of a dropped pool to another pool, or keeps it for the next receive.
    fn keep_unclaimed(&mut self, message: Message) {
        match self.pools.iter().filter_map(Weak::upgrade).find(|pool| !pool.is_closed()) {
            Some(pool) => pool.deliver(message),
            None => self.unclaimed.push_back(message),
        }
    }
}

fn cancelled() -> Error {
    Error::new(ErrorKind::Cancelled, "recv", "the receive was cancelled before a message arrived")
}
