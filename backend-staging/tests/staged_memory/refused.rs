//! Memory that libfabric's tcp provider refuses is staged if both processes allow it.

use backend_efa::{Efa, EfaConfig};
use multirail_spi::{Access, ErrorKind, Result};
use multirail_staging::StagingPolicy;
use transport_core::{Fabric, Pages, Peer, Region, WriteOptions};

use crate::OPEN;

const LEN: usize = 3 << 20;

fn open(staging: StagingPolicy) -> Option<Fabric> {
    crate::open(Efa::with(EfaConfig::default().provider("tcp").node("127.0.0.1")), staging)
}

fn register_refused(fabric: &Fabric) -> Result<Region> {
    crate::register_refused(fabric, LEN)
}

fn bytes(seed: u8) -> Vec<u8> {
    (0..LEN).map(|at| (at / 7) as u8 ^ (at >> 13) as u8 ^ seed).collect()
}

fn all_of(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; LEN];
    region.copy_out(0, &mut bytes).expect("in bounds");
    bytes
}

/// Writes all of `from` to `to`, reads it back into `back`, and compares.
fn there_and_back(peer: &Peer, from: &Region, to: &Region, back: &Region, seed: u8) {
    let remote = peer.import(&to.descriptor()).expect("an import");
    from.copy_in(0, &bytes(seed)).expect("in bounds");
    pollster::block_on(async {
        peer.write(from, 0..LEN, &remote, 0)?.await?;
        assert!(all_of(to) == bytes(seed), "the written bytes");
        peer.read(back, 0..LEN, &remote, 0)?.await
    })
    .expect("there and back");
    assert!(all_of(back) == bytes(seed), "the bytes that were read");
}

#[test]
fn staged_and_plain_memory_can_be_mixed() {
    let Some((here, there)) = open(StagingPolicy::WhereRefused).zip(open(StagingPolicy::WhereRefused)) else {
        return;
    };
    let (peer, origin) = here.connect_local(&there).expect("connected");
    let near = [here.alloc(LEN, OPEN).unwrap(), register_refused(&here).unwrap()];
    let far = [there.alloc(LEN, OPEN).unwrap(), register_refused(&there).unwrap()];
    for (seed, (from, to)) in near.iter().flat_map(|from| far.iter().map(move |to| (from, to))).enumerate() {
        for back in &near {
            back.copy_in(0, &vec![0; LEN]).unwrap();
            there_and_back(&peer, from, to, back, seed as u8);
        }
    }
    let path = |region: &Region| peer.import(&region.descriptor()).unwrap().path();
    assert_eq!((path(&far[0]), path(&far[1])), ("libfabric", "staged through the host's memory"));
    let explained = |from: &Region, to: &Region| {
        let remote = peer.import(&to.descriptor()).unwrap();
        peer.explain_write(from, 0..LEN, &remote, 0, &WriteOptions::new()).unwrap().staging_reason
    };
    assert_eq!(explained(&near[0], &far[1]), None);
    let reason = explained(&near[1], &far[0]).expect("a reason for staging");
    assert!(reason.starts_with("staged") && reason.contains("unsupported"), "with the refusal: {reason}");
    // Pages, and an imm that arrives after all of them.
    let count = LEN / 4096;
    let pages = Pages::new((0..count as u32).rev().collect::<Vec<_>>());
    let straight = Pages::new((0..count as u32).collect::<Vec<_>>());
    near[1].copy_in(0, &bytes(99)).unwrap();
    let remote = peer.import(&far[1].descriptor()).unwrap();
    let options = WriteOptions::new().imm(5);
    let write = peer.write_pages_with(&near[1], &straight, &remote, &pages, 4096, &options).unwrap();
    pollster::block_on(async {
        origin.imm(5).expect(1).await?;
        let (sent, came) = (bytes(99), all_of(&far[1]));
        assert!(sent.chunks(4096).rev().eq(came.chunks(4096)), "all pages before the imm");
        write.await
    })
    .expect("pages");
}

#[test]
fn the_target_refuses_access_to_dropped_regions() {
    let Some((here, there)) = open(StagingPolicy::WhereRefused).zip(open(StagingPolicy::WhereRefused)) else {
        return;
    };
    let (peer, _origin) = here.connect_local(&there).expect("connected");
    let from = here.alloc(LEN, Access::LOCAL).unwrap();
    let to = register_refused(&there).unwrap();
    let remote = peer.import(&to.descriptor()).unwrap();
    pollster::block_on(async {
        peer.write(&from, 0..LEN, &remote, 0)?.await?;
        drop(to);
        let gone = peer.write(&from, 0..LEN, &remote, 0)?.await.expect_err("the region is gone");
        assert!(matches!(gone.kind(), ErrorKind::RemoteAccess | ErrorKind::Revoked), "{gone}");
        // The connection still works.
        let next = register_refused(&there)?;
        let remote = peer.import(&next.descriptor())?;
        peer.write(&from, 0..LEN, &remote, 0)?.await
    })
    .expect("a connection");
}

#[test]
fn a_peer_without_staging_is_refused_staged_regions() {
    let Some((here, there)) = open(StagingPolicy::Never).zip(open(StagingPolicy::WhereRefused)) else {
        return;
    };
    let refused = register_refused(&here).err().expect("nothing is staged");
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
    // It makes no difference which process connects.
    for (one, other) in [(&here, &there), (&there, &here)] {
        let (peer, back) = one.connect_local(other).expect("connected");
        let (ours, theirs) = (one.alloc(LEN, OPEN).unwrap(), other.alloc(LEN, OPEN).unwrap());
        there_and_back(&peer, &ours, &theirs, &ours, 3);
        let (plain, _staged) = if std::ptr::eq(one, &here) { (&peer, &back) } else { (&back, &peer) };
        let why =
            plain.import(&register_refused(&there).unwrap().descriptor()).expect_err("it is staged there");
        assert!(
            why.kind() == ErrorKind::Unsupported && why.context().contains("MULTIRAIL_STAGING=1"),
            "{why}"
        );
    }
    // The staging process can stage its own memory without the peer's support.
    let (peer, _back) = there.connect_local(&here).expect("connected");
    there_and_back(
        &peer,
        &register_refused(&there).unwrap(),
        &here.alloc(LEN, OPEN).unwrap(),
        &register_refused(&there).unwrap(),
        9,
    );
}

#[test]
fn messages_without_a_receive_do_not_delay_writes() {
    let Some((here, there)) = open(StagingPolicy::WhereRefused).zip(open(StagingPolicy::WhereRefused)) else {
        return;
    };
    let (peer, _origin) = here.connect_local(&there).expect("connected");
    let (from, to) = (register_refused(&here).unwrap(), register_refused(&there).unwrap());
    let remote = peer.import(&to.descriptor()).unwrap();
    from.copy_in(0, &bytes(1)).unwrap();
    let message = |at: usize| peer.send(&from, 1000 * at..1000 * at + 1000).unwrap();
    let messages: Vec<_> = (0..100).map(message).collect();
    let limit = limit::HANG;
    for _ in 0..40 {
        peer.write(&from, 0..LEN, &remote, 0).unwrap().wait(limit).expect("a write behind messages");
    }
    assert!(all_of(&to) == bytes(1));
    // The messages are received into staged memory.
    let inbox = register_refused(&there).unwrap();
    let receives: Vec<_> =
        (0..100).map(|at| there.recv(&inbox, 1000 * at..1000 * at + 1000).unwrap()).collect();
    messages.into_iter().for_each(|mut message| assert!(message.wait(limit).is_ok()));
    receives.into_iter().for_each(|mut receive| assert!(receive.wait(limit).is_ok()));
    let mut came: Vec<Vec<u8>> = all_of(&inbox)[..100_000].chunks(1000).map(<[u8]>::to_vec).collect();
    let mut sent: Vec<Vec<u8>> = bytes(1)[..100_000].chunks(1000).map(<[u8]>::to_vec).collect();
    came.sort();
    sent.sort();
    assert!(came == sent, "every message once");
}

/// The imm of the crate's own requests and responses that announce no bytes.
const WAKE_IMM: u32 = 0x6b6e_6f63;
/// The imm that would announce the first slot request of the first slot, and that of the bytes of a read.
const SLOT_IMMS: [u32; 2] = [0x6b6f_0020, 0x6b6f_0030];

#[test]
fn every_imm_arrives_and_no_other() {
    let Some((here, there)) = open(StagingPolicy::WhereRefused).zip(open(StagingPolicy::WhereRefused)) else {
        return;
    };
    let (peer, origin) = here.connect_local(&there).expect("connected");
    let limit = limit::HANG;
    let takes = |imm: u32| {
        origin.imm(imm).expect(1).wait(limit).expect("an imm");
        assert!(origin.imm(imm).try_take(1));
    };
    let near = [here.alloc(LEN, OPEN).unwrap(), register_refused(&here).unwrap()];
    let far = [there.alloc(LEN, OPEN).unwrap(), register_refused(&there).unwrap()];
    for imm in [WAKE_IMM, WAKE_IMM + 1, SLOT_IMMS[0], SLOT_IMMS[1]] {
        let options = WriteOptions::new().imm(imm);
        for (from, to) in near.iter().flat_map(|from| far.iter().map(move |to| (from, to))) {
            let remote = peer.import(&to.descriptor()).unwrap();
            for (seed, len) in [(1, 0), (2, 9), (3, 64 << 10), (4, LEN)] {
                to.copy_in(0, &bytes(0)).unwrap();
                from.copy_in(0, &bytes(seed)).unwrap();
                let mut write = peer.write_with(from, 0..len, &remote, 0, &options).unwrap();
                takes(imm);
                assert!(all_of(to)[..len] == bytes(seed)[..len], "all {len} bytes before imm {imm:#x}");
                write.wait(limit).expect("a write");
            }
        }
        peer.write_imm(imm).unwrap().wait(limit).expect("an imm alone");
        takes(imm);
        // An imm that nobody sent would arrive before this one.
        peer.write_imm(9).unwrap().wait(limit).expect("another imm");
        takes(9);
        assert_eq!(origin.imm(imm).count(), 0, "no imm that nobody sent");
    }
}
