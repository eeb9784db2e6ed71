//! Messages into memory that the processor cannot access by its address, like GPU memory. `ci/rdma-vm/suite` runs the
//! tests, as root, on the soft-RoCE devices `rxe0` and `rxe1`.
#![cfg(target_os = "linux")]

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use multirail_spi::{Access, Backend, Error, ErrorKind, HostBuffer, Mapping, Memory, MemoryKind, Result};
use multirail_verbs::Verbs;
use pollster::block_on;
use rustix::mm::{MprotectFlags, mprotect};
use transport_core::{Fabric, FabricBuilder, Peer, Region, TransportConfig};

/// The limit of every wait.
const LIMIT: Duration = Duration::from_secs(60);
const LEN: usize = 16 << 10;

/// How the owner of the memory copies bytes into it.
#[derive(Clone, Copy, PartialEq)]
enum Store {
    Works,
    Fails,
    Absent,
}

/// A stand-in for GPU memory: the card writes it by its address, where the processor faults. Its owner accesses the
/// same bytes through another mapping.
struct DeviceMemory {
    bytes: HostBuffer,
    hidden: Mapping,
    store: Store,
}

impl DeviceMemory {
    fn new(store: Store) -> Self {
        let bytes = HostBuffer::sparse(LEN).unwrap();
        let file = bytes.shared_file().expect("memory has a file on Linux");
        let hidden = Mapping::of_file(file, LEN, true).unwrap();
        Self { bytes, hidden, store }
    }

    /// Makes the processor fault at the address from now on. The card has the pages already.
    fn hide(&self) {
        // SAFETY: the range is the whole mapping, and no code holds references into it.
        unsafe { mprotect(self.as_ptr().cast(), LEN, MprotectFlags::empty()) }.unwrap();
    }

    fn range(at: usize, len: usize) -> Range<usize> {
        assert!(at.checked_add(len).is_some_and(|end| end <= LEN));
        at..at + len
    }
}

// SAFETY: both mappings live as long as the value, at fixed addresses, and no code holds references into them.
unsafe impl Memory for DeviceMemory {
    fn as_ptr(&self) -> *mut u8 {
        self.hidden.start().as_ptr()
    }

    fn len(&self) -> usize {
        LEN
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Cuda { device: 0 }
    }

    fn store(&self, at: usize, bytes: &[u8]) -> Option<Result<()>> {
        let into = self.bytes.as_ptr().wrapping_add(Self::range(at, bytes.len()).start);
        match self.store {
            Store::Absent => None,
            // An empty `bytes` only asks whether the memory has a `store`.
            Store::Fails if !bytes.is_empty() => {
                Some(Err(Error::new(ErrorKind::Io, "copy", "the test makes it fail")))
            }
            _ => {
                // SAFETY: the range is in bounds, and a caller's slice does not overlap it.
                unsafe { into.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
                Some(Ok(()))
            }
        }
    }

    fn load(&self, at: usize, into: &mut [u8]) -> Option<Result<()>> {
        let from = self.bytes.as_ptr().wrapping_add(Self::range(at, into.len()).start);
        // SAFETY: as in `store`.
        unsafe { from.copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
        Some(Ok(()))
    }
}

fn fabric(card: usize) -> Fabric {
    let verbs = Arc::new(Verbs::new());
    let device = verbs.probe().expect("soft-RoCE devices exist").swap_remove(card);
    let transport = TransportConfig::new("verbs", verbs).devices(vec![device]);
    FabricBuilder::new().transport(transport).handshake_limit(LIMIT).open().unwrap()
}

fn device_region(fabric: &Fabric, store: Store) -> Region {
    let memory = Arc::new(DeviceMemory::new(store));
    // SAFETY: nothing but the region knows the memory.
    let region = unsafe { fabric.register(memory.clone(), Access::LOCAL) }.unwrap();
    memory.hide();
    region
}

/// Two connected fabrics: one sends to the other.
fn pair() -> (Fabric, Fabric, Peer, Peer) {
    let (near, far) = (fabric(0), fabric(1));
    let listener = block_on(far.listen("127.0.0.1:0")).unwrap();
    let there = block_on(near.connect(&listener.local_addr())).unwrap();
    let here = block_on(listener.accept()).unwrap();
    (near, far, there, here)
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + (at >> 8) + 1) as u8).collect()
}

fn read(region: &Region, range: Range<usize>) -> Vec<u8> {
    let mut bytes = vec![0; range.len()];
    region.copy_out(range.start, &mut bytes).unwrap();
    bytes
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn the_owner_stores_a_message() {
    let (near, far, to_far, _to_near) = pair();
    let into = device_region(&far, Store::Works);
    let from = near.alloc(LEN, Access::LOCAL).unwrap();
    let sent = bytes(LEN);
    from.copy_in(0, &sent).unwrap();
    for (at, len) in [(0, LEN), (100, 20), (5000, 8000), (7, 0)] {
        into.copy_in(0, &vec![0; LEN]).unwrap();
        let mut receive = far.recv(&into, at..LEN).unwrap();
        to_far.send(&from, at..at + len).unwrap().wait(LIMIT).unwrap();
        assert_eq!(receive.wait(LIMIT).unwrap().bytes, len as u64);
        let mut wanted = vec![0; LEN];
        wanted[at..at + len].copy_from_slice(&sent[at..at + len]);
        assert!(read(&into, 0..LEN) == wanted, "{len} bytes at {at}");
    }
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn a_few_bytes_of_device_memory_are_sent() {
    // A few bytes of host memory would go into the request itself, which the processor writes.
    let (near, far, to_far, _to_near) = pair();
    let from = device_region(&near, Store::Works);
    let into = far.alloc(LEN, Access::LOCAL).unwrap();
    from.copy_in(40, &bytes(24)).unwrap();
    let mut receive = far.recv(&into, 0..LEN).unwrap();
    to_far.send(&from, 40..64).unwrap().wait(LIMIT).unwrap();
    receive.wait(LIMIT).unwrap();
    assert_eq!(read(&into, 0..24), bytes(24));
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn without_a_store_a_receive_is_refused() {
    let (near, far, to_far, _to_near) = pair();
    let into = device_region(&far, Store::Absent);
    let why = far.recv(&into, 0..LEN).and_then(|mut receive| receive.wait(LIMIT)).unwrap_err();
    assert_eq!(why.kind(), ErrorKind::InvalidRequest, "{why}");
    assert!(why.context().contains("Memory::store, or receive into host memory"), "{why}");
    receives_into_host_memory(&near, &far, &to_far);
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn a_store_that_fails_ends_its_receive_alone() {
    let (near, far, to_far, _to_near) = pair();
    let into = device_region(&far, Store::Fails);
    let from = near.alloc(LEN, Access::LOCAL).unwrap();
    let mut receive = far.recv(&into, 0..LEN).unwrap();
    to_far.send(&from, 0..LEN).unwrap().wait(LIMIT).unwrap();
    let why = receive.wait(LIMIT).unwrap_err();
    assert!(why.kind() == ErrorKind::Io && why.context().contains("Memory::store"), "{why}");
    receives_into_host_memory(&near, &far, &to_far);
}

fn receives_into_host_memory(near: &Fabric, far: &Fabric, to_far: &Peer) {
    let (from, into) = (near.alloc(LEN, Access::LOCAL).unwrap(), far.alloc(LEN, Access::LOCAL).unwrap());
    from.copy_in(0, &bytes(LEN)).unwrap();
    let mut receive = far.recv(&into, 0..LEN).unwrap();
    to_far.send(&from, 0..LEN).unwrap().wait(LIMIT).unwrap();
    receive.wait(LIMIT).unwrap();
    assert!(read(&into, 0..LEN) == bytes(LEN));
}
