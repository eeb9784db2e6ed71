//! Failures of requests over a connection that has just ended, until the provider has forgotten it.

use std::collections::VecDeque;
use std::time::Duration;

use multirail_spi::{Event, PeerSlot, Time};

/// How long that may take: `tcp` of 1.17 connects anew after 5 to 20 ms, and what is posted before
/// fails with the connection as well, on a busy machine later.
const SETTLES: Duration = Duration::from_millis(250);

#[derive(Debug)]
struct Held {
    until: Time,
    peer: PeerSlot,
    event: Event,
}

/// What is told a little later, by age: who learns that a request was refused may post the next one
/// at once.
#[derive(Debug, Default)]
pub(crate) struct Settling(VecDeque<Held>);

impl Settling {
    /// Keeps what happened at `now` to a request for `peer`.
    pub(crate) fn hold(&mut self, now: Time, peer: PeerSlot, event: Event) {
        self.0.push_back(Held { until: now.after(SETTLES), peer, event });
    }

    /// Files what has settled by `now`, and what is for somebody who has left.
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

    /// When the oldest is told at the latest.
    pub(crate) fn due(&self) -> Time {
        self.0.front().map_or(Time::NEVER, |held| held.until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_told_in_time_or_when_the_peer_has_left() {
        let (mut settling, mut told, begun) = (Settling::default(), VecDeque::new(), Time::ZERO);
        assert_eq!(settling.due(), Time::NEVER);
        let moved = [Event::PeerGone { peer: PeerSlot(1) }, Event::PeerGone { peer: PeerSlot(2) }];
        settling.hold(begun, PeerSlot(1), moved[0]);
        settling.hold(begun, PeerSlot(2), moved[1]);
        settling.tell(|| begun, |_| false, &mut told);
        assert!(told.is_empty());
        settling.tell(|| begun, |peer| peer == PeerSlot(2), &mut told);
        assert_eq!(
            (told.drain(..).collect::<Vec<_>>(), settling.due()),
            (vec![moved[1]], begun.after(SETTLES))
        );
        settling.tell(|| begun.after(SETTLES), |_| false, &mut told);
        assert_eq!((told.drain(..).collect::<Vec<_>>(), settling.due()), (vec![moved[0]], Time::NEVER));
    }
}
