//! The endpoint of a failing device.
#![allow(unsafe_code)]

use std::sync::Arc;

use multirail::spi::{
    Armed, Batch, Completions, Endpoint, Event, PeerSlot, PostResult, ReceiveRequest, Status, TakeMessage,
};
use multirail::{ErrorKind, Time};

use super::RailFailure;

/// The status of a request to the lost device.
const LOST: Status = Status { kind: ErrorKind::DeviceLost, code: 0 };

/// An endpoint that is closed when its time has come, at the first poll with outstanding requests. Then its device is
/// lost.
pub(super) struct FailingEndpoint {
    /// `None` once the device is lost.
    inner: Option<Box<dyn Endpoint>>,
    /// The requests that were posted and have not ended.
    outstanding: u64,
    failure: Arc<RailFailure>,
    /// True until the loss is reported.
    is_unreported: bool,
}

impl FailingEndpoint {
    pub(super) fn new(inner: Box<dyn Endpoint>, failure: Arc<RailFailure>) -> Self {
        Self { inner: Some(inner), outstanding: 0, failure, is_unreported: true }
    }

    /// Closes the inner endpoint if its time has come.
    fn lose_if_due(&mut self) {
        if self.outstanding > 0 && self.inner.is_some() && self.failure.is_due() {
            // From here on, the device touches no memory of this side.
            self.inner = None;
            self.failure.lose();
        }
    }

    /// Counts requests that have ended.
    fn ended(&mut self, requests: u64) {
        self.outstanding = self.outstanding.saturating_sub(requests);
    }

    /// Reports the loss, and then the last event of each disconnected peer.
    fn report_loss(&mut self, into: &mut Completions) {
        if self.is_unreported {
            self.is_unreported = into.push(Event::DeviceLost { status: LOST }).is_err();
            return;
        }
        let mut leaving = self.failure.leaving();
        while let Some(peer) = leaving.last().copied()
            && into.push(Event::PeerGone { peer }).is_ok()
        {
            leaving.pop();
        }
    }
}

impl Endpoint for FailingEndpoint {
    unsafe fn post(&mut self, batch: &Batch) -> PostResult {
        let Some(inner) = &mut self.inner else { return PostResult { accepted: 0, error: Some(LOST) } };
        // SAFETY: handed on to the caller.
        let posted = unsafe { inner.post(batch) };
        self.outstanding += posted.accepted as u64;
        posted
    }

    unsafe fn post_recv(&mut self, batch: &[ReceiveRequest]) -> PostResult {
        match &mut self.inner {
            // SAFETY: handed on to the caller.
            Some(inner) => unsafe { inner.post_recv(batch) },
            None => PostResult { accepted: 0, error: Some(LOST) },
        }
    }

    fn poll(&mut self, into: &mut Completions) {
        self.lose_if_due();
        let Some(inner) = &mut self.inner else { return self.report_loss(into) };
        let before = into.as_slice().len();
        inner.poll(into);
        for event in &into.as_slice()[before..] {
            match event {
                Event::Done { count, .. } => self.ended(u64::from(*count)),
                Event::Failed { .. } | Event::FailedUnconfirmed { .. } => self.ended(1),
                Event::PeerGone { peer } => self.failure.leaving().retain(|slot| slot != peer),
                _ => {}
            }
        }
    }

    fn arm(&mut self) -> Armed {
        match &mut self.inner {
            Some(inner) => inner.arm(),
            None if self.is_unreported => Armed::Ready,
            // A disconnect wakes nobody.
            None => Armed::Unsupported,
        }
    }

    fn due(&self) -> Time {
        self.inner.as_ref().map_or(Time::NEVER, |inner| inner.due())
    }

    fn abort(&mut self, peer: PeerSlot) {
        if let Some(inner) = &mut self.inner {
            inner.abort(peer);
        }
    }

    fn is_lost(&self) -> bool {
        self.inner.as_ref().is_none_or(|inner| inner.is_lost())
    }

    fn cancel_recv(&mut self, id: u64) -> bool {
        self.inner.as_mut().is_some_and(|inner| inner.cancel_recv(id))
    }

    fn take_unclaimed(&mut self, peer: Option<PeerSlot>, take: &mut TakeMessage<'_>) {
        // A device that carries messages is never made to fail, so none wait at a lost one.
        if let Some(inner) = &mut self.inner {
            inner.take_unclaimed(peer, take);
        }
    }

    fn describe(&self, status: Status) -> String {
        match &self.inner {
            Some(inner) => inner.describe(status),
            None => "--fail-rail has closed its endpoint".to_owned(),
        }
    }
}
