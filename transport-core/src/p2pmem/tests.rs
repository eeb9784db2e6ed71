//! Tests on a p5's `/sys` that is made of files. `backend-verbs/tests/p2pmem.rs` tests the kernel's own.

use std::fs;
use std::path::PathBuf;

use topology::{Description, fixture};

use super::*;
use crate::{Error, ErrorKind};

const MIB: usize = 1 << 20;
/// A GPU, and three NICs: two behind its switch, one behind another host bridge.
const GPU: &str = "0000:53:00.0";
const NEAR: &str = "0000:4f:00.0";
const NEXT: &str = "0000:50:00.0";
const FAR: &str = "0000:60:00.0";

struct Host(tempfile::TempDir);

impl Host {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        fixture::write_sysfs(&Description::p5().machine().unwrap(), root.path()).unwrap();
        Self(root)
    }

    fn file(&self, address: &str, file: &str) -> PathBuf {
        self.0.path().join(format!("bus/pci/devices/{address}/p2pmem/{file}"))
    }

    /// Adds `size` bytes of p2pmem at `address`, which an earlier owner wrote to.
    fn with(self, address: &str, size: usize) -> Self {
        fs::create_dir(self.file(address, "")).unwrap();
        fs::write(self.file(address, "allocate"), vec![7; size]).unwrap();
        for (file, number) in [("size", size), ("available", size), ("published", 1)] {
            fs::write(self.file(address, file), format!("{number}\n")).unwrap();
        }
        self
    }

    fn allocator(&self, forwards: bool) -> P2pAllocator {
        P2pAllocator::of(self.0.path(), forwards).unwrap()
    }
}

fn at(address: &str) -> Address {
    address.parse().unwrap()
}

/// The provider that gave the memory, or the error.
fn taken(allocator: &P2pAllocator, len: usize) -> Result<String, Error> {
    allocator.allocate(len).map(|memory| memory.provider().to_string())
}

/// Checks the error's kind, and that its text contains `words`.
#[track_caller]
fn assert_refused(allocator: &P2pAllocator, len: usize, kind: ErrorKind, words: &str) {
    let why = taken(allocator, len).unwrap_err();
    assert!(why.kind() == kind && why.to_string().contains(words), "{kind}, {words:?}: {why}");
}

#[test]
fn memory_is_zeroed_and_knows_where_it_is() {
    let host = Host::new().with(NEAR, MIB);
    let memory = host.allocator(false).allocate(5000).unwrap();
    assert_eq!((memory.len(), memory.kind()), (5000, MemoryKind::P2pmem));
    assert_eq!((memory.near(), memory.provider()), (Some(at(NEAR)), at(NEAR)));
    assert!(memory.shared_file().is_none() && memory.dma_buf().unwrap().is_none());
    drop(memory);
    let bytes = fs::read(host.file(NEAR, "allocate")).unwrap();
    let pages = 5000_usize.next_multiple_of(page_size());
    assert!(bytes[..pages].iter().all(|byte| *byte == 0) && bytes[pages..].iter().all(|byte| *byte == 7));
}

#[test]
fn the_nearest_that_has_enough() {
    let host = Host::new().with(FAR, 4 * MIB).with(NEXT, 2 * MIB).with(NEAR, MIB);
    let near = host.allocator(true).near(at(GPU));
    assert_eq!(taken(&near, MIB).unwrap(), NEAR);
    assert_eq!(taken(&near, MIB + 1).unwrap(), NEXT);
    assert_eq!(taken(&near, 3 * MIB).unwrap(), FAR);
    assert_eq!(taken(&near.clone().reserve(MIB as u64), MIB).unwrap(), NEXT);
    assert_eq!(taken(&near.clone().provider(at(FAR)), 1).unwrap(), FAR);
    assert_refused(&near, 5 * MIB, ErrorKind::Exhausted, "where 4194304 are available");
    // The error lists every provider that was tried.
    assert_refused(&near, 5 * MIB, ErrorKind::Exhausted, "where 1048576 are available");
    assert_eq!(taken(&host.allocator(false), 3 * MIB).unwrap(), FAR);
}

#[test]
fn a_way_that_the_kernel_refuses_is_explained() {
    let host = Host::new().with(FAR, 4 * MIB).with(NEAR, MIB);
    let near = host.allocator(false).near(at(GPU));
    assert_eq!(taken(&near, MIB).unwrap(), NEAR);
    assert_refused(&near, 2 * MIB, ErrorKind::Exhausted, "0000:60:00.0: peer to peer from 0000:53:00.0 is");
    let far = near.clone().provider(at(FAR));
    assert_refused(&far, MIB, ErrorKind::Unsupported, "share no PCIe switch, and this root complex");
    let ways: Vec<_> = near.candidates().unwrap().into_iter().map(|(_, way)| way.unwrap()).collect();
    assert_eq!(ways.iter().map(|way| way.is_possible()).collect::<Vec<_>>(), [true, false]);
}

#[test]
fn the_reserve_stays() {
    let host = Host::new().with(NEAR, 2 * MIB);
    let half = host.allocator(false).reserve(MIB as u64);
    assert_eq!(taken(&half, MIB).unwrap(), NEAR);
    // The request counts as whole pages.
    assert_refused(&half, MIB + 1, ErrorKind::Exhausted, "1048576 to stay, where 2097152 are available");
    assert_refused(&half.reserve(u64::MAX), 1, ErrorKind::Exhausted, "ask for less");
}

#[test]
fn what_is_missing_is_said() {
    let none = Host::new();
    assert_refused(&none.allocator(false), 1, ErrorKind::NotFound, "CONFIG_PCI_P2PDMA");
    let host = none.with(NEAR, MIB);
    let allocator = host.allocator(false);
    assert_refused(&allocator, 0, ErrorKind::InvalidRequest, "0 bytes");
    assert_refused(&allocator, usize::MAX, ErrorKind::InvalidRequest, "ask for 1 to");
    assert_refused(&allocator, usize::MAX - page_size(), ErrorKind::InvalidRequest, "ask for 1 to");
    assert_refused(&allocator.clone().provider(at(FAR)), 1, ErrorKind::NotFound, "these have: 0000:4f:00.0");
    assert_refused(&allocator.clone().near(at("0000:ff:00.0")), 1, ErrorKind::NotFound, "0000:ff:00.0");
    fs::write(host.file(NEAR, "published"), "0\n").unwrap();
    assert_refused(&allocator, 1, ErrorKind::Unsupported, "keeps its p2pmem to itself");
    fs::write(host.file(NEAR, "published"), "yes\n").unwrap();
    assert_refused(&allocator, 1, ErrorKind::Io, "p2pmem/published");
    fs::write(host.file(NEAR, "published"), "1\n").unwrap();
    fs::remove_file(host.file(NEAR, "allocate")).unwrap();
    assert_refused(&allocator, 1, ErrorKind::Unsupported, "Linux 6.2");
}
