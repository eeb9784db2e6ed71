//! The bytes of a catalogue.

use serde::{Deserialize, Serialize};

use crate::descriptor::Entry;
use crate::spi::RemoteKey;
use crate::{Access, Descriptor, Error, ErrorKind, MemoryKind, Result};

/// The first bytes: `mrC` and the version of the format.
const MAGIC: [u8; 4] = *b"mrC\x01";
/// The largest catalogue: 100,000 regions on the 32 rails of a p5 have 47 MB.
const MAX_BYTES: usize = 64 << 20;
/// The most devices of a catalogue, and the most keys of a region, as for descriptors.
const MAX_ENTRIES: usize = 4096;
/// The longest name of a transport.
const MAX_LABEL: usize = 64;

/// A catalogue as it travels.
#[derive(Serialize, Deserialize)]
pub(super) struct WireCatalogue {
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
    keys: Vec<WireKey>,
}

#[derive(Serialize, Deserialize)]
struct WireKey {
    /// The number of the domain.
    domain: u32,
    base: u64,
    key: u64,
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
            WireKey { domain: number as u32, base: key.base, key: key.key }
        });
        let keys = keys.collect();
        catalogue.regions.push(WireRegion { region: descriptor.region, address, len, access, kind, keys });
    }
    // Extending a Vec with plain integers and strings cannot fail.
    postcard::to_extend(&catalogue, MAGIC.to_vec()).unwrap_or_default()
}

impl WireCatalogue {
    /// Refuses more bytes than a catalogue may have.
    pub fn check_size(bytes: usize) -> Result<()> {
        if bytes <= MAX_BYTES {
            return Ok(());
        }
        let why = format!(
            "{bytes} bytes are too many for a catalogue, which has at most {MAX_BYTES}; make several"
        );
        Err(Error::new(ErrorKind::TooLarge, "read a catalogue", why))
    }

    /// Parses bytes that are not trusted.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        Self::check_size(bytes.len())?;
        let refuse = |why: String| Error::new(ErrorKind::Protocol, "read a catalogue", why);
        let Some((magic, body)) =
            bytes.split_first_chunk::<4>().filter(|(magic, _)| magic[..3] == MAGIC[..3])
        else {
            return Err(refuse("the bytes are no catalogue; pass all bytes of Catalogue::to_bytes()".into()));
        };
        if magic[3] != MAGIC[3] {
            let (theirs, ours) = (magic[3], MAGIC[3]);
            let why = format!(
                "the catalogue has format {theirs}, this library reads {ours}; run one version on both sides"
            );
            return Err(Error::new(ErrorKind::Version, "read a catalogue", why));
        }
        let (catalogue, rest) = postcard::take_from_bytes::<Self>(body)
            .map_err(|e| refuse("the catalogue is cut short or damaged".into()).with_source(e))?;
        if !rest.is_empty() {
            return Err(refuse(format!("{} bytes follow the catalogue", rest.len())));
        }
        let Self { domains, regions, .. } = &catalogue;
        let has_long_name = domains.iter().any(|domain| domain.transport.len() > MAX_LABEL);
        let most_keys = regions.iter().map(|region| region.keys.len()).max().unwrap_or(0);
        if domains.len() > MAX_ENTRIES || most_keys > MAX_ENTRIES || has_long_name {
            return Err(refuse("it has more devices or longer names than any fabric makes".into()));
        }
        for region in regions {
            let is_wrong = |key: &WireKey| {
                key.domain as usize >= domains.len() || key.base.checked_add(region.len).is_none()
            };
            if region.address.checked_add(region.len).is_none() || region.keys.iter().any(is_wrong) {
                let why = "one of its regions goes beyond the last address, or has a key of no device";
                return Err(refuse(why.into()));
            }
        }
        Ok(catalogue)
    }

    pub fn len(&self) -> usize {
        self.regions.len()
    }

    /// The address and the length of each region.
    pub fn ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        self.regions.iter().map(|region| (region.address, region.len))
    }

    /// The length and the access rights of a region.
    pub fn describe(&self, number: usize) -> Option<(usize, Access)> {
        let region = self.regions.get(number)?;
        Some((region.len as usize, Access::from_bits_truncate(region.access)))
    }

    /// The descriptor of a region.
    pub fn descriptor(&self, number: usize) -> Option<Descriptor> {
        let WireRegion { region, len, access, kind, keys, .. } = self.regions.get(number)?;
        let entry = |wire: &WireKey| {
            let WireDomain { transport, domain, rail } = self.domains.get(wire.domain as usize)?;
            let key = RemoteKey { base: wire.base, key: wire.key, len: *len };
            Some(Entry { transport: transport.clone(), domain: *domain, rail: *rail, key })
        };
        let access = Access::from_bits_truncate(*access);
        Some(Descriptor::new(
            self.incarnation,
            *region,
            *len,
            access,
            *kind,
            keys.iter().filter_map(entry).collect(),
        ))
    }
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
            let read = WireCatalogue::from_bytes(&bytes).unwrap();
            let read: Vec<_> = read.ranges().map(|(address, _)| address).zip((0..).map_while(|at| read.descriptor(at))).collect();
            prop_assert_eq!(read, regions);
            prop_assert!(WireCatalogue::from_bytes(&bytes[..bytes.len() - 1]).is_err());
            let mut damaged = bytes.clone();
            damaged[flip.index(bytes.len())] = value;
            // Read or refused, whatever it is.
            if let Ok(read) = WireCatalogue::from_bytes(&damaged) {
                (0..read.len()).for_each(|at| drop(read.descriptor(at)));
            }
            let longer = [&bytes[..], &[0]].concat();
            prop_assert!(WireCatalogue::from_bytes(&longer).err().unwrap().context().contains("follow"));
        }
    }

    #[test]
    fn other_formats_are_named() {
        let error = WireCatalogue::from_bytes(b"mrC\x02").err().unwrap();
        assert!(error.kind() == ErrorKind::Version && error.context().contains("format 2"), "{error}");
        assert!(
            WireCatalogue::from_bytes(b"mrD\x01").err().unwrap().context().contains("Catalogue::to_bytes")
        );
        assert!(WireCatalogue::from_bytes(b"").is_err());
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
            assert_eq!(WireCatalogue::from_bytes(&bytes).unwrap().len(), 10_000);
        }
    }
}
