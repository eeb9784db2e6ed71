//! Peer slots: reserved, connected and ended by the control side, read by the endpoint.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use multirail_spi::{Error, ErrorKind, PeerSlot, Result};

use crate::flush::Target;
use crate::queue_pair::QueuePair;

/// Which of the connections that two sides have one after another: both sides call each one but the first the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Turn {
    /// Of the first connection 0, and one more than that of the connection that broke. An offer of a generation that
    /// the slot has had is stale: the side that sent it has taken another one meanwhile.
    pub(crate) generation: u64,
    /// Of both sides' offers of a generation, which cross, the lower one stands.
    pub(crate) nonce: u64,
}

/// The queue pairs of a peer.
pub(crate) struct Pairs {
    /// For writes and reads.
    pub(crate) accesses: Vec<QueuePair>,
    pub(crate) messages: QueuePair,
    /// What flushes the peer's card, once connected.
    pub(crate) flush: Option<Target>,
    pub(crate) turn: Turn,
}

impl Pairs {
    pub(crate) fn all(&self) -> impl Iterator<Item = &QueuePair> {
        self.accesses.iter().chain([&self.messages])
    }

    /// Stops all of them: what is posted comes back as flushed, nothing that comes is taken any more.
    pub(crate) fn fail(&self) {
        self.all().for_each(QueuePair::fail);
    }
}

/// A slot.
#[derive(Default)]
pub(crate) enum Slot {
    #[default]
    Free,
    /// Offered to a peer that has not answered.
    Offered(Pairs),
    /// The queue pairs of that offer are being connected.
    Joining {
        turn: Turn,
        was_up: bool,
    },
    Up(Arc<Pairs>),
    /// The connection of that generation failed: where there is an offer, the peer was told what comes next.
    Broken {
        generation: u64,
        offer: Option<Pairs>,
    },
    /// The device is lost, and the queue pairs with it.
    Lost,
    /// Ended by this side: the endpoint says when its last request is over.
    Leaving,
    /// Its last request is over, which the endpoint is telling: free once that was heard.
    Gone,
}

impl Slot {
    /// Whether the peer's offer of the next connection is to be taken. If not, the peer has left, has our offer, which
    /// it takes, or has taken it.
    pub(crate) fn takes(&self, offer: Turn) -> bool {
        match self {
            Self::Broken { offer: Some(ours), .. } if ours.turn.generation == offer.generation => {
                offer.nonce < ours.turn.nonce
            }
            Self::Broken { generation, .. } => offer.generation > *generation,
            Self::Joining { turn, was_up: true } => offer.generation > turn.generation,
            Self::Up(pairs) => offer.generation > pairs.turn.generation,
            _ => false,
        }
    }
}

/// Slots, and what goes with them.
#[derive(Default)]
pub(crate) struct Table {
    pub(crate) slots: Vec<Slot>,
    /// Queue pairs that are being connected, by their numbers.
    joining: Vec<(u32, PeerSlot)>,
    /// Connections that slots have no more, which the endpoint has perhaps never seen: it still tells what they have
    /// brought.
    retired: Vec<(PeerSlot, Arc<Pairs>)>,
}

impl Table {
    /// A slot of that number.
    pub(crate) fn slot(&mut self, slot: PeerSlot) -> Result<&mut Slot> {
        self.slots.get_mut(slot.0 as usize).ok_or_else(too_late)
    }

    /// Gives `slot` another state; the connection that it had.
    pub(crate) fn set(&mut self, slot: PeerSlot, state: Slot) -> Option<Arc<Pairs>> {
        let Slot::Up(pairs) = std::mem::replace(&mut self.slots[slot.0 as usize], state) else { return None };
        self.retired.push((slot, Arc::clone(&pairs)));
        Some(pairs)
    }

    /// The queue pairs are connected, or will not be.
    fn end_join(&mut self, pairs: &Pairs) {
        self.joining.retain(|(number, _)| pairs.all().all(|pair| pair.number() != *number));
    }

    /// Gives the endpoint the queue pairs of a join that no slot takes: the peer may have sent to them, and if the peer
    /// is still there, the endpoint tells what has come.
    fn retire(&mut self, slot: PeerSlot, pairs: Pairs) {
        let is_there = |slot: &Slot| {
            matches!(slot, Slot::Joining { was_up: true, .. } | Slot::Up(_) | Slot::Broken { .. })
        };
        if self.slots.get(slot.0 as usize).is_some_and(is_there) {
            pairs.fail();
            self.retired.push((slot, Arc::new(pairs)));
        }
    }
}

/// Queue pairs that are being connected. Dropped in order: the join is over once its queue pairs are destroyed.
pub(crate) struct Joining<'a> {
    pub(crate) pairs: Pairs,
    pub(crate) _join: Join<'a>,
}

/// Counts the joins that are under way.
#[derive(Default)]
struct Joins {
    count: Mutex<usize>,
    ended: Condvar,
}

impl Joins {
    fn count(&self) -> MutexGuard<'_, usize> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self) -> Join<'_> {
        *self.count() += 1;
        Join(self)
    }

    fn await_none(&self) {
        let over = self.ended.wait_while(self.count(), |count| *count > 0);
        drop(over.unwrap_or_else(PoisonError::into_inner));
    }
}

/// Counts a join as under way until it is dropped.
pub(crate) struct Join<'a>(&'a Joins);

impl Drop for Join<'_> {
    fn drop(&mut self) {
        *self.0.count() -= 1;
        self.0.ended.notify_all();
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
    table: Mutex<Table>,
    /// Counts changes, so that the endpoint looks only when there was one.
    changes: AtomicU64,
    /// The device does not work any more: no slot gets queue pairs. Changed with `table` locked.
    is_lost: AtomicBool,
    /// Joins that are under way. A join begins with `table` locked, as long as the device works.
    joins: Joins,
}

impl Peers {
    /// To change slots; who has changed one says so.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// To give slots queue pairs, as long as the device works.
    pub(crate) fn lock_working(&self) -> Result<MutexGuard<'_, Table>> {
        let table = self.lock();
        self.works(&table)?;
        Ok(table)
    }

    fn works(&self, _table: &MutexGuard<'_, Table>) -> Result<()> {
        if self.is_lost.load(Ordering::Relaxed) {
            return Err(Error::new(
                ErrorKind::DeviceLost,
                "connect",
                "the device does not work any more: open the fabric anew",
            ));
        }
        Ok(())
    }

    /// Begins a join; the caller holds the slots that [`Peers::lock_working`] gave.
    pub(crate) fn begin_join(&self, _table: &MutexGuard<'_, Table>) -> Join<'_> {
        self.joins.begin()
    }

    /// Whether queue pairs are being connected that no slot has. Once the device is lost, no further join begins.
    pub(crate) fn is_joining(&self) -> bool {
        *self.joins.count() > 0
    }

    /// Takes the queue pairs that `slot` offered, to connect them without holding up the callers that change other
    /// slots. `answered` says which offer the peer of a slot that was connected before has taken, `count` how many queue
    /// pairs for accesses the peer has. `None` if the slot offers nothing of the kind.
    pub(crate) fn take_offered(
        &self,
        slot: PeerSlot,
        answered: Option<Turn>,
        count: usize,
    ) -> Result<Option<Joining<'_>>> {
        let mut table = self.lock_working()?;
        let state = table.slot(slot)?;
        let pairs = match std::mem::take(state) {
            Slot::Offered(pairs) if answered.is_none() => pairs,
            Slot::Broken { offer: Some(pairs), .. } if answered == Some(pairs.turn) => pairs,
            other => {
                *state = other;
                return Ok(None);
            }
        };
        *state = Slot::Joining { turn: pairs.turn, was_up: answered.is_some() };
        // The peer reaches no other queue pairs: the further ones are given back.
        let connected = pairs.accesses.iter().take(count).chain([&pairs.messages]);
        table.joining.extend(connected.map(|pair| (pair.number(), slot)));
        Ok(Some(Joining { pairs, _join: self.begin_join(&table) }))
    }

    /// The device does not work any more: all slots lose their queue pairs, and none gets any from now on. Queue pairs
    /// that are being connected are destroyed by their join, as [`Peers::is_joining`] tells.
    pub(crate) fn lose(&self) {
        let mut table = self.lock();
        self.is_lost.store(true, Ordering::Relaxed);
        for slot in &mut table.slots {
            if matches!(slot, Slot::Offered(_) | Slot::Joining { .. } | Slot::Up(_) | Slot::Broken { .. }) {
                *slot = Slot::Lost;
            }
        }
        self.changed();
    }

    /// Forgets all slots, and returns once all queue pairs are destroyed. A join that is under way finds no slot, and
    /// none begins.
    pub(crate) fn clear(&self) {
        *self.lock() = Table::default();
        self.joins.await_none();
    }

    pub(crate) fn changed(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }

    pub(crate) fn reserve(&self, pairs: Pairs) -> Result<PeerSlot> {
        let mut table = self.lock_working()?;
        let slots = &mut table.slots;
        let free = slots.iter().position(|slot| matches!(slot, Slot::Free));
        let index = free.unwrap_or_else(|| {
            slots.push(Slot::Free);
            slots.len() - 1
        });
        slots[index] = Slot::Offered(pairs);
        Ok(PeerSlot(index as u32))
    }

    pub(crate) fn leave(&self, slot: PeerSlot) {
        let mut table = self.lock();
        let is_ours = |slot: &Slot| !matches!(slot, Slot::Free | Slot::Gone);
        if table.slots.get(slot.0 as usize).is_some_and(is_ours) {
            table.set(slot, Slot::Leaving);
            self.changed();
        }
    }

    /// Marks the queue pairs that `slot` offered as connected; `false` if the slot was given another state meanwhile.
    pub(crate) fn raise(&self, slot: PeerSlot, joining: Joining<'_>) -> Result<bool> {
        // Dropped in the other order: the queue pairs before the join is over.
        let Joining { _join, pairs } = joining;
        let mut table = self.lock();
        table.end_join(&pairs);
        self.works(&table)?;
        let state = table.slot(slot)?;
        let is_still = matches!(state, Slot::Joining { turn, .. } if *turn == pairs.turn);
        if is_still {
            *state = Slot::Up(Arc::new(pairs));
        } else {
            table.retire(slot, pairs);
        }
        self.changed();
        Ok(is_still)
    }

    /// The queue pairs of a join are not connected. The slot forgets their numbers before they are destroyed, as the
    /// card may give the numbers to another peer's. The peer has taken the offer: the next one is of the next
    /// generation.
    pub(crate) fn fail(&self, slot: PeerSlot, joining: Joining<'_>) {
        let Joining { _join, pairs } = joining;
        let mut table = self.lock();
        table.end_join(&pairs);
        let Ok(state) = table.slot(slot) else { return };
        let generation = pairs.turn.generation;
        if matches!(state, Slot::Joining { turn, was_up: true } if *turn == pairs.turn) {
            *state = Slot::Broken { generation, offer: None };
        }
        table.retire(slot, pairs);
        self.changed();
    }

    /// The slot of the queue pair `number`, which is connected or being connected.
    pub(crate) fn owner(&self, number: u32) -> Option<PeerSlot> {
        let table = self.lock();
        let is_up =
            |slot: &Slot| matches!(slot, Slot::Up(pairs) if pairs.all().any(|pair| pair.number() == number));
        if let Some(index) = table.slots.iter().position(is_up) {
            return Some(PeerSlot(index as u32));
        }
        let is_there = |slot: &Slot| matches!(slot, Slot::Joining { .. } | Slot::Up(_) | Slot::Broken { .. });
        let (_, slot) = table.joining.iter().find(|(of, _)| *of == number)?;
        table.slots.get(slot.0 as usize).is_some_and(is_there).then_some(*slot)
    }

    /// Nothing of the slot's peer is left here.
    pub(crate) fn end(&self, slot: PeerSlot) {
        self.lock().slots[slot.0 as usize] = Slot::Gone;
        self.changed();
    }

    /// The slot may be offered anew.
    pub(crate) fn free(&self, slot: PeerSlot) {
        self.lock().slots[slot.0 as usize] = Slot::Free;
    }

    /// The endpoint gives the slot's connection up, or has seen it fail: by the queue pair `number` then, which may be
    /// of a connection that has ended already. Whether the connection was up: then the peer is to be told.
    pub(crate) fn broke(&self, slot: PeerSlot, number: Option<u32>) -> bool {
        let mut table = self.lock();
        let Some(Slot::Up(pairs)) = table.slots.get(slot.0 as usize) else { return false };
        let generation = pairs.turn.generation;
        let is_its = |number| pairs.all().any(|pair| pair.number() == number);
        let breaks = number.is_none_or(is_its);
        if breaks {
            table.set(slot, Slot::Broken { generation, offer: None });
            self.changed();
        }
        breaks
    }

    pub(crate) fn is_up(&self, slot: PeerSlot) -> bool {
        let is_up = |slot: &Slot| {
            matches!(slot, Slot::Up(_) | Slot::Broken { .. } | Slot::Joining { was_up: true, .. })
        };
        self.lock().slots.get(slot.0 as usize).is_some_and(is_up)
    }

    /// Tells how the slots are, and which connections they have no more, if anything changed since the count in `seen`.
    #[inline]
    pub(crate) fn refresh(
        &self,
        seen: &mut u64,
        into: &mut Vec<View>,
        retired: &mut Vec<(PeerSlot, Arc<Pairs>)>,
    ) -> bool {
        let changes = self.changes.load(Ordering::Acquire);
        if changes == *seen {
            return false;
        }
        *seen = changes;
        self.read(into, retired);
        true
    }

    #[cold]
    fn read(&self, into: &mut Vec<View>, retired: &mut Vec<(PeerSlot, Arc<Pairs>)>) {
        into.clear();
        let mut table = self.lock();
        retired.append(&mut table.retired);
        into.extend(table.slots.iter().map(|slot| match slot {
            Slot::Free | Slot::Offered(_) | Slot::Joining { was_up: false, .. } | Slot::Gone => View::Free,
            Slot::Up(pairs) => View::Up(Arc::clone(pairs)),
            Slot::Broken { .. } | Slot::Joining { was_up: true, .. } => View::Broken,
            Slot::Lost => View::Lost,
            Slot::Leaving => View::Leaving,
        }));
    }
}

/// A connection that ended before it was made.
pub(crate) fn too_late() -> Error {
    Error::new(ErrorKind::Closed, "connect", "the connection ended before it was made")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_join_is_under_way_until_its_end_also_on_a_lost_device() {
        let peers = Peers::default();
        let join = peers.begin_join(&peers.lock_working().unwrap());
        peers.lose();
        assert!(peers.is_joining());
        drop(join);
        assert!(!peers.is_joining());
        let refused = peers.take_offered(PeerSlot(0), None, 1).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::DeviceLost);
    }

    #[test]
    fn nobody_has_queue_pairs_once_all_is_cleared() {
        let peers = Peers::default();
        let join = peers.begin_join(&peers.lock());
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                is_over.store(true, Ordering::Relaxed);
                drop(join);
            });
            peers.clear();
            assert!(is_over.load(Ordering::Relaxed));
        });
    }

    #[test]
    fn an_offer_of_a_generation_that_was_there_is_stale() {
        let turn = |generation| Turn { generation, nonce: 9 };
        let taken = |slot: Slot| [2, 3, 4].map(|generation| slot.takes(turn(generation)));
        assert_eq!(taken(Slot::Broken { generation: 2, offer: None }), [false, true, true]);
        assert_eq!(taken(Slot::Joining { turn: turn(3), was_up: true }), [false, false, true]);
        assert_eq!(taken(Slot::Joining { turn: turn(0), was_up: false }), [false; 3]);
        assert_eq!(taken(Slot::Leaving), [false; 3]);
    }

    #[test]
    fn queue_pairs_that_are_being_connected_are_their_slots() {
        let peers = Peers::default();
        let turn = Turn { generation: 0, nonce: 0 };
        let joining = |was_up| Slot::Joining { turn, was_up };
        peers.lock().slots.extend([Slot::Free, joining(false), joining(true)]);
        peers.lock().joining.extend([(17, PeerSlot(1)), (19, PeerSlot(1)), (18, PeerSlot(2))]);
        let owners = [17, 18, 19, 20].map(|number| peers.owner(number).map(|slot| slot.0));
        assert_eq!(owners, [Some(1), Some(2), Some(1), None]);
        peers.leave(PeerSlot(1));
        assert_eq!((peers.owner(17), peers.owner(18)), (None, Some(PeerSlot(2))));
        peers.lose();
        assert_eq!(peers.owner(18), None);
    }
}
