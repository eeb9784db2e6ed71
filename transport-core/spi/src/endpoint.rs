//! Posting and polling. One thread owns an endpoint.

#[cfg(unix)]
use std::os::fd::RawFd;

use crate::{Batch, Completions, PeerSlot, ReceiveRequest, Status, Time};

/// The settings of an endpoint.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct EndpointConfig {
    /// The most outstanding requests, if fewer than the device allows; `None` takes the device's limit.
    pub send_depth: Option<u32>,
}

/// The queues of a domain, owned by one thread.
///
/// Dropping an endpoint stops all requests that were posted to it: the device touches none of their memory after that.
pub trait Endpoint: Send {
    /// Posts a batch under one doorbell, in order.
    ///
    /// A full queue is back-pressure: `accepted` is short, and there is no error. If a batch fails half way, either
    /// `accepted` is exact, or the endpoint reports every posted request as failed. It never guesses.
    ///
    /// # Safety
    /// Until an accepted request has completed or failed, its local span stays valid, and the import behind its `rkey`
    /// stays alive.
    unsafe fn post(&mut self, batch: &Batch) -> PostResult;

    /// Posts receive buffers, by the rules of [`Endpoint::post`].
    ///
    /// # Safety
    /// Until a receive has completed or failed, its buffer stays valid, and nobody else touches it.
    unsafe fn post_recv(&mut self, batch: &[ReceiveRequest]) -> PostResult;

    /// Appends the events since the last call, up to the spare room of `into`. A caller that polls again has acted on
    /// all events before.
    fn poll(&mut self, into: &mut Completions);

    /// Prepares to sleep: the endpoint wakes the caller at its next event, and once the caller may post a request that
    /// had no room before.
    fn arm(&mut self) -> Armed;

    /// The next time, by the fabric's clock, at which the endpoint has to be polled. A model of a device knows it. Never
    /// by default.
    fn due(&self) -> Time {
        Time::NEVER
    }

    /// Stops the requests posted within the abort scope of `peer`. Later polls report each of them as done or failed,
    /// and the device touches none of its memory after that.
    fn abort(&mut self, peer: PeerSlot);

    /// Takes a posted receive back: a later poll reports it as failed with `Cancelled`. Returns false if the device
    /// gives no receive back: it stays posted until a message takes it or the endpoint is dropped.
    fn cancel_recv(&mut self, id: u64) -> bool;

    /// The provider's own text for a status, which the engine prints behind the text of the kind. Empty if the kind says
    /// all.
    fn describe(&self, status: Status) -> String;
}

/// The result of posting a batch: its first `accepted` requests are outstanding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PostResult {
    /// The number of requests that the endpoint took, in order.
    pub accepted: usize,
    /// Why the endpoint refuses the request after them for good; `None` means back-pressure.
    pub error: Option<Status>,
}

/// The answer of [`Endpoint::arm`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Armed {
    /// There are events already, or the caller has to look at something else: poll again.
    Ready,
    /// The descriptor becomes readable with the next event. The endpoint owns it; `arm` and `poll` clear it.
    #[cfg(unix)]
    Fd(RawFd),
    /// As [`Armed::Fd`], but some events do not make the descriptor readable: sleep no longer than for
    /// [`Armed::Unsupported`].
    #[cfg(unix)]
    FdOrNap(RawFd),
    /// The endpoint cannot wake its caller: sleep for at most `Capabilities::idle_backoff`.
    Unsupported,
}
