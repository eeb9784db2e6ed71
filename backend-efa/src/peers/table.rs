//! The slots of a domain, and the endpoints that peers may know.

use std::sync::Arc;
use std::time::Duration;

use multirail_spi::{Error, ErrorKind, PeerSlot, Result, Time};

use super::slot::{ConnectedPeer, FencedSlot, RemoteAddress, SlotState};
use crate::address_vector::AddressVector;
use crate::tag::PeerTag;

/// The bytes of a card's address that name a queue pair: its GID and number (`efa_ep_addr`). The queue pair's key
/// follows.
const QUEUE_PAIR_LEN: usize = 18;

/// An open endpoint.
pub(super) struct OpenEndpoint {
    pub(super) number: u32,
    /// The address by which peers reach the endpoint.
    pub(super) address: Vec<u8>,
    pub(super) av: Arc<AddressVector>,
}

#[derive(Default)]
pub(super) struct PeerTable {
    pub(super) slots: Vec<SlotState>,
    /// The peer tag of each slot's peer, or of its last one.
    pub(super) peer_tags: Vec<PeerTag>,
    /// The open endpoints, the newest last. There are two while one is replaced.
    pub(super) endpoints: Vec<OpenEndpoint>,
    /// The numbers of endpoints to which nothing is posted any more, and that libfabric has not closed.
    pub(super) closing: Vec<u32>,
    /// The endpoints that stay open for ever, each with the time since which no call goes there any more. Removed after
    /// [`EFA_GRACE`](crate::endpoint_replacement::EFA_GRACE).
    pub(super) left_open: Vec<(u32, Time)>,
    pub(super) fences: Vec<FencedSlot>,
}

impl PeerTable {
    /// The number and the address of the newest endpoint.
    pub(super) fn newest(&self) -> Result<(u32, Vec<u8>)> {
        let endpoint = self.endpoints.last();
        let lost = || Error::new(ErrorKind::DeviceLost, "connect", "the device does not work any more");
        endpoint.map(|endpoint| (endpoint.number, endpoint.address.clone())).ok_or_else(lost)
    }

    /// Whether anything may still arrive at `now` at an endpoint whose number is at most `last` ([`FencedSlot::last`]).
    /// Nothing arrives any more where no call has gone for as long as `quiet`.
    pub(super) fn is_any_reachable_up_to(&self, last: u32, now: Time, quiet: Duration) -> bool {
        let open = self.endpoints.iter().map(|endpoint| endpoint.number);
        let may_receive = |(_, since): &&(u32, Time)| now.since(*since) < quiet;
        let left_open = self.left_open.iter().filter(may_receive).map(|(number, _)| *number);
        open.chain(self.closing.iter().copied()).chain(left_open).any(|number| number <= last)
    }

    /// Whether all connections to this address are disconnected, and some still have requests. If both sides have
    /// connected to each other, there are several connections. They share the provider's state of the address.
    pub(super) fn is_leaving(&self, address: &[u8]) -> bool {
        let mut owners = self.slots.iter().filter(|slot| slot.address() == Some(address)).peekable();
        owners.peek().is_some() && !owners.any(SlotState::is_up)
    }

    /// Whether this side still knows another address with the same GID and queue pair number, and with another key. It
    /// belongs to a peer that is gone; the number was given to a new queue pair.
    ///
    /// The provider finds queue pairs by their numbers. If it removed the older address, it would remove the newer
    /// queue pair, and crash when the newer address is removed later (`efa_conn_release`; 1.17 to 2.5).
    pub(super) fn has_former_owner(&self, address: &[u8]) -> bool {
        let mut others = self.slots.iter().filter_map(SlotState::address).filter(|other| *other != address);
        others.any(|other| other.get(..QUEUE_PAIR_LEN) == address.get(..QUEUE_PAIR_LEN))
    }

    /// Whether another slot than `slot` has a live peer of another process with this address. Several slots may have
    /// the address of one process, where both sides have connected to each other.
    pub(super) fn is_address_taken(&self, slot: PeerSlot, remote: &RemoteAddress) -> bool {
        let others = (0_u32..).zip(&self.slots).filter(|(index, _)| *index != slot.0);
        let mut others = others
            .filter_map(|(_, other)| if let SlotState::Up(peer) = other { Some(&peer.remote) } else { None });
        others.any(|other| other.address == remote.address && other.process != remote.process)
    }

    /// Inserts the address of a peer, which knows `endpoint`, into the address vector of every endpoint.
    pub(super) fn insert_peer(
        &self,
        slot: PeerSlot,
        endpoint: u32,
        remote: RemoteAddress,
    ) -> Result<ConnectedPeer> {
        let (mut address, mut next_address) = (None, None);
        for open in &self.endpoints {
            let inserted = Some(open.av.insert(slot.0, &remote.address, self.endpoints.len() == 1)?);
            match open.number == endpoint {
                true => address = inserted,
                false if open.number > endpoint => next_address = inserted,
                false => {}
            }
        }
        Ok(ConnectedPeer { remote, endpoint, address, next_address, relocations: 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::EmptyWriteTarget;

    /// An address as EFA's provider writes it: a GID, a number, a key.
    fn address(number: u16, key: u32) -> Vec<u8> {
        [&[7; 16][..], &number.to_ne_bytes(), &[0; 2], &key.to_ne_bytes(), &[0; 8]].concat()
    }

    #[test]
    fn a_reused_queue_pair_number_is_noticed() {
        let leaving = |number, key| SlotState::Leaving(Some(address(number, key)));
        let slots = vec![SlotState::Free, leaving(1, 10), leaving(2, 10)];
        let table = PeerTable { slots, ..PeerTable::default() };
        assert!(table.has_former_owner(&address(1, 11)));
        assert!(!table.has_former_owner(&address(1, 10)), "the same queue pair connects again");
        assert!(!table.has_former_owner(&address(3, 10)));
    }

    #[test]
    fn an_address_belongs_to_one_process() {
        let at = |number, process| {
            let empty_write_target = EmptyWriteTarget { base: 0, key: 0 };
            let peer_tag = PeerTag::first(0);
            RemoteAddress { address: address(number, 10), process, peer_tag, empty_write_target }
        };
        let up = |remote| {
            let peer =
                ConnectedPeer { remote, endpoint: 0, address: Some(0), next_address: None, relocations: 0 };
            SlotState::Up(peer)
        };
        let mut table =
            PeerTable { slots: vec![up(at(1, 7)), SlotState::Offered(0)], ..PeerTable::default() };
        let slot = PeerSlot(1);
        assert!(table.is_address_taken(slot, &at(1, 8)));
        assert!(!table.is_address_taken(slot, &at(1, 7)), "both sides have connected");
        assert!(!table.is_address_taken(slot, &at(2, 8)));
        assert!(!table.is_address_taken(PeerSlot(0), &at(1, 8)), "it is the slot's own address");
        table.slots[0] = SlotState::Leaving(Some(address(1, 10)));
        assert!(!table.is_address_taken(slot, &at(1, 8)), "the former peer is gone");
    }

    #[test]
    fn an_endpoint_that_is_left_open_is_reachable_as_long_as_its_card_has_reads() {
        let (since, quiet) = (Time::ZERO, Duration::from_secs(30));
        let table = PeerTable { left_open: vec![(3, since)], closing: vec![5], ..PeerTable::default() };
        let later = since.after(quiet);
        assert!(!table.is_any_reachable_up_to(2, since, quiet));
        assert!(
            table.is_any_reachable_up_to(3, since, quiet) && !table.is_any_reachable_up_to(4, later, quiet)
        );
        assert!(!table.is_any_reachable_up_to(3, since, Duration::ZERO));
        assert!(table.is_any_reachable_up_to(5, later, quiet), "the other one is still closing");
    }
}
