//! Failures that may mean a refusal or a death, until it is known which.

use std::collections::VecDeque;
use std::time::Duration;

use super::{Event, PeerSlot, Status};
use crate::{ErrorKind, Time};

/// How long the control connection has to say that a peer is gone: it sees the end of a
/// process at once, and a host that is silent says nothing here either.
const HOLD: Duration = Duration::from_millis(250);

#[derive(Debug)]
struct Held {
    id: u64,
    peer: PeerSlot,
    otherwise: Status,
    until: Time,
}

/// Requests that are over and whose failure is not told yet, by age: a connection that ends says
/// the same whether the peer has died or refused something.
#[derive(Debug, Default)]
pub struct Verdicts(VecDeque<Held>);

impl Verdicts {
    /// Keeps the failure of a request at `now`: of who stays it is told as `otherwise`.
    pub fn hold(&mut self, id: u64, peer: PeerSlot, otherwise: Status, now: Time) {
        self.0.push_back(Held { id, peer, otherwise, until: now.after(HOLD) });
    }

    /// Files what is known by `now`: who `has_left` is dead.
    #[inline]
    pub fn tell(
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
            let Held { id, otherwise, .. } = *held;
            let status = match (has_left(held.peer), held.until <= now) {
                (true, _) => Status { kind: ErrorKind::PeerDied, ..otherwise },
                (false, true) => otherwise,
                (false, false) => return true,
            };
            into.push_back(Event::Failed { id, status });
            false
        });
    }

    /// When the oldest is told at the latest.
    pub fn due(&self) -> Time {
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
        let refused = Status { kind: ErrorKind::RemoteAccess, code: 125 };
        verdicts.hold(1, PeerSlot(0), refused, begun);
        verdicts.hold(2, PeerSlot(1), refused, begun);
        assert_eq!(verdicts.due(), begun.after(HOLD));
        verdicts.tell(|| begun, |_| false, &mut told);
        assert!(told.is_empty());
        verdicts.tell(|| begun, |peer| peer == PeerSlot(1), &mut told);
        let died = Event::Failed { id: 2, status: Status { kind: ErrorKind::PeerDied, code: 125 } };
        assert_eq!(told, [died]);
        verdicts.tell(|| begun.after(HOLD), |_| false, &mut told);
        assert_eq!(told, [died, Event::Failed { id: 1, status: refused }]);
        assert_eq!(verdicts.due(), Time::NEVER);
    }
}
