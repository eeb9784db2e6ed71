//! The peer slots of a domain. Control threads reserve, connect and disconnect them; the endpoint reads them.

mod slot;
mod table;

use std::sync::{Arc, Condvar, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use multirail_spi::{Error, ErrorKind, FenceKind, PeerSlot, Result, SlotTable, Time, claim_slot};

use crate::address_vector::AddressVector;
use crate::endpoint_replacement::{EFA_GRACE, MIN_RETIREMENT};
use crate::library::Info;
use crate::settings;
use crate::tag::PeerTag;
use slot::{ConnectedPeer, SlotState};
pub(crate) use slot::{Destination, EmptyWriteTarget, FencedSlot, RemoteAddress, SlotView};
use table::{OpenEndpoint, PeerTable};

/// How often a peer's address may change during a connection. This side keeps all of its addresses, because bytes may
/// still arrive from each. An honest peer needs seconds for each change.
const MAX_RELOCATIONS: u32 = 1024;

/// How long a peer that connects again waits for the end of its former connection. The two sides wait one after the
/// other. If it takes too long on the first rail, the handshake fails, so no other rail waits. The time of both sides
/// must be less than the limit of a handshake (5 s).
const FORMER_CONNECTION_LIMIT: Duration = Duration::from_millis(1500);

/// All peer slots of a domain.
#[derive(Default)]
pub(crate) struct Peers {
    table: SlotTable<PeerTable>,
    /// Whether a peer that connects again waits for the end of its former connection, because the provider keeps state
    /// for each address.
    waits_for_former: bool,
    /// Whether addresses name queue pairs.
    has_queue_pairs: bool,
    /// Whether this side knows the sender of an arrival only by its address, because completion data has no room for a
    /// peer tag.
    identifies_by_address: bool,
    /// How long a connecting peer may wait for other peers to leave.
    wait_limit: Duration,
    /// [`Peers::card_may_write`].
    card_may_write: bool,
    /// Notified when a connection has ended, and when an endpoint was closed.
    on_end: Condvar,
}

impl Peers {
    /// Creates the slots of a device. Nothing waits here if the caller drives the engine itself (`worker_sleeps` is
    /// false): the thread that waits would be the thread that has to poll meanwhile.
    pub(crate) fn new(info: &Info, worker_sleeps: bool) -> Self {
        Self {
            waits_for_former: info.uses_efa_protocols() && worker_sleeps,
            has_queue_pairs: info.is_card(),
            identifies_by_address: info.domain().cq_data_size < 8,
            card_may_write: info.is_card() && settings::may_use_device_reads(info),
            wait_limit: if worker_sleeps { FORMER_CONNECTION_LIMIT } else { Duration::ZERO },
            ..Self::default()
        }
    }

    /// Reserves a slot. Returns it with the address of the endpoint that its peer is to know.
    pub(crate) fn reserve(&self) -> Result<(PeerSlot, Vec<u8>)> {
        let mut table = self.lock();
        let (endpoint, address) = table.newest()?;
        let index = claim_slot(&mut table.slots, |slot| matches!(slot, SlotState::Free));
        if index == PeerTag::SLOTS as usize {
            table.slots.pop();
            return Err(Error::new(ErrorKind::Exhausted, "connect", "every peer slot is taken"));
        }
        match table.peer_tags.get_mut(index) {
            Some(tag) => *tag = tag.next(),
            None => table.peer_tags.push(PeerTag::first(index as u32)),
        }
        table.slots[index] = SlotState::Offered(endpoint);
        // Usually there is nothing to remove. There is a fence if the slot was fenced while its previous peer was
        // leaving.
        table.fences.retain(|fence| fence.slot.0 as usize != index);
        Ok((PeerSlot(index as u32), address))
    }

    /// The peer tag of a reserved or connected slot.
    pub(crate) fn peer_tag(&self, slot: PeerSlot) -> PeerTag {
        self.lock().peer_tags[slot.0 as usize]
    }

    /// Connects a reserved slot.
    ///
    /// A peer may connect again while its former connection still ends here. If the provider keeps state for each
    /// address, this method waits for that end: the provider drops its state with the address, and both sides begin
    /// without state. Otherwise one side might consider a handshake done while the other side waits for it.
    ///
    /// # Errors
    /// `Busy` if the wait takes too long, or if another live peer has the address.
    pub(crate) fn complete(&self, slot: PeerSlot, remote: RemoteAddress) -> Result<()> {
        let table = self.lock();
        let mut table = self.wait_for_others(table, slot, &remote)?;
        let Some(SlotState::Offered(endpoint)) = table.slots.get(slot.0 as usize) else {
            return Err(Error::new(ErrorKind::Closed, "connect", "the connection ended before it was made"));
        };
        let endpoint = *endpoint;
        let peer = table.insert_peer(slot, endpoint, remote)?;
        table.slots[slot.0 as usize] = SlotState::Up(peer);
        self.mark_changed();
        Ok(())
    }

    /// Waits until three conditions hold: no former connection to the address is ending, no former peer with the same
    /// queue pair number is known, and no other live peer has the address.
    fn wait_for_others<'a>(
        &'a self,
        table: MutexGuard<'a, PeerTable>,
        slot: PeerSlot,
        remote: &RemoteAddress,
    ) -> Result<MutexGuard<'a, PeerTable>> {
        let address = &remote.address;
        let must_wait = |table: &mut PeerTable| {
            let is_leaving = self.waits_for_former && table.is_leaving(address);
            let has_former = self.has_queue_pairs && table.has_former_owner(address);
            (is_leaving || has_former || self.is_address_taken(table, slot, remote))
                && !table.endpoints.is_empty()
        };
        let waited = self.on_end.wait_timeout_while(table, self.wait_limit, must_wait);
        match waited.unwrap_or_else(PoisonError::into_inner) {
            (table, limit) if !limit.timed_out() => Ok(table),
            (table, _) if self.is_address_taken(&table, slot, remote) => Err(address_taken()),
            _ => {
                let why = "requests of the former connection to this peer have not ended yet: connect again";
                Err(Error::new(ErrorKind::Busy, "connect", why))
            }
        }
    }

    /// Whether another live peer has the address, so that arrivals from the two could not be told apart.
    fn is_address_taken(&self, table: &PeerTable, slot: PeerSlot, remote: &RemoteAddress) -> bool {
        self.identifies_by_address && table.is_address_taken(slot, remote)
    }

    /// Whether an arrival that names one slot may be from the peer of the other.
    pub(crate) fn is_same_sender(&self, named: PeerSlot, other: PeerSlot) -> bool {
        named == other
            || self.identifies_by_address
                && self.lock().endpoints.iter().any(|open| open.av.shares_address(named.0, other.0))
    }

    /// Takes the new address of a slot's peer.
    ///
    /// # Errors
    /// `Protocol` if the address has changed too often, `Busy` if another live peer has it.
    pub(crate) fn renew(&self, slot: PeerSlot, remote: RemoteAddress) -> Result<()> {
        let mut table = self.lock();
        if self.is_address_taken(&table, slot, &remote) {
            return Err(address_taken());
        }
        // The peer may have left in the meantime.
        let Some(SlotState::Up(ConnectedPeer { endpoint, relocations, .. })) =
            table.slots.get(slot.0 as usize)
        else {
            return Ok(());
        };
        let (endpoint, relocations) = (*endpoint, *relocations + 1);
        if relocations > MAX_RELOCATIONS {
            let why = format!("the peer's address has changed {MAX_RELOCATIONS} times: connect anew");
            return Err(Error::new(ErrorKind::Protocol, "renew a connection", why));
        }
        let peer = table.insert_peer(slot, endpoint, remote)?;
        table.slots[slot.0 as usize] = SlotState::Up(ConnectedPeer { relocations, ..peer });
        self.mark_changed();
        Ok(())
    }

    /// The address of the newest endpoint, if the peer of `slot` does not know it.
    pub(crate) fn next_offer_address(&self, slot: PeerSlot) -> Option<Vec<u8>> {
        let table = self.lock();
        let (newest, address) = table.newest().ok()?;
        match table.slots.get(slot.0 as usize) {
            Some(SlotState::Up(peer)) if peer.endpoint != newest => Some(address),
            _ => None,
        }
    }

    /// Notes that the peer of `slot` knows the endpoint with this address.
    pub(crate) fn confirm_address(&self, slot: PeerSlot, address: &[u8]) {
        let mut table = self.lock();
        let Some(endpoint) = table
            .endpoints
            .last()
            .filter(|endpoint| endpoint.address == address)
            .map(|endpoint| endpoint.number)
        else {
            return;
        };
        if let Some(SlotState::Up(peer)) = table.slots.get_mut(slot.0 as usize)
            && let Some(address) = peer.next_address.take()
        {
            (peer.endpoint, peer.address) = (endpoint, Some(address));
            self.mark_changed();
        }
    }

    /// Adds an open endpoint, and inserts the addresses of connected peers there. Requests to a peer use the endpoint
    /// once the peer knows it.
    pub(crate) fn open_endpoint(&self, number: u32, address: Vec<u8>, av: &Arc<AddressVector>) -> Result<()> {
        let mut table = self.lock();
        for (slot, state) in (0_u32..).zip(&mut table.slots) {
            if let SlotState::Up(peer) = state {
                // `insert` sometimes removes an address and inserts it again, which is safe only on the only open endpoint.
                // `false` forbids that. It is not needed here: nothing has arrived at the new endpoint yet, so the provider
                // knows no address there.
                peer.next_address = Some(av.insert(slot, &peer.remote.address, false)?);
            }
        }
        table.endpoints.push(OpenEndpoint { number, address, av: Arc::clone(av) });
        self.mark_changed();
        Ok(())
    }

    /// Fences a slot: the endpoint replaces the libfabric endpoint that its peer may have sent to. Ready once that is
    /// closed, or left open so that nothing arrives there ([`Peers::endpoint_left_open`]).
    ///
    /// # Errors
    /// `Unsupported` if no other one can be opened.
    pub(crate) fn fence(&self, slot: PeerSlot, kind: FenceKind, now: Time) -> Poll<Result<()>> {
        let mut table = self.lock();
        let fence = match table.fences.iter().find(|fence| fence.slot == slot) {
            Some(fence) => *fence,
            // The peer has left in the meantime.
            None if !table.slots.get(slot.0 as usize).is_some_and(SlotState::is_up) => {
                return Poll::Ready(Ok(()));
            }
            None => {
                // If no endpoint is open, this side's device is lost: then the fence is about every endpoint so far.
                let newest = table.endpoints.last().map(|endpoint| (kind, endpoint.number));
                let (kind, last) = newest.unwrap_or((FenceKind::DeviceLost, u32::MAX));
                let fence = FencedSlot { slot, kind, last, is_refused: false };
                table.fences.push(fence);
                self.mark_changed();
                fence
            }
        };
        self.state_of(&table, fence, now)
    }

    /// Whether a fence is finished at `now`.
    fn state_of(&self, table: &PeerTable, fence: FencedSlot, now: Time) -> Poll<Result<()>> {
        if fence.is_refused {
            let why =
                "no other endpoint can be opened in place of the one to which the peer's device has sent";
            return Poll::Ready(Err(Error::new(ErrorKind::Unsupported, "fence", why)));
        }
        let quiet = match fence.kind {
            _ if !self.card_may_write => Duration::ZERO,
            // The other device sends nothing any more; its last packets need a moment.
            FenceKind::DeviceLost => MIN_RETIREMENT,
            _ => EFA_GRACE,
        };
        if table.is_any_reachable_up_to(fence.last, now, quiet) { Poll::Pending } else { Poll::Ready(Ok(())) }
    }

    /// Lifts a fence. Its peer sends to the newest endpoint from now on; nothing arrives any more where it has sent
    /// before.
    ///
    /// # Errors
    /// `Unsupported` if something may still arrive there.
    pub(crate) fn lift_fence(&self, slot: PeerSlot, now: Time) -> Result<()> {
        let mut table = self.lock();
        let fence = table.fences.iter().find(|fence| fence.slot == slot).copied();
        if fence.is_some_and(|fence| !matches!(self.state_of(&table, fence, now), Poll::Ready(Ok(())))) {
            let why = "the endpoint to which the peer has sent before is still in use";
            return Err(Error::new(ErrorKind::Unsupported, "lift a fence", why));
        }
        if fence.is_some() {
            table.fences.retain(|fence| fence.slot != slot);
            self.mark_changed();
        }
        Ok(())
    }

    /// Refuses the fences that would need another endpoint.
    pub(crate) fn refuse_fences(&self) {
        self.lock().fences.iter_mut().for_each(|fence| fence.is_refused = true);
        self.mark_changed();
    }

    /// Whether the card may still write to memory of this side over an endpoint that stays open, once no call goes
    /// there any more: by the reads that the provider has asked the card for.
    pub(crate) fn card_may_write(&self) -> bool {
        self.card_may_write
    }

    /// Notes that an endpoint stays open for ever, and that no call goes there any more.
    pub(crate) fn endpoint_left_open(&self, number: u32, now: Time) {
        let mut table = self.lock();
        table.closing.retain(|closing| *closing != number);
        table.left_open.retain(|(_, since)| now.since(*since) < EFA_GRACE);
        table.left_open.push((number, now));
    }

    /// Notes that libfabric has closed an endpoint.
    pub(crate) fn endpoint_closed(&self, number: u32) {
        self.lock().closing.retain(|closing| *closing != number);
    }

    /// Removes an endpoint that is to be closed: nothing is posted to it any more.
    pub(crate) fn close_endpoint(&self, number: u32) {
        let mut table = self.lock();
        self.on_end.notify_all();
        table.closing.push(number);
        table.endpoints.retain(|endpoint| endpoint.number != number);
        for slot in &mut table.slots {
            if let SlotState::Up(peer) = slot
                && peer.endpoint == number
            {
                peer.address = None;
            }
        }
        self.mark_changed();
    }

    /// Disconnects a slot.
    pub(crate) fn disconnect(&self, slot: PeerSlot) {
        let mut table = self.lock();
        let Some(state) = table.slots.get_mut(slot.0 as usize) else { return };
        let address = match state {
            SlotState::Offered(_) => None,
            SlotState::Up(peer) => Some(std::mem::take(&mut peer.remote.address)),
            SlotState::Free | SlotState::Leaving(_) | SlotState::Gone => return,
        };
        *state = SlotState::Leaving(address);
        // From now on, arrivals from this address belong to another slot with the same address, if there is one.
        table.endpoints.iter().for_each(|endpoint| endpoint.av.demote(slot.0));
        self.mark_changed();
    }

    /// Ends the connection of a disconnected slot, to which nothing is posted any more. If `is_pinned`, the peer's
    /// addresses stay in the address vectors.
    pub(crate) fn end(&self, slot: PeerSlot, is_pinned: bool) {
        let mut table = self.lock();
        table.endpoints.iter().for_each(|endpoint| endpoint.av.remove(slot.0, is_pinned));
        table.slots[slot.0 as usize] = SlotState::Gone;
        table.fences.retain(|fence| fence.slot != slot);
        self.on_end.notify_all();
        self.mark_changed();
    }

    /// Makes a slot free for the next peer.
    pub(crate) fn free(&self, slot: PeerSlot) {
        self.lock().slots[slot.0 as usize] = SlotState::Free;
    }

    /// Copies the state of all slots if it has changed since the last call with this `seen`. Returns whether it did.
    pub(crate) fn refresh(
        &self,
        seen: &mut u64,
        into: &mut Vec<SlotView>,
        peer_tags: &mut Vec<PeerTag>,
        fences: &mut Vec<FencedSlot>,
    ) -> bool {
        let Some(table) = self.table.lock_if_changed(seen) else { return false };
        into.clear();
        into.extend(table.slots.iter().map(SlotState::view));
        peer_tags.clone_from(&table.peer_tags);
        fences.clone_from(&table.fences);
        true
    }

    pub(crate) fn is_up(&self, slot: PeerSlot) -> bool {
        matches!(self.lock().slots.get(slot.0 as usize), Some(SlotState::Up(_)))
    }

    /// The length of this side's addresses in bytes; `None` if the device is lost.
    pub(crate) fn address_len(&self) -> Option<usize> {
        self.lock().endpoints.last().map(|endpoint| endpoint.address.len())
    }

    fn lock(&self) -> MutexGuard<'_, PeerTable> {
        self.table.lock()
    }

    fn mark_changed(&self) {
        self.table.mark_changed();
    }
}

fn address_taken() -> Error {
    let why = "another live peer, of another process, already has this address, and this device knows senders only by \
               their addresses. If the peer has restarted, connect again once its former connection has ended";
    Error::new(ErrorKind::Busy, "connect", why)
}
