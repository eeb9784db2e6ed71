//! Copies by GPUs. On a machine without a GPU, each test says that it is skipped.

mod pair;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use cuda::Device;
use multirail_loopback::{GpuSide, LoopbackConfig};
use multirail_spi::{Access, ErrorKind, HostBuffer, Memory};
use pair::{BOTH, FabricPair, TestMemory, builder, connected, content, fabrics, pairs, region};
use transport_core::{Pages, WriteOptions};

const LIMIT: Duration = limit::HANG;

/// Moves `count` pages of `page` bytes between shuffled positions, `skew` bytes off multiples of a page, and checks
/// every byte.
fn move_pages(pair: &FabricPair, memories: (TestMemory, TestMemory), page: usize, skew: usize, count: u32) {
    let stride = page + skew;
    let (source, content_here, target, remote) =
        pair.regions(memories, stride * count as usize + skew + page);
    let mut random = fastrand::Rng::with_seed(7);
    let mut order = || {
        let mut order: Vec<u32> = (0..count).collect();
        random.shuffle(&mut order);
        order
    };
    let (from, to) = (order(), order());
    let pages = |order: &[u32]| Pages::new(order.to_vec()).stride(stride).offset(skew);
    let mut op = pair.to.write_pages(&source, pages(&from), &remote, pages(&to), page).unwrap();
    op.wait(LIMIT).unwrap();
    let mut wanted = vec![0; target.len()];
    for (from, to) in from.iter().zip(&to) {
        let place = |index: &u32| skew + *index as usize * stride;
        wanted[place(to)..][..page].copy_from_slice(&content_here[place(from)..][..page]);
    }
    assert!(content(&target) == wanted, "{memories:?} {page} {skew} {count}");
}

fn pages_of_any_size_and_place() {
    for side in [GpuSide::Receiver, GpuSide::Sender] {
        let pair = fabrics(&LoopbackConfig::default().gpu_side(side));
        for memories in pairs() {
            for (page, skew, count) in [
                (1, 0, 100),
                (3, 5, 64),
                (64, 4, 500),
                (100, 8, 77),
                (4096, 0, 5000),
                (4096, 16, 300),
                (4100, 0, 60),
                (5000, 1, 60),
                (65536, 0, 333),
                (65536, 2, 40),
                (3 << 20, 0, 5),
            ] {
                move_pages(&pair, memories, page, skew, count);
            }
        }
    }
}

/// Operations between several regions, with pages of two sizes, and reads. This thread drives the fabric, so all
/// operations are under way before the first batch is launched, and those of one GPU share a batch.
fn operations_share_batches() {
    const COUNT: u32 = 2000;
    const PART: usize = COUNT as usize * 4096;
    let config = LoopbackConfig::default();
    let pair = connected(builder(&config).caller_driven().open().unwrap(), builder(&config).open().unwrap());
    for memories in pairs() {
        let (source, content_here, target, remote) = pair.regions(memories, 3 * PART);
        let other = region(&pair.here, memories.0, PART, Access::LOCAL);
        other.copy_in(0, &content_here[PART..2 * PART]).unwrap();
        target.copy_in(2 * PART, &content_here[..PART]).unwrap();
        // The source pages are in order and the target pages in reverse order, so no two pages are joined.
        let pages = |first, order: Vec<u32>| Pages::new(order).stride(4096).offset(first);
        let (from, order) = (pages(0, (0..COUNT).collect()), || (0..COUNT).rev().collect());
        let mut ops = [
            pair.to.write_pages(&source, &from, &remote, pages(0, order()), 4096).unwrap(),
            pair.to.write_pages(&other, &from, &remote, pages(PART, order()), 1000).unwrap(),
            pair.to.read(&source, 2 * PART..3 * PART, &remote, 2 * PART).unwrap(),
        ];
        for op in &mut ops {
            op.wait(LIMIT).unwrap();
        }
        let (found, back) = (content(&target), content(&source));
        for (first, page) in [(0, 4096), (PART, 1000)] {
            let there = found[first..][..PART].chunks(4096);
            let here = content_here[first..][..PART].chunks(4096).rev();
            let alike = |(there, here): (&[u8], &[u8])| {
                there[..page] == here[..page] && there[page..].iter().all(|byte| *byte == 0)
            };
            assert!(there.zip(here).all(alike), "{memories:?} {page}");
        }
        assert!(back[..2 * PART] == content_here[..2 * PART], "{memories:?}");
        assert!(back[2 * PART..] == content_here[..PART], "{memories:?}");
    }
}

fn blocks_and_groups_change_no_byte() {
    for (blocks, devices) in [(1, 1), (4, 2), (132, 2)] {
        let config = LoopbackConfig::default().devices(devices).groups(devices).gpu_blocks(blocks);
        let pair = fabrics(&config);
        for memories in pairs() {
            move_pages(&pair, memories, 16384, 0, 1000);
        }
    }
}

fn large_writes_and_reads() {
    let pair = fabrics(&LoopbackConfig::default().devices(2).groups(2));
    for memories in pairs() {
        let len = (40 << 20) + 5;
        let (source, content_here, target, remote) = pair.regions(memories, len);
        pair.to.write(&source, 0..len - 3, &remote, 3).unwrap().wait(LIMIT).unwrap();
        assert!(content(&target)[3..] == content_here[..len - 3], "{memories:?}");
        source.copy_in(0, &vec![0; len]).unwrap();
        pair.to.read(&source, 10..len, &remote, 3).unwrap().wait(LIMIT).unwrap();
        assert!(content(&source)[10..] == content_here[..len - 10], "{memories:?}");
    }
}

fn small_writes_at_once_and_imms() {
    let pair = fabrics(&LoopbackConfig::default());
    for memories in pairs() {
        let (source, content_here, target, remote) = pair.regions(memories, 200_000);
        for (at, len) in [(0, 8), (9, 1), (1000, 65536), (70_000, 65537)] {
            let options = WriteOptions::default().imm(at as u32);
            pair.to.write_with(&source, at..at + len, &remote, at, &options).unwrap().wait(LIMIT).unwrap();
            pair.from.imm(at as u32).expect(1).wait(LIMIT).unwrap();
            assert!(pair.from.imm(at as u32).try_take(1));
            assert!(content(&target)[at..at + len] == content_here[at..at + len], "{memories:?} {at} {len}");
        }
        assert_eq!(content(&target)[140_000], 0);
    }
}

fn a_peer_that_takes_no_imms_delays_no_other_peer() {
    // More than a message ring has room for.
    const IMMS: usize = 1500;
    let config = LoopbackConfig::default();
    for memories in pairs() {
        let quick = fabrics(&config);
        // No thread drives this fabric.
        let slow = connected(quick.here.clone(), builder(&config).caller_driven().open().unwrap());
        let (source, content_here, target, remote) = slow.regions(memories, IMMS * 8);
        let write = |at: usize| {
            slow.to.write_with(&source, at * 8..at * 8 + 8, &remote, at * 8, &WriteOptions::default().imm(1))
        };
        let mut waiting: Vec<_> = (0..IMMS).map(|at| write(at).unwrap()).collect();
        let (source, quick_content, other, remote) = quick.regions(memories, 100_000);
        let options = WriteOptions::default().imm(2);
        quick.to.write_with(&source, 0..100_000, &remote, 0, &options).unwrap().wait(LIMIT).unwrap();
        assert!(content(&other) == quick_content, "{memories:?}");
        // Operations whose imms wait fail with their peer.
        slow.to.disconnect();
        let ends: Vec<_> = waiting.iter_mut().map(|op| op.wait(LIMIT).map_err(|why| why.kind())).collect();
        let done = ends.iter().filter(|end| end.is_ok()).count();
        assert!((1..IMMS).contains(&done), "{memories:?}: {done} of {IMMS}");
        let lost = ends.iter().filter(|end| end.as_ref().err() == Some(&ErrorKind::Closed)).count();
        assert_eq!(done + lost, IMMS, "{memories:?}");
        assert!(content(&target)[..done * 8] == content_here[..done * 8], "{memories:?}");
    }
}

fn operations_complete_when_the_driver_refuses_a_copy() {
    let pair = fabrics(&LoopbackConfig::default());
    let device = Device::open(0).unwrap();
    let (source, content_here, target, remote) =
        pair.regions((TestMemory::Gpu(0), TestMemory::Gpu(0)), 8 << 20);
    // Half of the memory is page-locked. The driver refuses a copy across the border.
    let memory = Arc::new(HostBuffer::new(8 << 20).unwrap());
    // SAFETY: dropped before the memory, at the end.
    let lock = unsafe { cuda::PageLock::new(&device, memory.as_ptr(), 4 << 20) }.unwrap();
    // SAFETY: nobody refers to the bytes.
    let half = unsafe { pair.there.register(memory.clone(), BOTH) }.unwrap();
    let to_half = pair.to.import(&half.descriptor()).unwrap();
    let write = |remote| pair.to.write(&source, 0..8 << 20, remote, 0).unwrap();
    for _ in 0..20 {
        let mut ops = [write(&remote), write(&to_half), write(&remote), write(&to_half), write(&remote)];
        // Operations in the same batch may fail too. Every operation completes.
        for end in ops.each_mut().map(|op| op.wait(LIMIT)) {
            assert!(
                end.as_ref().map_or_else(|why| why.kind() == ErrorKind::InvalidRequest, |_| true),
                "{end:?}"
            );
        }
        write(&remote).wait(LIMIT).unwrap();
    }
    assert!(content(&target) == content_here);
    half.revoke().unwrap().wait(LIMIT).unwrap();
    drop(lock);
}

fn messages_from_and_into_gpus() {
    let pair = fabrics(&LoopbackConfig::default());
    for memories in pairs() {
        let (source, content_here, target, _) = pair.regions(memories, 60_000);
        let mut receive = pair.there.recv(&target, 100..50_100).unwrap();
        pair.to.send(&source, 7..50_007).unwrap().wait(LIMIT).unwrap();
        let message = receive.wait(LIMIT).unwrap();
        assert_eq!(message.bytes, 50_000, "{memories:?}");
        assert!(content(&target)[100..50_100] == content_here[7..50_007], "{memories:?}");
    }
}

fn wrong_requests_are_refused() {
    let pair = fabrics(&LoopbackConfig::default());
    for memories in pairs() {
        let (source, _, target, remote) = pair.regions(memories, 1 << 20);
        let beyond = Pages::new(vec![0, 16]);
        let inside = Pages::new(vec![0, 1]);
        for (from, to) in [(&beyond, &inside), (&inside, &beyond)] {
            let refused = pair.to.write_pages(&source, from, &remote, to, 65536).err().unwrap();
            assert_eq!(refused.kind(), ErrorKind::OutOfBounds, "{memories:?}");
        }
        let none = Pages::new(Vec::new());
        let refused = pair.to.write_pages(&source, &none, &remote, &none, 65536).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::InvalidRequest);
        // The targets overlap: each byte is one of those that were written to it.
        let twice = Pages::new(vec![3, 3, 3]);
        let three = Pages::new(vec![0, 1, 2]);
        pair.to.write_pages(&source, &three, &remote, &twice, 65536).unwrap().wait(LIMIT).unwrap();
        target.revoke().unwrap().wait(LIMIT).unwrap();
        let late = pair.to.write(&source, 0..8, &remote, 0).and_then(|mut op| op.wait(LIMIT)).unwrap_err();
        assert_eq!(late.kind(), ErrorKind::Revoked, "{memories:?}");
    }
}

fn main() -> ExitCode {
    conformance::run_or_skip(
        pair::missing(),
        conformance::tests![
            pages_of_any_size_and_place,
            operations_share_batches,
            blocks_and_groups_change_no_byte,
            large_writes_and_reads,
            small_writes_at_once_and_imms,
            a_peer_that_takes_no_imms_delays_no_other_peer,
            operations_complete_when_the_driver_refuses_a_copy,
            messages_from_and_into_gpus,
            wrong_requests_are_refused
        ],
    )
}
