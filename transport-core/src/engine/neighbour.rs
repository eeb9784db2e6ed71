//! A peer's link as the engine sees it.

use std::collections::VecDeque;
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
    /// Bytes of metered operations that are posted and not acknowledged.
    pub posted: u64,
    /// Operations that wait for the peer's grant, out of every rotation.
    pub parked: VecDeque<u32>,
    /// Imms and messages that came since the peer was last granted some.
    pub arrived: [u64; 2],
    /// So many of them, and it is granted more.
    pub steps: [u64; 2],
}

impl LinkState {
    pub fn new(
        peer: Arc<PeerInner>,
        slots: Vec<Option<PeerSlot>>,
        receiving: Vec<(usize, PeerSlot)>,
        steps: [u64; 2],
    ) -> Self {
        Self {
            peer,
            slots,
            receiving,
            dead: false,
            posted: 0,
            parked: VecDeque::new(),
            arrived: [0; 2],
            steps,
        }
    }

    /// One more of `kind` (0 imms, 1 messages) came; whether more is to be granted.
    #[inline]
    pub fn arrives(&mut self, kind: usize) -> bool {
        self.arrived[kind] += 1;
        self.arrived[kind] >= self.steps[kind] && !self.dead
    }

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
