//! Failures of requests over a connection that has just ended. They are reported once the provider connects anew.

use std::collections::VecDeque;
use std::time::Duration;

use multirail_spi::{Event, PeerSlot, Time};

/// How long a failure is kept. `tcp` of 1.17 connects anew after 5 to 20 ms, later on a busy machine, and a request posted
/// before that fails as well.
const DEFERRAL: Duration = Duration::from_millis(250);

#[derive(Debug)]
struct Deferred {
    until: Time,
    peer: PeerSlot,
    event: Event,
}

/// The kept failures, by age. A caller that learns of a failure may post the next request at once, so it learns it late.
#[derive(Debug, Default)]
pub(crate) struct DeferredFailures(VecDeque<Deferred>);

impl DeferredFailures {
    /// Keeps `event`, a failure at `now` of a request to `peer`.
    pub(crate) fn hold(&mut self, now: Time, peer: PeerSlot, event: Event) {
        self.0.push_back(Deferred { until: now.after(DEFERRAL), peer, event });
    }

    /// Reports the failures that were kept long enough, and those of peers that have left.
    #[inline]
    pub(crate) fn tell(
        &mut self,
        now: impl FnOnce() -> Time,
        has_left: impl Fn(PeerSlot) -> bool,
        into: &mut VecDeque<Event>,
    ) {
        if self.0.is_empty() {
            return;
        }
        let now = now();
        self.0.retain(|held| {
            let stays = held.until > now && !has_left(held.peer);
            if !stays {
                into.push_back(held.event);
            }
            stays
        });
    }

    /// When the oldest failure is due.
    pub(crate) fn due(&self) -> Time {
        self.0.front().map_or(Time::NEVER, |held| held.until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_told_in_time_or_when_the_peer_has_left() {
        let (mut deferred, mut told, begun) = (DeferredFailures::default(), VecDeque::new(), Time::ZERO);
        assert_eq!(deferred.due(), Time::NEVER);
        let moved = [Event::PeerGone { peer: PeerSlot(1) }, Event::PeerGone { peer: PeerSlot(2) }];
        deferred.hold(begun, PeerSlot(1), moved[0]);
        deferred.hold(begun, PeerSlot(2), moved[1]);
        deferred.tell(|| begun, |_| false, &mut told);
        assert!(told.is_empty());
        deferred.tell(|| begun, |peer| peer == PeerSlot(2), &mut told);
        assert_eq!(
            (told.drain(..).collect::<Vec<_>>(), deferred.due()),
            (vec![moved[1]], begun.after(DEFERRAL))
        );
        deferred.tell(|| begun.after(DEFERRAL), |_| false, &mut told);
        assert_eq!((told.drain(..).collect::<Vec<_>>(), deferred.due()), (vec![moved[0]], Time::NEVER));
    }
}
