//! Rail groups, and peers that have more or fewer rails.

use std::sync::Arc;
use std::time::Duration;

use multirail_loopback::{Loopback, LoopbackConfig};
use multirail_spi::{Access, ErrorKind};
use transport_core::{
    Fabric, FabricBuilder, Pages, Peer, Pinning, TransportConfig, Workers, WriteOptions, wait,
};

const LIMIT: Duration = limit::HANG;
const PAGE: usize = 4096;
const PAGES: usize = 96;

fn builder(devices: u32, groups: u32) -> FabricBuilder {
    let config = LoopbackConfig::default().devices(devices).groups(groups);
    FabricBuilder::new().transport(TransportConfig::new("loopback", Arc::new(Loopback::with(config))))
}

fn fabric(devices: u32, groups: u32) -> Fabric {
    builder(devices, groups).open().unwrap()
}

/// The two peers of a connection through sockets.
fn connected(a: &Fabric, b: &Fabric) -> (Peer, Peer) {
    let listener = wait(b.listen("127.0.0.1:0"), LIMIT).unwrap().unwrap();
    let address = listener.local_addr().to_string();
    let to_b = wait(a.connect(&address), LIMIT).unwrap().unwrap();
    (to_b, wait(listener.accept(), LIMIT).unwrap().unwrap())
}

/// Writes pages `0..PAGES` of `from` to the peer in reverse order, with imm 5, and checks them there.
fn moves_pages(from: &Fabric, peer: &Peer, to: &Fabric, seen: &Peer) {
    let source = from.alloc(PAGES * PAGE, Access::LOCAL).unwrap();
    let target = to.alloc(PAGES * PAGE, Access::REMOTE_WRITE).unwrap();
    let bytes: Vec<u8> = (0..PAGES * PAGE).map(|at| (at / PAGE * 7 + at) as u8).collect();
    source.copy_in(0, &bytes).unwrap();
    let remote = peer.import(&target.descriptor()).unwrap();
    let pages = Pages::new((0..PAGES as u32).collect::<Vec<_>>());
    let reversed = Pages::new((0..PAGES as u32).rev().collect::<Vec<_>>());
    let options = WriteOptions::new().imm(5);
    let before = seen.imm(5).count();
    let mut op = peer.write_pages_with(&source, &pages, &remote, &reversed, PAGE, &options).unwrap();
    assert_eq!(op.wait(LIMIT).unwrap().bytes, (PAGES * PAGE) as u64);
    seen.imm(5).expect(before + 1).wait(LIMIT).unwrap();
    let mut arrived = vec![0; PAGES * PAGE];
    target.copy_out(0, &mut arrived).unwrap();
    for (page, want) in bytes.chunks(PAGE).enumerate() {
        let at = (PAGES - 1 - page) * PAGE;
        assert!(arrived[at..at + PAGE] == *want, "page {page}");
    }
}

fn posts(fabric: &Fabric) -> Vec<u64> {
    fabric.counters().iter().map(|rail| rail.posts).collect()
}

#[test]
fn sides_with_different_numbers_of_rails_use_all_of_theirs() {
    for (ours, theirs) in [(4, 2), (2, 4), (3, 2), (1, 3), (5, 1)] {
        for sockets in [false, true] {
            let (a, b) = (fabric(ours, 1), fabric(theirs, 1));
            let (to_b, to_a) = if sockets { connected(&a, &b) } else { a.connect_local(&b).unwrap() };
            moves_pages(&a, &to_b, &b, &to_a);
            moves_pages(&b, &to_a, &a, &to_b);
            for (fabric, rails) in [(&a, ours), (&b, theirs)] {
                let posts = posts(fabric);
                assert_eq!(posts.len(), rails as usize);
                assert!(posts.iter().all(|posts| *posts > 0), "{ours} to {theirs} rails: {posts:?}");
            }
            // A disconnect ends every pair of rails, also pairs that only receive.
            to_b.disconnect();
            assert_eq!(wait(to_a.closed(), LIMIT).unwrap().kind(), ErrorKind::Closed);
            let (to_b, to_a) = a.connect_local(&b).unwrap();
            moves_pages(&a, &to_b, &b, &to_a);
        }
    }
}

#[test]
fn the_narrower_side_gets_even_shares() {
    // Rails 0 and 1 share the peer's rail 0; rail 2 has rail 1 for itself.
    let (a, b) = (fabric(3, 1), fabric(2, 1));
    let (to_b, to_a) = a.connect_local(&b).unwrap();
    moves_pages(&a, &to_b, &b, &to_a);
    let posts = posts(&a);
    let shares = PAGES as u64 / 4;
    // One post more is the imm's.
    assert!(posts[0].abs_diff(shares) <= 1 && posts[1].abs_diff(shares) <= 1, "{posts:?}");
    assert!(posts[2].abs_diff(2 * shares) <= 1, "{posts:?}");
}

#[test]
fn groups_have_engines_of_their_own_and_share_large_operations() {
    let size = 16 << 20;
    for workers in
        [Workers::per_group(), Workers::at_most(1), Workers::at_most(2).pinning(Pinning::Cores(vec![0]))]
    {
        let (a, b) = (builder(4, 4).workers(workers.clone()).open().unwrap(), fabric(4, 4));
        assert_eq!(a.transports()[0].groups, [0..1, 1..2, 2..3, 3..4]);
        let (to_b, to_a) = connected(&a, &b);
        let source = a.alloc(size, Access::LOCAL).unwrap();
        let target = b.alloc(size, Access::REMOTE_WRITE).unwrap();
        source.copy_in(size - 3, b"end").unwrap();
        let remote = to_b.import(&target.descriptor()).unwrap();
        let mut op = to_b.write_with(&source, 0..size, &remote, 0, &WriteOptions::new().imm(1)).unwrap();
        assert_eq!(op.wait(LIMIT).unwrap().bytes, size as u64);
        to_a.imm(1).expect(1).wait(LIMIT).unwrap();
        assert_eq!(to_a.imm(1).count(), 1, "one imm announces all shares");
        let mut end = [0; 3];
        target.copy_out(size - 3, &mut end).unwrap();
        assert_eq!(&end, b"end");
        let bytes: Vec<_> = a.counters().iter().map(|rail| rail.bytes).collect();
        assert!(bytes.iter().all(|bytes| *bytes == size as u64 / 4), "{bytes:?}");
        assert_eq!(a.dump().transports.len(), 4);
        // Small operations go over the same rail.
        for _ in 0..8 {
            moves_pages(&a, &to_b, &b, &to_a);
            assert_eq!(a.counters().iter().filter(|rail| rail.bytes > size as u64 / 4).count(), 1);
        }
    }
}

#[test]
fn small_operations_use_another_group_when_4_mib_wait() {
    let (a, b) = (builder(4, 4).caller_driven().open().unwrap(), fabric(4, 4));
    let (to_b, _) = a.connect_local(&b).unwrap();
    let size = 2 << 20;
    let source = a.alloc(size, Access::LOCAL).unwrap();
    let target = b.alloc(size, Access::REMOTE_WRITE).unwrap();
    let remote = to_b.import(&target.descriptor()).unwrap();
    let bytes = || a.counters().iter().map(|rail| rail.bytes >> 20).collect::<Vec<_>>();
    for _ in 0..8 {
        to_b.write(&source, 0..size, &remote, 0).unwrap().detach();
    }
    while a.step().outstanding > 0 || bytes().iter().sum::<u64>() < 16 {}
    assert_eq!(bytes(), [4; 4], "4 MiB wait with one group, then the next takes its share");
    // No operation waits, so all use the group of the last one.
    for _ in 0..8 {
        to_b.write(&source, 0..size, &remote, 0).unwrap().wait(LIMIT).unwrap();
    }
    let mut bytes = bytes();
    bytes.sort_unstable();
    assert_eq!(bytes, [4, 4, 4, 20]);
}

#[test]
fn memory_near_a_group_goes_over_its_rails_alone() {
    let (a, b) = (fabric(4, 2), fabric(4, 2));
    let (to_b, _) = a.connect_local(&b).unwrap();
    let source = a.alloc_near(1, 8 << 20, Access::LOCAL).unwrap();
    let target = b.alloc(8 << 20, Access::REMOTE_WRITE).unwrap();
    let remote = to_b.import(&target.descriptor()).unwrap();
    to_b.write(&source, 0..8 << 20, &remote, 0).unwrap().wait(LIMIT).unwrap();
    let bytes: Vec<_> = a.counters().iter().map(|rail| rail.bytes).collect();
    assert_eq!((bytes[0], bytes[1], bytes[2] + bytes[3]), (0, 0, 8 << 20));
    // The peer's region is near the other group, whose rails are not paired with these.
    let far = b.alloc_near(0, 8 << 20, Access::REMOTE_WRITE).unwrap();
    let far = to_b.import(&far.descriptor()).unwrap();
    let error = to_b.write(&source, 0..8 << 20, &far, 0).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    assert!(error.context().contains("register one of them on all rails"), "{error}");
    assert_eq!(a.alloc_near(2, 4096, Access::LOCAL).err().unwrap().kind(), ErrorKind::InvalidRequest);
    assert_eq!(a.recv(&source, 0..4096).err().unwrap().kind(), ErrorKind::InvalidRequest);
}

#[test]
fn all_ways_to_post_move_the_same_bytes() {
    for workers in
        [Workers::per_group().batch(1), Workers::per_group().eager(), Workers::per_group().behind_one_lock()]
    {
        let (a, b) = (builder(4, 2).workers(workers).open().unwrap(), fabric(4, 2));
        let (to_b, to_a) = a.connect_local(&b).unwrap();
        moves_pages(&a, &to_b, &b, &to_a);
    }
}
