//! Connects queue pairs: each side offers the address of its port and the numbers of its queue pairs.

use std::sync::Arc;
use std::task::Poll;

use multirail_spi::{Connector, Error, ErrorKind, FenceKind, PeerSlot, Result};

use crate::config::MOST_QUEUE_PAIRS;
use crate::domain::DomainState;
use crate::flush::FlushTarget;
use crate::gid::{MOST, choose_common};
use crate::peers::{ConnectionNumber, Joining, QueuePairs, SlotState, too_late};
use crate::port::Port;
use crate::queue_pair::{Carries, PSN_MASK, PortAddress, QueuePair, QueuePairAddress};
use crate::retries::FIRST_WAIT;

/// The offer of a connection, which the peer needs to connect. The first field is the version of the others.
#[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
struct VerbsOffer {
    version: u8,
    address: PortAddress,
    accesses: Vec<QueuePairAddress>,
    messages: QueuePairAddress,
    flush: FlushTarget,
    /// The number of the offered connection. An answer repeats the number of its offer.
    connection: ConnectionNumber,
}

const VERSION: u8 = 5;

impl DomainState {
    /// The number of a connection that this side offers.
    fn connection(&self, generation: u64) -> ConnectionNumber {
        ConnectionNumber { generation, nonce: self.random() }
    }

    /// Creates the queue pairs of a connection.
    fn pairs(&self, connection: ConnectionNumber) -> Result<QueuePairs> {
        let pair = |carries| QueuePair::new(&self.card, carries, self.random() as u32 & PSN_MASK);
        let accesses = (0..self.card.config.queue_pairs).map(|_| pair(Carries::Accesses));
        Ok(QueuePairs {
            accesses: accesses.collect::<Result<_>>()?,
            messages: pair(Carries::Messages)?,
            flush: None,
            connection,
        })
    }

    fn offer(&self, pairs: &QueuePairs) -> Result<Vec<u8>> {
        let offer = VerbsOffer {
            version: VERSION,
            address: self.card.address.clone(),
            accesses: pairs.accesses.iter().map(QueuePair::end).collect(),
            messages: pairs.messages.end(),
            flush: self.flush_page.target(),
            connection: pairs.connection,
        };
        let why = |error: postcard::Error| Error::new(ErrorKind::Io, "connect", error.to_string());
        postcard::to_stdvec(&offer).map_err(why)
    }

    /// Parses and checks the peer's offer.
    fn read(&self, bytes: &[u8]) -> Result<VerbsOffer> {
        let malformed =
            |why: &str| Error::new(ErrorKind::Protocol, "connect", format!("verbs' offer: {why}"));
        let offer: VerbsOffer = postcard::from_bytes(bytes).map_err(|error| malformed(&error.to_string()))?;
        if offer.version != VERSION {
            let context = format!("the peer's offer has version {}, ours {VERSION}", offer.version);
            return Err(Error::new(ErrorKind::Version, "connect", context));
        }
        let ends = || offer.accesses.iter().chain([&offer.messages]);
        let is_end = |end: &QueuePairAddress| end.number <= PSN_MASK && end.psn <= PSN_MASK;
        let count = 1..=usize::from(MOST_QUEUE_PAIRS);
        if !count.contains(&offer.accesses.len())
            || !ends().all(is_end)
            || !(1..=5).contains(&offer.address.mtu)
            || offer.address.gids.len() > MOST
        {
            return Err(malformed("impossible queue pairs"));
        }
        Ok(offer)
    }

    /// Connects each queue pair of this side with one of the peer. Destroys queue pairs that the peer has no partner
    /// for.
    fn join(&self, pairs: &mut QueuePairs, offer: &VerbsOffer) -> Result<()> {
        let (card, address) = (&self.card, &offer.address);
        let met = choose_common(&card.gids, &address.gids)
            .filter(|_| card.address.is_ethernet == address.is_ethernet);
        let Some((ours, theirs)) = met else {
            let context = "one side's port is of InfiniBand or its GIDs of IPv6, the other's is not: choose GIDs of \
                           one kind (`info` lists them)";
            return Err(Error::new(ErrorKind::Unreachable, "connect", context));
        };
        tracing::debug!(device = card.device.name, gid = %ours, "a connection is made");
        let (here, there) = (pairs.accesses.len(), offer.accesses.len());
        if here != there {
            tracing::info!(
                device = card.device.name,
                here,
                there,
                "the two sides have different numbers of queue pairs; the connection uses the lower one"
            );
        }
        pairs.accesses.truncate(there);
        for (pair, end) in pairs.accesses.iter().zip(&offer.accesses) {
            pair.connect(address, *end, (ours.index, theirs))?;
        }
        pairs.messages.connect(address, offer.messages, (ours.index, theirs))?;
        pairs.flush = Some(offer.flush);
        Ok(())
    }

    /// Fails if the port is not active: nothing reaches a peer, and the kernel looks for its address for a second.
    fn check_port(&self) -> Result<()> {
        let card = &self.card;
        match Port::query(&card.device, card.port)?.is_active() {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::Unreachable, "connect", "the port is not active")),
        }
    }

    /// The next connection of a slot could not be made, because a link is down: this side offers one later. That does
    /// not end the peer.
    fn retry_later(&self, slot: PeerSlot, error: &Error) {
        let device = &self.card.device.name;
        match self.retries.note_failure(slot, self.clock.now()) {
            FIRST_WAIT => {
                tracing::warn!(device, slot = slot.0, %error, "a connection cannot be made now: later again")
            }
            wait => tracing::debug!(device, slot = slot.0, %error, ?wait, "a connection cannot be made yet"),
        }
    }

    /// Connects the queue pairs that `slot` has offered. Returns false if the slot has got another state meanwhile.
    fn join_offered(&self, slot: PeerSlot, mut joining: Joining<'_>, offer: &VerbsOffer) -> Result<bool> {
        match self.join(&mut joining.pairs, offer) {
            Ok(()) => self.peers.raise(slot, joining),
            Err(error) => {
                self.peers.fail(slot, joining);
                Err(error)
            }
        }
    }
}

impl Connector for DomainState {
    fn fence(&self, slot: PeerSlot, _: FenceKind) -> Poll<Result<()>> {
        self.peers.fence(slot)
    }

    fn lift_fence(&self, slot: PeerSlot) -> Result<()> {
        self.peers.lift_fence(slot);
        Ok(())
    }

    fn prepare(&self) -> Result<(PeerSlot, Vec<u8>)> {
        let pairs = self.pairs(self.connection(0))?;
        let offer = self.offer(&pairs)?;
        Ok((self.peers.reserve(pairs)?, offer))
    }

    fn complete(&self, slot: PeerSlot, offer: &[u8]) -> Result<()> {
        let offer = self.read(offer)?;
        let joining = self.peers.take_offered(slot, None, offer.accesses.len())?.ok_or_else(too_late)?;
        if self.join_offered(slot, joining, &offer)? { Ok(()) } else { Err(too_late()) }
    }

    fn next_offer(&self, slot: PeerSlot) -> Result<Option<Vec<u8>>> {
        let mut table = self.peers.lock_working()?;
        if table.is_fenced(slot) {
            return Ok(None);
        }
        let SlotState::Broken { generation: broken, offer: None } = *table.slot(slot)? else {
            return Ok(None);
        };
        drop(table);
        if let Err(error) = self.check_port() {
            self.retry_later(slot, &error);
            return Ok(None);
        }
        // This side ignores a peer that has used the last number.
        let pairs = self.pairs(self.connection(broken.saturating_add(1)))?;
        let told = self.offer(&pairs)?;
        let mut table = self.peers.lock_working()?;
        match table.slot(slot)? {
            SlotState::Broken { generation, offer: offer @ None } if *generation == broken => {
                *offer = Some(pairs)
            }
            _ => return Ok(None),
        }
        Ok(Some(told))
    }

    fn renew(&self, slot: PeerSlot, offer: &[u8]) -> Result<Vec<u8>> {
        let offer = self.read(offer)?;
        let mut table = self.peers.lock_working()?;
        // If this side does not take the peer's offer, the peer takes ours.
        if !table.slot(slot)?.takes(offer.connection) {
            return Ok(Vec::new());
        }
        let join = self.peers.begin_join(&table);
        drop(table);
        // A card takes some milliseconds for this. Meanwhile other slots change, and this one may get another
        // connection. The peer sends nothing before it has the answer.
        let mut joining = Joining { pairs: self.pairs(offer.connection)?, _join: join };
        if let Err(error) = self.check_port().and_then(|()| self.join(&mut joining.pairs, &offer)) {
            // The peer keeps its offer until it has ours.
            self.peers.give_up(slot, offer.connection);
            self.retry_later(slot, &error);
            return Ok(Vec::new());
        }
        let answer = self.offer(&joining.pairs)?;
        let mut table = self.peers.lock_working()?;
        if !table.slot(slot)?.takes(offer.connection) {
            return Ok(Vec::new());
        }
        let replaced = table.set(slot, SlotState::Up(Arc::new(joining.pairs)));
        self.peers.mark_changed();
        drop(table);
        self.retries.forget(slot);
        // The replaced connection stops before the peer has the answer and sends over the next one: a late packet must
        // not land on newer bytes. Stopping also flushes the requests that are posted there, which wakes an endpoint
        // that sleeps: the peer acknowledges nothing over that connection any more, and a card that repeats requests
        // without end reports nothing by itself.
        if let Some(replaced) = replaced {
            replaced.fail();
        }
        Ok(answer)
    }

    fn finish_renewal(&self, slot: PeerSlot, answer: &[u8]) -> Result<()> {
        if answer.is_empty() {
            return Ok(());
        }
        let offer = self.read(answer)?;
        if let Some(joining) = self.peers.take_offered(slot, Some(offer.connection), offer.accesses.len())? {
            match self.join_offered(slot, joining, &offer) {
                Ok(_) => self.retries.forget(slot),
                Err(error) if error.kind() == ErrorKind::DeviceLost => return Err(error),
                Err(error) => self.retry_later(slot, &error),
            }
        }
        Ok(())
    }

    fn disconnect(&self, slot: PeerSlot) {
        self.peers.leave(slot);
        self.retries.forget(slot);
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests;
