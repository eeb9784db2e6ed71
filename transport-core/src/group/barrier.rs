//! Waiting until every peer of a group has come as far as we have.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use super::{PeerGroup, refused};
use crate::control::MAX_NAME;
use crate::engine::timers::Timer;
use crate::fabric::FabricInner;
use crate::op::{block_on, needs_steps};
use crate::peer::{MAX_AHEAD, Refusal};
use crate::{Error, ErrorKind, Result};

impl PeerGroup {
    /// Tells every peer of the group that we have reached the barrier of that name, a word or
    /// a number, and resolves once each of them has told us so too.
    ///
    /// Every member calls it with a group of all the others. Who comes first does not
    /// matter: arrivals are kept. A name may be used again and again, for one wait at a
    /// time; barriers of different names have nothing to do with each other. It goes over
    /// the control plane and takes no imm and no operation's place.
    ///
    /// It orders nothing but itself: await what the others are to find before it, or let an
    /// imm announce it.
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
    /// Now: `InvalidRequest` for a name of no or over 255 bytes; `Busy` if somebody waits for
    /// that barrier with one of the peers already; `Exhausted` if a peer has
    /// not reached 1024 barriers that we have; `PeerDied`, `Closed`.
    ///
    /// Later: `DeadlineExceeded` after `limit`, by the fabric's clock; `PeerDied` or `Closed`
    /// for a peer that goes before it has reached the barrier. In both cases, and if the
    /// future is dropped, those that know of our arrival keep it: the next
    /// call of that name waits on instead of arriving once more.
    pub fn barrier(&self, name: impl fmt::Display, limit: Duration) -> Result<Barrier> {
        let name = name.to_string();
        if name.is_empty() || name.len() > MAX_NAME {
            let why = format!("a name of {} bytes; 1 to {MAX_NAME} are allowed", name.len());
            return Err(refused("barrier", why));
        }
        let fabric = self.peers()[0].0.fabric.upgrade();
        let fabric =
            fabric.ok_or_else(|| Error::new(ErrorKind::Closed, "barrier", "the fabric is closed"))?;
        let timer = Timer::new(Arc::clone(fabric.first_engine()), fabric.deadline(fabric.now(), Some(limit)));
        let weak = Arc::downgrade(&fabric);
        // From here on, dropping it takes back what it has entered.
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
        for (place, peer) in self.peers().iter().enumerate() {
            if peer.0.barriers.announce(&barrier.name) {
                peer.announce_arrival(&barrier.name);
            }
            barrier.missing.push(place);
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
    /// How many peers of the group know that somebody waits here.
    entered: usize,
    /// Places of those that have not reached it, as far as was looked.
    missing: Vec<usize>,
}

impl Barrier {
    /// Blocks until every peer has reached it, at most its limit.
    ///
    /// # Errors
    /// As the future's.
    pub fn wait(mut self) -> Result<()> {
        let (engine, limit) = (Arc::clone(self.timer.engine()), self.limit);
        block_on(&mut self, limit, |_| true, || engine.drive()).unwrap_or_else(|| Err(self.late()))
    }

    fn enter(&mut self) -> Result<()> {
        let group = self.group.clone();
        for peer in group.peers() {
            let id = peer.id();
            let known = peer.0.barriers.enter(&self.name).map_err(|refusal| match refusal {
                Refusal::Awaited => {
                    let why = format!("a barrier of this name is awaited with {id}; use another name");
                    Error::new(ErrorKind::Busy, "barrier", why)
                }
                Refusal::TooMany => {
                    let why = format!("{id} has not reached {MAX_AHEAD} barriers that this side has");
                    Error::new(ErrorKind::Exhausted, "barrier", why)
                }
            })?;
            self.entered += 1;
            if !known {
                // One that knew of our arrival may have passed, and gone.
                peer.0.check_alive()?;
            }
        }
        Ok(())
    }

    /// Takes back what was entered.
    fn leave(&mut self, passed: bool) {
        for peer in &self.group.peers()[..std::mem::take(&mut self.entered)] {
            peer.0.barriers.leave(&self.name, passed);
        }
    }

    fn look(&mut self, context: &mut Context<'_>) -> Poll<Result<()>> {
        let Self { group, name, missing, .. } = self;
        let mut end = None;
        missing.retain(|place| {
            let peer = &group.peers()[*place].0;
            let reached = || peer.barriers.poll(name, context.waker());
            // A peer that passes may go at once: what it said before counts.
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
            self.missing.iter().take(3).map(|place| self.group.peers()[*place].id().to_string()).collect();
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
            let why = "the barrier's result was handed out before";
            return Poll::Ready(Err(Error::new(ErrorKind::Closed, "barrier", why)));
        }
        let mut polled = this.look(context);
        if polled.is_pending() {
            this.timer.set(context.waker());
            // After it was set, or the time might pass in between.
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
