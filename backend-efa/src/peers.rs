//! Peer slots: reserved and ended by the control side, read by the endpoint.

mod slot;
mod table;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use transport_core::spi::PeerSlot;
use transport_core::{Error, ErrorKind, Result};

use crate::addresses::Addresses;
use crate::library::Info;
use crate::tag::Seat;
use slot::{Known, Slot};
pub(crate) use slot::{Landing, Remote, There, View};
use table::{Open, Table};

/// Every place of a peer is kept, for what is still on its way from there: moves of one connection,
/// each of which takes seconds where it is earnest.
const MOVES: u32 = 1024;

/// How long a peer that comes back waits for the end of its former connection at most. One side waits after
/// the other, and on the first rail that it takes too long on no other: less than a handshake may take (5 s).
const FORMER: Duration = Duration::from_millis(1500);

/// All slots of a domain.
#[derive(Default)]
pub(crate) struct Peers {
    table: Mutex<Table>,
    /// Counts changes, so that the endpoint looks only when there was one.
    changes: AtomicU64,
    /// The provider keeps a state of each address: who comes back waits for the end of its former connection.
    keeps_states: bool,
    /// Addresses are those of queue pairs.
    are_cards: bool,
    /// The address says who sent something, as completion data has no room for it.
    by_address: bool,
    /// How long who connects may wait for others' ends.
    patience: Duration,
    /// A peer has ended, or a lane was closed.
    ended: Condvar,
}

impl Peers {
    /// Of a device, and of an endpoint whose worker `sleeps`: who drives it himself would have to go on
    /// while he waits, and nobody tells him so.
    pub(crate) fn new(info: &Info, sleeps: bool) -> Self {
        let (keeps_states, are_cards) = (info.has_states() && sleeps, info.card().is_some());
        let by_address = info.domain().cq_data_size < 8;
        let patience = if sleeps { FORMER } else { Duration::ZERO };
        Self { keeps_states, are_cards, by_address, patience, ..Self::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// A slot, and the name of the lane that its peer is to be told.
    pub(crate) fn reserve(&self) -> Result<(PeerSlot, Vec<u8>)> {
        let mut table = self.lock();
        let (lane, name) = table.newest()?;
        let index = match table.slots.iter().position(|slot| matches!(slot, Slot::Free)) {
            Some(index) => {
                table.seats[index] = table.seats[index].next();
                index
            }
            None if table.slots.len() < Seat::SLOTS as usize => {
                let index = table.slots.len();
                table.slots.push(Slot::Free);
                table.seats.push(Seat::first(index as u32));
                index
            }
            None => return Err(Error::new(ErrorKind::Exhausted, "connect", "every peer slot is taken")),
        };
        table.slots[index] = Slot::Offered(lane);
        Ok((PeerSlot(index as u32), name))
    }

    /// The seat of who has a slot, or is offered it.
    pub(crate) fn seat(&self, slot: PeerSlot) -> Seat {
        self.lock().seats[slot.0 as usize]
    }

    /// Brings an offered slot up.
    ///
    /// A peer may come back while its former connection still ends here. Where the provider keeps a state
    /// of each address, that end is waited for: the state goes with the address, and both sides begin anew.
    /// Else one side might think a handshake done that the other one waits for.
    ///
    /// # Errors
    /// `Busy` where that takes too long, or another live peer has the address.
    pub(crate) fn complete(&self, slot: PeerSlot, there: There) -> Result<()> {
        let table = self.lock();
        let mut table = self.wait_for_former(table, slot, &there)?;
        let Some(Slot::Offered(lane)) = table.slots.get(slot.0 as usize) else {
            return Err(Error::new(ErrorKind::Closed, "connect", "the connection ended before it was made"));
        };
        let lane = *lane;
        let known = table.know(slot, lane, there)?;
        table.slots[slot.0 as usize] = Slot::Up(known);
        self.changed();
        Ok(())
    }

    /// Waits until nobody of that address leaves any more, or of a former owner of its number, and no other live
    /// peer has it.
    fn wait_for_former<'a>(
        &'a self,
        table: MutexGuard<'a, Table>,
        slot: PeerSlot,
        there: &There,
    ) -> Result<MutexGuard<'a, Table>> {
        let address = &there.address;
        let is_early = |table: &mut Table| {
            let leaves = self.keeps_states && table.is_leaving(address);
            let has_former = self.are_cards && table.has_former_owner(address);
            (leaves || has_former || self.is_anothers(table, slot, there)) && !table.lanes.is_empty()
        };
        let waited = self.ended.wait_timeout_while(table, self.patience, is_early);
        match waited.unwrap_or_else(PoisonError::into_inner) {
            (table, limit) if !limit.timed_out() => Ok(table),
            (table, _) if self.is_anothers(&table, slot, there) => Err(anothers()),
            _ => {
                let why = "what was posted over the former connection to this peer has not ended yet: connect again";
                Err(Error::new(ErrorKind::Busy, "connect", why))
            }
        }
    }

    /// Whether what comes from there would be told as another live peer's, or another's as this one's.
    fn is_anothers(&self, table: &Table, slot: PeerSlot, there: &There) -> bool {
        self.by_address && table.is_anothers(slot, there)
    }

    /// The peer of `slot` is somewhere else now.
    ///
    /// # Errors
    /// `Protocol` where it has moved too often, `Busy` where another live peer is there.
    pub(crate) fn renew(&self, slot: PeerSlot, there: There) -> Result<()> {
        let mut table = self.lock();
        if self.is_anothers(&table, slot, &there) {
            return Err(anothers());
        }
        // One that has left meanwhile need not be found any more.
        let Some(Slot::Up(Known { lane, moves, .. })) = table.slots.get(slot.0 as usize) else {
            return Ok(());
        };
        let (lane, moves) = (*lane, *moves + 1);
        if moves > MOVES {
            let why = format!("the peer's endpoint has moved {MOVES} times: connect anew");
            return Err(Error::new(ErrorKind::Protocol, "renew a connection", why));
        }
        let known = table.know(slot, lane, there)?;
        table.slots[slot.0 as usize] = Slot::Up(Known { moves, ..known });
        self.changed();
        Ok(())
    }

    /// The name of the newest lane, if the peer of `slot` does not know it.
    pub(crate) fn untold(&self, slot: PeerSlot) -> Option<Vec<u8>> {
        let table = self.lock();
        let (newest, name) = table.newest().ok()?;
        match table.slots.get(slot.0 as usize) {
            Some(Slot::Up(known)) if known.lane != newest => Some(name),
            _ => None,
        }
    }

    /// The peer of `slot` knows the lane of that name.
    pub(crate) fn told(&self, slot: PeerSlot, name: &[u8]) {
        let mut table = self.lock();
        let Some(lane) = table.lanes.last().filter(|lane| lane.name == name).map(|lane| lane.number) else {
            return;
        };
        if let Some(Slot::Up(known)) = table.slots.get_mut(slot.0 as usize)
            && let Some(address) = known.ahead.take()
        {
            (known.lane, known.address) = (lane, Some(address));
            self.changed();
        }
    }

    /// Another lane is open: connected peers' addresses are inserted there, for when they know it.
    pub(crate) fn open_lane(&self, number: u32, name: Vec<u8>, addresses: &Arc<Addresses>) -> Result<()> {
        let mut table = self.lock();
        for (slot, known) in (0_u32..).zip(&mut table.slots) {
            if let Slot::Up(known) = known {
                // Nothing has come to it yet.
                known.ahead = Some(addresses.insert(slot, &known.there.address, false)?);
            }
        }
        table.lanes.push(Open { number, name, addresses: Arc::clone(addresses) });
        self.changed();
        Ok(())
    }

    /// A lane is closed: nothing goes over it any more.
    pub(crate) fn close_lane(&self, number: u32) {
        let mut table = self.lock();
        self.ended.notify_all();
        table.lanes.retain(|lane| lane.number != number);
        for slot in &mut table.slots {
            if let Slot::Up(known) = slot
                && known.lane == number
            {
                known.address = None;
            }
        }
        self.changed();
    }

    pub(crate) fn leave(&self, slot: PeerSlot) {
        let mut table = self.lock();
        let Some(state) = table.slots.get_mut(slot.0 as usize) else { return };
        let address = match state {
            Slot::Offered(_) => None,
            Slot::Up(known) => Some(std::mem::take(&mut known.there.address)),
            Slot::Free | Slot::Leaving(_) | Slot::Gone => return,
        };
        *state = Slot::Leaving(address);
        table.lanes.iter().for_each(|lane| lane.addresses.stands_back(slot.0));
        self.changed();
    }

    /// Nothing of the slot's peer is left here. The provider keeps its addresses where `is_haunted`.
    pub(crate) fn end(&self, slot: PeerSlot, is_haunted: bool) {
        let mut table = self.lock();
        table.lanes.iter().for_each(|lane| lane.addresses.remove(slot.0, is_haunted));
        table.slots[slot.0 as usize] = Slot::Gone;
        self.ended.notify_all();
        self.changed();
    }

    /// The slot may be offered anew.
    pub(crate) fn free(&self, slot: PeerSlot) {
        self.lock().slots[slot.0 as usize] = Slot::Free;
    }

    /// Tells how the slots are if anything changed since the count in `seen`.
    pub(crate) fn refresh(&self, seen: &mut u64, into: &mut Vec<View>, seats: &mut Vec<Seat>) -> bool {
        let changes = self.changes.load(Ordering::Acquire);
        if changes == *seen {
            return false;
        }
        *seen = changes;
        let table = self.lock();
        into.clear();
        into.extend(table.slots.iter().map(Slot::view));
        seats.clone_from(&table.seats);
        true
    }

    pub(crate) fn is_up(&self, slot: PeerSlot) -> bool {
        matches!(self.lock().slots.get(slot.0 as usize), Some(Slot::Up(_)))
    }

    /// Bytes of the addresses of this side, unless its device is lost.
    pub(crate) fn name_len(&self) -> Option<usize> {
        self.lock().lanes.last().map(|lane| lane.name.len())
    }
}

fn anothers() -> Error {
    let why = "the peer offers an address that another live peer has, of another process, and this device tells who \
               sent something by its address alone: where it is the same card after a restart, connect again once \
               the former peer is gone";
    Error::new(ErrorKind::Busy, "connect", why)
}

#[cfg(test)]
mod tests;
