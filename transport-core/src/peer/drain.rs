//! Waiting until a peer's operations have ended, also those whose future was dropped.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use super::PeerInner;
use crate::engine::op::needs_steps;
use crate::engine::{Control, DrainAnswer, EngineHandle, drain_answer};
use crate::{Error, ErrorKind, Result, wait};

/// The future of [`Peer::drain`](crate::Peer::drain) and [`Fabric::drain_device`](crate::Fabric::drain_device).
#[must_use = "only the awaited future says when no byte can move"]
pub struct Drain {
    /// The engines that have not answered, one per link.
    waits: Vec<(Arc<EngineHandle>, DrainAnswer)>,
    failed: Option<Error>,
}

impl Drain {
    /// Asks each engine that has operations to `peer`.
    pub(super) fn new(peer: &PeerInner) -> Result<Self> {
        let fabric = peer.context.fabric.upgrade().ok_or_else(closed)?;
        fabric.check_open("drain")?;
        let mut waits = Vec::new();
        for link in peer.links.iter().filter(|link| !link.backlog.is_empty()) {
            let (done, answer) = drain_answer();
            let deadline = fabric.deadline(fabric.now(), None);
            link.engine.control(Control::Drain { peer: peer.id, deadline, done });
            waits.push((Arc::clone(&link.engine), answer));
        }
        Ok(Self::of(waits))
    }

    /// A drain that ends once each of these engines has answered.
    pub(crate) fn of(waits: Vec<(Arc<EngineHandle>, DrainAnswer)>) -> Self {
        Self { waits, failed: None }
    }

    /// Blocks until no byte can move any more, at most `limit`. Then it returns `DeadlineExceeded`, and may be called
    /// again.
    pub fn wait(&mut self, limit: Duration) -> Result<()> {
        wait(self, limit)?
    }
}

impl Future for Drain {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { waits, failed } = self.get_mut();
        waits.retain_mut(|(engine, answer)| match Pin::new(answer).poll(context) {
            Poll::Pending => {
                needs_steps(engine);
                true
            }
            Poll::Ready(answer) => {
                *failed = failed.take().or(answer.err());
                false
            }
        });
        match waits.is_empty() {
            true => Poll::Ready(failed.take().map_or(Ok(()), Err)),
            false => Poll::Pending,
        }
    }
}

#[cold]
fn closed() -> Error {
    Error::new(ErrorKind::Closed, "drain", "the fabric is closed")
}
