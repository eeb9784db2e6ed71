//! Receive pools: receives whose buffers are posted again automatically.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::engine::op::{block_on, needs_steps};
use crate::engine::{EngineHandle, Inbox, PoolPart};
use crate::{Access, Error, ErrorKind, Fabric, Message, Result};

/// Receives of equal size, posted on every transport. Dropping a message posts its buffer again.
pub struct RecvPool {
    inbox: Arc<Inbox>,
    parts: Vec<Arc<PoolPart>>,
    fabric: Fabric,
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
        let inbox = Arc::new(Inbox::new(engines.len()));
        let mut parts = Vec::new();
        for engine in engines {
            // Messages arrive at the first rail group.
            let region = fabric.alloc_near(0, bytes, Access::LOCAL)?;
            let (engine, inbox) = (Arc::clone(engine), Arc::clone(&inbox));
            parts.push(Arc::new(PoolPart::new(region.0, size, engine, inbox)));
        }
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
        self.inbox.try_next()
    }
}

impl Drop for RecvPool {
    fn drop(&mut self) {
        self.parts.iter().for_each(PoolPart::drop_pool);
        self.inbox.clear();
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
        let polled = pool.inbox.poll_next(id, context.waker());
        if polled.is_pending() {
            pool.parts.iter().for_each(|part| needs_steps(part.engine()));
        }
        polled
    }
}

impl Drop for NextMessage<'_> {
    fn drop(&mut self) {
        self.pool.inbox.forget(&mut self.id);
    }
}
