//! The peer slots of a domain. The control side reserves, connects and ends them, and the endpoint reads them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use multirail_spi::PeerSlot;

use crate::inbound::Inbound;
use crate::offer::Token;
use crate::outbound::Outbound;

/// One peer, from `prepare` to `PeerGone`.
#[derive(Clone)]
pub(crate) struct Peer {
    pub(crate) inbound: Arc<Inbound>,
    /// Set by `complete`.
    pub(crate) outbound: Option<Arc<Outbound>>,
    /// This side has disconnected the peer. The endpoint has not reported `PeerGone` yet.
    pub(crate) leaving: bool,
}

impl Peer {
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

/// All peers. Changes are rare: the endpoint compares the version, and takes the lock only after a change.
#[derive(Default)]
pub(crate) struct PeerTable {
    slots: Mutex<Vec<Option<Peer>>>,
    version: AtomicU64,
}

impl PeerTable {
    /// Puts a peer into the lowest free slot.
    pub(crate) fn insert(&self, inbound: Arc<Inbound>) -> PeerSlot {
        let mut slots = self.lock();
        let at = slots.iter().position(Option::is_none).unwrap_or_else(|| {
            slots.push(None);
            slots.len() - 1
        });
        slots[at] = Some(Peer { inbound, outbound: None, leaving: false });
        self.changed();
        PeerSlot(at as u32)
    }

    /// The peer in `slot`.
    pub(crate) fn find(&self, slot: PeerSlot) -> Option<Peer> {
        self.lock().get(slot.0 as usize)?.clone()
    }

    /// The connection to which `token` admits an initiator.
    pub(crate) fn by_token(&self, token: &Token) -> Option<Arc<Inbound>> {
        let slots = self.lock();
        let mut live = slots.iter().flatten().filter(|peer| !peer.leaving);
        live.find(|peer| same(&peer.inbound.token, token)).map(|peer| peer.inbound.clone())
    }

    /// Changes the peer in `slot`. Returns the result of `change`, or `None` if the slot is free.
    pub(crate) fn update<R>(&self, slot: PeerSlot, change: impl FnOnce(&mut Peer) -> R) -> Option<R> {
        let result = self.lock().get_mut(slot.0 as usize)?.as_mut().map(change);
        self.changed();
        result
    }

    /// Frees a slot for reuse, if `inbound` is still in it.
    pub(crate) fn remove(&self, slot: PeerSlot, inbound: &Arc<Inbound>) {
        if let Some(peer) = self.lock().get_mut(slot.0 as usize) {
            peer.take_if(|peer| Arc::ptr_eq(&peer.inbound, inbound));
        }
        self.changed();
    }

    /// All peers, by slot.
    pub(crate) fn all(&self) -> Vec<(PeerSlot, Peer)> {
        let slots = self.lock();
        let numbered = slots.iter().enumerate();
        numbered.filter_map(|(n, peer)| Some((PeerSlot(n as u32), peer.clone()?))).collect()
    }

    /// A number that grows with every change.
    #[inline]
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    fn changed(&self) {
        self.version.fetch_add(1, Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Option<Peer>>> {
        self.slots.lock().expect("peer table")
    }
}

/// Returns true if both tokens are equal. The time that it takes does not tell where they differ.
fn same(a: &Token, b: &Token) -> bool {
    let differing = a.iter().zip(b).fold(0, |sum, (a, b)| std::hint::black_box(sum | (a ^ b)));
    differing == 0
}
