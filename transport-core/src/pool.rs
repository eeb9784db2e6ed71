//! Receive pools: receives whose buffers are posted again automatically.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use crate::engine::waker_set::WakerSet;
use crate::engine::{Control, EngineHandle};
use crate::fabric::Fabric;
use crate::op::{block_on, needs_steps};
use crate::region::{RegionInner, revoked};
use crate::{Error, ErrorKind, Outcome, PeerId, Region, Result};

/// Receives of equal size, posted on every transport. Dropping a message posts its buffer again.
pub struct RecvPool {
    inbox: Arc<Inbox>,
    parts: Vec<Arc<PoolPart>>,
    fabric: Fabric,
}

/// The part of a pool that belongs to one transport.
pub(crate) struct PoolPart {
    region: Region,
    size: usize,
    engine: Arc<EngineHandle>,
    inbox: Arc<Inbox>,
    /// Whether the pool was dropped.
    closed: AtomicBool,
    /// Whether the engine has ended, so that nothing more will arrive.
    has_ended: AtomicBool,
}

#[derive(Default)]
struct Inbox(Mutex<InboxState>);

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
}

impl RecvPool {
    pub(crate) fn new(
        fabric: &Fabric,
        engines: &[Arc<EngineHandle>],
        count: usize,
        size: usize,
    ) -> Result<Self> {
        let bytes = count
            .checked_mul(size)
            .filter(|bytes| *bytes > 0 && u32::try_from(count).is_ok())
            .ok_or_else(|| {
                let why = format!(
                    "the pool would have {count} buffers of {size} bytes; ask for at least one of at least one byte"
                );
                Error::new(ErrorKind::InvalidRequest, "recv_pool", why)
            })?;
        let inbox = Arc::new(Inbox::default());
        let mut parts = Vec::new();
        for engine in engines {
            // Messages arrive at the first rail group.
            let region = fabric.alloc_near(0, bytes, crate::Access::LOCAL)?;
            let (engine, inbox) = (Arc::clone(engine), Arc::clone(&inbox));
            parts.push(Arc::new(PoolPart {
                region,
                size,
                engine,
                inbox,
                closed: AtomicBool::new(false),
                has_ended: AtomicBool::new(false),
            }));
        }
        inbox.lock().open = parts.len();
        for part in &parts {
            (0..count as u32).for_each(|buffer| part.post(buffer));
        }
        Ok(Self { inbox, parts, fabric: fabric.clone() })
    }

    /// Waits for the next message, from any peer.
    ///
    /// # Errors
    /// The future returns `TooLarge` for a message that is too long for the buffers; the pool continues after it. It
    /// returns `Closed` once the fabric is closed and all messages are taken.
    pub fn next(&self) -> NextMessage<'_> {
        NextMessage { pool: self, id: None }
    }

    /// The next message, if one has arrived.
    pub fn try_next(&self) -> Option<Result<Message>> {
        let message = self.inbox.lock().queue.pop_front()?;
        // The lock is open again: dropping a failed receive posts its buffer.
        Some(message.map_err(|FailedReceive(error, _)| error))
    }
}

impl Drop for RecvPool {
    fn drop(&mut self) {
        for part in &self.parts {
            part.closed.store(true, Ordering::Release);
            part.engine.control(Control::PoolClosed { pool: Arc::clone(part) });
        }
        let undelivered = std::mem::take(&mut self.inbox.lock().queue);
        drop(undelivered);
    }
}

impl PoolPart {
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// The region, the offset and the length of a buffer.
    pub fn buffer(&self, buffer: u32) -> (Arc<RegionInner>, u64, u64) {
        (Arc::clone(&self.region.0), u64::from(buffer) * self.size as u64, self.size as u64)
    }

    /// Notes that a receive has ended, with a message or with an error. Returns a message that came after the pool was
    /// dropped.
    pub fn arrived(self: &Arc<Self>, number: u32, result: Result<Outcome>) -> Option<Message> {
        let terminal = [ErrorKind::Closed, ErrorKind::DeviceLost, ErrorKind::Cancelled];
        if result.as_ref().is_err_and(|error| terminal.contains(&error.kind())) {
            return None;
        }
        let buffer = Buffer { part: Arc::clone(self), number };
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

    fn post(self: &Arc<Self>, buffer: u32) {
        self.engine.control(Control::PoolReceive { pool: Arc::clone(self), buffer });
    }
}

impl Inbox {
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

/// The future of [`RecvPool::next`].
#[must_use = "futures do nothing unless awaited"]
pub struct NextMessage<'a> {
    pool: &'a RecvPool,
    /// The key of this future's waker in the set of wakers.
    id: Option<u64>,
}

impl NextMessage<'_> {
    /// Blocks until there is a message, at most `limit`. Then it returns `DeadlineExceeded`.
    pub fn wait(mut self, limit: Duration) -> Result<Message> {
        let fabric = self.pool.fabric.clone();
        block_on(&mut self, limit, |_| true, || fabric.drive()).unwrap_or_else(|| {
            Err(Error::new(
                ErrorKind::DeadlineExceeded,
                "recv",
                format!("no message arrived within {limit:?}"),
            ))
        })
    }
}

impl Future for NextMessage<'_> {
    type Output = Result<Message>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { pool, id } = self.get_mut();
        let mut inbox = pool.inbox.lock();
        let message = inbox.queue.pop_front();
        let closed = if message.is_none() { inbox.closed.clone() } else { None };
        let old = match message.is_none() && closed.is_none() {
            true => inbox.waiting.register(id, (), context.waker()),
            false => inbox.waiting.unregister(id, ()),
        };
        drop(inbox);
        drop(old);
        // The lock is open again: dropping a failed receive posts its buffer.
        let message = message.map(|message| message.map_err(|FailedReceive(error, _)| error));
        match message.or(closed.map(Err)) {
            Some(answer) => Poll::Ready(answer),
            None => {
                pool.parts.iter().for_each(|part| needs_steps(&part.engine));
                Poll::Pending
            }
        }
    }
}

impl Drop for NextMessage<'_> {
    fn drop(&mut self) {
        if self.id.is_some() {
            let old = self.pool.inbox.lock().waiting.unregister(&mut self.id, ());
            drop(old);
        }
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
        let (part, len) = (&self.buffer.part, into.len().min(self.len));
        let copied = part.region.copy_out(self.buffer.number as usize * part.size, &mut into[..len]);
        debug_assert!(copied.is_ok(), "buffers lie inside the pool's region");
        len
    }

    /// Copies the message into the `len` bytes of `region` from `offset` on, like a receive into these bytes.
    pub(crate) fn receive_into(self, region: Arc<RegionInner>, offset: u64, len: u64) -> Result<Outcome> {
        self.check_room(len as usize)?;
        if region.is_revoked() {
            return Err(revoked("recv"));
        }
        Region(region).copy_in(offset as usize, &self.to_vec())?;
        Ok(Outcome { bytes: self.len as u64, work_requests: 0, peer: Some(self.peer), imm: self.imm })
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
            self.part.post(self.number);
        }
    }
}
