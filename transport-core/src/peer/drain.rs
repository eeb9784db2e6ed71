//! Waiting until a peer's operations are over, also those whose future is gone.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use super::Peer;
use crate::engine::Control;
use crate::{Error, ErrorKind, Op, Result, wait};

impl Peer {
    /// Resolves once no byte can move any more of all operations that were submitted
    /// to this peer before, whether their [`Op`] was dropped, detached or is held.
    ///
    /// For operations that nobody can await any more: dropped by a `select!`, or with
    /// a task that was aborted. From then on their memory, here and there, is its
    /// owner's. Who still has the `Op` can ask for one alone by [`Op::cancel`].
    /// Operations that are submitted later are not waited for.
    ///
    /// Dropped operations are over by their deadline at the latest. The wait itself
    /// ends by the fabric's default one with `DeadlineExceeded`, and may be repeated.
    ///
    /// # Errors
    /// `Closed` if the fabric is closed, which ended them all; `Busy` if as many
    /// operations are under way as there may be.
    pub fn drain(&self) -> Result<Drain> {
        let fabric = self
            .0
            .fabric
            .upgrade()
            .ok_or_else(|| Error::new(ErrorKind::Closed, "drain", "the fabric is closed"))?;
        fabric.check_open("drain")?;
        let mut waits = Vec::new();
        for link in self.0.links.iter().filter(|link| !link.is_quiet()) {
            let id = link.engine.insert("drain")?;
            link.engine.control(Control::Drain { id, peer: self.0.id, deadline: fabric.deadline(None) });
            waits.push(Op::pending(link.engine.clone(), id));
        }
        Ok(Drain { waits, failed: None })
    }
}

/// The future of [`Peer::drain`].
#[must_use = "only the awaited future says when no byte can move"]
pub struct Drain {
    /// One per transport that has not answered.
    waits: Vec<Op>,
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
        waits.retain_mut(|wait| match Pin::new(wait).poll(context) {
            Poll::Pending => true,
            Poll::Ready(result) => {
                *failed = failed.take().or(result.err());
                false
            }
        });
        match waits.is_empty() {
            true => Poll::Ready(failed.take().map_or(Ok(()), Err)),
            false => Poll::Pending,
        }
    }
}
