//! Replaces the libfabric endpoint when requests to an aborted peer do not end: libfabric cannot cancel a single
//! request, only close the endpoint that it was posted to.
//!
//! Other peers must not lose requests. So the backend opens the next endpoint first, and peers get its address
//! (`Event::EndpointChanged`); one after the other they and we turn to the new one; and once nothing of
//! theirs is on the old one, it is closed with what is stuck there.

use std::time::Duration;

use libfabric_sys as sys;
use multirail_spi::{Completions, ErrorKind, Event, Piece, Status, Time, WorkRequest};

use crate::context::Posted;
use crate::endpoint::EfaEndpoint;
use crate::endpoint::{FULL, NO_DEVICE};
use crate::fabric_endpoint::FabricEndpoint;
use crate::library::Info;
use crate::peers::{Remote, View};
use crate::reaper;

/// How long requests to an aborted peer may take, where closing an endpoint cuts them off.
const GRACE: Duration = Duration::from_secs(2);
/// Where closing an endpoint waits for them, under a lock that its successor needs
/// (`efa_rdm_ep_wait_send`): by then a card has given up itself. What the provider has held back
/// since the beginning (`EFA_RDM_OPE_QUEUED_BEFORE_HANDSHAKE`) never ends, and is not waited for.
pub(crate) const GRACE_OF_CARDS: Duration = Duration::from_secs(30);
/// How long the retiring endpoint stays open at least. Requests that peers have posted to it end meanwhile, which nothing
/// reports. A hundred times what a deep queue takes.
const LINGER: Duration = Duration::from_millis(500);
/// How long it stays open at most for our own requests to other peers.
const LIMIT: Duration = Duration::from_secs(5);

/// How long requests to an aborted peer may take to fail by themselves.
pub(crate) fn grace(info: &Info) -> Duration {
    if info.card().is_some() && !info.is_direct() { GRACE_OF_CARDS } else { GRACE }
}

/// The endpoint before the current one.
pub(crate) struct RetiringEndpoint {
    pub(crate) endpoint: Box<FabricEndpoint>,
    since: Time,
}

impl EfaEndpoint {
    /// Continues the replacement, or begins one if an aborted peer still has requests.
    #[cold]
    pub(crate) fn proceed(&mut self, into: &mut Completions) {
        if let Some(mut retiring) = self.retiring.take() {
            self.visit(&mut retiring.endpoint, into);
            self.retiring = Some(retiring);
        }
        self.aborted.retain(|(peer, _)| self.outstanding[peer.0 as usize] > 0);
        let now = self.shared.setup.clock.now();
        if self.retiring.is_some() {
            self.close_retiring(now);
        } else if self.aborted.iter().any(|(_, until)| *until <= now) && self.endpoint.is_some() {
            self.replace_endpoint(now);
        }
    }

    /// Opens the next endpoint, and keeps the old one for peers that do not know the next one yet.
    fn replace_endpoint(&mut self, now: Time) {
        tracing::warn!(
            "requests to a peer that is gone do not end: the backend replaces the endpoint, which cuts them off"
        );
        let endpoint = match self.shared.open_endpoint() {
            Ok(endpoint) => endpoint,
            Err(error) => {
                tracing::warn!(%error, "no other endpoint can be opened: the device is given up");
                return self.lose(0);
            }
        };
        let old = self.endpoint.replace(Box::new(endpoint));
        self.retiring = old.map(|endpoint| Box::new(RetiringEndpoint { endpoint, since: now }));
        self.waiting.push_back(Event::EndpointChanged);
    }

    /// Closes the retiring endpoint once it has only requests of aborted peers.
    fn close_retiring(&mut self, now: Time) {
        let Some(retiring) = &self.retiring else { return };
        let (number, age) = (retiring.endpoint.number, now.since(retiring.since));
        let goes_there = |slot: &View| matches!(slot, View::Up(remote) if remote.endpoint == number);
        let given_up: u32 = self.aborted.iter().map(|(peer, _)| self.outstanding[peer.0 as usize]).sum();
        let is_needed =
            retiring.endpoint.posted.requests > given_up as usize || self.slots.iter().any(goes_there);
        if age < LINGER || (is_needed && age < LIMIT) {
            return;
        }
        let Some(retiring) = self.retiring.take() else { return };
        self.shared.peers.close_endpoint(number);
        let mut endpoint = retiring.endpoint;
        let ended = endpoint.posted.end_all();
        // Before the ends are reported, the endpoint is closed, or a reaper keeps all memory that it may touch.
        let is_closed = reaper::close(&self.shared, endpoint, !ended.is_empty());
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
            // Calls of the current endpoint would wait for the same lock.
            for receive in receives {
                self.waiting.push_back(Event::ReceiveFailed { id: receive.id, status });
            }
            return self.lose(sys::FI_ENODEV as i32);
        }
        let Some(mut endpoint) = self.endpoint.take() else { return };
        // SAFETY: the receives were posted until now, and the engine has not got them back: their buffers are valid.
        let result = unsafe { self.post_receives(&mut endpoint.guard(), &receives) };
        self.endpoint = Some(endpoint);
        for receive in &receives[result.accepted..] {
            self.waiting.push_back(Event::ReceiveFailed { id: receive.id, status });
        }
    }

    /// Posts to a peer that knows only the retiring endpoint.
    ///
    /// # Safety
    /// As `Endpoint::post`.
    #[cold]
    pub(crate) unsafe fn post_retiring(
        &mut self,
        run: &WorkRequest,
        pieces: &[Piece],
        remote: &Remote,
    ) -> (usize, isize) {
        let Some(mut retiring) = self.retiring.take() else { return (0, NO_DEVICE) };
        // It may have been closed since the slots were read.
        let result = match retiring.endpoint.number == remote.endpoint {
            // SAFETY: by the caller.
            true => unsafe { self.post_run(&mut retiring.endpoint.guard(), run, pieces, remote) },
            false => (0, FULL),
        };
        self.retiring = Some(retiring);
        result
    }
}
