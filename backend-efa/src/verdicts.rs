//! Failures that may mean a refusal or a death, until it is known which.

use std::collections::VecDeque;
use std::time::Duration;

use transport_core::spi::{Event, PeerSlot, Status};
use transport_core::{ErrorKind, Time};

use crate::status::is_unreachable;

/// How long the control connection has to say that a peer is gone: it sees the end of a
/// process at once, and a host that is silent says nothing here either.
const HOLD: Duration = Duration::from_millis(250);

struct Held {
    id: u64,
    peer: PeerSlot,
    code: i32,
    until: Time,
}

/// Requests that are over and whose failure is not told yet, by age.
#[derive(Default)]
pub(crate) struct Verdicts(VecDeque<Held>);

impl Verdicts {
    pub(crate) fn hold(&mut self, id: u64, peer: PeerSlot, code: i32, now: Time) {
        self.0.push_back(Held { id, peer, code, until: now.after(HOLD) });
    }

    /// Files what is known by `now`: who `has_left` is dead, who has not by then
    /// refused, or is not where it said.
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
            let kind = match (has_left(held.peer), held.until <= now) {
                (true, _) => ErrorKind::PeerDied,
                (false, true) if is_unreachable(held.code) => ErrorKind::Unreachable,
                (false, true) => ErrorKind::RemoteAccess,
                (false, false) => return true,
            };
            into.push_back(Event::Failed { id: held.id, status: Status { kind, code: held.code } });
            false
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
    fn the_living_refused_and_the_gone_died() {
        let (mut verdicts, mut told) = (Verdicts::default(), VecDeque::new());
        assert_eq!(verdicts.due(), Time::NEVER);
        let begun = Time::ZERO;
        verdicts.hold(1, PeerSlot(0), 125, begun);
        verdicts.hold(2, PeerSlot(1), 107, begun);
        assert_eq!(verdicts.due(), begun.after(HOLD));
        verdicts.tell(|| begun, |_| false, &mut told);
        assert!(told.is_empty());
        verdicts.tell(|| begun, |peer| peer == PeerSlot(1), &mut told);
        let died = Event::Failed { id: 2, status: Status { kind: ErrorKind::PeerDied, code: 107 } };
        assert_eq!(told, [died]);
        verdicts.tell(|| begun.after(HOLD), |_| false, &mut told);
        let refused = Event::Failed { id: 1, status: Status { kind: ErrorKind::RemoteAccess, code: 125 } };
        assert_eq!(told, [died, refused]);
        told.clear();
        verdicts.hold(3, PeerSlot(0), 111, begun);
        verdicts.tell(|| begun.after(HOLD), |_| false, &mut told);
        let nobody = Event::Failed { id: 3, status: Status { kind: ErrorKind::Unreachable, code: 111 } };
        assert_eq!(told, [nobody]);
    }
}
