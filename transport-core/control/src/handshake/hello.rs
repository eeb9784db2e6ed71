//! The hello, the first frame of each side: which versions it speaks, a nonce, and whether it
//! has a token. An unauthenticated client learns nothing else.
//!
//! # Versions
//!
//! The head of a hello never changes: eight bytes of magic, then the lowest and the
//! highest version that the sender speaks. These rules hold for every release:
//!
//! - After the hellos, both sides use the highest version that both speak.
//! - If they have no version in common, both end with an error that names both ranges and
//!   the side to upgrade. Neither side tries another version.
//! - The sender writes the rest of a hello in the *lowest* version that it speaks. An older release
//!   therefore understands a newer one that still speaks version 1.
//! - The frames of a released version never change, in meaning or in bytes.
//!   Version 1 is recorded in `tests/frames/v1`; a change there needs a new version.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use multirail_spi::{Error, ErrorKind, Result};

/// The protocol versions that this code speaks.
pub const VERSIONS: RangeInclusive<u16> = 1..=1;

/// The first bytes of the head. The lowest and the highest version follow, two
/// little-endian bytes each. The head is not postcard and never changes.
const MAGIC: [u8; 8] = *b"mrailctl";
const HEAD_BYTES: usize = MAGIC.len() + 4;

/// The first frame of a side, sent before any authentication.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct Hello {
    /// Random bytes, new for every connection, so that a recorded proof cannot be replayed.
    pub nonce: [u8; 32],
    /// Whether the sender has a token and therefore expects a proof.
    pub token: bool,
}

impl Hello {
    /// A hello with a new nonce.
    pub fn new(token: bool) -> Result<Self> {
        let mut nonce = [0; 32];
        getrandom::fill(&mut nonce).map_err(|e| {
            Error::new(ErrorKind::Io, "send a hello", format!("the system returned no random bytes: {e}"))
        })?;
        Ok(Self { nonce, token })
    }

    /// Encodes the hello as a frame.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let head = [&MAGIC[..], &VERSIONS.start().to_le_bytes(), &VERSIONS.end().to_le_bytes()].concat();
        postcard::to_extend(self, head)
            .map_err(|e| Error::new(ErrorKind::InvalidRequest, "send a hello", "").with_source(e))
    }

    /// Parses untrusted bytes.
    pub fn decode(frame: &[u8]) -> Result<Self> {
        let refuse = |why: String| Error::new(ErrorKind::Protocol, "read the peer's hello", why);
        let Some((head, body)) =
            frame.split_first_chunk::<HEAD_BYTES>().filter(|(head, _)| head.starts_with(&MAGIC))
        else {
            return Err(refuse(
                "the other side is not a multirail fabric: check the address and port".into(),
            ));
        };
        let [.., a, b, c, d] = *head;
        common_version(u16::from_le_bytes([a, b])..=u16::from_le_bytes([c, d]))?;
        let (hello, rest) = postcard::take_from_bytes::<Self>(body)
            .map_err(|e| refuse("the hello is cut short or damaged".into()).with_source(e))?;
        if !rest.is_empty() {
            return Err(refuse(format!("the hello has {} bytes too many", rest.len())));
        }
        Ok(hello)
    }
}

/// The highest version that both sides speak.
fn common_version(theirs: RangeInclusive<u16>) -> Result<u16> {
    let (ours, version) = (VERSIONS, *theirs.end().min(VERSIONS.end()));
    if theirs.contains(&version) && ours.contains(&version) {
        return Ok(version);
    }
    let older = if theirs.end() < ours.start() { "the peer" } else { "this side" };
    let why =
        format!("peer speaks {theirs:?}, we speak {ours:?}: upgrade {older}, so that both run one release");
    Err(Error::new(ErrorKind::Version, "read the peer's hello", why))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hello() -> Hello {
        Hello { nonce: [7; 32], token: true }
    }

    /// A hello of other versions, with an unknown body.
    fn of_versions(low: u16, high: u16) -> Vec<u8> {
        [&MAGIC[..], &low.to_le_bytes(), &high.to_le_bytes(), b"whatever comes"].concat()
    }

    #[test]
    fn decodes_what_was_encoded() {
        let decoded = Hello::decode(&hello().encode().unwrap()).unwrap();
        assert_eq!(decoded, hello());
        assert_ne!(Hello::new(true).unwrap().nonce, Hello::new(true).unwrap().nonce);
    }

    #[test]
    fn other_versions_are_refused_with_advice() {
        let error = Hello::decode(&of_versions(3, 4)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Version);
        assert!(error.context().contains("peer speaks 3..=4, we speak 1..=1: upgrade this side"), "{error}");
        let error = Hello::decode(&of_versions(0, 0)).unwrap_err();
        assert!(error.context().contains("upgrade the peer"), "{error}");
        assert_eq!(Hello::decode(&of_versions(9, 0)).unwrap_err().kind(), ErrorKind::Version);
        // A later release that still speaks our version is accepted.
        let mut later = hello().encode().unwrap();
        later[10..12].copy_from_slice(&7_u16.to_le_bytes());
        assert_eq!(Hello::decode(&later).unwrap(), hello());
    }

    #[test]
    fn other_protocols_are_refused() {
        for bytes in [&b""[..], b"mrailctl", b"GET / HTTP/1.1\r\n\r\n"] {
            assert_eq!(Hello::decode(bytes).unwrap_err().kind(), ErrorKind::Protocol);
        }
        let mut trailing = hello().encode().unwrap();
        trailing.push(0);
        assert_eq!(Hello::decode(&trailing).unwrap_err().kind(), ErrorKind::Protocol);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn garbage_never_panics(body in prop::collection::vec(any::<u8>(), 0..300), at: prop::sample::Index, to: u8) {
            let _ = Hello::decode(&body);
            let mut frame = hello().encode().unwrap();
            let at = at.index(frame.len());
            frame[at] = to;
            let _ = Hello::decode(&frame);
            frame.truncate(HEAD_BYTES);
            frame.extend(body);
            let _ = Hello::decode(&frame);
        }
    }
}
