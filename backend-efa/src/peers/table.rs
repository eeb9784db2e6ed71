//! The slots of a domain, and the endpoints by which their peers may know it.

use std::sync::Arc;

use multirail_spi::{Error, ErrorKind, PeerSlot, Result};

use super::slot::{Known, RemoteAddress, Slot};
use crate::addresses::Addresses;
use crate::tag::PeerTag;

/// Bytes of a card's address that name a queue pair: its GID and number (`efa_ep_addr`); its key follows.
const QUEUE_PAIR: usize = 18;

/// An endpoint that peers may know.
pub(super) struct Open {
    pub(super) number: u32,
    /// By which peers reach it.
    pub(super) name: Vec<u8>,
    pub(super) addresses: Arc<Addresses>,
}

#[derive(Default)]
pub(super) struct Table {
    pub(super) slots: Vec<Slot>,
    /// Of who has each slot, or had it last.
    pub(super) peer_tags: Vec<PeerTag>,
    /// The newest last: two while the endpoint moves, else one.
    pub(super) endpoints: Vec<Open>,
}

impl Table {
    pub(super) fn newest(&self) -> Result<(u32, Vec<u8>)> {
        let endpoint = self.endpoints.last();
        let gone = || Error::new(ErrorKind::DeviceLost, "connect", "the device does not work any more");
        endpoint.map(|endpoint| (endpoint.number, endpoint.name.clone())).ok_or_else(gone)
    }

    /// Whether all connections to that address end, and some have not yet. There may be several, where two
    /// sides have connected to each other: they share one state.
    pub(super) fn is_leaving(&self, address: &[u8]) -> bool {
        let mut sharers = self.slots.iter().filter(|slot| slot.address() == Some(address)).peekable();
        sharers.peek().is_some() && !sharers.any(Slot::is_up)
    }

    /// Whether another peer with that queue pair's number is still known: it is gone, and its number was given
    /// anew. The provider finds queue pairs by their numbers, and would take the newer one's place out with the
    /// older one's address, on whose own removal it then crashes (`efa_conn_release`; 1.17 to 2.5).
    pub(super) fn has_former_owner(&self, address: &[u8]) -> bool {
        let mut others = self.slots.iter().filter_map(Slot::address).filter(|other| *other != address);
        others.any(|other| other.get(..QUEUE_PAIR) == address.get(..QUEUE_PAIR))
    }

    /// Whether a live peer, in another process and another slot than `slot`, has that address. Several slots of one
    /// process may share it, where two sides have connected to each other.
    pub(super) fn is_anothers(&self, slot: PeerSlot, there: &RemoteAddress) -> bool {
        let others = (0_u32..).zip(&self.slots).filter(|(index, _)| *index != slot.0);
        let mut known = others
            .filter_map(|(_, other)| if let Slot::Up(known) = other { Some(&known.there) } else { None });
        known.any(|known| known.address == there.address && known.process != there.process)
    }

    /// Inserts a peer that knows `endpoint` into every endpoint.
    pub(super) fn know(&self, slot: PeerSlot, endpoint: u32, there: RemoteAddress) -> Result<Known> {
        let (mut address, mut ahead) = (None, None);
        for open in &self.endpoints {
            let inserted = Some(open.addresses.insert(slot.0, &there.address, self.endpoints.len() == 1)?);
            match open.number == endpoint {
                true => address = inserted,
                false if open.number > endpoint => ahead = inserted,
                false => {}
            }
        }
        Ok(Known { there, endpoint, address, ahead, moves: 0 })
    }
}
