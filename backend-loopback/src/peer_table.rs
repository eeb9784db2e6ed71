//! The peer slots of a domain. The control side reserves, connects and ends them, and the endpoint reads them.

use std::collections::HashMap;
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
    /// The slot is in [`Slots::changed`].
    is_changed: bool,
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

/// All peers. Changes are rare: the endpoint takes the lock only after a change, and reads only what has changed.
#[derive(Default)]
pub(crate) struct PeerTable(SlotTable<Slots>);

#[derive(Default)]
struct Slots {
    entries: Vec<Option<PeerEntry>>,
    /// Slots that have changed since the endpoint has read them, each once.
    changed: Vec<PeerSlot>,
    /// The slots of the peers whose initiator may still come.
    by_token: HashMap<OfferToken, PeerSlot>,
}

impl Slots {
    fn entry(&mut self, slot: PeerSlot) -> Option<&mut PeerEntry> {
        self.entries.get_mut(slot.0 as usize)?.as_mut()
    }

    fn note_change(&mut self, slot: PeerSlot) {
        if let Some(entry) = self.entry(slot)
            && !std::mem::replace(&mut entry.is_changed, true)
        {
            self.changed.push(slot);
        }
    }
}

impl PeerTable {
    /// Puts a peer into the lowest free slot.
    pub(crate) fn insert(&self, inbound: Arc<Inbound>) -> PeerSlot {
        let mut slots = self.0.lock();
        let at = claim_slot(&mut slots.entries, Option::is_none);
        let slot = PeerSlot(at as u32);
        inbound.set_slot(slot);
        slots.by_token.insert(inbound.token, slot);
        slots.entries[at] = Some(PeerEntry { inbound, outbound: None, leaving: false, is_changed: false });
        slots.note_change(slot);
        self.0.mark_changed();
        slot
    }

    /// The peer in `slot`.
    pub(crate) fn find(&self, slot: PeerSlot) -> Option<PeerEntry> {
        self.0.lock().entry(slot).cloned()
    }

    /// The connection to which `token` admits an initiator.
    pub(crate) fn by_token(&self, token: &OfferToken) -> Option<Arc<Inbound>> {
        let mut slots = self.0.lock();
        let slot = *slots.by_token.get(token)?;
        let peer = slots.entry(slot).filter(|peer| !peer.leaving && same(&peer.inbound.token, token))?;
        Some(peer.inbound.clone())
    }

    /// Changes the peer in `slot`. Returns the result of `change`, or `None` if the slot is free.
    pub(crate) fn update<R>(&self, slot: PeerSlot, change: impl FnOnce(&mut PeerEntry) -> R) -> Option<R> {
        let mut slots = self.0.lock();
        let result = change(slots.entry(slot)?);
        slots.note_change(slot);
        self.0.mark_changed();
        Some(result)
    }

    /// Frees a slot for reuse, if `inbound` is still in it.
    pub(crate) fn remove(&self, slot: PeerSlot, inbound: &Arc<Inbound>) {
        let mut slots = self.0.lock();
        let entry = slots.entries.get_mut(slot.0 as usize);
        if entry.and_then(|peer| peer.take_if(|peer| Arc::ptr_eq(&peer.inbound, inbound))).is_some() {
            slots.by_token.remove(&inbound.token);
            slots.changed.retain(|changed| *changed != slot);
        }
    }

    /// Makes the endpoint, which is new, read all peers.
    pub(crate) fn note_all(&self) {
        let mut slots = self.0.lock();
        (0..slots.entries.len() as u32).for_each(|slot| slots.note_change(PeerSlot(slot)));
        self.0.mark_changed();
    }

    /// The peers that have changed since the last call. Only the endpoint calls this.
    pub(crate) fn take_changed(&self) -> Vec<(PeerSlot, PeerEntry)> {
        let mut slots = self.0.lock();
        let changed = std::mem::take(&mut slots.changed);
        let read = |slot: PeerSlot| {
            let entry = slots.entry(slot)?;
            entry.is_changed = false;
            Some((slot, entry.clone()))
        };
        changed.into_iter().filter_map(read).collect()
    }

    /// All peers, by slot.
    pub(crate) fn all(&self) -> Vec<(PeerSlot, PeerEntry)> {
        let slots = self.0.lock();
        let numbered = slots.entries.iter().enumerate();
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
