//! Peer slots: reserved, connected and ended by the control side, read by the endpoint.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
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
    /// The queue pairs of the offer with that nonce are being connected; `numbers` are those of the queue pairs.
    Joining {
        nonce: u64,
        was_up: bool,
        numbers: Vec<u32>,
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

/// Queue pairs that are being connected. Dropped in order: the join is over once its queue pairs are destroyed.
pub(crate) struct Joining<'a> {
    pub(crate) pairs: Pairs,
    pub(crate) _join: Join<'a>,
}

/// Counts a join as under way until it is dropped.
pub(crate) struct Join<'a>(&'a AtomicUsize);

impl Drop for Join<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
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
    /// Joins that are under way. A join begins with `slots` locked, as long as the device works.
    joins: AtomicUsize,
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

    /// Begins a join; the caller holds the slots that [`Peers::lock_working`] gave.
    pub(crate) fn begin_join(&self, _slots: &MutexGuard<'_, Vec<Slot>>) -> Join<'_> {
        self.joins.fetch_add(1, Ordering::Relaxed);
        Join(&self.joins)
    }

    /// Whether queue pairs are being connected that no slot has. Once the device is lost, no further join begins.
    pub(crate) fn is_joining(&self) -> bool {
        self.joins.load(Ordering::Acquire) > 0
    }

    /// Takes the queue pairs that `slot` offered, to connect them without holding up the callers that change other
    /// slots. `was_up` says whether the slot was connected before, `count` how many queue pairs for accesses the
    /// peer has. `None` if the slot offers nothing of the kind.
    pub(crate) fn take_offered(
        &self,
        slot: PeerSlot,
        was_up: bool,
        count: usize,
    ) -> Result<Option<Joining<'_>>> {
        let mut slots = self.lock_working()?;
        let slot = slot_of(&mut slots, slot)?;
        let pairs = match std::mem::take(slot) {
            Slot::Offered(pairs) if !was_up => pairs,
            Slot::Broken(Some(pairs)) if was_up => pairs,
            other => {
                *slot = other;
                return Ok(None);
            }
        };
        // The peer reaches no other queue pairs: the further ones are given back.
        let connected = pairs.accesses.iter().take(count).chain([&pairs.messages]);
        let numbers = connected.map(QueuePair::number).collect();
        *slot = Slot::Joining { nonce: pairs.nonce, was_up, numbers };
        Ok(Some(Joining { pairs, _join: self.begin_join(&slots) }))
    }

    /// The device does not work any more: all slots lose their queue pairs, and none gets any from now on. Queue pairs
    /// that are being connected are destroyed by their join, as [`Peers::is_joining`] tells.
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
    pub(crate) fn raise(&self, slot: PeerSlot, joining: Joining<'_>) -> Result<bool> {
        let mut slots = self.lock_working()?;
        let slot = slot_of(&mut slots, slot)?;
        let is_still = matches!(slot, Slot::Joining { nonce, .. } if *nonce == joining.pairs.nonce);
        if is_still {
            *slot = Slot::Up(Arc::new(joining.pairs));
            self.changed();
        }
        Ok(is_still)
    }

    /// The queue pairs of a join are not connected. The slot forgets their numbers before they are destroyed, as the
    /// card may give the numbers to another peer's.
    pub(crate) fn fail(&self, slot: PeerSlot, joining: Joining<'_>) {
        let mut slots = self.lock();
        if let Some(Slot::Joining { nonce, numbers, .. }) = slots.get_mut(slot.0 as usize)
            && *nonce == joining.pairs.nonce
        {
            numbers.clear();
        }
    }

    /// The slot of the queue pair `number`, which is connected or being connected.
    pub(crate) fn owner(&self, number: u32) -> Option<PeerSlot> {
        let has = |slot: &Slot| match slot {
            Slot::Joining { numbers, .. } => numbers.contains(&number),
            Slot::Up(pairs) => pairs.all().any(|pair| pair.number() == number),
            _ => false,
        };
        self.lock().iter().position(has).map(|index| PeerSlot(index as u32))
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

    /// The endpoint gives the slot's connection up, or has seen it fail: by the queue pair `number` then, which may be
    /// of a connection that has ended already. Whether the connection was up: then the peer is to be told.
    pub(crate) fn broke(&self, slot: PeerSlot, number: Option<u32>) -> bool {
        let mut slots = self.lock();
        let Some(slot) = slots.get_mut(slot.0 as usize) else { return false };
        let Slot::Up(pairs) = slot else { return false };
        let is_its = |number| pairs.all().any(|pair| pair.number() == number);
        let breaks = number.is_none_or(is_its);
        if breaks {
            *slot = Slot::Broken(None);
            self.changed();
        }
        breaks
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_join_is_under_way_until_its_end_also_on_a_lost_device() {
        let peers = Peers::default();
        let join = peers.begin_join(&peers.lock_working().unwrap());
        peers.lose();
        assert!(peers.is_joining());
        drop(join);
        assert!(!peers.is_joining());
        let refused = peers.take_offered(PeerSlot(0), false, 1).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::DeviceLost);
    }

    #[test]
    fn queue_pairs_that_are_being_connected_are_their_slots() {
        let peers = Peers::default();
        let joining = |was_up, numbers| Slot::Joining { nonce: 0, was_up, numbers };
        peers.lock().extend([Slot::Free, joining(false, vec![17, 19]), joining(true, vec![18])]);
        let owners = [17, 18, 19, 20].map(|number| peers.owner(number).map(|slot| slot.0));
        assert_eq!(owners, [Some(1), Some(2), Some(1), None]);
        peers.leave(PeerSlot(1));
        assert_eq!((peers.owner(17), peers.owner(18)), (None, Some(PeerSlot(2))));
        peers.lose();
        assert_eq!(peers.owner(18), None);
    }
}
