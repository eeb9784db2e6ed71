//! Descriptors: the bytes that a peer needs to reach a region. The user may send them by any means.

use serde::{Deserialize, Serialize};

use crate::spi::RemoteKey;
use crate::{Access, Error, ErrorKind, MemoryKind, Result};

/// The first bytes of every descriptor: `mrD` and the version of the format.
const MAGIC: [u8; 4] = *b"mrD\x01";
/// The largest descriptor. It is more than any reasonable fabric needs: 64 transports of 64 rails have 4096 entries of
/// about 40 bytes.
const MAX_BYTES: usize = 256 << 10;
const MAX_ENTRIES: usize = 4096;
const MAX_LABEL: usize = 64;

/// A region's address and keys, one entry per transport and rail.
///
/// A reader skips the entries of transports that it does not have, so a descriptor also serves peers with other
/// backends. A descriptor is valid for one opening of the owner's fabric (the incarnation) and for one registration
/// (the region's number).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Descriptor {
    pub(crate) incarnation: u64,
    pub(crate) region: u64,
    pub(crate) len: u64,
    access: u32,
    pub(crate) kind: MemoryKind,
    pub(crate) entries: Vec<Entry>,
}

/// How one rail of one transport addresses the region.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub transport: String,
    pub domain: u64,
    pub rail: u16,
    pub key: RemoteKey,
}

impl Descriptor {
    pub(crate) fn new(
        incarnation: u64,
        region: u64,
        len: u64,
        access: Access,
        kind: MemoryKind,
        entries: Vec<Entry>,
    ) -> Self {
        Self { incarnation, region, len, access: access.bits(), kind, entries }
    }

    /// The region's length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the region has no bytes; such a region cannot be registered.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What the reader may do with the region.
    pub fn access(&self) -> Access {
        Access::from_bits_truncate(self.access)
    }

    /// The descriptor as bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let bytes = MAGIC.to_vec();
        // Extending a Vec with plain integers and strings cannot fail.
        postcard::to_extend(self, bytes).unwrap_or_default()
    }

    /// Parses bytes that are not trusted.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let refuse = |why: String| Error::new(ErrorKind::Protocol, "parse a descriptor", why);
        if bytes.len() > MAX_BYTES {
            return Err(refuse(format!("it has {} bytes; at most {MAX_BYTES} are allowed", bytes.len())));
        }
        let Some((magic, body)) = bytes.split_first_chunk::<4>() else {
            return Err(refuse(format!(
                "{} bytes are too few; pass all bytes of Descriptor::to_bytes()",
                bytes.len()
            )));
        };
        if magic[..3] != MAGIC[..3] {
            return Err(refuse("the bytes are no descriptor; pass those of Descriptor::to_bytes()".into()));
        }
        if magic[3] != MAGIC[3] {
            let (theirs, ours) = (magic[3], MAGIC[3]);
            let why = format!(
                "the descriptor has format {theirs}, this library reads {ours}; run one version on both sides"
            );
            return Err(Error::new(ErrorKind::Version, "parse a descriptor", why));
        }
        let (descriptor, rest) = postcard::take_from_bytes::<Self>(body)
            .map_err(|e| refuse("the descriptor is cut short or damaged".into()).with_source(e))?;
        if !rest.is_empty() {
            return Err(refuse(format!("{} bytes follow the descriptor", rest.len())));
        }
        if descriptor.entries.len() > MAX_ENTRIES
            || descriptor.entries.iter().any(|e| e.transport.len() > MAX_LABEL)
        {
            return Err(refuse("it has more entries or longer names than any fabric makes".into()));
        }
        if descriptor
            .entries
            .iter()
            .any(|e| e.key.len != descriptor.len || e.key.base.checked_add(e.key.len).is_none())
        {
            return Err(refuse("one of its entries does not span the region".into()));
        }
        Ok(descriptor)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entries() -> impl Strategy<Value = Vec<Entry>> {
        prop::collection::vec(
            ("[a-z0-9:]{1,20}", any::<u64>(), any::<u16>(), any::<u32>(), any::<u64>()),
            0..6,
        )
        .prop_map(|list| {
            list.into_iter()
                .map(|(transport, domain, rail, base, key)| Entry {
                    transport,
                    domain,
                    rail,
                    key: RemoteKey { base: base.into(), key, len: 4096 },
                })
                .collect()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 256 }, failure_persistence: None, ..Default::default() })]

        #[test]
        fn survives_the_wire(incarnation: u64, region: u64, access in 0_u32..4, entries in entries()) {
            let sent = Descriptor::new(incarnation, region, 4096, Access::from_bits_truncate(access), MemoryKind::Host, entries);
            prop_assert_eq!(Descriptor::from_bytes(&sent.to_bytes()).unwrap(), sent);
        }

        #[test]
        fn damage_is_an_error_or_another_descriptor(entries in entries(), at: prop::sample::Index, to: u8) {
            let sent = Descriptor::new(1, 2, 4096, Access::REMOTE_WRITE, MemoryKind::Host, entries);
            let whole = sent.to_bytes();
            let mut bytes = whole.clone();
            let at = at.index(bytes.len());
            bytes[at] = to;
            if let Ok(parsed) = Descriptor::from_bytes(&bytes) {
                // No byte is left out of account: another byte is another descriptor, as good as its sender's.
                prop_assert_eq!(parsed == sent, bytes == whole);
                prop_assert!(parsed.entries.len() <= MAX_ENTRIES);
                for entry in &parsed.entries {
                    prop_assert!(entry.transport.len() <= MAX_LABEL && entry.key.len == parsed.len);
                    prop_assert!(entry.key.base.checked_add(entry.key.len).is_some());
                }
                prop_assert_eq!(Descriptor::from_bytes(&parsed.to_bytes()).unwrap(), parsed);
            }
        }

        #[test]
        fn a_byte_less_or_more_is_an_error(entries in entries(), cut: prop::sample::Index, more: u8) {
            let mut bytes = Descriptor::new(1, 2, 4096, Access::REMOTE_WRITE, MemoryKind::Host, entries).to_bytes();
            prop_assert!(Descriptor::from_bytes(&bytes).is_ok());
            let short = &bytes[..cut.index(bytes.len())];
            prop_assert_eq!(Descriptor::from_bytes(short).unwrap_err().kind(), ErrorKind::Protocol);
            bytes.push(more);
            prop_assert_eq!(Descriptor::from_bytes(&bytes).unwrap_err().kind(), ErrorKind::Protocol);
        }

        #[test]
        fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(Descriptor::from_bytes(&bytes).is_err());
            let mut with_magic = MAGIC.to_vec();
            with_magic.extend(&bytes);
            let _ = Descriptor::from_bytes(&with_magic);
        }
    }
}
