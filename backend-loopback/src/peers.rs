//! The slots of a domain: who is connected, coming or going.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use multirail_spi::PeerSlot;

use crate::offer::Token;
use crate::peer::{Inbound, Outbound};

/// One peer, from `prepare` to `PeerGone`.
#[derive(Clone)]
pub(crate) struct Peer {
    pub(crate) inbound: Arc<Inbound>,
    /// Set by `complete`.
    pub(crate) outbound: Option<Arc<Outbound>>,
    /// Disconnected; the endpoint has not said goodbye yet.
    pub(crate) leaving: bool,
}

impl Peer {
    /// Ends both directions. A peer that waits for staged bytes hears of it.
    pub(crate) fn hang_up(&self) {
        self.inbound.close();
        if let Some(outbound) = &self.outbound {
            if self.inbound.stage().is_some() {
                outbound.ring();
            }
            outbound.hang_up();
        }
    }
}

/// All peers. Changes are rare: the endpoint watches the version, not the lock.
#[derive(Default)]
pub(crate) struct Peers {
    slots: Mutex<Vec<Option<Peer>>>,
    version: AtomicU64,
}

impl Peers {
    /// Takes the lowest free slot.
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

    /// The connection that `token` admits to.
    pub(crate) fn by_token(&self, token: &Token) -> Option<Arc<Inbound>> {
        let slots = self.lock();
        let mut live = slots.iter().flatten().filter(|peer| !peer.leaving);
        live.find(|peer| same(&peer.inbound.token, token)).map(|peer| peer.inbound.clone())
    }

    /// Changes the peer in `slot`, if there is one.
    pub(crate) fn update<R>(&self, slot: PeerSlot, change: impl FnOnce(&mut Peer) -> R) -> Option<R> {
        let result = self.lock().get_mut(slot.0 as usize)?.as_mut().map(change);
        self.changed();
        result
    }

    /// Frees a slot for reuse, if `inbound` is still the one in it.
    pub(crate) fn remove(&self, slot: PeerSlot, inbound: &Arc<Inbound>) {
        if let Some(peer) = self.lock().get_mut(slot.0 as usize) {
            peer.take_if(|peer| Arc::ptr_eq(&peer.inbound, inbound));
        }
        self.changed();
    }

    /// All of them, by slot.
    pub(crate) fn all(&self) -> Vec<(PeerSlot, Peer)> {
        let slots = self.lock();
        let numbered = slots.iter().enumerate();
        numbered.filter_map(|(n, peer)| Some((PeerSlot(n as u32), peer.clone()?))).collect()
    }

    /// Grows with every change.
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

/// Whether both are one secret, in a time that does not tell where they differ.
fn same(a: &Token, b: &Token) -> bool {
    let differing = a.iter().zip(b).fold(0, |sum, (a, b)| std::hint::black_box(sum | (a ^ b)));
    differing == 0
}
