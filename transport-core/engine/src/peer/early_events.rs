//! Events of peers that the engine does not know yet, because their `Link` command is still in its queue.

use std::collections::HashMap;

use crate::spi::{Event, PeerSlot};

/// The most events kept per slot. The fabric hands a peer to the user only after both sides have admitted it, so a
/// correct peer sends hardly anything before its `Link` command is here.
const MAX_EVENTS: usize = 4096;

/// Early events by rail and slot.
#[derive(Debug, Default)]
pub(crate) struct EarlyEvents(HashMap<(usize, PeerSlot), SlotEvents>);

/// The early events of one slot.
#[derive(Debug, Default)]
pub(crate) struct SlotEvents {
    pub events: Vec<Event>,
    /// Whether the slot had more than [`MAX_EVENTS`] events; the later ones were dropped.
    pub overflowed: bool,
}

impl EarlyEvents {
    /// Keeps an event of a slot. Returns false if it was dropped.
    pub fn keep(&mut self, rail: usize, peer: PeerSlot, event: Event) -> bool {
        let slot = self.0.entry((rail, peer)).or_default();
        if slot.events.len() >= MAX_EVENTS {
            slot.overflowed = true;
            return false;
        }
        slot.events.push(event);
        true
    }

    /// Removes and returns the events of a slot, because its peer was admitted or never will be.
    pub fn take(&mut self, rail: usize, peer: PeerSlot) -> SlotEvents {
        self.0.remove(&(rail, peer)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_is_per_slot() {
        let mut early = EarlyEvents::default();
        let imm = |peer| Event::Imm { peer, imm: 1 };
        let kept = (0..MAX_EVENTS + 5).filter(|_| early.keep(0, PeerSlot(1), imm(PeerSlot(1)))).count();
        assert_eq!(kept, MAX_EVENTS);
        assert!(early.keep(0, PeerSlot(2), imm(PeerSlot(2))));
        assert!(early.take(0, PeerSlot(1)).overflowed);
        let other = early.take(0, PeerSlot(2));
        assert_eq!((other.events.len(), other.overflowed), (1, false));
        assert!(early.take(0, PeerSlot(1)).events.is_empty());
    }
}
