//! The peer slots of a domain. The control side reserves, connects and ends them, and the endpoint reads them.

use std::sync::Arc;

use multirail_spi::{PeerSlot, SlotTable, claim_slot};

use crate::inbound::Inbound;
use crate::offer::OfferToken;
use crate::outbound::Outbound;

/// One peer, from `prepare` to `PeerGone`.
#[derive(Clone)]
pub(crate) struct PeerEntry {
    pub(crate) inbound: Arc<Inbound>,
    /// Set by `complete`.
    pub(crate) outbound: Option<Arc<Outbound>>,
    /// This side has disconnected the peer. The endpoint has not reported `PeerGone` yet.
    pub(crate) leaving: bool,
}

impl PeerEntry {
    /// Closes both halves. Wakes a peer that may wait for staged bytes.
    pub(crate) fn close(&self) {
        self.inbound.close();
        if let Some(outbound) = &self.outbound {
            if self.inbound.staging_buffer().is_some() {
                outbound.wake();
            }
            outbound.close();
        }
    }
}

/// All peers. Changes are rare: the endpoint takes the lock only after a change.
#[derive(Default)]
pub(crate) struct PeerTable(SlotTable<Vec<Option<PeerEntry>>>);

impl PeerTable {
    /// Puts a peer into the lowest free slot.
    pub(crate) fn insert(&self, inbound: Arc<Inbound>) -> PeerSlot {
        let mut slots = self.0.lock();
        let at = claim_slot(&mut slots, Option::is_none);
        slots[at] = Some(PeerEntry { inbound, outbound: None, leaving: false });
        self.0.mark_changed();
        PeerSlot(at as u32)
    }

    /// The peer in `slot`.
    pub(crate) fn find(&self, slot: PeerSlot) -> Option<PeerEntry> {
        self.0.lock().get(slot.0 as usize)?.clone()
    }

    /// The connection to which `token` admits an initiator.
    pub(crate) fn by_token(&self, token: &OfferToken) -> Option<Arc<Inbound>> {
        let slots = self.0.lock();
        let mut live = slots.iter().flatten().filter(|peer| !peer.leaving);
        live.find(|peer| same(&peer.inbound.token, token)).map(|peer| peer.inbound.clone())
    }

    /// Changes the peer in `slot`. Returns the result of `change`, or `None` if the slot is free.
    pub(crate) fn update<R>(&self, slot: PeerSlot, change: impl FnOnce(&mut PeerEntry) -> R) -> Option<R> {
        let result = self.0.lock().get_mut(slot.0 as usize)?.as_mut().map(change);
        self.0.mark_changed();
        result
    }

    /// Frees a slot for reuse, if `inbound` is still in it.
    pub(crate) fn remove(&self, slot: PeerSlot, inbound: &Arc<Inbound>) {
        if let Some(peer) = self.0.lock().get_mut(slot.0 as usize) {
            peer.take_if(|peer| Arc::ptr_eq(&peer.inbound, inbound));
        }
        self.0.mark_changed();
    }

    /// All peers, by slot.
    pub(crate) fn all(&self) -> Vec<(PeerSlot, PeerEntry)> {
        let slots = self.0.lock();
        let numbered = slots.iter().enumerate();
        numbered.filter_map(|(n, peer)| Some((PeerSlot(n as u32), peer.clone()?))).collect()
    }

    /// The number of changes so far.
    #[inline]
    pub(crate) fn changes(&self) -> u64 {
        self.0.changes()
    }
}

/// Returns true if both tokens are equal. The time of the comparison does not depend on where they differ.
fn same(a: &OfferToken, b: &OfferToken) -> bool {
    let differing = a.iter().zip(b).fold(0, |sum, (a, b)| std::hint::black_box(sum | (a ^ b)));
    differing == 0
}
