//! The move from one lane to the next, where requests of a peer that was given up do not end:
//! libfabric cannot call a single one back, only close the endpoint that they were posted to.
//!
//! Others must not lose by it. So another lane is opened first, and peers are told of it
//! (`Event::Moved`); one after the other they and we turn to the new one; and once nothing of
//! theirs is on the old one, it is closed with what is stuck there.

use std::time::Duration;

use libfabric_sys as sys;
use transport_core::spi::{Completions, Event, Piece, Status, WorkRequest};
use transport_core::{ErrorKind, Time};

use crate::context::Posted;
use crate::endpoint::EfaEndpoint;
use crate::lane::Lane;
use crate::library::Info;
use crate::peers::{Remote, View};
use crate::posting::{FULL, NO_DEVICE};
use crate::reaper;

/// Where closing an endpoint cuts them off.
const GRACE: Duration = Duration::from_secs(2);
/// Where closing an endpoint waits for them, under a lock that its successor needs
/// (`efa_rdm_ep_wait_send`): by then a card has given up itself. What the provider has held back
/// since the beginning (`EFA_RDM_OPE_QUEUED_BEFORE_HANDSHAKE`) never ends, and is not waited for.
pub(crate) const GRACE_OF_CARDS: Duration = Duration::from_secs(30);
/// How long the old lane stays open at least: what peers have posted to it ends meanwhile, and
/// nobody tells us when. A hundred times what a deep queue takes.
const LINGER: Duration = Duration::from_millis(500);
/// How long it stays open at most for our own requests to others.
const LIMIT: Duration = Duration::from_secs(5);

/// How long requests to a peer that is given up may take to fail by themselves.
pub(crate) fn grace(info: &Info) -> Duration {
    if info.card().is_some() && !info.is_direct() { GRACE_OF_CARDS } else { GRACE }
}

/// The lane before.
pub(crate) struct Former {
    pub(crate) lane: Box<Lane>,
    since: Time,
}

impl EfaEndpoint {
    /// Does what is due while peers are given up or a move is under way.
    #[cold]
    pub(crate) fn move_on(&mut self, into: &mut Completions) {
        if let Some(mut former) = self.former.take() {
            self.visit(&mut former.lane, into);
            self.former = Some(former);
        }
        self.aborted.retain(|(peer, _)| self.outstanding[peer.0 as usize] > 0);
        let now = self.shared.setup.clock.now();
        if self.former.is_some() {
            self.leave_former(now);
        } else if self.aborted.iter().any(|(_, until)| *until <= now) && self.lane.is_some() {
            self.change_lanes(now);
        }
    }

    /// Opens another lane, and keeps the old one for those who do not know it yet.
    fn change_lanes(&mut self, now: Time) {
        tracing::warn!(
            "requests to a peer that is gone do not end: the endpoint moves, and they are cut off"
        );
        let lane = match self.shared.open_lane() {
            Ok(lane) => lane,
            Err(error) => {
                tracing::warn!(%error, "there is no other: the endpoint is closed");
                return self.lose(0);
            }
        };
        let old = self.lane.replace(Box::new(lane));
        self.former = old.map(|lane| Box::new(Former { lane, since: now }));
        self.waiting.push_back(Event::Moved);
    }

    /// Closes the old lane once only what is to be cut off is there.
    fn leave_former(&mut self, now: Time) {
        let Some(former) = &self.former else { return };
        let (number, age) = (former.lane.number, now.since(former.since));
        let goes_there = |slot: &View| matches!(slot, View::Up(remote) if remote.lane == number);
        let given_up: u32 = self.aborted.iter().map(|(peer, _)| self.outstanding[peer.0 as usize]).sum();
        let is_needed = former.lane.posted.requests > given_up as usize || self.slots.iter().any(goes_there);
        if age < LINGER || (is_needed && age < LIMIT) {
            return;
        }
        let Some(former) = self.former.take() else { return };
        self.shared.peers.close_lane(number);
        let mut lane = former.lane;
        let ended = lane.posted.end_all();
        // Before it is told: closed, or with a reaper that keeps all that it may touch.
        let is_closed = reaper::close(&self.shared, lane, !ended.is_empty());
        let status = Status { kind: ErrorKind::Unreachable, code: sys::FI_ECANCELED as i32 };
        let mut receives = Vec::new();
        for ended in ended {
            match ended {
                Posted::Request { .. } => self.fail(ended, status),
                Posted::Receive { is_recalled: true, .. } => {
                    self.fail(ended, Status { kind: ErrorKind::Cancelled, ..status });
                }
                Posted::Receive { .. } if self.own.is_some() => self.fail(ended, status),
                Posted::Receive { receive, .. } => receives.push(receive),
            }
        }
        if !is_closed {
            // The new lane's calls would wait for the same lock.
            for receive in receives {
                self.waiting.push_back(Event::ReceiveFailed { id: receive.id, status });
            }
            return self.lose(sys::FI_ENODEV as i32);
        }
        let Some(mut lane) = self.lane.take() else { return };
        // SAFETY: posted to the old lane until now, and not given back: they are still as promised.
        let result = unsafe { self.post_receives(&mut lane.turn(), &receives) };
        self.lane = Some(lane);
        for receive in &receives[result.accepted..] {
            self.waiting.push_back(Event::ReceiveFailed { id: receive.id, status });
        }
    }

    /// Posts to a peer that knows only the lane before.
    ///
    /// # Safety
    /// As `Endpoint::post`.
    #[cold]
    pub(crate) unsafe fn post_former(
        &mut self,
        run: &WorkRequest,
        pieces: &[Piece],
        remote: &Remote,
    ) -> (usize, isize) {
        let Some(mut former) = self.former.take() else { return (0, NO_DEVICE) };
        // It may have been closed since the slots were looked at.
        let result = match former.lane.number == remote.lane {
            // SAFETY: by the caller.
            true => unsafe { self.post_run(&mut former.lane.turn(), run, pieces, remote) },
            false => (0, FULL),
        };
        self.former = Some(former);
        result
    }
}
