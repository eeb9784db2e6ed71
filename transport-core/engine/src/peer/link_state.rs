//! The engine's state of the link to one peer.

use std::collections::VecDeque;
use std::sync::Arc;

use super::PeerState;
use crate::rail::PostedPiece;
use crate::spi::{FenceReport, PeerSlot};
use crate::{Error, Result};

/// The engine's state of the link to one peer.
pub(crate) struct LinkState {
    pub peer: Arc<PeerState>,
    /// The slot over which each rail sends. `None` if the rail is not paired, once its path is broken, and once
    /// the slot is gone.
    pub send_slots: Vec<Option<PeerSlot>>,
    /// The slots over which only the peer sends, because it has more rails than this side or because the path is
    /// broken. Each with its rail, until it is gone.
    pub receive_slots: Vec<(usize, PeerSlot)>,
    /// Whether the link has failed. The engine reuses its index once all slots are gone and no operation is left.
    pub has_failed: bool,
    /// Unacknowledged bytes of operations that take credit.
    pub posted_bytes: u64,
    /// Operations that wait for credit of the peer's grant. They are in no rail's queue.
    pub waiting_for_credit: VecDeque<u32>,
    /// The rails over which nothing is sent to the peer any more, since this side's or the peer's device is lost.
    broken_paths: Vec<BrokenPath>,
    /// Per rail: the imms that were posted over `send_slots`. `None` once one of them has failed: it may have arrived.
    sent_imms: Vec<Option<u64>>,
    /// Imms and messages that arrived since the peer was last granted more.
    pub arrivals: [u64; 2],
    /// The numbers of arrivals after which the engine grants the peer more.
    pub renew_after: [u64; 2],
}

/// A rail over which nothing is sent to a peer any more.
pub(crate) struct BrokenPath {
    pub rail: usize,
    pub slot: PeerSlot,
    pub error: Error,
    /// The requests that were posted over it, that this side's device has ended, and that may have arrived.
    pub lost: Vec<PostedPiece>,
    /// The peer's answer. If it is `Ok`, nothing arrives any more; if it is an error, bytes may.
    pub fenced: Option<Result<FenceReport>>,
}

/// The link that a slot belongs to, and what has arrived over the slot.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SlotLink {
    pub link: u32,
    /// The imms that have arrived over the slot.
    pub imms: u64,
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
            broken_paths: Vec::new(),
            sent_imms: vec![Some(0); send_slots.len()],
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

    /// Counts posted imms.
    pub fn count_sent_imms(&mut self, rail: usize, more: u32) {
        if let Some(sent) = &mut self.sent_imms[rail] {
            *sent += u64::from(more);
        }
    }

    /// Notes that an imm has failed: nobody knows any more how many have arrived.
    #[cold]
    pub fn note_failed_imm(&mut self, rail: usize) {
        self.sent_imms[rail] = None;
    }

    /// The imms that were posted over a rail. `None` if one of them has failed.
    pub fn sent_imms(&self, rail: usize) -> Option<u64> {
        self.sent_imms[rail]
    }

    /// Sends nothing over a rail any more; what arrives there is still taken. Returns the slot, or `None` if nothing
    /// was sent there before.
    pub fn break_path(&mut self, rail: usize, error: &Error) -> Option<PeerSlot> {
        let slot = self.send_slots[rail].take()?;
        self.receive_slots.push((rail, slot));
        let error = error.clone();
        self.broken_paths.push(BrokenPath { rail, slot, error, lost: Vec::new(), fenced: None });
        Some(slot)
    }

    /// The slots of a rail that have only ever received, because the peer has more rails than this side.
    pub fn slots_that_only_receive(&self, rail: usize) -> impl Iterator<Item = PeerSlot> + '_ {
        let is_broken =
            move |slot: PeerSlot| self.broken_paths.iter().any(|path| path.slot == slot && path.rail == rail);
        let of_rail = self.receive_slots.iter().filter(move |(of, _)| *of == rail).map(|(_, slot)| *slot);
        of_rail.filter(move |slot| !is_broken(*slot))
    }

    pub fn broken_path(&mut self, rail: usize) -> Option<&mut BrokenPath> {
        self.broken_paths.iter_mut().find(|path| path.rail == rail)
    }

    pub fn take_broken_paths(&mut self) -> Vec<BrokenPath> {
        std::mem::take(&mut self.broken_paths)
    }

    pub fn broken_paths(&self) -> &[BrokenPath] {
        &self.broken_paths
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
