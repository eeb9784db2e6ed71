//! The bytes that two domains exchange before they connect.
//!
//! An offer is `"MRLO"`, a version, the length of the body, then the body. The bytes come from a peer: the parser
//! checks all bounds, and this side uses an offer only to find the peer and to show it the token.

use multirail_spi::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::host::HostIdentity;

/// A secret that admits one initiator to one inbound connection.
pub(crate) type OfferToken = [u8; 16];

/// How a peer reaches one prepared slot of a domain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LoopbackOffer {
    pub(crate) host: HostIdentity,
    /// The process id, in the process's own pid namespace.
    pub(crate) process: u32,
    pub(crate) domain: u64,
    pub(crate) token: OfferToken,
    /// The name of the Unix socket at which the domain's server hands memory out: abstract on Linux, a path on the
    /// portable path.
    pub(crate) socket: String,
}

const MAGIC: [u8; 4] = *b"MRLO";
const VERSION: u16 = 1;
const HEADER: usize = 8;
const MAX_BODY: usize = 256;
/// Bytes of a socket's name, at most. The paths of sockets may have 103 bytes on macOS, 107 on Linux (unix(7)).
pub(crate) const MAX_SOCKET_NAME: usize = 100;

impl LoopbackOffer {
    /// The bytes to hand to the peer.
    pub(crate) fn to_bytes(&self) -> Result<Vec<u8>> {
        let body = postcard::to_stdvec(self).map_err(|e| {
            Error::new(ErrorKind::Protocol, "prepare", "the offer does not encode").with_source(e)
        })?;
        let length = u16::try_from(body.len())
            .map_err(|_| Error::new(ErrorKind::TooLarge, "prepare", "the offer is too long"))?;
        let mut bytes = Vec::with_capacity(HEADER + body.len());
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(length.to_le_bytes());
        bytes.extend(body);
        Ok(bytes)
    }

    /// Reads a peer's bytes.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self> {
        let bad = |context| Error::new(ErrorKind::Protocol, "connect", context);
        let (header, body) = bytes.split_at_checked(HEADER).ok_or_else(|| bad("the offer is cut short"))?;
        if header[..4] != MAGIC {
            return Err(bad("the bytes are no loopback offer: pass what the peer's `prepare` returned"));
        }
        let version = u16::from_le_bytes([header[4], header[5]]);
        if version != VERSION {
            let context =
                format!("the offer has version {version}, this build speaks {VERSION}: use one build");
            return Err(Error::new(ErrorKind::Version, "connect", context));
        }
        if body.len() > MAX_BODY || body.len() != usize::from(u16::from_le_bytes([header[6], header[7]])) {
            return Err(bad("the offer's length does not match its bytes"));
        }
        let (offer, rest) = postcard::take_from_bytes::<Self>(body)
            .map_err(|e| bad("the offer does not parse").with_source(e))?;
        if !rest.is_empty() || offer.socket.len() > MAX_SOCKET_NAME {
            return Err(bad("the offer has trailing or oversized fields"));
        }
        Ok(offer)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn offer() -> LoopbackOffer {
        LoopbackOffer {
            host: HostIdentity::here(),
            process: 7,
            domain: u64::MAX,
            token: [9; 16],
            socket: "multirail-lo".into(),
        }
    }

    #[test]
    fn an_offer_parses_back() {
        let bytes = offer().to_bytes().unwrap();
        assert_eq!(LoopbackOffer::parse(&bytes).unwrap(), offer());
        for cut in 0..bytes.len() {
            assert!(LoopbackOffer::parse(&bytes[..cut]).is_err());
        }
        let mut newer = bytes.clone();
        newer[4] = 2;
        assert_eq!(LoopbackOffer::parse(&newer).unwrap_err().kind(), ErrorKind::Version);
        let longer = [&bytes[..], &[0]].concat();
        assert_eq!(LoopbackOffer::parse(&longer).unwrap_err().kind(), ErrorKind::Protocol);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

        #[test]
        fn garbage_is_an_error(body in proptest::collection::vec(any::<u8>(), 0..300), at in 0..200_usize, flip: u8) {
            let mut bytes = [&MAGIC[..], &VERSION.to_le_bytes(), &(body.len() as u16).to_le_bytes(), &body].concat();
            let _ = LoopbackOffer::parse(&bytes);
            bytes[4] ^= flip;
            let _ = LoopbackOffer::parse(&bytes);
            let mut real = offer().to_bytes().unwrap();
            let at = at % real.len();
            real[at] ^= flip;
            let _ = LoopbackOffer::parse(&real);
        }
    }
}
