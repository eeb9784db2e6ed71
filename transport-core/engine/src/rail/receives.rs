//! Receives: the engine posts them on the rails that its peers send messages over, and the backend matches messages to
//! them.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use foldhash::HashMap;

use super::{Message, PoolPart, Rail};
use crate::EngineHandle;
use crate::memory::{RegionInner, revoked};
use crate::op::OpId;
use crate::spi::ReceiveRequest;
use crate::{Error, ErrorKind, Outcome, PeerId, Time};

/// The rail of an engine over which messages go at first. If its device is lost, here or at the peer, messages between
/// the two change to another rail.
pub(crate) const FIRST_MESSAGE_RAIL: usize = 0;

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
    /// The rail that it is posted on.
    posted_on: Option<usize>,
    /// Why the engine takes it back, if it does.
    taken_back: Option<TakenBack>,
    /// When the user submitted it; zero for a pool's buffer.
    submitted_at: Time,
}

/// Why the engine takes a posted receive back. Both end with the endpoint's event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TakenBack {
    /// To end it.
    ToEnd,
    /// To post it on another rail. `returns`: its end follows.
    ToMove { returns: bool },
}

/// A message without a receive. The next receive takes the oldest of them.
enum Unclaimed {
    /// Of a pool that was dropped, on a device that cannot cancel a receive.
    OfPool(Message),
    /// Of a rail that is not used any more.
    OfRail { peer: PeerId, bytes: Box<[u8]>, imm: Option<u32> },
}

/// What the engine knows of one rail's receives.
#[derive(Debug, Clone, Copy, Default)]
struct RailReceives {
    posted: usize,
    /// Messages that peers have announced, and that have not arrived.
    announced: u64,
}

/// All receives that have not ended.
pub(crate) struct Receives {
    /// By the id of their receive request.
    receives: HashMap<u64, Receive>,
    /// Receives that the endpoint has had no room for, oldest first.
    unposted: VecDeque<u64>,
    next_id: u64,
    /// All pools that have had a buffer here. The engine closes them when it closes.
    pools: Vec<Weak<PoolPart>>,
    unclaimed: VecDeque<Unclaimed>,
    rails: Vec<RailReceives>,
    /// The rails that peers send messages over, in ascending order: at least one.
    used: Vec<usize>,
    /// Why the engine posts no more receives.
    closed: Option<Error>,
}

impl Receives {
    /// Receives of an engine with `rails` rails.
    pub fn new(rails: usize) -> Self {
        Self {
            receives: HashMap::default(),
            unposted: VecDeque::new(),
            next_id: 0,
            pools: Vec::new(),
            unclaimed: VecDeque::new(),
            rails: vec![RailReceives::default(); rails],
            used: vec![FIRST_MESSAGE_RAIL],
            closed: None,
        }
    }

    /// The number of receives that endpoints hold.
    pub fn posted(&self) -> usize {
        self.rails.iter().map(|rail| rail.posted).sum()
    }

    /// The receives that users submitted: the operation, the size of the buffer in bytes, the rail, whether it is
    /// posted there, and when it was submitted.
    pub fn operations(&self) -> impl Iterator<Item = (OpId, u64, usize, bool, Time)> {
        self.receives.values().filter_map(|receive| match receive.recipient {
            Recipient::Op(id) => {
                let (rail, is_posted) = (receive.posted_on, receive.posted_on.is_some());
                Some((id, receive.len, rail.unwrap_or(self.used[0]), is_posted, receive.submitted_at))
            }
            Recipient::Pool { .. } => None,
        })
    }

    /// Adds a receive that a user submitted. The caller then calls [`Receives::post`].
    pub fn add(&mut self, id: OpId, submitted_at: Time, (region, offset, len): (Arc<RegionInner>, u64, u64)) {
        self.insert(Recipient::Op(id), (region, offset, len), submitted_at);
    }

    /// Adds a receive into a buffer of a pool. The caller then calls [`Receives::post`].
    pub fn add_pooled(&mut self, part: Arc<PoolPart>, buffer: u32) {
        if !self.pools.iter().any(|known| Weak::as_ptr(known) == Arc::as_ptr(&part)) {
            self.pools.retain(|known| known.strong_count() > 0);
            self.pools.push(Arc::downgrade(&part));
        }
        let range = part.begin_post(buffer);
        self.insert(Recipient::Pool { part, buffer }, range, Time::ZERO);
    }

    fn insert(
        &mut self,
        recipient: Recipient,
        (region, offset, len): (Arc<RegionInner>, u64, u64),
        submitted_at: Time,
    ) {
        let receive =
            Receive { recipient, region, offset, len, posted_on: None, taken_back: None, submitted_at };
        self.receives.insert(self.next_id, receive);
        self.unposted.push_back(self.next_id);
        self.next_id += 1;
    }

    /// Posts receives until an endpoint has no more room. Messages without a receive take the first ones.
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
            if let Some(message) = self.unclaimed.pop_front() {
                self.unposted.pop_front();
                let result = message.receive_into(Arc::clone(region), receive.offset, receive.len);
                self.end(id, result, handle);
                continue;
            }
            let rail = match self.used[..] {
                [rail] => rail,
                _ => needy_rail(&self.used, &self.rails),
            };
            let request = ReceiveRequest {
                id,
                local: region.start().wrapping_add(receive.offset as usize),
                lkey: region.regions[handle.transport][handle.first_rail + rail]
                    .as_ref()
                    .map_or(0, |region| region.lkey()),
                len: receive.len,
            };
            // SAFETY: the range was checked when the receive was made, and
            // `self.receives` holds its region until the endpoint has ended it.
            let result = unsafe { rails[rail].endpoint.post_recv(&[request]) };
            match (result.accepted, result.error) {
                (0, None) => return,
                // `Event::DeviceLost` follows.
                (0, Some(_)) if rails[rail].endpoint.is_lost() => return,
                (0, Some(status)) => {
                    self.unposted.pop_front();
                    let text = rails[rail].endpoint.describe(status);
                    self.end(id, Err(Error::new(status.kind, "recv", text)), handle);
                }
                _ => {
                    receive.posted_on = Some(rail);
                    self.rails[rail].posted += 1;
                    self.unposted.pop_front();
                }
            }
        }
    }

    /// Completes a receive: a message arrived on `rail`.
    pub fn received(
        &mut self,
        id: u64,
        rail: usize,
        (peer, len, imm): (Option<PeerId>, u64, Option<u32>),
        rails: &mut [Rail],
        handle: &EngineHandle,
    ) {
        self.note_ended(id, rail);
        let announced = &mut self.rails[rail].announced;
        *announced = announced.saturating_sub(1);
        // The endpoint has room for the next receive now.
        self.claim(rails, handle);
        self.end(id, Ok(Outcome { bytes: len, peer, imm, ..Outcome::default() }), handle);
    }

    /// Fails a receive that was posted on `rail`; or posts it on another rail, if the engine has taken it back for
    /// that.
    pub fn failed(&mut self, id: u64, rail: usize, error: Error, rails: &mut [Rail], handle: &EngineHandle) {
        // `Event::DeviceLost` is about all receives of a lost device.
        let is_lost = error.kind() == ErrorKind::DeviceLost && rails[rail].endpoint.is_lost();
        if is_lost || !self.note_ended(id, rail) {
            return;
        }
        let receive = self.receives.get_mut(&id);
        let moved = receive.filter(|receive| {
            matches!(receive.taken_back, Some(TakenBack::ToMove { .. })) && self.closed.is_none()
        });
        if let Some(moved) = moved.filter(|_| error.kind() == ErrorKind::Cancelled) {
            moved.taken_back = None;
            self.put_back([id]);
            return self.claim(rails, handle);
        }
        // The endpoint reports `Cancelled` for every receive that the engine took back. The user's error says why the
        // engine did so: the fabric was closed, or the region was revoked.
        let is_cancelled = error.kind() == ErrorKind::Cancelled;
        let error = if is_cancelled { self.why_taken_back(id) } else { error };
        // The endpoint has room for the next receive now.
        self.claim(rails, handle);
        self.end(id, Err(error), handle);
    }

    /// Notes that an endpoint holds a receive no more. Returns false if it was not posted on that rail.
    fn note_ended(&mut self, id: u64, rail: usize) -> bool {
        let Some(receive) = self.receives.get_mut(&id).filter(|receive| receive.posted_on == Some(rail))
        else {
            return false;
        };
        receive.posted_on = None;
        self.rails[rail].posted -= 1;
        true
    }

    /// The error of a receive that the engine has taken back to end it.
    fn why_taken_back(&self, id: u64) -> Error {
        let is_revoked = || self.receives.get(&id).is_some_and(|receive| receive.region.is_revoked());
        match &self.closed {
            Some(closed) => closed.clone(),
            None if is_revoked() => revoked("recv"),
            None => cancelled(),
        }
    }

    /// Makes receives unposted again, in their order.
    fn put_back(&mut self, ids: impl IntoIterator<Item = u64>) {
        self.unposted.extend(ids);
        self.unposted.make_contiguous().sort_unstable();
    }

    /// Cancels the receive of an operation. Returns false if the operation is not a receive.
    pub fn cancel(&mut self, op: OpId, rails: &mut [Rail], handle: &EngineHandle) -> bool {
        let is_of_op = |receive: &Receive| matches!(receive.recipient, Recipient::Op(id) if id == op);
        let found = self.receives.iter().find(|(_, receive)| is_of_op(receive));
        let Some((&id, _)) = found else { return false };
        self.take_back(id, cancelled(), rails, handle);
        true
    }

    /// Cancels the receives of a pool that was dropped.
    pub fn close_pool(&mut self, part: &Arc<PoolPart>, rails: &mut [Rail], handle: &EngineHandle) {
        let of_pool = |receive: &Receive| matches!(&receive.recipient, Recipient::Pool { part: of, .. } if Arc::ptr_eq(of, part));
        let ids: Vec<_> =
            self.receives.iter().filter(|(_, receive)| of_pool(receive)).map(|(id, _)| *id).collect();
        for id in ids {
            self.take_back(id, cancelled(), rails, handle);
        }
    }

    /// Cancels all receives into a revoked region.
    pub fn revoke(&mut self, region: &Arc<RegionInner>, rails: &mut [Rail], handle: &EngineHandle) {
        let into = self.receives.iter().filter(|(_, receive)| Arc::ptr_eq(&receive.region, region));
        for id in into.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.take_back(id, revoked("recv"), rails, handle);
        }
    }

    /// Ends an unposted receive with `error`. A posted one ends later, by an event, once the device no longer uses
    /// the buffer.
    fn take_back(&mut self, id: u64, error: Error, rails: &mut [Rail], handle: &EngineHandle) {
        let Some(receive) = self.receives.get_mut(&id) else { return };
        match receive.posted_on {
            None => self.end(id, Err(error), handle),
            Some(rail) => {
                if receive.taken_back.replace(TakenBack::ToEnd).is_none() {
                    rails[rail].endpoint.cancel_recv(id);
                }
            }
        }
    }

    /// Whether any receive writes into a region.
    pub fn has_receive_into(&self, region: &Arc<RegionInner>) -> bool {
        self.receives.values().any(|receive| Arc::ptr_eq(&receive.region, region))
    }

    // ---- receives that change their rail ----

    /// Keeps a message that arrived on a rail that takes no receives any more.
    pub fn keep(&mut self, peer: PeerId, bytes: &[u8], imm: Option<u32>) {
        self.unclaimed.push_back(Unclaimed::OfRail { peer, bytes: bytes.into(), imm });
    }

    /// Gives the messages that were kept to receives. Posted receives are taken back for that, the oldest first. A
    /// device that cannot cancel receives keeps them, and the next receives take the messages.
    pub fn claim(&mut self, rails: &mut [Rail], handle: &EngineHandle) {
        self.post(rails, handle);
        if !self.unclaimed.is_empty() {
            self.take_back_for_unclaimed(rails);
        }
    }

    #[cold]
    fn take_back_for_unclaimed(&mut self, rails: &mut [Rail]) {
        let returns = |receive: &&Receive| receive.taken_back == Some(TakenBack::ToMove { returns: true });
        let returning = self.receives.values().filter(returns).count();
        let count = self.unclaimed.len().saturating_sub(returning);
        let posted = self.receives.iter().filter(|(_, receive)| receive.taken_back.is_none());
        let mut posted: Vec<_> = posted.filter_map(|(id, receive)| Some((*id, receive.posted_on?))).collect();
        posted.sort_unstable();
        posted.truncate(count);
        self.take_back_to_move(posted, rails);
    }

    /// Takes posted receives back, each with its rail, to post them again.
    fn take_back_to_move(&mut self, posted: Vec<(u64, usize)>, rails: &mut [Rail]) {
        for (id, rail) in posted {
            if let Some(receive) = self.receives.get_mut(&id) {
                let returns = rails[rail].endpoint.cancel_recv(id);
                receive.taken_back = Some(TakenBack::ToMove { returns });
            }
        }
    }

    /// Peers send messages over these rails from now on, at least one; each with the number of messages that were
    /// announced and have not arrived. Receives on other rails are taken back, and posted on these.
    ///
    /// A device that cannot cancel receives gives them back when its endpoint is replaced, or never.
    pub fn set_used(&mut self, used: Vec<(usize, u64)>, rails: &mut [Rail], handle: &EngineHandle) {
        for (rail, announced) in &used {
            self.rails[*rail].announced = *announced;
        }
        self.used = used.into_iter().map(|(rail, _)| rail).collect();
        handle.spreads_receives.store(self.used.len() > 1, Ordering::Relaxed);
        let is_movable = |receive: &Receive, rail: usize| {
            receive.posted_on == Some(rail) && receive.taken_back.is_none() && rails[rail].lost.is_none()
        };
        let mut moved = Vec::new();
        for rail in (0..self.rails.len()).filter(|rail| self.rails[*rail].posted > 0) {
            let spare = match self.used.contains(&rail) {
                false => usize::MAX,
                true if self.used.len() == 1 => 0,
                true => self.rails[rail].posted.saturating_sub(self.rails[rail].announced as usize),
            };
            let missing = self.used.iter().map(|other| self.rails[*other].missing());
            let missing = missing.fold(0, u64::saturating_add);
            let count = if spare == usize::MAX { spare } else { spare.min(missing as usize) };
            if count == 0 {
                continue;
            }
            let ids =
                self.receives.iter().filter(|(_, receive)| is_movable(receive, rail)).map(|(id, _)| *id);
            let mut ids: Vec<_> = ids.collect();
            // The oldest receives stay first.
            ids.sort_unstable();
            moved.extend(ids.into_iter().rev().take(count).map(|id| (id, rail)));
        }
        self.take_back_to_move(moved, rails);
        self.claim(rails, handle);
    }

    /// The device of a rail is lost, and does not touch its receives any more: they are to be posted on another rail.
    pub fn on_device_lost(&mut self, rail: usize, handle: &EngineHandle) {
        self.rails[rail] = RailReceives::default();
        let mut unposted = Vec::new();
        for (id, receive) in &mut self.receives {
            if receive.posted_on == Some(rail) {
                receive.posted_on = None;
                unposted.push((*id, receive.taken_back.take()));
            }
        }
        for (id, _) in unposted.extract_if(.., |(_, taken_back)| *taken_back == Some(TakenBack::ToEnd)) {
            let error = self.why_taken_back(id);
            self.end(id, Err(error), handle);
        }
        self.put_back(unposted.into_iter().map(|(id, _)| id));
    }

    // ---- the end ----

    /// Cancels all receives. Unposted ones end at once, posted ones by their events or with the endpoint.
    pub fn close(&mut self, error: &Error, rails: &mut [Rail], handle: &EngineHandle) {
        self.closed.get_or_insert_with(|| error.clone());
        self.end_unposted(handle, error);
        for (id, receive) in &mut self.receives {
            let Some(rail) = receive.posted_on else { continue };
            // A device that cannot cancel the receive keeps it until a message arrives or the endpoint is closed. So
            // the engine does not wait for it.
            if !rails[rail].endpoint.cancel_recv(*id) {
                receive.posted_on = None;
                self.rails[rail].posted -= 1;
            }
        }
    }

    /// The devices of all rails are lost: ends all receives, and posts no more.
    pub fn on_all_lost(&mut self, error: &Error, handle: &EngineHandle) {
        self.closed.get_or_insert_with(|| error.clone());
        self.end_all(error, handle);
    }

    /// Ends all receives and closes all pools: no endpoint holds a receive any more.
    pub fn end_all(&mut self, error: &Error, handle: &EngineHandle) {
        for id in self.receives.keys().copied().collect::<Vec<_>>() {
            self.end(id, Err(error.clone()), handle);
        }
        self.rails.fill(RailReceives::default());
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
            None => self.unclaimed.push_back(Unclaimed::OfPool(message)),
        }
    }
}

impl Unclaimed {
    /// Copies the message into the `len` bytes of `region` from `offset` on.
    fn receive_into(self, region: Arc<RegionInner>, offset: u64, len: u64) -> crate::Result<Outcome> {
        match self {
            Self::OfPool(message) => message.receive_into(region, offset, len),
            Self::OfRail { peer, bytes, imm } => {
                if bytes.len() as u64 > len {
                    let why = format!("the message has {} bytes, and the buffer {len}", bytes.len());
                    return Err(Error::new(ErrorKind::TooLarge, "recv", why));
                }
                region.copy_in(offset as usize, &bytes)?;
                Ok(Outcome { bytes: bytes.len() as u64, peer: Some(peer), imm, ..Outcome::default() })
            }
        }
    }
}

impl RailReceives {
    /// The receives that are missing for messages that were announced.
    fn missing(self) -> u64 {
        self.announced.saturating_sub(self.posted as u64)
    }
}

/// The rail that needs the next receive most: one that lacks receives for messages that were announced, or else the one
/// with the fewest receives.
#[cold]
fn needy_rail(used: &[usize], rails: &[RailReceives]) -> usize {
    let need = |rail: &&usize| {
        let RailReceives { posted, .. } = rails[**rail];
        (rails[**rail].missing() == 0, posted)
    };
    *used.iter().min_by_key(need).unwrap_or(&FIRST_MESSAGE_RAIL)
}

fn cancelled() -> Error {
    Error::new(ErrorKind::Cancelled, "recv", "the receive was cancelled before a message arrived")
}
