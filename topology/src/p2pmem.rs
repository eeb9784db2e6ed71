//! Memory that PCI functions lend to other functions, as the kernel lists it (p2pmem,
//! `/sys/bus/pci/devices/ADDRESS/p2pmem`). An example is a disk's controller memory buffer. Linux has it if it is built
//! with `CONFIG_PCI_P2PDMA`.

use std::io;
use std::path::Path;

use serde::Serialize;

use crate::p2p::PeerToPeer;
use crate::sysfs::{entries, parsed};
use crate::{Address, Error, Machine};

/// A PCI function with such memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Provider {
    /// The address of the function.
    pub address: Address,
    /// Bytes in all.
    pub size: u64,
    /// Bytes that were free when this was read. They may be in several pieces.
    pub available: u64,
    /// Whether the function's driver offers the memory to others, instead of only using it itself.
    pub published: bool,
}

/// The providers of a host, by address. `root` is the host's `/sys`, or a copy of it.
///
/// # Errors
/// A provider's file is missing, unreadable or malformed.
pub fn providers(root: &Path) -> Result<Vec<Provider>, Error> {
    let links = root.join("bus/pci/devices");
    let mut found = Vec::new();
    for name in entries(&links)? {
        let (function, folder) = (links.join(&name), links.join(&name).join("p2pmem"));
        if entries(&folder)?.is_empty() {
            continue;
        }
        let number = |file: &str| -> Result<u64, Error> {
            let path = folder.join(file);
            parsed(&path)?.ok_or_else(|| Error::unreadable(&path, io::ErrorKind::NotFound.into()))
        };
        found.push(Provider {
            address: name
                .parse()
                .map_err(|why: crate::InvalidAddress| Error::malformed(&function, why.to_string()))?,
            size: number("size")?,
            available: number("available")?,
            published: match number("published")? {
                0 => false,
                1 => true,
                other => {
                    return Err(Error::malformed(
                        &folder.join("published"),
                        format!("{other} is neither 0 nor 1"),
                    ));
                }
            },
        });
    }
    found.sort_by_key(|provider| provider.address);
    Ok(found)
}

/// The providers, and how `device` reaches their memory. The nearest by the kernel's count come first, in the order of
/// their addresses if equally near. Providers that `device` cannot reach come last ([`PeerToPeer::is_possible`]).
/// Providers that are not in `machine` are left out; the result is empty if `device` is not in it.
///
/// `forwards` is the answer of [`forwards_peers`](crate::p2p::forwards_peers).
pub fn nearest(
    machine: &Machine,
    providers: &[Provider],
    device: Address,
    forwards: bool,
) -> Vec<(Provider, PeerToPeer)> {
    let Some(device) = machine.function(device) else { return Vec::new() };
    let reached = |provider: &Provider| {
        let memory = machine.function(provider.address)?;
        Some((provider.clone(), PeerToPeer::between(machine, memory, device, forwards)))
    };
    let mut all: Vec<_> = providers.iter().filter_map(reached).collect();
    all.sort_by_key(|(provider, p2p)| (!p2p.is_possible(), p2p.distance, provider.address));
    all
}

#[cfg(all(test, unix))]
mod tests {
    use std::fs;

    use super::*;
    use crate::p2p::{OffSwitch, Route};
    use crate::{Description, fixture, sysfs};

    /// A copy of a p5's `/sys` in which these functions have memory: size, available, published.
    fn host(providers: &[(&str, [&str; 3])]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fixture::write_sysfs(&Description::p5().machine().unwrap(), root.path()).unwrap();
        for (address, texts) in providers {
            let folder = root.path().join(format!("bus/pci/devices/{address}/p2pmem"));
            fs::create_dir(&folder).unwrap();
            for (file, text) in ["size", "available", "published"].iter().zip(texts) {
                fs::write(folder.join(file), format!("{text}\n")).unwrap();
            }
        }
        root
    }

    #[test]
    fn providers_are_listed() {
        let root = host(&[]);
        assert_eq!(providers(root.path()).unwrap(), []);
        assert_eq!(providers(&root.path().join("bus")).unwrap(), []);
        let root =
            host(&[("0000:60:00.0", ["67108864", "66977792", "1"]), ("0000:4f:00.0", ["1048576", "0", "0"])]);
        let [near, far] = providers(root.path()).unwrap().try_into().unwrap();
        assert_eq!((near.address.to_string(), near.published), ("0000:4f:00.0".into(), false));
        assert_eq!((far.size, far.available, far.published), (64 << 20, (64 << 20) - 131_072, true));
    }

    #[test]
    fn errors_name_the_invalid_file() {
        for (file, texts) in [
            ("size", ["64M", "0", "1"]),
            ("available", ["64", "", "1"]),
            ("available", ["64", "-1", "1"]),
            ("published", ["64", "64", "2"]),
        ] {
            let root = host(&[("0000:4f:00.0", texts)]);
            let why = providers(root.path()).unwrap_err();
            assert!(matches!(why, Error::Malformed { .. }), "{why}");
            assert!(why.to_string().contains(&format!("0000:4f:00.0/p2pmem/{file}: ")), "{why}");
        }
        let root = host(&[("0000:4f:00.0", ["64", "64", "1"])]);
        fs::remove_file(root.path().join("bus/pci/devices/0000:4f:00.0/p2pmem/size")).unwrap();
        let why = providers(root.path()).unwrap_err().to_string();
        assert!(why.contains("0000:4f:00.0/p2pmem/size: "), "{why}");
    }

    #[test]
    fn the_nearest_come_first_and_the_refused_last() {
        // Two are behind the switch of the GPU 53:00.0, one is behind another host bridge.
        let texts = ["64", "64", "1"];
        let root = host(&[("0000:60:00.0", texts), ("0000:50:00.0", texts), ("0000:4f:00.0", texts)]);
        let (machine, providers) = (sysfs::read(root.path()).unwrap(), providers(root.path()).unwrap());
        let reached = |device: &str, forwards| {
            let reached = nearest(&machine, &providers, device.parse().unwrap(), forwards);
            reached.into_iter().map(|(provider, p2p)| (provider.address.to_string(), p2p)).collect::<Vec<_>>()
        };
        let order = |reached: &[(String, PeerToPeer)]| {
            reached.iter().map(|(at, p2p)| (at[5..7].to_owned(), p2p.distance)).collect::<Vec<_>>()
        };
        let near = reached("0000:53:00.0", false);
        assert_eq!(order(&near), [("4f".into(), 4), ("50".into(), 4), ("60".into(), 8)]);
        assert_eq!(near[2].1.route, Route::Refused(OffSwitch::NoSharedBridge));
        assert!(reached("0000:53:00.0", true).iter().all(|(_, p2p)| p2p.is_possible()));
        assert_eq!(order(&reached("0000:60:00.0", true))[0], ("60".into(), 0));
        assert_eq!(reached("0000:ff:00.0", true), []);
    }
}
