//! Connecting: each side offers its endpoint's address, and its peer tag for the other side.

use std::sync::OnceLock;
use std::task::Poll;

use libfabric_sys as sys;
use multirail_spi::{Connector, Error, ErrorKind, FenceKind, PeerSlot, Result};

use crate::domain::DomainState;
use crate::peers::{EmptyWriteTarget, RemoteAddress};
use crate::region::random_number;
use crate::shm;
use crate::tag::PeerTag;

/// What a peer needs for requests to this side. `version` is the version of the other fields.
#[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
struct Offer {
    version: u8,
    /// libfabric's provider, which must be the same on both sides.
    provider: String,
    /// A random number of this process.
    process: u64,
    /// The format of the address (`FI_ADDR_*` of libfabric).
    format: u32,
    address: Vec<u8>,
    /// The peer tag that this side gives the peer. The peer sends it with each request.
    peer_tag: u32,
    /// The address and key on this side that the peer uses in requests that have no bytes.
    empty_write_target: EmptyWriteTarget,
}

const VERSION: u8 = 1;

/// A number that identifies this process.
fn process_number() -> Result<u64> {
    static NUMBER: OnceLock<u64> = OnceLock::new();
    match NUMBER.get() {
        Some(number) => Ok(*number),
        None => {
            let number = random_number("connect")?;
            Ok(*NUMBER.get_or_init(|| number))
        }
    }
}

fn malformed(why: &str) -> Error {
    Error::new(ErrorKind::Protocol, "connect", format!("efa's offer: {why}"))
}

fn decode(bytes: &[u8]) -> Result<Offer> {
    postcard::from_bytes(bytes).map_err(|error| malformed(&error.to_string()))
}

impl DomainState {
    /// The offer for the peer of `slot`, to reach the endpoint with this `address`.
    fn offer(&self, slot: PeerSlot, address: Vec<u8>) -> Result<Vec<u8>> {
        let offer = Offer {
            version: VERSION,
            provider: self.device.info.provider(),
            process: process_number()?,
            format: self.device.info.get().addr_format,
            address,
            peer_tag: self.peers.peer_tag(slot).number(),
            empty_write_target: self.empty_write_target(),
        };
        let why = |error: postcard::Error| Error::new(ErrorKind::Io, "connect", error.to_string());
        postcard::to_stdvec(&offer).map_err(why)
    }

    /// Checks a peer's offer, and returns what it says.
    fn parse_offer(&self, bytes: &[u8]) -> Result<RemoteAddress> {
        let offer = decode(bytes)?;
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
            if offer.process == process_number()? {
                // 1.17 and 2.1 keep pointers into the other endpoint's memory after that endpoint is closed.
                let context = "libfabric's shm crashes when endpoints of one process disconnect: use loopback \
                               within a process";
                return Err(Error::new(ErrorKind::Unreachable, "connect", context));
            }
            shm::check_reachable(&offer.address)?;
        }
        // libfabric reads as many bytes as this provider's addresses have, or a string up to its zero byte.
        let is_readable = match format {
            sys::FI_ADDR_STR => offer.address.last() == Some(&0) && offer.address.len() <= 256,
            _ => self.peers.address_len().is_none_or(|len| offer.address.len() == len),
        };
        match PeerTag::from_number(offer.peer_tag).filter(|_| is_readable) {
            Some(peer_tag) => {
                let Offer { address, process, empty_write_target, .. } = offer;
                Ok(RemoteAddress { address, process, peer_tag, empty_write_target })
            }
            None => Err(malformed("its address or its peer tag is invalid")),
        }
    }
}

impl Connector for DomainState {
    fn prepare(&self) -> Result<(PeerSlot, Vec<u8>)> {
        let (slot, address) = self.peers.reserve()?;
        let offer = self.offer(slot, address).inspect_err(|_| self.peers.free(slot))?;
        Ok((slot, offer))
    }

    fn complete(&self, slot: PeerSlot, offer: &[u8]) -> Result<()> {
        self.peers.complete(slot, self.parse_offer(offer)?)
    }

    fn next_offer(&self, slot: PeerSlot) -> Result<Option<Vec<u8>>> {
        self.peers.next_offer_address(slot).map(|address| self.offer(slot, address)).transpose()
    }

    fn renew(&self, slot: PeerSlot, offer: &[u8]) -> Result<Vec<u8>> {
        self.peers.renew(slot, self.parse_offer(offer)?)?;
        // The answer is the offer itself, so that the peer knows which offer this was.
        Ok(offer.to_vec())
    }

    fn finish_renewal(&self, slot: PeerSlot, offer: &[u8]) -> Result<()> {
        // The answer is this side's own offer.
        self.peers.confirm_address(slot, &decode(offer)?.address);
        Ok(())
    }

    fn fence(&self, slot: PeerSlot, kind: FenceKind) -> Poll<Result<()>> {
        self.peers.fence(slot, kind, self.setup.clock.now())
    }

    fn lift_fence(&self, slot: PeerSlot) -> Result<()> {
        self.peers.lift_fence(slot, self.setup.clock.now())
    }

    fn is_same_sender(&self, named: PeerSlot, other: PeerSlot) -> bool {
        self.peers.is_same_sender(named, other)
    }

    fn disconnect(&self, slot: PeerSlot) {
        self.peers.disconnect(slot);
    }
}
