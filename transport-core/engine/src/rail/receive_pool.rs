//! The buffers of receive pools, and the messages that arrive in them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use crate::memory::{RegionInner, revoked};
use crate::waker_set::WakerSet;
use crate::{Control, EngineHandle, Error, ErrorKind, Outcome, PeerId, Result};

/// The part of a receive pool (buffers that the engine posts again once the user has freed them) that belongs to one
/// transport.
pub struct PoolPart {
    region: Arc<RegionInner>,
    size: usize,
    engine: Arc<EngineHandle>,
    inbox: Arc<Inbox>,
    /// The number of buffers, and of those that the engine has not posted.
    count: usize,
    unposted: AtomicUsize,
    /// Whether the pool was dropped.
    closed: AtomicBool,
    /// Whether the engine has ended, so that nothing more will arrive.
    has_ended: AtomicBool,
}

/// Where the messages of a pool wait for the user.
#[derive(Default)]
pub struct Inbox(Mutex<InboxState>);

#[derive(Default)]
struct InboxState {
    queue: VecDeque<Result<Message, FailedReceive>>,
    waiting: WakerSet<()>,
    /// The number of parts whose engine has not ended.
    open: usize,
    /// The reason why the last engine has ended.
    closed: Option<Error>,
}

/// The error of a failed receive, and its buffer. The buffer is posted again when the error is taken, so that the
/// number of errors that nobody reads is bounded too.
struct FailedReceive(Error, #[expect(dead_code, reason = "reposts when dropped")] Buffer);

/// A received message. Dropping it returns its buffer to the pool.
pub struct Message {
    buffer: Buffer,
    len: usize,
    peer: PeerId,
    imm: Option<u32>,
}

/// A buffer that is not posted. Dropping it posts it again.
struct Buffer {
    part: Arc<PoolPart>,
    number: u32,
    /// The sender of the message that is in it.
    sender: Option<PeerId>,
}

impl PoolPart {
    /// A part whose buffers of `size` bytes are cut from `region`. Nothing is posted.
    pub fn new(region: Arc<RegionInner>, size: usize, engine: Arc<EngineHandle>, inbox: Arc<Inbox>) -> Self {
        let (closed, has_ended) = (AtomicBool::new(false), AtomicBool::new(false));
        let count = region.len() as usize / size.max(1);
        let unposted = AtomicUsize::new(count);
        Self { region, size, engine, inbox, count, unposted, closed, has_ended }
    }

    /// The engine that the part's buffers are posted to.
    pub fn engine(&self) -> &Arc<EngineHandle> {
        &self.engine
    }

    /// Closes the part, because the pool was dropped: the engine cancels its receives.
    pub fn drop_pool(self: &Arc<Self>) {
        self.closed.store(true, Ordering::Release);
        self.engine.control(Control::PoolClosed { pool: Arc::clone(self) });
    }

    /// Whether the pool was dropped.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// The region, the offset and the length of a buffer that the engine posts.
    pub fn begin_post(&self, buffer: u32) -> (Arc<RegionInner>, u64, u64) {
        self.unposted.fetch_sub(1, Ordering::Relaxed);
        self.buffer(buffer)
    }

    /// Whether the worker must wake to post a buffer that is free. Not if so many others are posted that this one can
    /// wait until the worker wakes for another reason: for the message of one of those, at the latest.
    ///
    /// Of several rails, one may have all those buffers, and the next message comes over another. And the sender of a
    /// notification waits for the credit of its buffer.
    fn needs_worker(&self) -> bool {
        self.engine.for_notifications
            || self.engine.spreads_receives.load(Ordering::Relaxed)
            || self.unposted.load(Ordering::Relaxed) > self.count / 2
    }

    /// The region, the offset and the length of a buffer.
    fn buffer(&self, buffer: u32) -> (Arc<RegionInner>, u64, u64) {
        (Arc::clone(&self.region), u64::from(buffer) * self.size as u64, self.size as u64)
    }

    /// Notes that a receive has ended, with a message or with an error. Returns a message that came after the pool was
    /// dropped.
    pub fn arrived(self: &Arc<Self>, number: u32, result: Result<Outcome>) -> Option<Message> {
        let terminal = [ErrorKind::Closed, ErrorKind::DeviceLost, ErrorKind::Cancelled];
        if result.as_ref().is_err_and(|error| terminal.contains(&error.kind())) {
            return None;
        }
        let sender = result.as_ref().ok().and_then(|outcome| outcome.peer);
        self.unposted.fetch_add(1, Ordering::Relaxed);
        let buffer = Buffer { part: Arc::clone(self), number, sender };
        let arrival = match result {
            Ok(Outcome { bytes, peer: Some(peer), imm, .. }) => {
                Ok(Message { buffer, len: bytes as usize, peer, imm })
            }
            // The message is of a peer that is gone already.
            Ok(_) => return None,
            Err(error) => Err(FailedReceive(error, buffer)),
        };
        if self.is_closed() {
            return arrival.ok();
        }
        self.inbox.update(|inbox| inbox.queue.push_back(arrival));
        None
    }

    /// Delivers a message that lies in a buffer of another pool.
    pub fn deliver(&self, message: Message) {
        let arrival = match message.check_room(self.size) {
            Ok(()) => Ok(message),
            Err(error) => Err(FailedReceive(error, message.buffer)),
        };
        self.inbox.update(|inbox| inbox.queue.push_back(arrival));
    }

    /// Notes that the engine has ended.
    pub fn close(&self, error: Error) {
        if !self.has_ended.swap(true, Ordering::AcqRel) {
            self.inbox.update(|inbox| {
                inbox.open -= 1;
                inbox.closed = (inbox.open == 0).then_some(error);
            });
        }
    }

    /// Posts a buffer that is free.
    pub fn post(self: &Arc<Self>, buffer: u32) {
        self.engine.control(Control::PoolReceive { pool: Arc::clone(self), buffer, freed_from: None });
    }
}

impl Inbox {
    /// The inbox of a pool of `parts` parts.
    pub fn new(parts: usize) -> Self {
        Self(Mutex::new(InboxState { open: parts, ..InboxState::default() }))
    }

    /// Takes the next message, if one has arrived.
    pub fn try_next(&self) -> Option<Result<Message>> {
        let message = self.lock().queue.pop_front()?;
        // The lock is open again: dropping a failed receive posts its buffer.
        Some(message.map_err(|FailedReceive(error, _)| error))
    }

    /// Takes the next message, or the reason why none will come. While there is neither, registers `waker`; `id` as in
    /// [`WakerSet::register`].
    pub fn poll_next(&self, id: &mut Option<u64>, waker: &Waker) -> Poll<Result<Message>> {
        let mut inbox = self.lock();
        let message = inbox.queue.pop_front();
        let closed = if message.is_none() { inbox.closed.clone() } else { None };
        let old = match message.is_none() && closed.is_none() {
            true => inbox.waiting.register(id, (), waker),
            false => inbox.waiting.unregister(id, ()),
        };
        drop(inbox);
        drop(old);
        // The lock is open again: dropping a failed receive posts its buffer.
        let message = message.map(|message| message.map_err(|FailedReceive(error, _)| error));
        message.or(closed.map(Err)).map_or(Poll::Pending, Poll::Ready)
    }

    /// Removes the waker of a wait that is dropped.
    pub fn forget(&self, id: &mut Option<u64>) {
        if id.is_some() {
            let old = self.lock().waiting.unregister(id, ());
            drop(old);
        }
    }

    /// Drops the messages that nobody has taken.
    pub fn clear(&self) {
        let undelivered = std::mem::take(&mut self.lock().queue);
        drop(undelivered);
    }

    /// Changes the inbox. Then opens the lock and wakes the waiters.
    fn update(&self, change: impl FnOnce(&mut InboxState)) {
        let due = {
            let mut state = self.lock();
            change(&mut state);
            state.waiting.take_all()
        };
        due.wake();
    }

    fn lock(&self) -> MutexGuard<'_, InboxState> {
        // No holder panics half way through a change, so a poisoned lock holds good data.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Message {
    /// The sender.
    pub fn peer(&self) -> PeerId {
        self.peer
    }

    /// The message's immediate data, if it has any.
    pub fn imm(&self) -> Option<u32> {
        self.imm
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the message has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies the first bytes of the message into `into`, as many as fit. Returns their number.
    pub fn copy_out(&self, into: &mut [u8]) -> usize {
        self.copy_out_from(0, into)
    }

    /// As [`Message::copy_out`], for the bytes from `offset` on.
    pub fn copy_out_from(&self, offset: usize, into: &mut [u8]) -> usize {
        let (part, len) = (&self.buffer.part, into.len().min(self.len.saturating_sub(offset)));
        let start = self.buffer.number as usize * part.size + offset;
        let copied = part.region.copy_out(start, &mut into[..len]);
        debug_assert!(copied.is_ok(), "buffers lie inside the pool's region");
        len
    }

    /// Copies the message into the `len` bytes of `region` from `offset` on, like a receive into these bytes.
    pub(crate) fn receive_into(self, region: Arc<RegionInner>, offset: u64, len: u64) -> Result<Outcome> {
        self.check_room(len as usize)?;
        if region.is_revoked() {
            return Err(revoked("recv"));
        }
        region.copy_in(offset as usize, &self.to_vec())?;
        Ok(Outcome { bytes: self.len as u64, peer: Some(self.peer), imm: self.imm, ..Outcome::default() })
    }

    fn check_room(&self, room: usize) -> Result<()> {
        if self.len <= room {
            return Ok(());
        }
        let why = format!("the message has {} bytes, and the buffer {room}", self.len);
        Err(Error::new(ErrorKind::TooLarge, "recv", why))
    }

    /// A copy of the message.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.copy_out(&mut bytes);
        bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if !self.part.is_closed() {
            let (pool, buffer, freed_from) = (Arc::clone(&self.part), self.number, self.sender);
            let control = Control::PoolReceive { pool, buffer, freed_from };
            self.part.engine.control_later(control, || self.part.needs_worker());
        }
    }
}

#[cfg(all(test, not(multirail_loom)))]
mod tests {
    use std::sync::Weak;

    use super::*;
    use crate::memory::{RegionOwner, RegionSetup};
    use crate::spi::{Access, HostBuffer};
    use crate::{Op, PeerId};

    struct NoOwner;

    impl RegionOwner for NoOwner {
        fn incarnation(&self) -> u64 {
            0
        }

        fn addresses(&self) -> Vec<(String, Vec<u64>)> {
            Vec::new()
        }

        fn revoke(&self, _: &Arc<RegionInner>) -> Result<Op> {
            Ok(Op::ready(Ok(Outcome::default())))
        }
    }

    /// A part of `count` buffers, of which the engine has posted `posted`.
    fn part(count: u32, posted: u32) -> Arc<PoolPart> {
        let setup = RegionSetup {
            regions: vec![vec![None]].into(),
            access: Access::LOCAL,
            id: 1,
            fabric_id: 1,
            owner: Weak::<NoOwner>::new(),
            retained: Weak::new(),
        };
        let memory = Arc::new(HostBuffer::new(count as usize * 8).unwrap());
        let region = Arc::new(RegionInner::new(memory, setup));
        let part = Arc::new(PoolPart::new(region, 8, EngineHandle::without_engine(), Arc::default()));
        (0..posted).for_each(|buffer| drop(part.begin_post(buffer)));
        part
    }

    /// Whether the worker wakes when a buffer is freed that had a message.
    fn wakes(part: &Arc<PoolPart>) -> bool {
        part.engine.parked.store(true, Ordering::Relaxed);
        let outcome = Outcome { bytes: 1, peer: Some(PeerId::next()), ..Outcome::default() };
        assert!(part.arrived(0, Ok(outcome)).is_none());
        drop(part.inbox.try_next().unwrap().unwrap());
        assert!(part.engine.controls.pop().is_some());
        !part.engine.parked.load(Ordering::Relaxed)
    }

    #[test]
    fn a_freed_buffer_wakes_the_worker_if_few_are_posted() {
        let part = part(8, 6);
        // Five are posted when the buffer is freed, four, three, ...
        assert_eq!([(); 5].map(|()| wakes(&part)), [false, false, true, true, true]);
    }

    #[test]
    fn a_freed_buffer_wakes_the_worker_if_receives_are_spread_over_rails() {
        let part = part(8, 8);
        assert!(!wakes(&part));
        part.engine.spreads_receives.store(true, Ordering::Relaxed);
        assert!(wakes(&part));
    }
}
