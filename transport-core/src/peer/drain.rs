//! Waiting until a peer's operations are over, also those whose future is gone.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::oneshot;

use super::Peer;
use crate::engine::{Control, EngineHandle};
use crate::op::needs_turns;
use crate::{Error, ErrorKind, Result, wait};

impl Peer {
    /// Resolves once no byte can move any more of all operations that were submitted
    /// to this peer before, whether their [`Op`](crate::Op) was dropped, detached or is held.
    ///
    /// For operations that nobody can await any more: dropped by a `select!`, or with
    /// a task that was aborted. From then on their memory, here and there, is its
    /// owner's. Who still has the `Op` can ask for one alone by [`Op::cancel`](crate::Op::cancel).
    /// Operations that are submitted later are not waited for.
    ///
    /// Dropped operations are over by their deadline at the latest. The wait itself
    /// ends by the fabric's default one with `DeadlineExceeded`, and may be repeated.
    ///
    /// # Errors
    /// `Closed` if the fabric is closed, which ended them all.
    pub fn drain(&self) -> Result<Drain> {
        let fabric = self.0.fabric.upgrade().ok_or_else(closed)?;
        fabric.check_open("drain")?;
        let mut waits = Vec::new();
        for link in self.0.links.iter().filter(|link| !link.backlog.is_empty()) {
            let (done, answer) = oneshot::channel();
            let deadline = fabric.deadline(fabric.now(), None);
            link.engine.control(Control::Drain { peer: self.0.id, deadline, done });
            waits.push((Arc::clone(&link.engine), answer));
        }
        Ok(Drain { waits, failed: None })
    }
}

/// The future of [`Peer::drain`].
#[must_use = "only the awaited future says when no byte can move"]
pub struct Drain {
    /// One per transport that has not answered.
    waits: Vec<(Arc<EngineHandle>, oneshot::Receiver<Result<()>>)>,
    failed: Option<Error>,
}

impl Drain {
    /// Blocks until no byte can move any more, at most `limit`: then
    /// `DeadlineExceeded`, and `wait` may be called again.
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
                needs_turns(engine);
                true
            }
            Poll::Ready(answer) => {
                *failed = failed.take().or(answer.unwrap_or_else(|_| Err(closed())).err());
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
