//! Failures that may mean a refusal or the peer's death: told once the peer has said something, or
//! is gone.
//!
//! A process that dies may lose its memory and its connections long before its control connection
//! ends: the system takes gigabytes back first, which takes seconds. No span is long enough to wait
//! for that, and none has to be: the peer is asked over the control connection. Who answers what was
//! asked after the failure was alive then; who does not is dead by the limit of silence.

use std::sync::Arc;

use super::{Control, Engine, EngineHandle};
use crate::spi::{PeerSlot, Status};
use crate::{ErrorKind, PeerId};

/// A request that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Doubt {
    rail: usize,
    id: u64,
    link: u32,
    /// What it means of a peer that lives.
    status: Status,
    /// The peer was asked after it had failed.
    is_asked: bool,
}

/// Requests that are over and whose failure is not told yet, by age.
#[derive(Debug, Default)]
pub(super) struct Doubts(Vec<Doubt>);

impl Doubts {
    /// Keeps a failure; whether the peer of that link is to be asked: it answers one question
    /// after the other.
    fn keep(&mut self, rail: usize, id: u64, link: u32, status: Status) -> bool {
        let is_asked = self.0.iter().all(|doubt| doubt.link != link);
        self.0.push(Doubt { rail, id, link, status, is_asked });
        is_asked
    }

    /// The peer of a link has answered: what it was asked about, and whether it is to be asked again.
    fn answered(&mut self, link: u32) -> (Vec<Doubt>, bool) {
        let settled = self.0.extract_if(.., |doubt| doubt.link == link && doubt.is_asked).collect();
        let mut is_open = false;
        for doubt in self.0.iter_mut().filter(|doubt| doubt.link == link) {
            (doubt.is_asked, is_open) = (true, true);
        }
        (settled, is_open)
    }

    /// The peer of a link is gone.
    fn of_gone(&mut self, link: u32) -> Vec<Doubt> {
        self.0.extract_if(.., |doubt| doubt.link == link).collect()
    }

    /// A rail is lost, with all that was posted on it.
    pub fn forget(&mut self, rail: usize) {
        self.0.retain(|doubt| doubt.rail != rail);
    }
}

/// A question to a peer whether it lives. Whatever becomes of it, the engine is told when it is over:
/// after the peer's end, if that is why.
pub(crate) struct Question {
    engine: Arc<EngineHandle>,
    link: u32,
    peer: PeerId,
}

impl Drop for Question {
    fn drop(&mut self) {
        self.engine.control(Control::Answered { link: self.link, peer: self.peer });
    }
}

impl Engine {
    /// A request failed, for which the peer's death may be the reason.
    #[cold]
    pub(super) fn doubts(&mut self, rail: usize, id: u64, peer: PeerSlot, status: Status) {
        let link = self.slot_links[rail].get(peer.0 as usize).copied().flatten();
        let lives = |link: &u32| self.links[*link as usize].as_ref().is_some_and(|link| !link.dead);
        match link.filter(lives) {
            Some(link) if self.doubts.keep(rail, id, link, status) => self.ask(link),
            Some(_) => {}
            None => self.acknowledge(rail, id, 1, Some(Status { kind: ErrorKind::PeerDied, ..status })),
        }
    }

    fn ask(&self, link: u32) {
        let Some(state) = &self.links[link as usize] else { return };
        let question = Question { engine: Arc::clone(&self.handle), link, peer: state.peer.id };
        state.peer.session.probe(Box::new(question));
    }

    /// A question to the peer of a link is over.
    pub(super) fn answered_by(&mut self, link: u32, peer: PeerId) {
        let Some(state) = self.links.get(link as usize).and_then(Option::as_ref) else { return };
        // Of one that is gone meanwhile, its end is on the way here, and settles all.
        if self.link_of.get(&peer) != Some(&link) || state.peer.death().is_some() {
            return;
        }
        let (settled, is_open) = self.doubts.answered(link);
        for doubt in settled {
            self.acknowledge(doubt.rail, doubt.id, 1, Some(doubt.status));
        }
        if is_open {
            self.ask(link);
        }
    }

    /// The peer of a link is gone: that is why.
    pub(super) fn settle_doubts(&mut self, link: u32) {
        for Doubt { rail, id, status, .. } in self.doubts.of_gone(link) {
            self.acknowledge(rail, id, 1, Some(Status { kind: ErrorKind::PeerDied, ..status }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_settles_what_was_asked_before_it() {
        let refused = Status { kind: ErrorKind::RemoteAccess, code: 125 };
        let mut doubts = Doubts::default();
        assert!(doubts.keep(0, 1, 7, refused) && doubts.keep(0, 2, 8, refused));
        assert!(!doubts.keep(1, 3, 7, refused));
        let ids = |(settled, is_open): (Vec<Doubt>, bool)| {
            (settled.iter().map(|doubt| (doubt.rail, doubt.id)).collect::<Vec<_>>(), is_open)
        };
        // The third failed when the question was under way: it is asked about next.
        assert_eq!(ids(doubts.answered(7)), (vec![(0, 1)], true));
        assert_eq!(ids(doubts.answered(7)), (vec![(1, 3)], false));
        assert_eq!(ids((doubts.of_gone(8), false)), (vec![(0, 2)], false));
        assert!(doubts.keep(0, 4, 7, refused) && doubts.0.len() == 1);
        doubts.forget(0);
        assert_eq!(ids(doubts.answered(7)), (vec![], false));
    }
}
