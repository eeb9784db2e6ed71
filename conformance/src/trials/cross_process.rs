//! Every operation between two processes. The owner of each region checks its bytes.

use std::time::Duration;

use transport_core::spi::Operations;
use transport_core::{ErrorKind, Pages, Peer, SendOptions, WriteOptions};

use crate::backend_under_test::Variant;
use crate::check::{TestResult, ensure_eq, ensure_err, within};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::process::{ConnectedPair, HelperProcess, LIMIT, permutation};
use crate::trial::{Trial, TrialContext, TrialFabric};

const ALL: Operations = Operations::all();
const PATHS: &[Variant] = &[Variant::Plain, Variant::Queued];

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("cross_process::outward", |context| on_pair(context, outward)).on(PATHS).needs(ALL).process(),
    Trial::new("cross_process::inward", |context| on_pair(context, inward)).on(PATHS).needs(ALL).process(),
    Trial::new("cross_process::messages_before_their_receives", |context| on_pair(context, early_messages))
        .on(PATHS)
        .needs(ALL)
        .process(),
    Trial::new("cross_process::a_pool_in_place_of_another", pool_in_place_of_another)
        .on(PATHS)
        .needs(ALL)
        .process(),
    Trial::new("cross_process::more_imms_than_any_queue", |context| on_pair(context, more_imms))
        .on(PATHS)
        .needs(ALL)
        .process(),
    Trial::new("cross_process::named_regions", |context| on_pair(context, named_regions)).process(),
    Trial::new("cross_process::revoked_under_fire", |context| on_pair(context, revoked_under_fire))
        .on(PATHS)
        .process(),
];

const LEN: usize = 6 << 20;
const PIECES: [(usize, usize, usize); 7] = [
    (0, 1, 3),
    (5, 4095, 100),
    (9, 4096, 8192),
    (77, 4097, 20_001),
    (1000, 65_537, 40_000),
    (3, 262_145, 200_000),
    (11, 4 << 20, 1 << 20),
];

/// A wait for an imm that usually arrives at once, but on some transports waits behind the message.
const OVERTAKE_LIMIT: Duration = Duration::from_millis(300);

/// Runs a trial on the shared pair, as a program would use one connection. So each trial uses its own imms and names.
fn on_pair(
    context: &TrialContext,
    trial: fn(&TrialFabric, &Peer, &mut HelperProcess) -> TestResult,
) -> TestResult {
    let mut pair = ConnectedPair::kept_or_new(context)?;
    trial(&pair.fabric, &pair.peer, &mut pair.helper)?;
    pair.keep(context);
    Ok(())
}

/// This process is the initiator.
fn outward(fabric: &TrialFabric, peer: &Peer, helper: &mut HelperProcess) -> TestResult {
    let mut near = CheckedRegion::new(fabric, LEN, FULL_ACCESS, 1)?;
    helper.command(&format!("alloc far {LEN} 2"))?;
    let mut far = CheckedRegion::new(fabric, LEN, FULL_ACCESS, 2)?; // The bytes that the helper should hold.
    let remote = within(LIMIT, "a lookup", peer.region("far"))??;
    for (number, (from, len, to)) in PIECES.into_iter().enumerate() {
        let options = WriteOptions::new().imm(number as u32);
        peer.write_with(&near.region, from..from + len, &remote, to, &options)?.wait(LIMIT)?;
        far.expect_from(to, &near, from..from + len);
        ensure_eq("imms", helper.command(&format!("expect {number} 1"))?, "1".into())?;
    }
    peer.read(&near.region, 0..LEN, &remote, 0)?.wait(LIMIT)?;
    near.expect_from(0, &far, 0..LEN);
    near.check("all of the helper's region, read back")?;
    // Then with content that the helper computes from the seed.
    near.fill(3)?;
    let (from, to) = permutation(1500, 4);
    helper.command("fill far 3")?;
    let order: Vec<_> = from.iter().copied().zip(to.iter().copied()).collect();
    let (from, to) = (Pages::new(from), Pages::new(to));
    let options = WriteOptions::new().imm(50).per_wr();
    peer.write_pages_with(&near.region, &from, &remote, &to, 4096, &options)?.wait(LIMIT)?;
    ensure_eq("imms of pages", helper.command("expect 50 1500")?, "1500".into())?;
    // The inverse permutation returns every page to its offset in the helper's region.
    peer.write_pages(&near.region, &to, &remote, &to, 4096)?.wait(LIMIT)?;
    helper.command("check-all far")?;
    far.fill(3)?;
    peer.read_pages(&near.region, &to, &remote, &from, 4096)?.wait(LIMIT)?;
    for (from, to) in order {
        near.expect_from(to as usize * 4096, &far, from as usize * 4096..(from as usize + 1) * 4096);
    }
    near.check("1500 pages, read")?;
    near.fill(3)?;
    let most = peer.max_message() as usize;
    for len in [0, 1, 4096, most] {
        helper.command(&format!("receive far {} {}", LEN / 2, most))?;
        peer.send_with(&near.region, 0..len, &SendOptions::new().imm(len as u32))?.wait(LIMIT)?;
        ensure_eq("the message", helper.command("wait-receive")?, format!("{len} {:?}", Some(len as u32)))?;
        // The content of one seed has the same prefix for any length.
        helper.command(&format!("check far {} {len} 3", LEN / 2))?;
    }
    Ok(())
}

/// The helper is the initiator.
fn inward(fabric: &TrialFabric, peer: &Peer, helper: &mut HelperProcess) -> TestResult {
    let mut near = CheckedRegion::new(fabric, LEN, FULL_ACCESS, 1)?;
    fabric.publish("near", &near.region)?;
    helper.command(&format!("alloc far {LEN} 2"))?;
    let far = CheckedRegion::new(fabric, LEN, FULL_ACCESS, 2)?;
    for (number, (from, len, to)) in PIECES.into_iter().enumerate() {
        helper.command(&format!("write far {from} {len} near {to} {number}"))?;
        peer.imm(number as u32).expect(1).wait(LIMIT)?;
        near.expect_from(to, &far, from..from + len);
        near.check("a write")?;
    }
    helper.command("pages far near 1500 4096 4 60")?;
    peer.imm(60).expect(1).wait(LIMIT)?;
    let (from, to) = permutation(1500, 4);
    for (from, to) in from.into_iter().zip(to) {
        let (from, to) = (from as usize * 4096, to as usize * 4096);
        near.expect_from(to, &far, from..from + 4096);
    }
    near.check("1500 pages")?;
    let mut receive = fabric.recv(&near.region, 5000..5000 + 4096)?;
    helper.command("send far 100 4096 9")?;
    let got = receive.wait(LIMIT)?;
    ensure_eq("the message", (got.bytes, got.imm, got.peer), (4096, Some(9), Some(peer.id())))?;
    near.expect_from(5000, &far, 100..4196);
    near.check("a message")?;
    helper.command(&format!("read far 0 {LEN} near 0"))?;
    near.check("the source of a read")?;
    near.fill(8)?;
    helper.command("fill far 9")?;
    helper.command("read far 17 1000000 near 0")?;
    helper.command("check far 17 1000000 8").map(drop)
}

/// Messages that reach the helper before it posts a receive for them. Each keeps its bytes and its imm.
fn early_messages(fabric: &TrialFabric, peer: &Peer, helper: &mut HelperProcess) -> TestResult {
    let most = (peer.max_message() as usize).min(100_000);
    let near = CheckedRegion::new(fabric, most, FULL_ACCESS, 3)?;
    helper.command(&format!("alloc far {most} 2"))?;
    for (round, len) in (1..).zip([0, 1, 4096, most]) {
        let mut sent = peer.send_with(&near.region, 0..len, &SendOptions::new().imm(len as u32))?;
        // Once a later imm has arrived, the message usually has, too. Over libfabric 2.1's tcp nothing overtakes a
        // message that waits.
        let mut later = peer.write_imm(105)?;
        let overtook = later.wait(OVERTAKE_LIMIT);
        helper.command(&format!("receive far 0 {most}"))?;
        ensure_eq("the message", helper.command("wait-receive")?, format!("{len} {:?}", Some(len as u32)))?;
        sent.wait(LIMIT)?;
        overtook.or_else(|_| later.wait(LIMIT))?;
        helper.command(&format!("expect 105 {round}"))?;
        helper.command(&format!("check far 0 {len} 3"))?;
    }
    Ok(())
}

/// The helper replaces a pool with posted receives by another pool. All later messages reach the new pool, even if
/// a device cannot cancel posted receives. Such receives would take the messages of later trials, so this trial does
/// not keep its pair.
fn pool_in_place_of_another(context: &TrialContext) -> TestResult {
    let ConnectedPair { fabric, peer, mut helper } = ConnectedPair::new(context)?;
    let near = CheckedRegion::new(&fabric, 64, FULL_ACCESS, 3)?;
    helper.command("pool 4 64")?;
    helper.command("pool 8 64")?;
    for _ in 0..3 {
        let sent: Result<Vec<_>, _> = (0..8).map(|_| peer.send(&near.region, 0..64)).collect();
        helper.command("wait-pool 8 64")?;
        for mut op in sent? {
            op.wait(LIMIT)?;
        }
    }
    Ok(())
}

/// The engine holds the sender back and continues by itself, in both directions.
fn more_imms(_: &TrialFabric, peer: &Peer, helper: &mut HelperProcess) -> TestResult {
    for round in 1..=5 {
        let ops: Result<Vec<_>, _> = (0..4000).map(|_| peer.write_imm(103)).collect();
        for mut op in ops? {
            op.wait(LIMIT)?;
        }
        let sum = 4000 * round;
        ensure_eq("imms there", helper.command(&format!("expect 103 {sum}"))?, sum.to_string())?;
        helper.command("imms 104 4000")?;
        peer.imm(104).expect(sum).wait(LIMIT)?;
        ensure_eq("imms here", peer.imm(104).count(), sum)?;
    }
    Ok(())
}

fn named_regions(_: &TrialFabric, peer: &Peer, helper: &mut HelperProcess) -> TestResult {
    let lookup = |name: &str| within(LIMIT, "a lookup", peer.region(name));
    ensure_err("no such name", lookup("nothing")?.map(drop), &[ErrorKind::NotFound])?;
    ensure_err("too long a name", lookup(&"n".repeat(5000))?.map(drop), &[ErrorKind::InvalidRequest])?;
    helper.command("alloc one 10000 1")?;
    helper.command("alloc two 20000 2")?;
    ensure_eq("length", (lookup("one")??.len(), lookup("two")??.len()), (10_000, 20_000))?;
    helper.command("unpublish one")?;
    ensure_err("an unpublished name", lookup("one")?.map(drop), &[ErrorKind::NotFound])?;
    helper.command("revoke two")?;
    ensure_err("a revoked region", lookup("two")?.map(drop), &[ErrorKind::NotFound, ErrorKind::Revoked])?;
    // Many lookups at once.
    for number in 0..100 {
        helper.command(&format!("alloc r{number} {} 1", 1000 + number))?;
    }
    let names: Vec<_> = (0..100).map(|number| format!("r{number}")).collect();
    let lookups: Vec<_> = names.iter().map(|name| peer.region(name)).collect();
    for (number, lookup) in lookups.into_iter().enumerate() {
        ensure_eq("length", within(LIMIT, "a lookup", lookup)??.len(), 1000 + number)?;
    }
    Ok(())
}

/// The helper revokes its region while this process writes to it as fast as possible.
fn revoked_under_fire(fabric: &TrialFabric, peer: &Peer, helper: &mut HelperProcess) -> TestResult {
    let src = CheckedRegion::new(fabric, 1 << 20, FULL_ACCESS, 1)?;
    for round in 0..10 {
        helper.command(&format!("alloc target {} 2", 1 << 20))?;
        let remote = within(LIMIT, "a lookup", peer.region("target"))??;
        helper.start("revoke target")?;
        let error = loop {
            // Several writes are outstanding at any time, small and large.
            let sizes = [64, 1 << 20, 4096, 300_000];
            let ops: Vec<_> = sizes.map(|size| peer.write(&src.region, 0..size, &remote, 0)).into();
            let results = ops.into_iter().map(|op| op.and_then(|mut op| op.wait(LIMIT)));
            if let Some(error) = results.filter_map(Result::err).last() {
                break error;
            }
        };
        ensure_err::<()>("the writes", Err(error), &[ErrorKind::Revoked, ErrorKind::RemoteAccess])?;
        helper.finish("revoke target")?;
        helper.command(&format!("fill target {round}"))?;
        for size in [64, 1 << 20] {
            let late = peer.write(&src.region, 0..size, &remote, 0).and_then(|mut op| op.wait(LIMIT));
            ensure_err("a late write", late, &[ErrorKind::Revoked, ErrorKind::RemoteAccess])?;
        }
        helper.command("check-all target")?;
    }
    Ok(())
}
