//! Waiting until every peer of a group has reached the same point as this side.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use super::{PeerGroup, refused};
use crate::control::MAX_NAME;
use crate::engine::op::{block_on, needs_steps};
use crate::engine::timers::Timer;
use crate::fabric::FabricInner;
use crate::peer::{MAX_AHEAD, Refusal};
use crate::{Error, ErrorKind, Result};

impl PeerGroup {
    /// Tells every peer of the group that this side has reached the barrier `name`, a word or a number. Resolves once
    /// each of the peers has told this side the same.
    ///
    /// Every member calls it with a group of all the other members, in any order in time: arrivals are kept. A name may
    /// be used again and again, for one wait at a time. Barriers of different names are independent. A barrier uses the
    /// control plane. It takes no imm and no slot of the op table.
    ///
    /// A barrier does not order operations. If the peers must find the bytes of an operation after the barrier, await
    /// that operation before the barrier, or announce it by an imm.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use multirail_core::{PeerGroup, Result};
    /// # async fn rounds(group: &PeerGroup) -> Result<()> {
    /// for round in 0..10 {
    ///     // ... what the others must not see half done ...
    ///     group.barrier(round, Duration::from_secs(10))?.await?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The call returns `InvalidRequest` for a name that is empty or longer than 255 bytes; `Busy` if another future
    /// waits for this barrier with one of the peers; `Exhausted` if there are 1024 barriers that this side has reached
    /// and one of the peers has not; `PeerDied`, `Closed`.
    ///
    /// The future returns `DeadlineExceeded` after `limit`, by the fabric's clock; `PeerDied` or `Closed` if a peer
    /// ends before it has reached the barrier. In both cases, and if the future is dropped, the peers keep this side's
    /// arrival: the next call with the same name goes on waiting, and does not arrive a second time.
    pub fn barrier(&self, name: impl fmt::Display, limit: Duration) -> Result<Barrier> {
        let name = name.to_string();
        if name.is_empty() || name.len() > MAX_NAME {
            let why = format!("the name has {} bytes; 1 to {MAX_NAME} are allowed", name.len());
            return Err(refused("barrier", why));
        }
        let fabric = self.peers()[0].0.context.fabric.upgrade();
        let fabric =
            fabric.ok_or_else(|| Error::new(ErrorKind::Closed, "barrier", "the fabric is closed"))?;
        let timer = Timer::new(Arc::clone(fabric.first_engine()), fabric.deadline(fabric.now(), Some(limit)));
        let weak = Arc::downgrade(&fabric);
        // From here on, dropping the future leaves the barriers that it has entered.
        let mut barrier = Barrier {
            group: self.clone(),
            fabric: weak,
            name,
            limit,
            timer,
            entered: 0,
            missing: Vec::new(),
        };
        barrier.enter()?;
        for (position, peer) in self.peers().iter().enumerate() {
            if peer.0.context.barriers.announce(&barrier.name) {
                peer.announce_arrival(&barrier.name);
            }
            barrier.missing.push(position);
        }
        Ok(barrier)
    }
}

/// The future of [`PeerGroup::barrier`].
#[must_use = "this side has reached the barrier; only the awaited future says that the others have"]
pub struct Barrier {
    group: PeerGroup,
    fabric: Weak<FabricInner>,
    name: String,
    limit: Duration,
    timer: Timer,
    /// The number of peers, from the first on, whose barrier this future has entered.
    entered: usize,
    /// The positions of the peers that had not reached the barrier at the last poll.
    missing: Vec<usize>,
}

impl Barrier {
    /// Blocks until every peer has reached the barrier, at most for the barrier's limit.
    ///
    /// # Errors
    /// As the future's.
    pub fn wait(mut self) -> Result<()> {
        let (engine, limit) = (Arc::clone(self.timer.engine()), self.limit);
        block_on(&mut self, limit, |_| true, || engine.drive()).unwrap_or_else(|| Err(self.late()))
    }

    /// Enters the barrier of each peer.
    fn enter(&mut self) -> Result<()> {
        let group = self.group.clone();
        for peer in group.peers() {
            let id = peer.id();
            let known = peer.0.context.barriers.enter(&self.name).map_err(|refusal| match refusal {
                Refusal::Awaited => {
                    let why = format!(
                        "another future waits for a barrier of this name with {id}; use another name"
                    );
                    Error::new(ErrorKind::Busy, "barrier", why)
                }
                Refusal::TooMany => {
                    let why = format!(
                        "this side has reached {MAX_AHEAD} barriers that {id} has not; wait for some of them"
                    );
                    Error::new(ErrorKind::Exhausted, "barrier", why)
                }
            })?;
            self.entered += 1;
            if !known {
                // A peer that knew of this side's arrival may have passed the barrier, and may have gone.
                peer.0.check_alive()?;
            }
        }
        Ok(())
    }

    /// Leaves the barriers that were entered.
    fn leave(&mut self, passed: bool) {
        for peer in &self.group.peers()[..std::mem::take(&mut self.entered)] {
            peer.0.context.barriers.leave(&self.name, passed);
        }
    }

    fn poll_missing(&mut self, context: &mut Context<'_>) -> Poll<Result<()>> {
        let Self { group, name, missing, .. } = self;
        let mut end = None;
        missing.retain(|position| {
            let peer = &group.peers()[*position].0;
            let reached = || peer.context.barriers.poll(name, context.waker());
            // A peer that passes the barrier may close at once. Its arrival before that counts.
            let missing = !reached() && (peer.close_reason().is_none() || !reached());
            if missing {
                end = end.take().or_else(|| peer.close_reason());
            }
            missing
        });
        match end {
            Some(error) => Poll::Ready(Err(error)),
            None if missing.is_empty() => Poll::Ready(Ok(())),
            None => Poll::Pending,
        }
    }

    #[cold]
    fn late(&self) -> Error {
        let names: Vec<_> =
            self.missing.iter().take(3).map(|at| self.group.peers()[*at].id().to_string()).collect();
        let more = if self.missing.len() > names.len() { ", ..." } else { "" };
        let why = format!(
            "{} of {} peers have not reached barrier {} within {:?} ({}{more}); call it again to wait on",
            self.missing.len(),
            self.group.len(),
            self.name,
            self.limit,
            names.join(", ")
        );
        Error::new(ErrorKind::DeadlineExceeded, "barrier", why)
    }
}

impl Future for Barrier {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        if this.entered == 0 {
            let why = "the barrier's result was already taken";
            return Poll::Ready(Err(Error::new(ErrorKind::Closed, "barrier", why)));
        }
        let mut polled = this.poll_missing(context);
        if polled.is_pending() {
            this.timer.set(context.waker());
            // Checked after the timer was set. Otherwise the deadline might pass in between unnoticed.
            let late = this.fabric.upgrade().is_some_and(|fabric| fabric.now() >= this.timer.at());
            if !late {
                needs_steps(this.timer.engine());
                return Poll::Pending;
            }
            polled = Poll::Ready(Err(this.late()));
        }
        let passed = matches!(polled, Poll::Ready(Ok(())));
        this.leave(passed);
        polled
    }
}

impl Drop for Barrier {
    fn drop(&mut self) {
        self.leave(false);
    }
}
