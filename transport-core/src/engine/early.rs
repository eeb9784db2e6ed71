//! Events of peers whose admission is still on its way to the engine.

use std::collections::HashMap;

use crate::spi::{Event, PeerSlot};

/// Events kept per slot. A peer is handed out only once both sides have admitted
/// it, so an honest one sends next to nothing before its `Link` is here.
const ROOM: usize = 4096;

#[derive(Debug, Default)]
pub(super) struct Early(HashMap<(usize, PeerSlot), Kept>);

#[derive(Debug, Default)]
pub(super) struct Kept {
    pub events: Vec<Event>,
    /// More came than there is room for, and was dropped.
    pub flooded: bool,
}

impl Early {
    /// Keeps an event of a slot; `false` if it was dropped.
    pub fn keep(&mut self, rail: usize, peer: PeerSlot, event: Event) -> bool {
        let kept = self.0.entry((rail, peer)).or_default();
        if kept.events.len() >= ROOM {
            kept.flooded = true;
            return false;
        }
        kept.events.push(event);
        true
    }

    /// What was kept of a slot, whether it was admitted now or never will be.
    pub fn take(&mut self, rail: usize, peer: PeerSlot) -> Kept {
        self.0.remove(&(rail, peer)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_bounded_and_spoils_its_own_slot_only() {
        let mut early = Early::default();
        let imm = |peer| Event::Imm { peer, imm: 1 };
        let kept = (0..ROOM + 5).filter(|_| early.keep(0, PeerSlot(1), imm(PeerSlot(1)))).count();
        assert_eq!(kept, ROOM);
        assert!(early.keep(0, PeerSlot(2), imm(PeerSlot(2))));
        assert!(early.take(0, PeerSlot(1)).flooded);
        let other = early.take(0, PeerSlot(2));
        assert_eq!((other.events.len(), other.flooded), (1, false));
        assert!(early.take(0, PeerSlot(1)).events.is_empty());
    }
}
