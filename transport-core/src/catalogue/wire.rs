//! The bytes of a catalogue.

use serde::{Deserialize, Serialize};

use crate::descriptor::Entry;
use crate::spi::RemoteKey;
use crate::{Access, Descriptor, Error, ErrorKind, MemoryKind, Result};

/// The first bytes: `mrC` and the version of the format.
const MAGIC: [u8; 4] = *b"mrC\x01";
/// The largest catalogue. 100,000 regions on 32 rails of a p5 have 130 MB.
const MAX_BYTES: usize = 256 << 20;
/// The longest name of a transport.
const MAX_LABEL: usize = 64;

#[derive(Serialize, Deserialize)]
struct WireCatalogue {
    incarnation: u64,
    /// The domains that hold keys. Regions name them by number.
    domains: Vec<WireDomain>,
    regions: Vec<WireRegion>,
}

#[derive(Serialize, Deserialize, PartialEq)]
struct WireDomain {
    transport: String,
    domain: u64,
    rail: u16,
}

#[derive(Serialize, Deserialize)]
struct WireRegion {
    region: u64,
    address: u64,
    len: u64,
    access: u32,
    kind: MemoryKind,
    /// Number of the domain, address and key.
    keys: Vec<(u32, u64, u64)>,
}

/// Regions, each with the address of its first byte, as bytes.
pub(super) fn to_bytes(regions: impl Iterator<Item = (u64, Descriptor)>) -> Vec<u8> {
    let mut catalogue = WireCatalogue { incarnation: 0, domains: Vec::new(), regions: Vec::new() };
    for (address, descriptor) in regions {
        catalogue.incarnation = descriptor.incarnation;
        let (len, access, kind) = (descriptor.len, descriptor.access().bits(), descriptor.kind);
        let keys = descriptor.entries.into_iter().map(|Entry { transport, domain, rail, key }| {
            let of_key = WireDomain { transport, domain, rail };
            let known = catalogue.domains.iter().position(|known| *known == of_key);
            let number = known.unwrap_or_else(|| {
                catalogue.domains.push(of_key);
                catalogue.domains.len() - 1
            });
            (number as u32, key.base, key.key)
        });
        let keys = keys.collect();
        catalogue.regions.push(WireRegion { region: descriptor.region, address, len, access, kind, keys });
    }
    // Extending a Vec with plain integers and strings cannot fail.
    postcard::to_extend(&catalogue, MAGIC.to_vec()).unwrap_or_default()
}

/// Parses bytes that are not trusted.
pub(super) fn from_bytes(bytes: &[u8]) -> Result<Vec<(u64, Descriptor)>> {
    let refuse = |why: String| Error::new(ErrorKind::Protocol, "parse a catalogue", why);
    if bytes.len() > MAX_BYTES {
        return Err(refuse(format!("it has {} bytes; at most {MAX_BYTES} are allowed", bytes.len())));
    }
    let Some((magic, body)) = bytes.split_first_chunk::<4>().filter(|(magic, _)| magic[..3] == MAGIC[..3])
    else {
        return Err(refuse("the bytes are no catalogue; pass all bytes of Catalogue::to_bytes()".into()));
    };
    if magic[3] != MAGIC[3] {
        let (theirs, ours) = (magic[3], MAGIC[3]);
        let why = format!(
            "the catalogue has format {theirs}, this library reads {ours}; run one version on both sides"
        );
        return Err(Error::new(ErrorKind::Version, "parse a catalogue", why));
    }
    let (catalogue, rest) = postcard::take_from_bytes::<WireCatalogue>(body)
        .map_err(|e| refuse("the catalogue is cut short or damaged".into()).with_source(e))?;
    if !rest.is_empty() {
        return Err(refuse(format!("{} bytes follow the catalogue", rest.len())));
    }
    if catalogue.domains.iter().any(|domain| domain.transport.len() > MAX_LABEL) {
        return Err(refuse("it has longer names of transports than any fabric makes".into()));
    }
    let WireCatalogue { incarnation, domains, regions } = catalogue;
    let read = |WireRegion { region, address, len, access, kind, keys }: WireRegion| {
        if address.checked_add(len).is_none() {
            return Err(refuse("one of its regions has more bytes than there are addresses".into()));
        }
        let entry = |(number, base, key): (u32, u64, u64)| {
            let of_key = domains.get(number as usize).filter(|_| base.checked_add(len).is_some());
            let WireDomain { transport, domain, rail } = of_key.ok_or_else(|| {
                refuse("one of its keys is of no domain, or does not span the region".into())
            })?;
            let key = RemoteKey { base, key, len };
            Ok(Entry { transport: transport.clone(), domain: *domain, rail: *rail, key })
        };
        let entries = keys.into_iter().map(entry).collect::<Result<_>>()?;
        let access = Access::from_bits_truncate(access);
        Ok((address, Descriptor::new(incarnation, region, len, access, kind, entries)))
    };
    regions.into_iter().map(read).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn descriptors() -> impl Strategy<Value = Vec<(u64, Descriptor)>> {
        let entries =
            prop::collection::vec(("[a-c]", any::<u8>(), 0..4_u16, any::<u32>(), any::<u64>()), 0..4);
        let region = (any::<u64>(), any::<u32>(), 1..100_000_u64, 0..4_u32, entries);
        prop::collection::vec(region, 0..6).prop_map(|regions| {
            let one = |(region, address, len, access, entries): (u64, u32, u64, u32, Vec<_>)| {
                let entry = |(transport, domain, rail, base, key): (String, u8, u16, u32, u64)| Entry {
                    transport,
                    domain: domain.into(),
                    rail,
                    key: RemoteKey { base: base.into(), key, len },
                };
                let entries = entries.into_iter().map(entry).collect();
                let access = Access::from_bits_truncate(access);
                (address.into(), Descriptor::new(7, region, len, access, MemoryKind::Host, entries))
            };
            regions.into_iter().map(one).collect()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 256 }, failure_persistence: None, ..Default::default() })]

        #[test]
        fn what_is_written_is_read(regions in descriptors(), flip: prop::sample::Index, value: u8) {
            let bytes = to_bytes(regions.iter().cloned());
            prop_assert_eq!(from_bytes(&bytes).unwrap(), regions);
            prop_assert!(from_bytes(&bytes[..bytes.len() - 1]).is_err());
            let mut damaged = bytes.clone();
            damaged[flip.index(bytes.len())] = value;
            // Read or refused, whatever it is.
            let _ = from_bytes(&damaged);
            let longer = [&bytes[..], &[0]].concat();
            prop_assert!(from_bytes(&longer).unwrap_err().context().contains("follow"));
        }
    }

    #[test]
    fn other_formats_are_named() {
        let error = from_bytes(b"mrC\x02").unwrap_err();
        assert!(error.kind() == ErrorKind::Version && error.context().contains("format 2"), "{error}");
        assert!(from_bytes(b"mrD\x01").unwrap_err().context().contains("Catalogue::to_bytes"));
        assert!(from_bytes(b"").is_err());
    }

    #[test]
    fn ten_thousand_regions_are_small() {
        let entry = |rail: u16| Entry {
            transport: "efa".into(),
            domain: rail.into(),
            rail,
            key: RemoteKey { base: 0x7f00_0000_0000 + (1 << 30), key: 0xffff_ffff, len: 1 << 20 },
        };
        let descriptor = |rails| {
            Descriptor::new(
                1,
                9999,
                1 << 20,
                Access::all(),
                MemoryKind::Host,
                (0..rails).map(entry).collect(),
            )
        };
        for (rails, most) in [(1, 40), (32, 32 * 14 + 40)] {
            let regions =
                (0..10_000_u64).map(|number| (0x7f00_0000_0000 + (number << 20), descriptor(rails)));
            let bytes = to_bytes(regions);
            assert!(bytes.len() < 10_000 * most, "{} bytes with {rails} rails", bytes.len());
            assert_eq!(from_bytes(&bytes).unwrap().len(), 10_000);
        }
    }
}
