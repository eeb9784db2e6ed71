//! The bytes by which another process connects to a fabric.
//!
//! `mrM` and the version of the format, the number of the fabric's opening in 8 bytes (little-endian), the number of
//! addresses in one byte, and each address as one byte of length and text.

use std::net::{IpAddr, SocketAddr};

use multirail::{Error, ErrorKind, Fabric};

use crate::abi::*;
use crate::failure::Failure;
use crate::interfaces;
use crate::operation::{NewPeer, Value};

const MAGIC: [u8; 4] = *b"mrM\x01";
const MAX_ADDRESSES: usize = 16;
/// The longest name of a host, and a port.
const MAX_ADDRESS: usize = 120;

/// Where a fabric listens, and which opening it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Metadata {
    incarnation: u64,
    addresses: Vec<String>,
}

impl Metadata {
    /// That of a fabric that listens at `listening`. `advertised` are hosts, each with or without a port.
    pub fn new(incarnation: u64, listening: &str, advertised: &[String]) -> Result<Self, Failure> {
        let at: Option<SocketAddr> = listening.parse().ok();
        let port = at.map_or_else(
            || listening.rsplit(':').next().unwrap_or_default().to_owned(),
            |at| at.port().to_string(),
        );
        let mut addresses = match at {
            _ if !advertised.is_empty() => advertised.iter().map(|host| with_port(host, &port)).collect(),
            Some(at) if at.ip().is_unspecified() => {
                // A socket of IPv6 takes clients of IPv4 too, unless the system is set otherwise.
                let reachable = |address: &IpAddr| at.is_ipv6() || address.is_ipv4();
                let found = interfaces::addresses()?.into_iter().filter(reachable);
                found.map(|address| SocketAddr::new(address, at.port()).to_string()).collect()
            }
            _ => vec![listening.to_owned()],
        };
        addresses.truncate(MAX_ADDRESSES);
        if let Some(long) = addresses.iter().find(|address| address.len() > MAX_ADDRESS) {
            let why = format!("the address {long:?} has {} bytes; {MAX_ADDRESS} are allowed", long.len());
            return Err(Failure::invalid(why));
        }
        Ok(Self { incarnation, addresses })
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.incarnation.to_le_bytes());
        bytes.push(self.addresses.len() as u8);
        for address in &self.addresses {
            bytes.push(address.len() as u8);
            bytes.extend(address.as_bytes());
        }
        bytes
    }

    /// Parses bytes that are not trusted.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Failure> {
        let refuse = || {
            let why = "the bytes are no metadata, or not all of it; pass those of mr_fabric_metadata";
            Failure::new(MR_ERROR_PROTOCOL, why)
        };
        let (magic, rest) = bytes.split_first_chunk::<4>().ok_or_else(refuse)?;
        if magic[..3] != MAGIC[..3] {
            return Err(refuse());
        }
        if magic[3] != MAGIC[3] {
            let why = format!(
                "the metadata has format {}, and this library reads {}; run one version on both sides",
                magic[3], MAGIC[3]
            );
            return Err(Failure::new(MR_ERROR_VERSION, why));
        }
        let (incarnation, rest) = rest.split_first_chunk::<8>().ok_or_else(refuse)?;
        let (count, mut rest) = rest.split_first().ok_or_else(refuse)?;
        let mut addresses = Vec::new();
        for _ in 0..*count {
            let (length, text) = rest.split_first().ok_or_else(refuse)?;
            let (address, next) = text.split_at_checked(usize::from(*length)).ok_or_else(refuse)?;
            addresses.push(std::str::from_utf8(address).map_err(|_| refuse())?.to_owned());
            rest = next;
        }
        let is_sane = (1..=MAX_ADDRESSES).contains(&addresses.len())
            && addresses.iter().all(|address| (1..=MAX_ADDRESS).contains(&address.len()));
        match rest.is_empty() && is_sane {
            true => Ok(Self { incarnation: u64::from_le_bytes(*incarnation), addresses }),
            false => Err(refuse()),
        }
    }

    /// Connects to the fabric: tries its addresses one after the other.
    pub async fn connect(self, fabric: Fabric) -> Result<Value, Error> {
        let mut failed = Vec::new();
        for address in &self.addresses {
            match fabric.connect(address).await {
                Ok(peer) if peer.incarnation() == self.incarnation => {
                    return Ok(Value::Peer(NewPeer::new(peer)));
                }
                Ok(other) => {
                    other.disconnect();
                    let why = format!(
                        "another fabric answers at {address}: the process was restarted, or another has its port; ask \
                         for new metadata"
                    );
                    failed.push(Error::new(ErrorKind::PeerDied, "connect", why));
                }
                // A closed fabric fails in the same way at every address.
                Err(error) if error.kind() == ErrorKind::Closed => return Err(error),
                Err(error) => failed.push(error),
            }
        }
        Err(most_telling(failed))
    }
}

/// Of the errors of several addresses: one of a program that has answered, or else the first.
fn most_telling(mut errors: Vec<Error>) -> Error {
    let silent = |error: &Error| matches!(error.kind(), ErrorKind::Unreachable | ErrorKind::DeadlineExceeded);
    let at = errors.iter().position(|error| !silent(error)).unwrap_or(0);
    match errors.is_empty() {
        true => Error::new(ErrorKind::Protocol, "connect", "the metadata has no address"),
        false => errors.swap_remove(at),
    }
}

/// `host:port`, where the host may have a port already.
fn with_port(host: &str, port: &str) -> String {
    match host.parse::<IpAddr>() {
        Ok(IpAddr::V6(address)) => format!("[{address}]:{port}"),
        Ok(IpAddr::V4(address)) => format!("{address}:{port}"),
        Err(_) if host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok()) => {
            host.to_owned()
        }
        Err(_) => format!("{host}:{port}"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn addresses_follow_from_the_listener() {
        let addresses = |listening: &str, advertised: &[&str]| {
            let advertised: Vec<String> = advertised.iter().map(|host| (*host).to_owned()).collect();
            Metadata::new(1, listening, &advertised).unwrap().addresses
        };
        assert_eq!(addresses("127.0.0.1:7", &[]), ["127.0.0.1:7"]);
        let advertised = ["node-3", "node-3:8", "10.0.0.1", "::1", "[::1]:9"];
        let expected = ["node-3:7", "node-3:8", "10.0.0.1:7", "[::1]:7", "[::1]:9"];
        assert_eq!(addresses("0.0.0.0:7", &advertised), expected);
        let all = addresses("0.0.0.0:7", &[]);
        assert!(!all.is_empty() && all.iter().all(|address| address.ends_with(":7")), "{all:?}");
        assert!(!all.iter().any(|address| address.starts_with("0.0.0.0")), "{all:?}");
        assert!(Metadata::new(1, "0.0.0.0:7", &["x".repeat(200)]).is_err());
    }

    #[test]
    fn other_bytes_are_refused() {
        let status = |bytes: &[u8]| Metadata::from_bytes(bytes).unwrap_err().status();
        assert_eq!(status(b""), MR_ERROR_PROTOCOL);
        assert_eq!(status(b"mrM\x02"), MR_ERROR_VERSION);
        let mut bytes = Metadata::new(1, "127.0.0.1:7", &[]).unwrap().to_bytes();
        bytes.push(0);
        assert_eq!(status(&bytes), MR_ERROR_PROTOCOL);
    }

    proptest! {
        #[test]
        fn bytes_are_read_as_they_are_written(
            incarnation in any::<u64>(),
            addresses in prop::collection::vec("[a-z0-9:.]{1,120}", 1..=MAX_ADDRESSES),
            cut in any::<prop::sample::Index>(),
        ) {
            let metadata = Metadata { incarnation, addresses };
            let bytes = metadata.to_bytes();
            prop_assert!(bytes.len() <= 2048);
            let cut = cut.index(bytes.len());
            prop_assert!(Metadata::from_bytes(&bytes[..cut]).is_err());
            prop_assert_eq!(Metadata::from_bytes(&bytes), Ok(metadata));
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut with_magic = MAGIC.to_vec();
            with_magic.extend(bytes);
            if let Ok(metadata) = Metadata::from_bytes(&with_magic) {
                prop_assert_eq!(metadata.to_bytes(), with_magic);
            }
        }
    }
}
