//! The first frame of each side. Its head never changes, so that any later
//! version of this protocol can be told apart and refused in plain words.

use std::ops::RangeInclusive;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::frame::{Identity, MAX_NAME};
use crate::{Error, ErrorKind, Result};

/// Versions of the protocol that this code speaks.
pub(crate) const VERSIONS: RangeInclusive<u16> = 1..=1;

/// The head: these bytes, then the lowest and the highest version, two
/// little-endian bytes each. It is not postcard and stays as it is for ever.
const MAGIC: [u8; 8] = *b"mrailctl";
const HEAD: usize = MAGIC.len() + 4;

/// Who a side is and how long it bears silence.
///
/// It is written as the lowest version says that its sender speaks; what comes
/// after it is in the highest version both speak.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub(crate) struct Hello {
    pub identity: Identity,
    /// Silence after which the sender takes us for dead, in milliseconds: we
    /// must be heard well within it, whatever our own heartbeat is.
    peer_timeout_ms: u32,
}

impl Hello {
    pub fn new(identity: Identity, peer_timeout: Duration) -> Self {
        Self { identity, peer_timeout_ms: u32::try_from(peer_timeout.as_millis()).unwrap_or(u32::MAX) }
    }

    /// Silence after which the sender takes us for dead.
    pub fn peer_timeout(&self) -> Duration {
        Duration::from_millis(self.peer_timeout_ms.into())
    }

    /// The frame.
    pub fn encode(&self) -> Result<Vec<u8>> {
        self.check().map_err(|why| Error::new(ErrorKind::InvalidRequest, "say hello", why))?;
        let head = [&MAGIC[..], &VERSIONS.start().to_le_bytes(), &VERSIONS.end().to_le_bytes()].concat();
        postcard::to_extend(self, head)
            .map_err(|e| Error::new(ErrorKind::InvalidRequest, "say hello", "").with_source(e))
    }

    /// Parses bytes that are not trusted.
    pub fn decode(frame: &[u8]) -> Result<Self> {
        let refuse = |why: String| Error::new(ErrorKind::Protocol, "read the peer's hello", why);
        let Some((head, body)) =
            frame.split_first_chunk::<HEAD>().filter(|(head, _)| head.starts_with(&MAGIC))
        else {
            return Err(refuse("the other side is no multirail fabric: check the address and port".into()));
        };
        let [.., a, b, c, d] = *head;
        common_version(u16::from_le_bytes([a, b])..=u16::from_le_bytes([c, d]))?;
        let (hello, rest) = postcard::take_from_bytes::<Self>(body)
            .map_err(|e| refuse("cut short or damaged".into()).with_source(e))?;
        if !rest.is_empty() {
            return Err(refuse(format!("{} bytes too many", rest.len())));
        }
        hello.check().map_err(refuse)?;
        Ok(hello)
    }

    fn check(&self) -> Result<(), String> {
        let host = self.identity.host.len();
        if host > MAX_NAME {
            Err(format!("a host name of {host} bytes; the limit is {MAX_NAME}"))
        } else {
            Ok(())
        }
    }
}

/// The highest version both sides speak.
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
        Hello::new(Identity { incarnation: u64::MAX, host: "node-7".into() }, Duration::from_secs(3))
    }

    /// A hello of another version, with a body of its own.
    fn of_versions(low: u16, high: u16) -> Vec<u8> {
        [&MAGIC[..], &low.to_le_bytes(), &high.to_le_bytes(), b"whatever comes"].concat()
    }

    #[test]
    fn survives_the_wire() {
        let decoded = Hello::decode(&hello().encode().unwrap()).unwrap();
        assert_eq!(decoded, hello());
        assert_eq!(decoded.peer_timeout(), Duration::from_secs(3));
    }

    #[test]
    fn other_versions_are_refused_by_name() {
        let error = Hello::decode(&of_versions(3, 4)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Version);
        assert!(error.context().contains("peer speaks 3..=4, we speak 1..=1: upgrade this side"), "{error}");
        let error = Hello::decode(&of_versions(0, 0)).unwrap_err();
        assert!(error.context().contains("upgrade the peer"), "{error}");
        assert_eq!(Hello::decode(&of_versions(9, 0)).unwrap_err().kind(), ErrorKind::Version);
        // A later release that still speaks ours is welcome.
        let mut later = hello().encode().unwrap();
        later[10..12].copy_from_slice(&7_u16.to_le_bytes());
        assert_eq!(Hello::decode(&later).unwrap(), hello());
    }

    #[test]
    fn strangers_and_long_names_are_refused() {
        for bytes in [&b""[..], b"mrailctl", b"GET / HTTP/1.1\r\n\r\n"] {
            assert_eq!(Hello::decode(bytes).unwrap_err().kind(), ErrorKind::Protocol);
        }
        let long = Hello::new(Identity { incarnation: 0, host: "x".repeat(MAX_NAME + 1) }, Duration::ZERO);
        assert_eq!(long.encode().unwrap_err().kind(), ErrorKind::InvalidRequest);
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
            frame.truncate(HEAD);
            frame.extend(body);
            let _ = Hello::decode(&frame);
        }
    }
}
