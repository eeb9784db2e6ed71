//! Memory of a PCI device (p2pmem), through the kernel's files and soft-RoCE cards. `ci/rdma-vm/p2pmem` runs the tests,
//! as root, on a machine whose NVMe disk has p2pmem and whose cards `rxe0` and `rxe1` page on demand.
#![cfg(target_os = "linux")]

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use multirail_spi::{Access, Backend, Error, ErrorKind, Memory, MemoryKind};
use multirail_verbs::{Verbs, VerbsConfig};
use pollster::block_on;
use topology::Address;
use topology::p2pmem::{Provider, providers};
use transport_core::{Fabric, FabricBuilder, P2pAllocator, P2pMemory, Region, TransportConfig};

/// The limit of every wait.
const LIMIT: Duration = limit::HANG;
const MIB: u64 = 1 << 20;

/// The only PCI function of the machine with p2pmem.
fn provider() -> Provider {
    let [one] = providers(Path::new("/sys")).unwrap().try_into().expect("one disk has p2pmem");
    one
}

fn available() -> u64 {
    provider().available
}

/// An allocator that trusts no root complex to forward between devices, whatever the processor.
fn allocator() -> P2pAllocator {
    P2pAllocator::of(Path::new("/sys"), false).unwrap()
}

fn refused(allocator: &P2pAllocator, len: u64) -> Error {
    allocator.allocate(len as usize).err().expect("no memory")
}

fn bytes(count: u64) -> Vec<u8> {
    (0..count as usize).map(|at| (at * 7 + (at >> 8)) as u8).collect()
}

/// Reads all bytes of the memory with the processor.
fn read(memory: &P2pMemory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    // SAFETY: the range is in bounds of both, and no device has the memory.
    unsafe { memory.as_ptr().copy_to(bytes.as_mut_ptr(), bytes.len()) };
    bytes
}

/// A fabric on one card.
fn fabric(card: usize, is_paged: bool) -> Fabric {
    let config = VerbsConfig::default().queue_pairs(1).on_demand_paging(is_paged);
    let verbs = Arc::new(Verbs::with(config));
    let device = verbs.probe().expect("soft-RoCE devices exist").swap_remove(card);
    let transport = TransportConfig::new("verbs", verbs).devices(vec![device]);
    FabricBuilder::new().transport(transport).open().unwrap()
}

fn register(fabric: &Fabric, memory: P2pMemory, access: Access) -> Result<Region, Error> {
    // SAFETY: only the region has the memory.
    unsafe { fabric.register(Arc::new(memory), access) }
}

#[test]
#[ignore = "needs a disk with p2pmem: ci/rdma-vm/p2pmem"]
fn memory_is_zeroed_and_returned() {
    let Provider { address, size, available: before, published, .. } = provider();
    println!("{address}: size {size}, available {before}, published {published}");
    assert!(published && before > 8 * MIB && before <= size);
    let memory = allocator().allocate(MIB as usize).unwrap();
    let other = allocator().provider(address).allocate(5000).unwrap();
    assert_eq!(before - available(), MIB + 8192, "whole pages are taken");
    assert_eq!((memory.kind(), memory.near(), memory.len()), (MemoryKind::P2pmem, Some(address), 1 << 20));
    let sent = bytes(MIB);
    // SAFETY: the range is in bounds of both, and no device has the memory.
    unsafe { memory.as_ptr().copy_from(sent.as_ptr(), sent.len()) };
    assert_eq!(read(&memory), sent);
    assert_eq!(read(&other), [0; 5000], "two allocations are not the same memory");
    drop((memory, other));
    assert_eq!(available(), before);
    // The kernel gives the same pages again and does not clear them.
    assert_eq!(read(&allocator().allocate(MIB as usize).unwrap()), vec![0; MIB as usize]);
    assert_eq!(available(), before);
}

#[test]
#[ignore = "needs a disk with p2pmem: ci/rdma-vm/p2pmem"]
fn more_than_the_device_has_is_refused() {
    let Provider { address, size, available: before, .. } = provider();
    let why = refused(&allocator(), size);
    println!("{why}");
    assert_eq!(why.kind(), ErrorKind::Exhausted);
    assert!(why.context().contains(&format!("where {before} are available")), "{why}");

    let reserved = allocator().reserve(before - MIB);
    let memory = reserved.allocate(MIB as usize).unwrap();
    assert_eq!(refused(&reserved, 1).kind(), ErrorKind::Exhausted);
    assert_eq!(available(), before - MIB);
    drop(memory);
    // The test takes the middle of the memory. The rest is large enough, but in two parts.
    let mut pages: Vec<_> = (0..before / (4 * MIB)).map(|_| allocator().allocate(4 << 20).unwrap()).collect();
    pages.remove(pages.len() / 2);
    pages.remove(0);
    let why = refused(&allocator(), 8 * MIB);
    println!("{why}");
    assert!(available() >= 8 * MIB && why.kind() == ErrorKind::Exhausted, "{why}");
    drop(pages);
    assert_eq!(available(), before);
    assert_eq!(
        refused(&allocator().provider("ffff:00:00.0".parse().unwrap()), 1).kind(),
        ErrorKind::NotFound
    );
    assert_eq!(allocator().provider(address).candidates().unwrap().len(), 1);
}

#[test]
#[ignore = "needs a disk with p2pmem: ci/rdma-vm/p2pmem"]
fn the_path_between_devices_decides() {
    let Provider { address, available: before, .. } = provider();
    let machine = topology::sysfs::this_host().unwrap();
    let here = machine.function(address).unwrap();
    let beside = |other: &&topology::Function| other.class == here.class && other.address != address;
    let disk: Address = machine.functions.iter().find(beside).expect("a second disk").address;
    // A function of the root complex itself, like QEMU's other devices.
    let far = machine.functions.iter().find(|one| one.bridges.is_empty()).unwrap().address;
    for (device, distance) in [(address, 0), (disk, 4)] {
        let near = allocator().near(device);
        let path = near.candidates().unwrap().remove(0).1.expect("a path from the named device");
        println!("{device}: {path}");
        assert_eq!((path.distance, path.is_possible()), (distance, true));
        assert_eq!(near.allocate(1).unwrap().provider(), address);
    }
    let why = refused(&allocator().near(far), 1);
    println!("{why}");
    assert_eq!(why.kind(), ErrorKind::Unsupported);
    assert!(why.context().contains(&format!("{address}: peer to peer from {far} is not possible")), "{why}");
    assert_eq!(available(), before);
}

#[test]
#[ignore = "needs a disk with p2pmem: ci/rdma-vm/p2pmem"]
fn only_root_can_allocate() {
    let this = std::env::current_exe().unwrap();
    let mut child = Command::new(this);
    let child = child.args(["--ignored", "--exact", "as_another_user", "--nocapture"]).uid(1000).gid(1000);
    let output = child.env("MULTIRAIL_P2PMEM_USER", "1000").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("permission denied"), "{said}");
    said.lines().filter(|line| line.contains("permission denied")).for_each(|line| println!("{line}"));
}

#[test]
#[ignore = "the other half of only_root_can_allocate"]
fn as_another_user() {
    if std::env::var_os("MULTIRAIL_P2PMEM_USER").is_none() {
        println!("skipped: only_root_can_allocate runs it");
        return;
    }
    let why = refused(&allocator(), 1);
    println!("{why}");
    assert_eq!(why.kind(), ErrorKind::Permission);
    assert!(why.context().contains("p2pmem/allocate: it is root's alone"), "{why}");
}

#[test]
#[ignore = "needs a disk with p2pmem and soft-RoCE: ci/rdma-vm/p2pmem"]
fn pinning_is_refused_with_advice() {
    let (before, fabric) = (available(), fabric(1, false));
    for access in [Access::all(), Access::LOCAL] {
        let why = register(&fabric, allocator().allocate(MIB as usize).unwrap(), access).err().unwrap();
        println!("{why}");
        assert_eq!((why.kind(), why.operation()), (ErrorKind::Io, "register"));
        for words in
            ["the kernel pins none for RDMA", "VerbsConfig::on_demand_paging", "DMA-BUF", "Bad address"]
        {
            assert!(why.context().contains(words), "{why}");
        }
    }
    assert_eq!(available(), before, "refused memory is returned");
}

#[test]
#[ignore = "needs a disk with p2pmem and soft-RoCE: ci/rdma-vm/p2pmem"]
fn memory_paged_on_demand_is_written_and_read() {
    let before = available();
    let (near, far) = (fabric(0, false), fabric(1, true));
    let target = register(&far, allocator().allocate(MIB as usize).unwrap(), Access::all()).unwrap();
    assert_eq!(before - available(), MIB);
    // Each packet is a whole page. In any memory that is paged on demand, soft-RoCE of Linux 7.3 ignores at which
    // offset of its page a packet begins (`__rxe_odp_mr_copy`).
    let (source, back) =
        (near.alloc(1 << 20, Access::LOCAL).unwrap(), near.alloc(1 << 20, Access::LOCAL).unwrap());
    let (sent, mut came) = (bytes(MIB), vec![0; MIB as usize]);
    source.copy_in(0, &sent).unwrap();
    far.publish("p2pmem", &target).unwrap();
    let (peer, _origin) = near.connect_local(&far).unwrap();
    let remote = block_on(peer.region("p2pmem")).unwrap();
    peer.write(&source, 0..sent.len(), &remote, 0).unwrap().wait(LIMIT).unwrap();
    target.copy_out(0, &mut came).unwrap();
    assert!(came == sent, "all bytes of a write have arrived");
    peer.read(&back, 0..sent.len(), &remote, 0).unwrap().wait(LIMIT).unwrap();
    came.fill(0);
    back.copy_out(0, &mut came).unwrap();
    assert!(came == sent, "all bytes of a read have arrived");
    drop((remote, target, peer, near, far));
    assert_eq!(available(), before, "dropping the last handle returns the memory");
}
