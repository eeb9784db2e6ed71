//! Posting and polling. One thread at a time uses an endpoint.

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

/// Takes a message: its sender, its bytes and its imm.
pub type TakeMessage<'a> = dyn FnMut(PeerSlot, &[u8], Option<u32>) + 'a;

/// The queues of a domain. One thread at a time uses them.
///
/// After the drop of an endpoint, the device touches no memory of the requests that were posted to it. If the device's
/// library has not closed the endpoint by then, the backend keeps that memory alive until it has
/// ([`Domain::unclosed_endpoints`](crate::Domain::unclosed_endpoints)).
pub trait Endpoint: Send {
    /// Posts a batch under one doorbell, in order.
    ///
    /// If a queue is full, the endpoint accepts fewer requests and returns no error: this is back-pressure.
    /// [`PostResult::accepted`] is exact even if a batch fails half way: the engine waits for the end of each accepted
    /// request, and may post the others again.
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

    /// Appends the events since the last call, up to the spare room of `into`. The caller must act on all events before
    /// it polls again.
    fn poll(&mut self, into: &mut Completions);

    /// Prepares to sleep. The endpoint then wakes the caller at its next event, and also as soon as there is room for a
    /// request that it did not accept before.
    ///
    /// While the caller sleeps, another thread may [`post`](Self::post) and then wake it. So only `poll`, `arm` and the
    /// drop of the endpoint close the returned descriptor.
    fn arm(&mut self) -> Armed;

    /// The next time, by the fabric's clock, at which the endpoint has to be polled even without an event. The default
    /// is [`Time::NEVER`]. Simulated devices use it, for example.
    fn due(&self) -> Time {
        Time::NEVER
    }

    /// Stops the posted requests to `peer`. With [`AbortScope::Endpoint`](crate::AbortScope::Endpoint), the endpoint
    /// may have to stop requests to other peers, too. Later polls report each stopped request as done or failed, and
    /// the device touches none of its memory after that.
    fn abort(&mut self, peer: PeerSlot);

    /// Whether the device is lost, that is, whether [`Event::DeviceLost`](crate::Event::DeviceLost) was or will be
    /// reported. If it is, the engine ignores the failures with
    /// [`ErrorKind::DeviceLost`](crate::ErrorKind::DeviceLost), and handles all these requests when it gets that event.
    /// If it is not, such a failure says nothing about other requests: for example, the GPU of the request's memory is
    /// lost.
    fn is_lost(&self) -> bool {
        false
    }

    /// The peer has fenced its end of a slot ([`Connector::fence`](crate::Connector::fence)): nothing that was posted
    /// there can touch the peer's memory any more. An endpoint that waits for answers of the peer's endpoint ends the
    /// requests that only such an answer would end. Does nothing by default.
    fn peer_fenced(&mut self, peer: PeerSlot) {
        let _ = peer;
    }

    /// Cancels a posted receive: a later poll reports it as failed with `Cancelled`. Returns false if the device cannot
    /// cancel receives: the receive stays posted until a message consumes it or the endpoint is dropped.
    fn cancel_recv(&mut self, id: u64) -> bool;

    /// Hands over messages that have arrived and that wait for a receive in the backend's own memory: their senders may
    /// know already that they have arrived. Calls `take` for each, in order of arrival: with the sender, the bytes and
    /// the imm. `peer` is the sender that is asked for; `None` means all.
    ///
    /// The engine calls this when the device is lost, and when a peer is fenced. Receives on other rails take the
    /// messages. The default is for backends that keep none.
    fn take_unclaimed(&mut self, _peer: Option<PeerSlot>, _take: &mut TakeMessage<'_>) {}

    /// The provider's own text for a status, which the engine prints behind the text of the kind. Empty if the kind
    /// says all.
    fn describe(&self, status: Status) -> String;
}

/// The result of posting a batch: its first `accepted` requests are outstanding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PostResult {
    /// The number of requests that the endpoint took, in order.
    pub accepted: usize,
    /// Why the next request fails; posting it again would not help. `None` means back-pressure.
    pub error: Option<Status>,
}

/// The answer of [`Endpoint::arm`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Armed {
    /// The caller must not sleep: there are events already, or the endpoint has work that only the next `poll` or
    /// `post` does.
    Ready,
    /// The descriptor becomes readable with the next event. The endpoint owns it; `arm` and `poll` clear it.
    #[cfg(unix)]
    Fd(RawFd),
    /// As [`Armed::Fd`], but some events do not make the descriptor readable: sleep at most as long as for
    /// [`Armed::Unsupported`].
    #[cfg(unix)]
    FdOrTimeout(RawFd),
    /// The endpoint cannot wake its caller, which sleeps no longer than by the rule of `Capabilities::idle_backoff`.
    Unsupported,
}
