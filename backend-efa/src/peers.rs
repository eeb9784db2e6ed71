//! Peer slots: reserved and ended by the control side, read by the endpoint.

mod slot;
mod table;

use std::sync::{Arc, Condvar, MutexGuard, PoisonError};
use std::time::Duration;

use multirail_spi::{Error, ErrorKind, PeerSlot, Result, SlotTable, claim_slot};

use crate::addresses::Addresses;
use crate::library::Info;
use crate::tag::PeerTag;
use slot::{Known, Slot};
pub(crate) use slot::{Landing, Remote, RemoteAddress, View};
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
    table: SlotTable<Table>,
    /// The provider keeps a state of each address: who comes back waits for the end of its former connection.
    keeps_states: bool,
    /// Addresses are those of queue pairs.
    are_cards: bool,
    /// The address says who sent something, as completion data has no room for it.
    by_address: bool,
    /// How long who connects may wait for others' ends.
    patience: Duration,
    /// A peer has ended, or an endpoint was closed.
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
        self.table.lock()
    }

    fn changed(&self) {
        self.table.changed();
    }

    /// A slot, and the name of the endpoint that its peer is to be told.
    pub(crate) fn reserve(&self) -> Result<(PeerSlot, Vec<u8>)> {
        let mut table = self.lock();
        let (endpoint, name) = table.newest()?;
        let index = claim_slot(&mut table.slots, |slot| matches!(slot, Slot::Free));
        if index == PeerTag::SLOTS as usize {
            table.slots.pop();
            return Err(Error::new(ErrorKind::Exhausted, "connect", "every peer slot is taken"));
        }
        match table.peer_tags.get_mut(index) {
            Some(tag) => *tag = tag.next(),
            None => table.peer_tags.push(PeerTag::first(index as u32)),
        }
        table.slots[index] = Slot::Offered(endpoint);
        Ok((PeerSlot(index as u32), name))
    }

    /// The peer tag of who has a slot, or is offered it.
    pub(crate) fn peer_tag(&self, slot: PeerSlot) -> PeerTag {
        self.lock().peer_tags[slot.0 as usize]
    }

    /// Brings an offered slot up.
    ///
    /// A peer may come back while its former connection still ends here. Where the provider keeps a state
    /// of each address, that end is waited for: the state goes with the address, and both sides begin anew.
    /// Else one side might think a handshake done that the other one waits for.
    ///
    /// # Errors
    /// `Busy` where that takes too long, or another live peer has the address.
    pub(crate) fn complete(&self, slot: PeerSlot, there: RemoteAddress) -> Result<()> {
        let table = self.lock();
        let mut table = self.wait_for_former(table, slot, &there)?;
        let Some(Slot::Offered(endpoint)) = table.slots.get(slot.0 as usize) else {
            return Err(Error::new(ErrorKind::Closed, "connect", "the connection ended before it was made"));
        };
        let endpoint = *endpoint;
        let known = table.know(slot, endpoint, there)?;
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
        there: &RemoteAddress,
    ) -> Result<MutexGuard<'a, Table>> {
        let address = &there.address;
        let is_early = |table: &mut Table| {
            let leaves = self.keeps_states && table.is_leaving(address);
            let has_former = self.are_cards && table.has_former_owner(address);
            (leaves || has_former || self.is_anothers(table, slot, there)) && !table.endpoints.is_empty()
        };
        let waited = self.ended.wait_timeout_while(table, self.patience, is_early);
        match waited.unwrap_or_else(PoisonError::into_inner) {
            (table, limit) if !limit.timed_out() => Ok(table),
            (table, _) if self.is_anothers(&table, slot, there) => Err(anothers()),
            _ => {
                let why = "what was posted over the retiring connection to this peer has not ended yet: connect again";
                Err(Error::new(ErrorKind::Busy, "connect", why))
            }
        }
    }

    /// Whether what comes from there would be told as another live peer's, or another's as this one's.
    fn is_anothers(&self, table: &Table, slot: PeerSlot, there: &RemoteAddress) -> bool {
        self.by_address && table.is_anothers(slot, there)
    }

    /// The peer of `slot` is somewhere else now.
    ///
    /// # Errors
    /// `Protocol` where it has moved too often, `Busy` where another live peer is there.
    pub(crate) fn renew(&self, slot: PeerSlot, there: RemoteAddress) -> Result<()> {
        let mut table = self.lock();
        if self.is_anothers(&table, slot, &there) {
            return Err(anothers());
        }
        // One that has left meanwhile need not be found any more.
        let Some(Slot::Up(Known { endpoint, moves, .. })) = table.slots.get(slot.0 as usize) else {
            return Ok(());
        };
        let (endpoint, moves) = (*endpoint, *moves + 1);
        if moves > MOVES {
            let why = format!("the peer's endpoint has moved {MOVES} times: connect anew");
            return Err(Error::new(ErrorKind::Protocol, "renew a connection", why));
        }
        let known = table.know(slot, endpoint, there)?;
        table.slots[slot.0 as usize] = Slot::Up(Known { moves, ..known });
        self.changed();
        Ok(())
    }

    /// The name of the newest endpoint, if the peer of `slot` does not know it.
    pub(crate) fn untold(&self, slot: PeerSlot) -> Option<Vec<u8>> {
        let table = self.lock();
        let (newest, name) = table.newest().ok()?;
        match table.slots.get(slot.0 as usize) {
            Some(Slot::Up(known)) if known.endpoint != newest => Some(name),
            _ => None,
        }
    }

    /// The peer of `slot` knows the endpoint of that name.
    pub(crate) fn told(&self, slot: PeerSlot, name: &[u8]) {
        let mut table = self.lock();
        let Some(endpoint) =
            table.endpoints.last().filter(|endpoint| endpoint.name == name).map(|endpoint| endpoint.number)
        else {
            return;
        };
        if let Some(Slot::Up(known)) = table.slots.get_mut(slot.0 as usize)
            && let Some(address) = known.ahead.take()
        {
            (known.endpoint, known.address) = (endpoint, Some(address));
            self.changed();
        }
    }

    /// Another endpoint is open: connected peers' addresses are inserted there, for when they know it.
    pub(crate) fn open_endpoint(&self, number: u32, name: Vec<u8>, addresses: &Arc<Addresses>) -> Result<()> {
        let mut table = self.lock();
        for (slot, known) in (0_u32..).zip(&mut table.slots) {
            if let Slot::Up(known) = known {
                // Nothing has come to it yet.
                known.ahead = Some(addresses.insert(slot, &known.there.address, false)?);
            }
        }
        table.endpoints.push(Open { number, name, addresses: Arc::clone(addresses) });
        self.changed();
        Ok(())
    }

    /// An endpoint is closed: nothing goes over it any more.
    pub(crate) fn close_endpoint(&self, number: u32) {
        let mut table = self.lock();
        self.ended.notify_all();
        table.endpoints.retain(|endpoint| endpoint.number != number);
        for slot in &mut table.slots {
            if let Slot::Up(known) = slot
                && known.endpoint == number
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
        table.endpoints.iter().for_each(|endpoint| endpoint.addresses.demote(slot.0));
        self.changed();
    }

    /// Nothing of the slot's peer is left here. The provider keeps its addresses where `is_haunted`.
    pub(crate) fn end(&self, slot: PeerSlot, is_haunted: bool) {
        let mut table = self.lock();
        table.endpoints.iter().for_each(|endpoint| endpoint.addresses.remove(slot.0, is_haunted));
        table.slots[slot.0 as usize] = Slot::Gone;
        self.ended.notify_all();
        self.changed();
    }

    /// The slot may be offered anew.
    pub(crate) fn free(&self, slot: PeerSlot) {
        self.lock().slots[slot.0 as usize] = Slot::Free;
    }

    /// Tells how the slots are if anything changed since the count in `seen`.
    pub(crate) fn refresh(&self, seen: &mut u64, into: &mut Vec<View>, peer_tags: &mut Vec<PeerTag>) -> bool {
        let Some(table) = self.table.lock_if_changed(seen) else { return false };
        into.clear();
        into.extend(table.slots.iter().map(Slot::view));
        peer_tags.clone_from(&table.peer_tags);
        true
    }

    pub(crate) fn is_up(&self, slot: PeerSlot) -> bool {
        matches!(self.lock().slots.get(slot.0 as usize), Some(Slot::Up(_)))
    }

    /// Bytes of the addresses of this side, unless its device is lost.
    pub(crate) fn name_len(&self) -> Option<usize> {
        self.lock().endpoints.last().map(|endpoint| endpoint.name.len())
    }
}

fn anothers() -> Error {
    let why = "the peer offers an address that another live peer has, of another process, and this device tells who \
               sent something by its address alone: where it is the same card after a restart, connect again once \
               the retiring peer is gone";
    Error::new(ErrorKind::Busy, "connect", why)
}

#[cfg(test)]
mod tests;
