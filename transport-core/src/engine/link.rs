//! A peer's link as the engine sees it.

use std::sync::Arc;

use crate::peer::PeerInner;
use crate::spi::PeerSlot;

pub(super) struct LinkState {
    pub peer: Arc<PeerInner>,
    /// The slot over which each rail sends; `None` once gone, or never paired.
    pub slots: Vec<Option<PeerSlot>>,
    /// Slots that only receive, with their rails, until they are gone.
    pub receiving: Vec<(usize, PeerSlot)>,
    /// Set when the peer is gone; the link is reused after its last `PeerGone`.
    pub dead: bool,
}

impl LinkState {
    /// Every slot that is not gone, with its rail.
    pub fn all_slots(&self) -> impl Iterator<Item = (usize, PeerSlot)> {
        let sending = self.slots.iter().enumerate().filter_map(|(rail, slot)| Some((rail, (*slot)?)));
        sending.chain(self.receiving.iter().copied())
    }

    /// A slot is gone.
    pub fn forget(&mut self, rail: usize, slot: PeerSlot) {
        if self.slots[rail] == Some(slot) {
            self.slots[rail] = None;
        }
        self.receiving.retain(|known| *known != (rail, slot));
    }
}
