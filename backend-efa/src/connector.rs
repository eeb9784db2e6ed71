//! Connecting: each side tells its endpoint's address and the peer tag it keeps for the other.

use std::sync::OnceLock;

use libfabric_sys as sys;
use multirail_spi::{Connector, Error, ErrorKind, PeerSlot, Result};

use crate::domain::Shared;
use crate::peers::{Landing, RemoteAddress};
use crate::region::random;
use crate::shm;
use crate::tag::PeerTag;

/// What a peer needs to send here. The first field counts versions of the others.
#[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
struct Offer {
    version: u8,
    /// Both sides must use one provider.
    provider: String,
    /// A number of the process's own.
    process: u64,
    /// libfabric's number of the address's format.
    format: u32,
    address: Vec<u8>,
    /// The peer tag kept for the reader, which goes with all that it sends.
    peer_tag: u32,
    landing: Landing,
}

const VERSION: u8 = 1;

/// A number that no other process has.
fn process() -> Result<u64> {
    static NUMBER: OnceLock<u64> = OnceLock::new();
    match NUMBER.get() {
        Some(number) => Ok(*number),
        None => {
            let number = random("connect")?;
            Ok(*NUMBER.get_or_init(|| number))
        }
    }
}

fn malformed(why: &str) -> Error {
    Error::new(ErrorKind::Protocol, "connect", format!("efa's offer: {why}"))
}

fn parse(bytes: &[u8]) -> Result<Offer> {
    postcard::from_bytes(bytes).map_err(|error| malformed(&error.to_string()))
}

impl Shared {
    /// What the peer of `slot` is told, to reach the endpoint called `address`.
    fn offer(&self, slot: PeerSlot, address: Vec<u8>) -> Result<Vec<u8>> {
        let offer = Offer {
            version: VERSION,
            provider: self.device.info.provider(),
            process: process()?,
            format: self.device.info.get().addr_format,
            address,
            peer_tag: self.peers.peer_tag(slot).number(),
            landing: self.landing(),
        };
        let why = |error: postcard::Error| Error::new(ErrorKind::Io, "connect", error.to_string());
        postcard::to_stdvec(&offer).map_err(why)
    }

    /// Where the peer is by its offer, if that can be used here.
    fn read(&self, bytes: &[u8]) -> Result<RemoteAddress> {
        let offer = parse(bytes)?;
        if offer.version != VERSION {
            let context = format!("the peer's offer has version {}, ours {VERSION}", offer.version);
            return Err(Error::new(ErrorKind::Version, "connect", context));
        }
        let (provider, format) = (self.device.info.provider(), self.device.info.get().addr_format);
        if offer.provider != provider || offer.format != format {
            let context = format!(
                "the peer uses libfabric's provider {} (addresses of format {}), this side {provider} \
                 ({format}): choose the same on both",
                offer.provider, offer.format
            );
            return Err(Error::new(ErrorKind::Unreachable, "connect", context));
        }
        if self.device.info.is_shm() {
            if offer.process == process()? {
                // 1.17 and 2.1 then keep pointers into the other endpoint's memory beyond its end.
                let context =
                    "libfabric's shm crashes when endpoints of one process part: use loopback there";
                return Err(Error::new(ErrorKind::Unreachable, "connect", context));
            }
            shm::check_reachable(&offer.address)?;
        }
        // libfabric reads as many bytes as addresses have here, or a string up to its end.
        let readable = match format {
            sys::FI_ADDR_STR => offer.address.last() == Some(&0) && offer.address.len() <= 256,
            _ => self.peers.name_len().is_none_or(|len| offer.address.len() == len),
        };
        match PeerTag::of(offer.peer_tag).filter(|_| readable) {
            Some(peer_tag) => {
                let Offer { address, process, landing, .. } = offer;
                Ok(RemoteAddress { address, process, peer_tag, landing })
            }
            None => Err(malformed("an address or a peer_tag that cannot be")),
        }
    }
}

impl Connector for Shared {
    fn prepare(&self) -> Result<(PeerSlot, Vec<u8>)> {
        let (slot, address) = self.peers.reserve()?;
        let offer = self.offer(slot, address).inspect_err(|_| self.peers.free(slot))?;
        Ok((slot, offer))
    }

    fn complete(&self, slot: PeerSlot, offer: &[u8]) -> Result<()> {
        self.peers.complete(slot, self.read(offer)?)
    }

    fn offer_again(&self, slot: PeerSlot) -> Result<Option<Vec<u8>>> {
        self.peers.untold(slot).map(|address| self.offer(slot, address)).transpose()
    }

    fn renew(&self, slot: PeerSlot, offer: &[u8]) -> Result<Vec<u8>> {
        self.peers.renew(slot, self.read(offer)?)?;
        // It says which of its offers that was.
        Ok(offer.to_vec())
    }

    fn renewed(&self, slot: PeerSlot, offer: &[u8]) -> Result<()> {
        // Our own, which comes back.
        self.peers.told(slot, &parse(offer)?.address);
        Ok(())
    }

    fn disconnect(&self, slot: PeerSlot) {
        self.peers.leave(slot);
    }
}
