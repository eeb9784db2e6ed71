//! Peer slots: reserved, connected and ended by the control side, read by the endpoint.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use transport_core::spi::PeerSlot;
use transport_core::{Error, ErrorKind, Result};

use crate::flush::Target;
use crate::queue_pair::QueuePair;

/// The queue pairs of a peer.
pub(crate) struct Pairs {
    /// For writes and reads.
    pub(crate) accesses: Vec<QueuePair>,
    pub(crate) messages: QueuePair,
    /// What flushes the peer's card, once connected.
    pub(crate) flush: Option<Target>,
    /// Of both sides' offers that cross, the lower one stands.
    pub(crate) nonce: u64,
}

impl Pairs {
    pub(crate) fn all(&self) -> impl Iterator<Item = &QueuePair> {
        self.accesses.iter().chain([&self.messages])
    }
}

/// A slot.
#[derive(Default)]
pub(crate) enum Slot {
    #[default]
    Free,
    /// Offered to a peer that has not answered.
    Offered(Pairs),
    /// The queue pairs of the offer with that nonce are being connected.
    Joining {
        nonce: u64,
        was_up: bool,
    },
    Up(Arc<Pairs>),
    /// The connection failed: where there is an offer, the peer was told what comes next.
    Broken(Option<Pairs>),
    /// The device is lost, and the queue pairs with it.
    Lost,
    /// Ended by this side: the endpoint says when its last request is over.
    Leaving,
    /// Its last request is over, which the endpoint is telling: free once that was heard.
    Gone,
}

impl Slot {
    /// Takes what was offered, to connect it without holding up who else changes slots.
    pub(crate) fn take_offered(&mut self) -> Option<Pairs> {
        let was_up = matches!(self, Self::Broken(_));
        match std::mem::take(self) {
            Self::Offered(pairs) | Self::Broken(Some(pairs)) => {
                *self = Self::Joining { nonce: pairs.nonce, was_up };
                Some(pairs)
            }
            other => {
                *self = other;
                None
            }
        }
    }
}

/// A slot as the endpoint sees it.
#[derive(Clone, Default)]
pub(crate) enum View {
    #[default]
    Free,
    Up(Arc<Pairs>),
    Broken,
    Lost,
    Leaving,
}

/// All slots of a domain.
#[derive(Default)]
pub(crate) struct Peers {
    slots: Mutex<Vec<Slot>>,
    /// Counts changes, so that the endpoint looks only when there was one.
    changes: AtomicU64,
    /// The device does not work any more: no slot gets queue pairs. Changed with `slots` locked.
    is_lost: AtomicBool,
}

impl Peers {
    /// To change slots; who has changed one says so.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Vec<Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// To give slots queue pairs, as long as the device works.
    pub(crate) fn lock_working(&self) -> Result<MutexGuard<'_, Vec<Slot>>> {
        let slots = self.lock();
        if self.is_lost.load(Ordering::Relaxed) {
            return Err(Error::new(
                ErrorKind::DeviceLost,
                "connect",
                "the device does not work any more: open the fabric anew",
            ));
        }
        Ok(slots)
    }

    /// The device does not work any more: all slots lose their queue pairs, and none gets any from now on.
    pub(crate) fn lose(&self) {
        let mut slots = self.lock();
        self.is_lost.store(true, Ordering::Relaxed);
        for slot in &mut *slots {
            if matches!(slot, Slot::Offered(_) | Slot::Joining { .. } | Slot::Up(_) | Slot::Broken(_)) {
                *slot = Slot::Lost;
            }
        }
        self.changed();
    }

    pub(crate) fn changed(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }

    pub(crate) fn reserve(&self, pairs: Pairs) -> Result<PeerSlot> {
        let mut slots = self.lock_working()?;
        let free = slots.iter().position(|slot| matches!(slot, Slot::Free));
        let index = free.unwrap_or_else(|| {
            slots.push(Slot::Free);
            slots.len() - 1
        });
        slots[index] = Slot::Offered(pairs);
        Ok(PeerSlot(index as u32))
    }

    pub(crate) fn leave(&self, slot: PeerSlot) {
        let mut slots = self.lock();
        let is_ours = |slot: &&mut Slot| !matches!(slot, Slot::Free | Slot::Gone);
        if let Some(slot) = slots.get_mut(slot.0 as usize).filter(is_ours) {
            *slot = Slot::Leaving;
            self.changed();
        }
    }

    /// Marks the queue pairs that `slot` offered as connected; `false` if the slot was given another state meanwhile.
    pub(crate) fn raise(&self, slot: PeerSlot, pairs: Pairs) -> Result<bool> {
        let mut slots = self.lock_working()?;
        let slot = slot_of(&mut slots, slot)?;
        let is_still = matches!(slot, Slot::Joining { nonce, .. } if *nonce == pairs.nonce);
        if is_still {
            *slot = Slot::Up(Arc::new(pairs));
            self.changed();
        }
        Ok(is_still)
    }

    /// Nothing of the slot's peer is left here.
    pub(crate) fn end(&self, slot: PeerSlot) {
        self.lock()[slot.0 as usize] = Slot::Gone;
        self.changed();
    }

    /// The slot may be offered anew.
    pub(crate) fn free(&self, slot: PeerSlot) {
        self.lock()[slot.0 as usize] = Slot::Free;
    }

    /// The endpoint has seen a connection fail. Whether it was up: then the peer is to be told.
    pub(crate) fn broke(&self, slot: PeerSlot) -> bool {
        let mut slots = self.lock();
        let Some(slot) = slots.get_mut(slot.0 as usize) else { return false };
        let was_up = matches!(slot, Slot::Up(_));
        if was_up {
            *slot = Slot::Broken(None);
            self.changed();
        }
        was_up
    }

    pub(crate) fn is_up(&self, slot: PeerSlot) -> bool {
        let slots = self.lock();
        let up =
            |slot: &Slot| matches!(slot, Slot::Up(_) | Slot::Broken(_) | Slot::Joining { was_up: true, .. });
        slots.get(slot.0 as usize).is_some_and(up)
    }

    /// Tells how the slots are if anything changed since the count in `seen`.
    #[inline]
    pub(crate) fn refresh(&self, seen: &mut u64, into: &mut Vec<View>) -> bool {
        let changes = self.changes.load(Ordering::Acquire);
        if changes == *seen {
            return false;
        }
        *seen = changes;
        self.read(into);
        true
    }

    #[cold]
    fn read(&self, into: &mut Vec<View>) {
        into.clear();
        into.extend(self.lock().iter().map(|slot| match slot {
            Slot::Free | Slot::Offered(_) | Slot::Joining { was_up: false, .. } | Slot::Gone => View::Free,
            Slot::Up(pairs) => View::Up(Arc::clone(pairs)),
            Slot::Broken(_) | Slot::Joining { was_up: true, .. } => View::Broken,
            Slot::Lost => View::Lost,
            Slot::Leaving => View::Leaving,
        }));
    }
}

/// A connection that ended before it was made.
pub(crate) fn too_late() -> Error {
    Error::new(ErrorKind::Closed, "connect", "the connection ended before it was made")
}

/// A slot of that number.
pub(crate) fn slot_of(slots: &mut [Slot], slot: PeerSlot) -> Result<&mut Slot> {
    slots.get_mut(slot.0 as usize).ok_or_else(too_late)
}
