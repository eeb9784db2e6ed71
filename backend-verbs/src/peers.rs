//! The slots of peers. The control side reserves, connects and ends them, and the endpoint reads them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use multirail_spi::{Error, ErrorKind, PeerSlot, Result, SlotTable, claim_slot};

use crate::flush::FlushTarget;
use crate::queue_pair::QueuePair;

/// The number of a connection among those that two sides make one after another. From the second connection on, both
/// sides use the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct ConnectionNumber {
    /// 0 for the first connection; for each later one, the number of the broken connection plus 1. An offer of a
    /// generation that the slot has had is stale: its sender has taken another offer meanwhile.
    pub(crate) generation: u64,
    /// A random number. If the offers of both sides for one generation cross, the lower nonce wins.
    pub(crate) nonce: u64,
}

/// The queue pairs of a peer.
pub(crate) struct QueuePairs {
    /// For writes and reads.
    pub(crate) accesses: Vec<QueuePair>,
    pub(crate) messages: QueuePair,
    /// The memory of the peer that a flush reads, once connected.
    pub(crate) flush: Option<FlushTarget>,
    pub(crate) connection: ConnectionNumber,
}

impl QueuePairs {
    pub(crate) fn all(&self) -> impl Iterator<Item = &QueuePair> {
        self.accesses.iter().chain([&self.messages])
    }

    /// Stops all of them: their requests come back as flushed, and they take no arrival any more.
    pub(crate) fn fail(&self) {
        self.all().for_each(QueuePair::fail);
    }
}

/// The state of a slot.
#[derive(Default)]
pub(crate) enum SlotState {
    #[default]
    Free,
    /// Offered to a peer that has not answered.
    Offered(QueuePairs),
    /// The control side is connecting the queue pairs that were offered.
    Joining {
        connection: ConnectionNumber,
        was_up: bool,
    },
    Up(Arc<QueuePairs>),
    /// The connection of that generation failed. `offer` has the queue pairs of the next one, once the peer has the
    /// offer.
    Broken {
        generation: u64,
        offer: Option<QueuePairs>,
    },
    /// The device is lost, and the queue pairs with it.
    Lost,
    /// This side has ended the connection. The endpoint reports when its last request is over.
    Leaving,
    /// Its last request is over, and the endpoint reports that. The slot is free once the engine has acted on it.
    Gone,
}

impl SlotState {
    fn view(&self) -> SlotView {
        match self {
            Self::Free | Self::Offered(_) | Self::Joining { was_up: false, .. } | Self::Gone => {
                SlotView::Free
            }
            Self::Up(pairs) => SlotView::Up(Arc::clone(pairs)),
            Self::Broken { .. } | Self::Joining { was_up: true, .. } => SlotView::Broken,
            Self::Lost => SlotView::Lost,
            Self::Leaving => SlotView::Leaving,
        }
    }

    /// Whether this side takes the peer's offer of the next connection. If not, the peer has left, or it takes our
    /// offer.
    pub(crate) fn takes(&self, offer: ConnectionNumber) -> bool {
        match self {
            Self::Broken { offer: Some(ours), .. } if ours.connection.generation == offer.generation => {
                offer.nonce < ours.connection.nonce
            }
            Self::Broken { generation, .. } => offer.generation > *generation,
            Self::Joining { connection, was_up: true } => offer.generation > connection.generation,
            Self::Up(pairs) => offer.generation > pairs.connection.generation,
            _ => false,
        }
    }
}

/// All slots, and the queue pairs that no slot has.
#[derive(Default)]
pub(crate) struct PeerSlots {
    pub(crate) slots: Vec<SlotState>,
    /// Queue pairs that are being connected, by their numbers.
    joining: Vec<(u32, PeerSlot)>,
    /// Connections that slots have given up, and that the endpoint may have never seen. The endpoint still reports
    /// their arrivals.
    retired: Vec<(PeerSlot, Arc<QueuePairs>)>,
    /// Slots whose peer has lost its device or its path: they get no next connection until the fence is lifted. Each
    /// with the generation of the connection that was stopped.
    fenced: Vec<(PeerSlot, u64)>,
}

impl PeerSlots {
    pub(crate) fn is_fenced(&self, slot: PeerSlot) -> bool {
        self.fenced.iter().any(|(fenced, _)| *fenced == slot)
    }

    /// The slot of that number.
    pub(crate) fn slot(&mut self, slot: PeerSlot) -> Result<&mut SlotState> {
        self.slots.get_mut(slot.0 as usize).ok_or_else(too_late)
    }

    /// Gives `slot` another state. Returns the connection that it had.
    pub(crate) fn set(&mut self, slot: PeerSlot, state: SlotState) -> Option<Arc<QueuePairs>> {
        let SlotState::Up(pairs) = std::mem::replace(&mut self.slots[slot.0 as usize], state) else {
            return None;
        };
        self.retired.push((slot, Arc::clone(&pairs)));
        Some(pairs)
    }

    /// Forgets the numbers of queue pairs that are connected now, or never will be.
    fn end_join(&mut self, pairs: &QueuePairs) {
        self.joining.retain(|(number, _)| pairs.all().all(|pair| pair.number() != *number));
    }

    /// Gives the endpoint the queue pairs of a join that no slot takes. The peer may have sent to them: if it is still
    /// connected, the endpoint reports those arrivals.
    fn retire(&mut self, slot: PeerSlot, pairs: QueuePairs) {
        let is_there = |slot: &SlotState| {
            matches!(
                slot,
                SlotState::Joining { was_up: true, .. } | SlotState::Up(_) | SlotState::Broken { .. }
            )
        };
        if self.slots.get(slot.0 as usize).is_some_and(is_there) {
            pairs.fail();
            self.retired.push((slot, Arc::new(pairs)));
        }
    }
}

/// Queue pairs that the control side is connecting. The fields are dropped in order: the join ends after its queue
/// pairs are destroyed.
pub(crate) struct Joining<'a> {
    pub(crate) pairs: QueuePairs,
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

/// The state of a slot as the endpoint sees it.
#[derive(Clone, Default)]
pub(crate) enum SlotView {
    #[default]
    Free,
    Up(Arc<QueuePairs>),
    Broken,
    /// The connection is broken, and there is no next one before the fence is lifted.
    Fenced,
    Lost,
    Leaving,
}

/// All slots of a domain.
#[derive(Default)]
pub(crate) struct Peers {
    table: SlotTable<PeerSlots>,
    /// The device is lost: no slot gets queue pairs any more. Changed with `table` locked.
    is_lost: AtomicBool,
    /// Joins that are under way. A join begins with `table` locked, as long as the device works.
    joins: Joins,
}

impl Peers {
    /// Locks the table. A caller that changes a slot calls [`Peers::changed`].
    pub(crate) fn lock(&self) -> MutexGuard<'_, PeerSlots> {
        self.table.lock()
    }

    /// Locks the table to give a slot queue pairs. Fails if the device is lost.
    pub(crate) fn lock_working(&self) -> Result<MutexGuard<'_, PeerSlots>> {
        let table = self.lock();
        self.works(&table)?;
        Ok(table)
    }

    fn works(&self, _table: &MutexGuard<'_, PeerSlots>) -> Result<()> {
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
    pub(crate) fn begin_join(&self, _table: &MutexGuard<'_, PeerSlots>) -> Join<'_> {
        self.joins.begin()
    }

    /// Whether a join is under way. Once the device is lost, no further join begins.
    pub(crate) fn is_joining(&self) -> bool {
        *self.joins.count() > 0
    }

    /// Takes the queue pairs that `slot` has offered, to connect them while others change other slots. `answered` names
    /// the offer that the peer has taken, if the slot was connected before; `count` is the number of the peer's queue
    /// pairs for accesses. `None` if the slot has no such offer.
    pub(crate) fn take_offered(
        &self,
        slot: PeerSlot,
        answered: Option<ConnectionNumber>,
        count: usize,
    ) -> Result<Option<Joining<'_>>> {
        let mut table = self.lock_working()?;
        let state = table.slot(slot)?;
        let pairs = match std::mem::take(state) {
            SlotState::Offered(pairs) if answered.is_none() => pairs,
            SlotState::Broken { offer: Some(pairs), .. } if answered == Some(pairs.connection) => pairs,
            other => {
                *state = other;
                return Ok(None);
            }
        };
        *state = SlotState::Joining { connection: pairs.connection, was_up: answered.is_some() };
        // The peer connects `count` of them. The others are destroyed.
        let connected = pairs.accesses.iter().take(count).chain([&pairs.messages]);
        table.joining.extend(connected.map(|pair| (pair.number(), slot)));
        Ok(Some(Joining { pairs, _join: self.begin_join(&table) }))
    }

    /// Takes the queue pairs from all slots of a lost device; no slot gets any from now on. A join that is under way
    /// destroys its queue pairs itself, and [`Peers::is_joining`] tells when.
    pub(crate) fn lose(&self) {
        let mut table = self.lock();
        self.is_lost.store(true, Ordering::Relaxed);
        for slot in &mut table.slots {
            if matches!(
                slot,
                SlotState::Offered(_)
                    | SlotState::Joining { .. }
                    | SlotState::Up(_)
                    | SlotState::Broken { .. }
            ) {
                *slot = SlotState::Lost;
            }
        }
        self.mark_changed();
    }

    /// Removes all slots. Returns once all queue pairs are destroyed: a join that is under way finds no slot for them.
    pub(crate) fn clear(&self) {
        *self.lock() = PeerSlots::default();
        self.joins.await_none();
    }

    pub(crate) fn mark_changed(&self) {
        self.table.mark_changed();
    }

    pub(crate) fn reserve(&self, pairs: QueuePairs) -> Result<PeerSlot> {
        let mut table = self.lock_working()?;
        let slots = &mut table.slots;
        let index = claim_slot(slots, |slot| matches!(slot, SlotState::Free));
        slots[index] = SlotState::Offered(pairs);
        Ok(PeerSlot(index as u32))
    }

    pub(crate) fn leave(&self, slot: PeerSlot) {
        let mut table = self.lock();
        let is_ours = |slot: &SlotState| !matches!(slot, SlotState::Free | SlotState::Gone);
        if table.slots.get(slot.0 as usize).is_some_and(is_ours) {
            table.set(slot, SlotState::Leaving);
            self.mark_changed();
        }
    }

    /// Gives `slot` the connected queue pairs of its offer. Returns false if the slot has got another state meanwhile.
    pub(crate) fn raise(&self, slot: PeerSlot, joining: Joining<'_>) -> Result<bool> {
        // Dropped in reverse order: the queue pairs before the join.
        let Joining { _join, pairs } = joining;
        let mut table = self.lock();
        table.end_join(&pairs);
        self.works(&table)?;
        let state = table.slot(slot)?;
        let is_still =
            matches!(state, SlotState::Joining { connection, .. } if *connection == pairs.connection);
        if is_still {
            *state = SlotState::Up(Arc::new(pairs));
        } else {
            table.retire(slot, pairs);
        }
        self.mark_changed();
        Ok(is_still)
    }

    /// Ends a join that has failed. The table forgets the numbers of its queue pairs before these are destroyed, as the
    /// card may give the numbers to queue pairs of another peer. The peer has taken the offer, so that the next offer
    /// has the next generation.
    pub(crate) fn fail(&self, slot: PeerSlot, joining: Joining<'_>) {
        let Joining { _join, pairs } = joining;
        let mut table = self.lock();
        table.end_join(&pairs);
        let Ok(state) = table.slot(slot) else { return };
        let generation = pairs.connection.generation;
        if matches!(state, SlotState::Joining { connection, was_up: true } if *connection == pairs.connection)
        {
            *state = SlotState::Broken { generation, offer: None };
        }
        table.retire(slot, pairs);
        self.mark_changed();
    }

    /// The slot of the queue pair `number`, if that is connected or being connected.
    pub(crate) fn owner(&self, number: u32) -> Option<PeerSlot> {
        let table = self.lock();
        let is_up = |slot: &SlotState| matches!(slot, SlotState::Up(pairs) if pairs.all().any(|pair| pair.number() == number));
        if let Some(index) = table.slots.iter().position(is_up) {
            return Some(PeerSlot(index as u32));
        }
        let is_there = |slot: &SlotState| {
            matches!(slot, SlotState::Joining { .. } | SlotState::Up(_) | SlotState::Broken { .. })
        };
        let (_, slot) = table.joining.iter().find(|(of, _)| *of == number)?;
        table.slots.get(slot.0 as usize).is_some_and(is_there).then_some(*slot)
    }

    /// Marks a slot whose last request is over.
    pub(crate) fn end(&self, slot: PeerSlot) {
        let mut table = self.lock();
        table.slots[slot.0 as usize] = SlotState::Gone;
        table.fenced.retain(|(fenced, _)| *fenced != slot);
        self.mark_changed();
    }

    /// Frees a slot for the next peer.
    pub(crate) fn free(&self, slot: PeerSlot) {
        self.lock().slots[slot.0 as usize] = SlotState::Free;
    }

    /// Marks the slot's connection as broken: the endpoint gives it up, or its queue pair `number` has failed. That
    /// queue pair may belong to an earlier connection. Returns true if the slot was connected: the peer then gets the
    /// next offer.
    pub(crate) fn mark_broken(&self, slot: PeerSlot, number: Option<u32>) -> bool {
        let mut table = self.lock();
        let Some(SlotState::Up(pairs)) = table.slots.get(slot.0 as usize) else { return false };
        let generation = pairs.connection.generation;
        let is_its = |number| pairs.all().any(|pair| pair.number() == number);
        let is_broken = number.is_none_or(is_its);
        if is_broken {
            table.set(slot, SlotState::Broken { generation, offer: None });
            self.mark_changed();
        }
        is_broken
    }

    /// Gives up the connection of a slot: the peer has offered the next one, and this side could not make it. The slot
    /// offers a later one.
    pub(crate) fn give_up(&self, slot: PeerSlot, offered: ConnectionNumber) {
        let mut table = self.lock();
        if table.slot(slot).is_ok_and(|state| state.takes(offered)) {
            table.set(slot, SlotState::Broken { generation: offered.generation, offer: None });
            self.mark_changed();
        }
    }

    /// Stops the queue pairs of a slot: they take no arrival any more, and the slot offers no next connection until the
    /// fence is lifted. Pending while queue pairs of the slot are being connected.
    ///
    /// # Errors
    /// That of the card, if it does not stop a queue pair.
    pub(crate) fn fence(&self, slot: PeerSlot) -> Poll<Result<()>> {
        let mut table = self.lock();
        let stop = |pairs: &Arc<QueuePairs>| pairs.all().try_for_each(QueuePair::stop);
        let mut retired = table.retired.iter().filter(|(of, _)| *of == slot);
        retired.try_for_each(|(_, pairs)| stop(pairs))?;
        let generation = match table.slots.get_mut(slot.0 as usize) {
            Some(SlotState::Joining { .. }) => return Poll::Pending,
            Some(SlotState::Up(pairs)) => {
                stop(pairs)?;
                pairs.connection.generation
            }
            Some(SlotState::Broken { generation, offer }) => {
                // The peer may have taken the offer and posted requests. These would arrive if its answer, which is
                // still under way, connected the queue pairs.
                if let Some(offer) = offer.take() {
                    *generation = offer.connection.generation;
                }
                *generation
            }
            _ => return Poll::Ready(Ok(())),
        };
        match table.fenced.iter_mut().find(|(fenced, _)| *fenced == slot) {
            Some((_, stopped)) => *stopped = generation,
            None => table.fenced.push((slot, generation)),
        }
        self.mark_changed();
        Poll::Ready(Ok(()))
    }

    /// Lifts a fence: the slot gets a next connection. The one that was stopped takes no arrival any more.
    pub(crate) fn lift_fence(&self, slot: PeerSlot) {
        let mut table = self.lock();
        let Some(at) = table.fenced.iter().position(|(fenced, _)| *fenced == slot) else { return };
        let (_, stopped) = table.fenced.swap_remove(at);
        // The peer may have made the next connection already.
        let is_stopped = matches!(table.slots.get(slot.0 as usize),
            Some(SlotState::Up(pairs)) if pairs.connection.generation == stopped);
        if is_stopped {
            table.set(slot, SlotState::Broken { generation: stopped, offer: None });
        }
        self.mark_changed();
    }

    pub(crate) fn is_up(&self, slot: PeerSlot) -> bool {
        let is_up = |slot: &SlotState| {
            matches!(
                slot,
                SlotState::Up(_) | SlotState::Broken { .. } | SlotState::Joining { was_up: true, .. }
            )
        };
        self.lock().slots.get(slot.0 as usize).is_some_and(is_up)
    }

    /// Reads the states of all slots, and the connections that slots have given up, if there was a change since `seen`.
    #[inline]
    pub(crate) fn refresh(
        &self,
        seen: &mut u64,
        into: &mut Vec<SlotView>,
        retired: &mut Vec<(PeerSlot, Arc<QueuePairs>)>,
    ) -> bool {
        let Some(mut table) = self.table.lock_if_changed(seen) else { return false };
        into.clear();
        retired.append(&mut table.retired);
        into.extend(table.slots.iter().map(SlotState::view));
        for (slot, _) in &table.fenced {
            let view = &mut into[slot.0 as usize];
            if matches!(view, SlotView::Broken) {
                *view = SlotView::Fenced;
            }
        }
        true
    }
}

/// The error of a connection that ended before it was made.
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
        let connection = |generation| ConnectionNumber { generation, nonce: 9 };
        let taken = |slot: SlotState| [2, 3, 4].map(|generation| slot.takes(connection(generation)));
        assert_eq!(taken(SlotState::Broken { generation: 2, offer: None }), [false, true, true]);
        assert_eq!(
            taken(SlotState::Joining { connection: connection(3), was_up: true }),
            [false, false, true]
        );
        assert_eq!(taken(SlotState::Joining { connection: connection(0), was_up: false }), [false; 3]);
        assert_eq!(taken(SlotState::Leaving), [false; 3]);
    }

    #[test]
    fn queue_pairs_that_are_being_connected_are_their_slots() {
        let peers = Peers::default();
        let connection = ConnectionNumber { generation: 0, nonce: 0 };
        let joining = |was_up| SlotState::Joining { connection, was_up };
        peers.lock().slots.extend([SlotState::Free, joining(false), joining(true)]);
        peers.lock().joining.extend([(17, PeerSlot(1)), (19, PeerSlot(1)), (18, PeerSlot(2))]);
        let owners = [17, 18, 19, 20].map(|number| peers.owner(number).map(|slot| slot.0));
        assert_eq!(owners, [Some(1), Some(2), Some(1), None]);
        peers.leave(PeerSlot(1));
        assert_eq!((peers.owner(17), peers.owner(18)), (None, Some(PeerSlot(2))));
        peers.lose();
        assert_eq!(peers.owner(18), None);
    }
}
