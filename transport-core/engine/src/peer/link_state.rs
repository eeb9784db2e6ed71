//! The engine's state of the link to one peer.

use std::collections::VecDeque;
use std::sync::Arc;

use super::PeerState;
use crate::spi::PeerSlot;

/// The engine's state of the link to one peer.
pub(crate) struct LinkState {
    pub peer: Arc<PeerState>,
    /// The slot over which each rail sends. `None` if the rail is not paired, or once the slot is gone.
    pub send_slots: Vec<Option<PeerSlot>>,
    /// Slots that only receive, with their rails, until they are gone.
    pub receive_slots: Vec<(usize, PeerSlot)>,
    /// Whether the link has failed. The engine reuses its index once all slots are gone and no operation is left.
    pub has_failed: bool,
    /// Unacknowledged bytes of operations that take credit.
    pub posted_bytes: u64,
    /// Operations that wait for credit of the peer's grant. They are in no rail's queue.
    pub waiting_for_credit: VecDeque<u32>,
    /// Imms and messages that arrived since the peer was last granted more.
    pub arrivals: [u64; 2],
    /// The numbers of arrivals after which the engine grants the peer more.
    pub renew_after: [u64; 2],
}

/// What a peer's grant counts; indexes [`LinkState::arrivals`].
#[derive(Debug, Clone, Copy)]
pub(crate) enum ArrivalKind {
    Imm = 0,
    Message = 1,
}

impl LinkState {
    pub fn new(
        peer: Arc<PeerState>,
        send_slots: Vec<Option<PeerSlot>>,
        receive_slots: Vec<(usize, PeerSlot)>,
        renew_after: [u64; 2],
    ) -> Self {
        Self {
            peer,
            send_slots,
            receive_slots,
            has_failed: false,
            posted_bytes: 0,
            waiting_for_credit: VecDeque::new(),
            arrivals: [0; 2],
            renew_after,
        }
    }

    /// Counts an arrival. Returns true if the engine has to grant the peer more.
    #[inline]
    pub fn count_arrival(&mut self, kind: ArrivalKind) -> bool {
        let kind = kind as usize;
        self.arrivals[kind] += 1;
        self.arrivals[kind] >= self.renew_after[kind] && !self.has_failed
    }

    /// All slots that are not gone, with their rails.
    pub fn all_slots(&self) -> impl Iterator<Item = (usize, PeerSlot)> {
        let sending = self.send_slots.iter().enumerate().filter_map(|(rail, slot)| Some((rail, (*slot)?)));
        sending.chain(self.receive_slots.iter().copied())
    }

    /// Removes a slot that is gone.
    pub fn remove_slot(&mut self, rail: usize, slot: PeerSlot) {
        if self.send_slots[rail] == Some(slot) {
            self.send_slots[rail] = None;
        }
        self.receive_slots.retain(|known| *known != (rail, slot));
    }
}
