//! Posting and polling, by the one thread that owns the endpoint.

#[cfg(unix)]
use std::os::fd::RawFd;

use crate::Time;
use crate::{Batch, Completions, PeerSlot, ReceiveRequest, Status};

/// What an endpoint is opened with.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct EndpointConfig {
    /// Fewer outstanding requests than the device allows; `None` takes its limit.
    pub send_depth: Option<u32>,
}

/// Queues of a domain, owned by one thread.
///
/// Dropping an endpoint stops everything posted to it: nothing is touched after that.
pub trait Endpoint: Send {
    /// Posts a batch under one doorbell, in order.
    ///
    /// A full queue is back-pressure (`accepted` short, no error). If a batch
    /// fails half way, `accepted` is exact, or the endpoint reports every posted
    /// request as failed: it never guesses.
    ///
    /// # Safety
    /// Until each accepted request has completed or failed: its local span stays
    /// valid, and the import behind its `rkey` stays alive.
    unsafe fn post(&mut self, batch: &Batch) -> PostResult;

    /// Posts receive buffers. Same rules as [`Endpoint::post`].
    ///
    /// # Safety
    /// Each buffer stays valid, and nobody else touches it, until it completed or failed.
    unsafe fn post_recv(&mut self, batch: &[ReceiveRequest]) -> PostResult;

    /// Appends what happened since the last call, up to `into`'s spare room. Who polls again has acted on all
    /// that was told.
    fn poll(&mut self, into: &mut Completions);

    /// Asks to be woken by the next event, or once a request that it had no room
    /// for may be posted again.
    fn arm(&mut self) -> Armed;

    /// When something will happen by itself, in the fabric's clock: a model of a device
    /// knows, a device does not. Nothing by default.
    fn due(&self) -> Time {
        Time::NEVER
    }

    /// Stops posted work within the abort scope of `peer`: every such request
    /// is reported by later polls, done or failed, and touches nothing after that.
    fn abort(&mut self, peer: PeerSlot);

    /// Takes a posted receive back: it is reported as failed with `Cancelled`. `false` where the
    /// device gives none back: it stays posted, until a message takes it or the endpoint is dropped.
    fn cancel_recv(&mut self, id: u64) -> bool;

    /// A provider's own words for a status. The engine puts the words of the kind before them; an empty text
    /// where the kind says all.
    fn describe(&self, status: Status) -> String;
}

/// What became of a batch: the first `accepted` requests are outstanding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PostResult {
    /// How many requests were taken, in order.
    pub accepted: usize,
    /// Why the request after them was refused for good; `None` is back-pressure.
    pub error: Option<Status>,
}

/// The answer of [`Endpoint::arm`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Armed {
    /// Something is there already: poll again.
    Ready,
    /// This descriptor becomes readable with the next event. It stays the
    /// endpoint's; `arm` and `poll` clear it.
    #[cfg(unix)]
    Fd(RawFd),
    /// As [`Armed::Fd`], but not all that may happen makes it readable: nap at most as where there is
    /// no way to wait.
    #[cfg(unix)]
    FdOrNap(RawFd),
    /// No way to wait: nap, at most for `Capabilities::idle_backoff`.
    Unsupported,
}
