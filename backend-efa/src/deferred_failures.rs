//! Failures of requests whose connection has just ended. The endpoint reports them late, once the provider has had time
//! to connect again.

use std::collections::VecDeque;
use std::time::Duration;

use multirail_spi::{Event, PeerSlot, Time};

/// How long a failure is kept. `tcp` of 1.17 connects again after 5 to 20 ms, later on a busy machine. A request that
/// is posted earlier fails as well.
const DEFERRAL: Duration = Duration::from_millis(250);

#[derive(Debug)]
struct Deferred {
    until: Time,
    peer: PeerSlot,
    event: Event,
}

/// The kept failures, oldest first. The engine may post the next request as soon as it knows of a failure, so it learns
/// of the failure late.
#[derive(Debug, Default)]
pub(crate) struct DeferredFailures(VecDeque<Deferred>);

impl DeferredFailures {
    /// Keeps `event`: a request to `peer` failed at `now`.
    pub(crate) fn push(&mut self, now: Time, peer: PeerSlot, event: Event) {
        self.0.push_back(Deferred { until: now.after(DEFERRAL), peer, event });
    }

    /// Reports the failures that were kept long enough, and those of peers that have left.
    #[inline]
    pub(crate) fn report_due(
        &mut self,
        now: impl FnOnce() -> Time,
        has_left: impl Fn(PeerSlot) -> bool,
        into: &mut VecDeque<Event>,
    ) {
        if self.0.is_empty() {
            return;
        }
        let now = now();
        self.0.retain(|deferred| {
            let stays = deferred.until > now && !has_left(deferred.peer);
            if !stays {
                into.push_back(deferred.event);
            }
            stays
        });
    }

    /// When the oldest failure is due.
    pub(crate) fn due(&self) -> Time {
        self.0.front().map_or(Time::NEVER, |deferred| deferred.until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_reported_when_due_or_when_the_peer_has_left() {
        let (mut deferred, mut reported, start) = (DeferredFailures::default(), VecDeque::new(), Time::ZERO);
        assert_eq!(deferred.due(), Time::NEVER);
        let events = [Event::PeerGone { peer: PeerSlot(1) }, Event::PeerGone { peer: PeerSlot(2) }];
        deferred.push(start, PeerSlot(1), events[0]);
        deferred.push(start, PeerSlot(2), events[1]);
        deferred.report_due(|| start, |_| false, &mut reported);
        assert!(reported.is_empty());
        deferred.report_due(|| start, |peer| peer == PeerSlot(2), &mut reported);
        assert_eq!(
            (reported.drain(..).collect::<Vec<_>>(), deferred.due()),
            (vec![events[1]], start.after(DEFERRAL))
        );
        deferred.report_due(|| start.after(DEFERRAL), |_| false, &mut reported);
        assert_eq!((reported.drain(..).collect::<Vec<_>>(), deferred.due()), (vec![events[0]], Time::NEVER));
    }
}
