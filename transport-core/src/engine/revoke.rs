//! Regions that are being taken back, until this side's operations have let go of them and no peer is inside a copy.

use std::sync::Arc;
use std::task::Poll;

use super::Engine;
use crate::observe::{OperationKind, What};
use crate::op::OpId;
use crate::region::{RegionInner, revoked};
use crate::spi::WorkKind;
use crate::{Error, ErrorKind, Outcome, Time};

pub(super) struct Revoking {
    /// The operation that is to be answered, until it is.
    pub id: Option<OpId>,
    pub region: Arc<RegionInner>,
    pub deadline: Time,
    pub begun: Time,
    pub stalled: bool,
    used_as: Use,
    /// The operations and receives that use the region were told to end.
    are_users_stopped: bool,
}

/// What operations and receives of this side still use a revoked region as. No new ones begin, so that it only falls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Use {
    Nothing,
    /// Bytes leave it.
    Source,
    /// Bytes land in it.
    Target,
}

impl Revoking {
    /// Whether operations or receives of this side still use the region.
    pub fn is_in_use(&self) -> bool {
        self.used_as > Use::Nothing
    }
}

impl Engine {
    /// Ends the operations and receives that use a revoked region, and watches it until it is quiet. Without an `id`
    /// nobody waits for that. Who asks again after having given up waits for what is watched already.
    pub(super) fn revoke(&mut self, id: Option<OpId>, region: Arc<RegionInner>, deadline: Time) {
        let begun = self.now();
        if let Some(id) = id {
            self.begins(id, OperationKind::Revoke, 0, region.len);
            self.watch_until(begun, deadline);
        }
        let known =
            self.revoking.iter().position(|known| known.id.is_none() && Arc::ptr_eq(&known.region, &region));
        let place = known.unwrap_or(self.revoking.len());
        match self.revoking.get_mut(place) {
            Some(known) => {
                (known.id, known.deadline, known.begun, known.stalled) = (id, deadline, begun, false)
            }
            None => self.revoking.push(Revoking {
                id,
                region,
                deadline,
                begun,
                stalled: false,
                used_as: Use::Target,
                are_users_stopped: false,
            }),
        }
        self.stop_users(place);
    }

    /// Ends the operations and receives that use the region of a revocation. A waker of the user's that panics leaves
    /// the rest to the next turn.
    fn stop_users(&mut self, place: usize) {
        let region = Arc::clone(&self.revoking[place].region);
        for op in 0..self.active.len() as u32 {
            let uses =
                self.active[op as usize].as_ref().filter(|active| is_local(&active.work.local, &region));
            if let Some(kind) = uses.map(|active| active.work.kind) {
                self.stop(op, revoked(Self::operation_name(kind)));
            }
        }
        self.receives.revoke(&region, &mut self.rails, &self.handle);
        self.revoking[place].are_users_stopped = true;
    }

    /// Asks every region that is being revoked whether it is quiet.
    pub(super) fn advance_revokes(&mut self) -> usize {
        let mut ended = 0;
        let rails = self.handle.first_rail..self.handle.first_rail + self.rails.len();
        for place in (0..self.revoking.len()).rev() {
            if !self.revoking[place].are_users_stopped {
                self.stop_users(place);
            }
            if self.revoking[place].is_in_use() {
                self.revoking[place].used_as = self.use_of(&self.revoking[place].region);
            }
            let this = &self.revoking[place];
            let quiet = this.region.poll_quiet(self.handle.transport, rails.clone(), this.is_in_use());
            let result = match quiet {
                Poll::Ready(Ok(())) if this.used_as == Use::Target => continue,
                Poll::Ready(result) => result,
                // Every key was asked for, and nobody waits for more.
                Poll::Pending if this.id.is_none() && !this.is_in_use() => Ok(()),
                Poll::Pending => continue,
            };
            ended += 1;
            match self.revoking.swap_remove(place).id {
                Some(id) => self.end_revoke(id, result),
                None => drop(result.inspect_err(|error| tracing::warn!(%error, "a region stays registered"))),
            }
        }
        ended
    }

    /// Revocations that somebody waits for.
    #[inline]
    pub(super) fn awaited_revokes(&self) -> usize {
        if self.revoking.is_empty() { 0 } else { self.count_awaited_revokes() }
    }

    #[cold]
    fn count_awaited_revokes(&self) -> usize {
        self.revoking.iter().filter(|revoking| revoking.id.is_some()).count()
    }

    /// Answers a revocation whose waiter has given it up. The region stays revoked.
    pub(super) fn cancel_revoke(&mut self, id: OpId) {
        let Some(revoking) = self.revoking.iter_mut().find(|revoking| revoking.id == Some(id)) else {
            return;
        };
        revoking.id = None;
        let why = "no longer awaited; the region stays revoked";
        self.end_revoke(id, Err(Error::new(ErrorKind::Cancelled, "revoke", why)));
    }

    /// Answers the revocations whose deadline has passed. The regions stay revoked, and the engine takes back later
    /// what operations of this side still use.
    pub(super) fn expire_revokes(&mut self, now: Time, next: &mut Time) -> usize {
        let mut expired = 0;
        for revoking in &mut self.revoking {
            let Some(id) = revoking.id else { continue };
            if revoking.deadline > now {
                *next = (*next).min(revoking.deadline);
                continue;
            }
            expired += 1;
            revoking.id = None;
            self.handle.recorder.write(What::Expired { op: id }.pack(now));
            let why = match revoking.used_as {
                Use::Nothing => {
                    "a peer is still inside a copy to the region; it stays revoked, revoke() again to wait on"
                }
                _ => {
                    "the device still has a request or a receive of this side on the region; it stays revoked, \
                     revoke() again to wait on"
                }
            };
            self.handle.table.end(id, Err(Error::new(ErrorKind::DeadlineExceeded, "revoke", why)));
        }
        expired
    }

    /// Answers all, as the engine closes.
    pub(super) fn close_revokes(&mut self, error: &Error) {
        for id in std::mem::take(&mut self.revoking).into_iter().filter_map(|revoking| revoking.id) {
            self.handle.table.end(id, Err(error.clone()));
        }
    }

    fn end_revoke(&mut self, id: OpId, result: crate::Result<()>) {
        self.record(What::Ended { op: id, error: result.as_ref().err().map(Error::kind) });
        self.handle.table.end(id, result.map(|()| Outcome::default()));
    }

    fn use_of(&self, region: &Arc<RegionInner>) -> Use {
        if self.receives.is_into(region) {
            return Use::Target;
        }
        let uses = self.active.iter().flatten().filter(|active| is_local(&active.work.local, region));
        let used_as =
            uses.map(|active| if active.work.kind == WorkKind::Read { Use::Target } else { Use::Source });
        used_as.max().unwrap_or(Use::Nothing)
    }
}

fn is_local(local: &Option<Arc<RegionInner>>, region: &Arc<RegionInner>) -> bool {
    local.as_ref().is_some_and(|local| Arc::ptr_eq(local, region))
}
