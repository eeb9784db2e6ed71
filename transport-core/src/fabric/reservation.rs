//! The slots for a peer on one transport: how they are reserved, paired with the peer's slots, and brought up.

use std::sync::Arc;

use crossbeam_utils::CachePadded;

use super::Transport;
use super::group::Group;
use super::pairing::Pairing;
use crate::control::{LinkReport, TransportOffer};
use crate::engine::flow_control::SendCredit;
use crate::engine::peer::{Link, PairedRail};
use crate::no_transport::OfferedTransport;
use crate::spi::{Domain, PeerSlot};
use crate::{Error, ErrorKind, Result};

/// The slots that are reserved for a peer on one transport.
pub(super) struct Reservation {
    pub label: String,
    pub is_companion: bool,
    backend: &'static str,
    domains: Vec<Arc<dyn Domain>>,
    /// Whether each rail's device was lost before.
    lost: Vec<bool>,
    /// Whether the peer is in this process.
    is_local: bool,
    /// The rate of each rail in Mbit/s, 0 if unknown.
    rates: Vec<u32>,
    /// One slot per rail, or one per pair of rails once the pairs are known.
    pub slots: Vec<RailSlot>,
    pairing: Option<Pairing>,
    /// The rates of the peer's rails.
    peer_rates: Vec<u32>,
    /// The peer's offers that have arrived, one per pair.
    offers: Vec<Vec<u8>>,
    /// The credit that the peer grants this side, over all rail groups.
    credit: Arc<SendCredit>,
    /// Why this transport does not reach the peer.
    pub refused: Option<String>,
}

/// A peer slot on one rail, with the offer for the peer.
pub(super) struct RailSlot {
    rail: usize,
    domain: Arc<dyn Domain>,
    /// `None` if this side's device of the pair is lost, or the peer's. The two sides do not use the pair then.
    slot: Option<PeerSlot>,
    /// No bytes if this side's device is lost.
    offer: Vec<u8>,
}

impl RailSlot {
    /// Connects the slot with the peer's offer, or gives the slot back if the peer's device is lost.
    fn complete(&mut self, offer: &[u8]) -> Result<()> {
        match self.slot {
            Some(slot) if !offer.is_empty() => self.domain.connector().complete(slot, offer),
            _ => {
                self.give_back();
                Ok(())
            }
        }
    }

    /// Gives the slot back to the backend.
    pub fn give_back(&mut self) {
        if let Some(slot) = self.slot.take() {
            self.domain.connector().disconnect(slot);
        }
    }
}

impl Reservation {
    pub fn new(transport: &Transport, is_local: bool) -> Self {
        Self {
            is_local,
            label: transport.label.clone(),
            is_companion: transport.is_companion,
            backend: transport.backend,
            domains: transport.domains.clone(),
            lost: transport.lost_rails(),
            rates: transport.rates(),
            slots: Vec::new(),
            pairing: None,
            peer_rates: Vec::new(),
            offers: Vec::new(),
            credit: Arc::default(),
            refused: None,
        }
    }

    /// The transport's label and backend, as the peer learns them.
    pub fn offered(&self) -> OfferedTransport {
        OfferedTransport::new(&self.label, self.backend)
    }

    fn matches(&self, offer: &TransportOffer) -> bool {
        offer.label == self.label && offer.backend == self.backend
    }

    /// Reserves a slot on a rail, if its device works.
    fn reserve_on(&self, rail: usize) -> Result<RailSlot> {
        let domain = Arc::clone(&self.domains[rail]);
        let connector = domain.connector();
        let prepared = match self.lost[rail] {
            true => None,
            false => {
                let prepared = if self.is_local { connector.prepare_local() } else { connector.prepare() };
                match prepared {
                    // The engine has not noticed the loss yet.
                    Err(error) if error.kind() == ErrorKind::DeviceLost => None,
                    prepared => Some(prepared?),
                }
            }
        };
        let (slot, offer) = prepared.map_or((None, Vec::new()), |(slot, offer)| (Some(slot), offer));
        Ok(RailSlot { rail, domain, slot, offer })
    }

    /// Reserves one slot per rail on the side that connects, and one per pair of rails on the other side, which has
    /// the peer's offers `theirs`.
    pub fn reserve(&mut self, theirs: Option<&[TransportOffer]>) -> Result<()> {
        let rails: Vec<_> = match theirs {
            None => (0..self.domains.len()).collect(),
            Some(theirs) => match theirs.iter().find(|offer| self.matches(offer)) {
                Some(offer) => self.pair_with(offer),
                None => Vec::new(),
            },
        };
        for rail in rails {
            let slot = self.reserve_on(rail)?;
            self.slots.push(slot);
        }
        Ok(())
    }

    /// The offer to send to the peer.
    pub fn offer(&self) -> TransportOffer {
        TransportOffer {
            label: self.label.clone(),
            backend: self.backend.into(),
            rates: self.rates.clone(),
            rails: self.slots.iter().map(|slot| slot.offer.clone()).collect(),
        }
    }

    /// Brings the pairs up, and returns the report for the peer.
    pub fn complete(&mut self, theirs: &[TransportOffer], reports: &[LinkReport]) -> LinkReport {
        let offer = theirs.iter().find(|offer| self.matches(offer));
        let report = reports.iter().find(|report| report.label == self.label);
        let done = match (offer, self.pairing) {
            (None, _) => Err(unreachable("the peer has no transport of this label and backend")),
            (Some(offer), None) => self.complete_as_connector(offer),
            (Some(_), Some(pairing)) => self.complete_as_listener(pairing, report).map(|()| 0),
        };
        let done = done.and_then(|new| match self.slots.iter().any(|slot| slot.slot.is_some()) {
            true => Ok(new),
            false => Err(unreachable("no pair of rails has a device that works at both ends")),
        });
        let new = self.slots.len() - *done.as_ref().unwrap_or(&0)..;
        let more = self.slots[new].iter().map(|slot| slot.offer.clone()).collect();
        // The order of the pairs. The sort is stable, and each rail sends over its first slot.
        self.slots.sort_by_key(|slot| slot.rail);
        // The context alone is a sentence for the missing transport. A backend's error needs its kind and source too.
        let describe = |error: Error| match offer {
            None => error.context().to_owned(),
            Some(_) => error.to_string(),
        };
        self.refused = done.err().map(describe);
        LinkReport { label: self.label.clone(), refused: self.refused.clone(), more }
    }

    /// Pairs the rails with those of a peer that connects. Returns the local rail of each pair.
    fn pair_with(&mut self, offer: &TransportOffer) -> Vec<usize> {
        self.peer_rates.clone_from(&offer.rates);
        self.offers.clone_from(&offer.rails);
        self.pairing = Pairing::new(self.domains.len(), offer.rails.len());
        self.pairing
            .map_or(Vec::new(), |pairing| (0..pairing.len()).map(|pair| pairing.local(pair)).collect())
    }

    /// Completes all pairs on the side that connected. Returns the number of slots that are new; they are the last.
    fn complete_as_connector(&mut self, offer: &TransportOffer) -> Result<usize> {
        let pairing = Pairing::new(self.domains.len(), offer.rates.len())
            .ok_or_else(|| unreachable("the peer offers no rail"))?;
        check_offers(offer.rails.len(), pairing)?;
        self.peer_rates.clone_from(&offer.rates);
        let before = self.slots.len();
        for pair in (0..pairing.len()).filter(|pair| !pairing.sends(*pair)) {
            let slot = self.reserve_on(pairing.local(pair))?;
            self.slots.push(slot);
        }
        let order = Self::order(pairing);
        for (slot, pair) in self.slots.iter_mut().zip(order) {
            slot.complete(&offer.rails[pair])?;
        }
        self.pairing = Some(pairing);
        Ok(self.slots.len() - before)
    }

    /// Completes all pairs on the side that listens, which now has every offer.
    fn complete_as_listener(&mut self, pairing: Pairing, report: Option<&LinkReport>) -> Result<()> {
        let report = report.ok_or_else(|| unreachable("the peer did not report on this transport"))?;
        if let Some(why) = &report.refused {
            return Err(unreachable(&format!("refused by the peer: {why}")));
        }
        self.offers.extend_from_slice(&report.more);
        check_offers(self.offers.len(), pairing)?;
        for (offer, pair) in self.offers.iter().zip(Self::order(pairing.mirrored())) {
            self.slots[pair].complete(offer)?;
        }
        Ok(())
    }

    /// The pairs in the order of the connecting side's slots: first the pairs that its rails send over, then the
    /// others.
    fn order(pairing: Pairing) -> impl Iterator<Item = usize> {
        let send = (0..pairing.len()).filter(move |pair| pairing.sends(*pair));
        send.chain((0..pairing.len()).filter(move |pair| !pairing.sends(*pair)))
    }

    /// The link over one of the transport's rail groups.
    pub fn link(&self, transport: &Transport, group: &Group) -> Link {
        let pairing = self.pairing.filter(|_| self.refused.is_none());
        let mut link = Link {
            label: self.label.clone(),
            engine: Arc::clone(&group.engine),
            index: u32::MAX,
            domain: Arc::clone(&self.domains[group.rails.start]),
            rails: group.rails.clone().map(|_| None).collect(),
            is_whole: self.slots.iter().all(|slot| slot.slot.is_some()),
            receiving: Vec::new(),
            refused: self.refused.clone(),
            credit: Arc::clone(&self.credit),
            direct: None,
            direct_slot: 0,
            max_direct: 0,
            backlog: CachePadded::default(),
            counts: CachePadded::default(),
        };
        let Some(pairing) = pairing else { return link };
        let weights = pairing.weights(&transport.rates(), &self.peer_rates);
        let of_group = |(_, slot): &(usize, &RailSlot)| group.rails.contains(&slot.rail);
        for (pair, slot) in self.slots.iter().enumerate().filter(of_group) {
            let Some(peer_slot) = slot.slot else { continue };
            let paired = PairedRail {
                domain: Arc::clone(&slot.domain),
                slot: peer_slot,
                pair: pair as u16,
                remote: pairing.remote(pair) as u16,
                weight: weights[slot.rail],
                renewals: Default::default(),
                capacity: PairedRail::full_capacity(weights[slot.rail]),
            };
            let rail = slot.rail - group.rails.start;
            // The first pair whose devices work: without losses, the one for which `Pairing::sends` is true.
            match &mut link.rails[rail] {
                sends @ None => *sends = Some(paired),
                Some(_) => link.receiving.push((rail, paired)),
            }
        }
        link.index = group.engine.allocate_link();
        if let Some(first) = link.rails.iter().flatten().next() {
            link.direct = first.domain.direct(first.slot);
            link.direct_slot = first.slot.0;
            link.max_direct = first.domain.capabilities().max_direct;
        }
        link
    }
}

/// Checks that there is an offer for every pair.
fn check_offers(offers: usize, pairing: Pairing) -> Result<()> {
    match pairing.len() {
        pairs if pairs == offers => Ok(()),
        pairs => Err(unreachable(&format!("the peer made {offers} offers for {pairs} pairs of rails"))),
    }
}

fn unreachable(why: &str) -> Error {
    Error::new(ErrorKind::Unreachable, "connect", why)
}
