//! When the kernel has no memory left, loopback returns an error, and there is no `SIGBUS`.
//!
//! Linux raises that signal if `vm.overcommit_memory` is 2: it then counts the pages of shared memory at their first
//! touch. The setting is the whole machine's, so the test runs only where it is set, as in `ci/rdma-vm/suite`.

mod common;

use std::process::{Command, ExitCode};
use std::ptr::null_mut;

use common::*;
use multirail_loopback::LoopbackConfig;
use multirail_spi::{ErrorKind, HostBuffer, Memory};
use rustix::mm::{MapFlags, ProtFlags};

/// Tells this test executable that it is the child.
const CHILD: &str = "MULTIRAIL_LOOPBACK_SHORTAGE";

/// Bytes that stay free, and fewer than a buffer takes.
const LEFT: usize = 1 << 20;
const BUFFER: usize = 8 << 20;
/// Peers of which each takes a page of shared memory at least: more than [`LEFT`], and what the kernel miscounts.
const PEERS: usize = 4096;
/// Blocks of the heap, of 1 KiB each, that the child has when memory ends.
const HEAP_BLOCKS: usize = 8192;

/// Takes all memory that the kernel would still promise, except [`LEFT`], without touching it.
fn exhaust() {
    let take = |len| {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choosing overlaps nothing.
        unsafe { rustix::mm::mmap_anonymous(null_mut(), len, protection, MapFlags::PRIVATE) }
    };
    let kept = take(LEFT).unwrap();
    let mut step = 1 << 40;
    while step >= 64 << 10 {
        if take(step).is_err() {
            step /= 2;
        }
    }
    // SAFETY: the mapping made above, to which nobody refers.
    unsafe { rustix::mm::munmap(kept, LEFT) }.unwrap();
}

/// The child: takes all memory, then asks for more in every way there is.
fn short_of_memory() {
    let (a, b) = (node(LoopbackConfig::default(), 1), node(LoopbackConfig::default(), 2));
    // Offers for other processes: segments with a file, which the kernel counts at their first touch.
    let (to_b, offer_a) = a.domain.connector().prepare().unwrap();
    let (_, offer_b) = b.domain.connector().prepare().unwrap();
    let _kept = (a.register(4096, BOTH), offer_a);
    // The heap must not grow any more. Its last block keeps the others from going back to the kernel.
    let mut blocks: Vec<_> = (0..HEAP_BLOCKS).map(|_| Box::new([1_u8; 1024])).collect();
    let _last = blocks.pop();
    drop(blocks);
    exhaust();
    let error = match HostBuffer::new(BUFFER) {
        Err(error) => error,
        Ok(buffer) => {
            // SAFETY: the buffer's own bytes.
            unsafe { buffer.as_ptr().write_bytes(1, BUFFER) };
            panic!("{BUFFER} bytes were given out and had memory");
        }
    };
    assert_eq!(error.kind(), ErrorKind::Exhausted, "{error}");
    // A connection whose memory is there already is made.
    a.domain.connector().complete(to_b, &offer_b).unwrap();
    let mut offers = Vec::with_capacity(PEERS);
    let error = (0..PEERS).find_map(|_| match a.domain.connector().prepare() {
        Ok(offer) => {
            offers.push(offer);
            None
        }
        Err(error) => Some(error),
    });
    let error = error.unwrap_or_else(|| panic!("{PEERS} peers found memory"));
    assert_eq!(error.kind(), ErrorKind::Exhausted, "{error}");
    assert!(error.to_string().contains("vm.overcommit_ratio"), "{error}");
    println!("typed after {} offers", offers.len());
}

fn memory_that_is_short_is_an_error() {
    let child = Command::new(std::env::current_exe().unwrap()).env(CHILD, "1").output().unwrap();
    let said = [child.stdout, child.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(child.status.success() && said.contains("typed"), "{}: {said}", child.status);
}

fn main() -> ExitCode {
    if std::env::var_os(CHILD).is_some() {
        short_of_memory();
        return ExitCode::SUCCESS;
    }
    let setting = std::fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap_or_default();
    let missing = (setting.trim() != "2").then(|| "vm.overcommit_memory is not 2".to_owned());
    conformance::run_or_skip(missing, conformance::tests![memory_that_is_short_is_an_error])
}
