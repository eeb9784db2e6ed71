//! Receives: posted on the first rail, matched by the backend, answered here.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};

use super::{EngineHandle, Rail};
use crate::op::OpId;
use crate::pool::PoolPart;
use crate::region::{RegionInner, revoked};
use crate::spi::ReceiveRequest;
use crate::{Error, ErrorKind, Message, Outcome, PeerId, Time};

/// The rail that messages arrive on.
pub(super) const RAIL: usize = 0;

/// Who learns of a message.
enum Sink {
    Op(OpId),
    Pool { part: Arc<PoolPart>, buffer: u32 },
}

struct Receive {
    sink: Sink,
    /// Held until the device can no longer write to it.
    region: Arc<RegionInner>,
    offset: u64,
    len: u64,
    posted: bool,
    /// When an operation of a user's began.
    begun: Time,
}

/// Every receive that has not ended.
#[derive(Default)]
pub(crate) struct Receives {
    known: HashMap<u64, Receive>,
    /// Those the endpoint had no room for yet, oldest first.
    waiting: VecDeque<u64>,
    next: u64,
    /// Pools that have had a buffer here, to be told of the end.
    pools: Vec<Weak<PoolPart>>,
    /// Messages for pools that were dropped, from devices that give no receive back: those who receive next get them.
    strays: VecDeque<Message>,
    /// Why nothing is posted any more.
    closed: Option<Error>,
}

impl Receives {
    /// Receives the endpoint holds.
    pub fn posted(&self) -> usize {
        self.known.values().filter(|receive| receive.posted).count()
    }

    /// Receives of users: id, room in bytes, whether it is posted, since when.
    pub fn operations(&self) -> impl Iterator<Item = (OpId, u64, bool, Time)> {
        self.known.values().filter_map(|receive| match receive.sink {
            Sink::Op(id) => Some((id, receive.len, receive.posted, receive.begun)),
            Sink::Pool { .. } => None,
        })
    }

    pub fn add(
        &mut self,
        id: OpId,
        begun: Time,
        (region, offset, len): (Arc<RegionInner>, u64, u64),
        handle: &EngineHandle,
    ) {
        match self.strays.pop_front() {
            Some(message) => handle.table.end(id, message.receive_into(region, offset, len)),
            None => self.insert(Receive { sink: Sink::Op(id), region, offset, len, posted: false, begun }),
        }
    }

    pub fn add_pooled(&mut self, part: Arc<PoolPart>, buffer: u32) {
        if !self.pools.iter().any(|known| Weak::as_ptr(known) == Arc::as_ptr(&part)) {
            self.pools.retain(|known| known.strong_count() > 0);
            self.pools.push(Arc::downgrade(&part));
        }
        self.strays.drain(..).for_each(|message| part.adopt(message));
        let (region, offset, len) = part.buffer(buffer);
        let sink = Sink::Pool { part, buffer };
        self.insert(Receive { sink, region, offset, len, posted: false, begun: Time::ZERO });
    }

    fn insert(&mut self, receive: Receive) {
        self.known.insert(self.next, receive);
        self.waiting.push_back(self.next);
        self.next += 1;
    }

    /// Posts what waits, as far as the endpoint takes it.
    pub fn post(&mut self, rails: &mut [Rail], handle: &EngineHandle) {
        if let Some(error) = self.closed.clone() {
            self.end_waiting(handle, &error);
            return;
        }
        while let Some(id) = self.waiting.front().copied() {
            let Some(receive) = self.known.get_mut(&id) else {
                self.waiting.pop_front();
                continue;
            };
            let region = &receive.region;
            if region.is_revoked() {
                self.waiting.pop_front();
                self.end(id, Err(revoked("recv")), handle);
                continue;
            }
            let request = ReceiveRequest {
                id,
                local: region.start.wrapping_add(receive.offset as usize),
                lkey: region.regions[handle.transport][handle.first_rail + RAIL]
                    .as_ref()
                    .map_or(0, |region| region.lkey()),
                len: receive.len,
            };
            // SAFETY: the range was checked when the receive was made, and
            // `self.known` holds its region until the endpoint has ended it.
            let result = unsafe { rails[RAIL].endpoint.post_recv(&[request]) };
            match (result.accepted, result.error) {
                (0, None) => return,
                (0, Some(status)) => {
                    self.waiting.pop_front();
                    let words = rails[RAIL].endpoint.describe(status);
                    self.end(id, Err(Error::new(status.kind, "recv", words)), handle);
                }
                _ => {
                    receive.posted = true;
                    self.waiting.pop_front();
                }
            }
        }
    }

    pub fn received(
        &mut self,
        id: u64,
        peer: Option<PeerId>,
        len: u64,
        imm: Option<u32>,
        rails: &mut [Rail],
        handle: &EngineHandle,
    ) {
        // The endpoint has room for one that waits.
        self.post(rails, handle);
        self.end(id, Ok(Outcome { bytes: len, work_requests: 0, peer, imm }), handle);
    }

    pub fn failed(&mut self, id: u64, error: Error, rails: &mut [Rail], handle: &EngineHandle) {
        // What closing took back ends with the fabric, not by somebody's cancel.
        let is_revoked = || self.known.get(&id).is_some_and(|receive| receive.region.is_revoked());
        let error = match &self.closed {
            _ if error.kind() != ErrorKind::Cancelled => error,
            Some(closed) => closed.clone(),
            None if is_revoked() => revoked("recv"),
            None => error,
        };
        // The endpoint has room for one that waits.
        self.post(rails, handle);
        self.end(id, Err(error), handle);
    }

    /// Cancels the receive of an operation; false if it is no receive.
    pub fn cancel(&mut self, op: OpId, rails: &mut [Rail], handle: &EngineHandle) -> bool {
        let found = self.known.iter().find(|(_, receive)| matches!(receive.sink, Sink::Op(id) if id == op));
        let Some((&id, receive)) = found else { return false };
        if receive.posted {
            // It ends by an event, once the device has let go of the buffer.
            rails[RAIL].endpoint.cancel_recv(id);
        } else {
            self.end(id, Err(cancelled()), handle);
        }
        true
    }

    pub fn close_pool(&mut self, part: &Arc<PoolPart>, rails: &mut [Rail], handle: &EngineHandle) {
        let of_pool =
            |receive: &Receive| matches!(&receive.sink, Sink::Pool { part: of, .. } if Arc::ptr_eq(of, part));
        let ids: Vec<_> =
            self.known.iter().filter(|(_, receive)| of_pool(receive)).map(|(id, _)| *id).collect();
        for id in ids {
            if self.known[&id].posted {
                rails[RAIL].endpoint.cancel_recv(id);
            } else {
                self.end(id, Err(cancelled()), handle);
            }
        }
    }

    /// Takes back every receive into a revoked region.
    pub fn revoke(&mut self, region: &Arc<RegionInner>, rails: &mut [Rail], handle: &EngineHandle) {
        let into = self.known.iter().filter(|(_, receive)| Arc::ptr_eq(&receive.region, region));
        for (id, is_posted) in into.map(|(id, receive)| (*id, receive.posted)).collect::<Vec<_>>() {
            if is_posted {
                // It ends by an event, once the device has let go of the buffer.
                rails[RAIL].endpoint.cancel_recv(id);
            } else {
                self.end(id, Err(revoked("recv")), handle);
            }
        }
    }

    /// Whether a receive is posted into a region.
    pub fn is_into(&self, region: &Arc<RegionInner>) -> bool {
        self.known.values().any(|receive| Arc::ptr_eq(&receive.region, region))
    }

    /// Takes everything back; posted receives end by their events, or with the endpoint.
    pub fn close(&mut self, error: &Error, rails: &mut [Rail], handle: &EngineHandle) {
        self.closed.get_or_insert_with(|| error.clone());
        self.end_waiting(handle, error);
        for (id, receive) in &mut self.known {
            receive.posted &= rails[RAIL].endpoint.cancel_recv(*id);
        }
    }

    /// The device of `rail` is lost, and with it every receive posted there.
    pub fn lost(&mut self, rail: usize, error: &Error, handle: &EngineHandle) {
        if rail == RAIL {
            self.closed.get_or_insert_with(|| error.clone());
            self.end_all(error, handle);
        }
    }

    /// Ends everything: no endpoint holds a receive any more.
    pub fn end_all(&mut self, error: &Error, handle: &EngineHandle) {
        for id in self.known.keys().copied().collect::<Vec<_>>() {
            self.end(id, Err(error.clone()), handle);
        }
        self.strays.clear();
        for pool in self.pools.drain(..).filter_map(|pool| pool.upgrade()) {
            pool.close(error.clone());
        }
    }

    fn end_waiting(&mut self, handle: &EngineHandle, error: &Error) {
        for id in std::mem::take(&mut self.waiting) {
            self.end(id, Err(error.clone()), handle);
        }
    }

    fn end(&mut self, id: u64, result: crate::Result<Outcome>, handle: &EngineHandle) {
        let Some(receive) = self.known.remove(&id) else { return };
        drop(receive.region);
        match receive.sink {
            Sink::Op(op) => handle.table.end(op, result),
            Sink::Pool { part, buffer } => {
                if let Some(message) = part.arrived(buffer, result) {
                    self.pass_on(message);
                }
            }
        }
    }

    /// Gives the message of a dropped pool to another one, or keeps it for whoever receives next.
    fn pass_on(&mut self, message: Message) {
        match self.pools.iter().filter_map(Weak::upgrade).find(|pool| !pool.is_closed()) {
            Some(pool) => pool.adopt(message),
            None => self.strays.push_back(message),
        }
    }
}

fn cancelled() -> Error {
    Error::new(ErrorKind::Cancelled, "recv", "taken back before a message came")
}
