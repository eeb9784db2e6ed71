//! Revoking regions: once a revocation has completed, no late byte lands.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use transport_core::spi::Operations;
use transport_core::{
    Access, Error, ErrorKind, Op, Pages, Peer, PeerGroup, PreparedTransfer, Region, RemoteRegion,
    ScatterPart, WriteOptions,
};

use crate::backend_under_test::Variant;
use crate::check::{TestResult, ensure, ensure_eq, ensure_err, within};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::process::{ConnectedPair, LIMIT};
use crate::sim_harness::SimPair;
use crate::trial::{ALL_PATHS, Trial, TrialContext, TrialFabric};

const ALL: Operations = Operations::all();
const REFUSALS: &[ErrorKind] = &[ErrorKind::Revoked, ErrorKind::RemoteAccess];
/// The data paths, and operations that stay posted for long.
const PATHS: &[Variant] = &[
    Variant::Plain,
    Variant::Queued,
    Variant::SmallQueue,
    Variant::Partial,
    Variant::Reorder,
    Variant::Slow,
];

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("revoke::operations_after_it", operations_after_it).on(ALL_PATHS),
    Trial::new("revoke::reads_after_it", reads_after_it).on(ALL_PATHS).needs(Operations::READ),
    Trial::new("revoke::import_after_it", import_after_it),
    Trial::new("revoke::in_flight", in_flight).on(PATHS),
    Trial::new("revoke::pages_in_flight", pages_in_flight).on(PATHS),
    Trial::new("revoke::under_a_flood", under_a_flood).on(PATHS),
    Trial::new("revoke::spares_other_regions", spares_other_regions).on(ALL_PATHS),
    Trial::new("revoke::may_be_repeated", may_be_repeated),
    Trial::new("revoke::a_key_is_not_reused", a_key_is_not_reused),
    Trial::new("revoke::target_dropped_while_posted", target_dropped).on(PATHS),
    Trial::new("revoke::source_dropped_while_posted", source_dropped).on(PATHS),
    Trial::new("revoke::refuses_the_owner", refuses_the_owner).on(ALL_PATHS).needs(ALL),
    Trial::new("revoke::ends_what_the_owner_does", ends_what_the_owner_does).on(PATHS).needs(ALL),
    Trial::new("revoke::refuses_the_owner_in_real_time", refuses_in_real_time).needs(ALL).process(),
    Trial::new("revoke::amid_the_owners_own_traffic", amid_own_traffic).needs(ALL).process(),
    Trial::new("revoke::takes_a_receive_back", takes_a_receive_back).needs(ALL).process(),
];

fn operations_after_it(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 300_000, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, 300_000, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    pair.sim.done(dst.region.revoke()?)?;
    for len in [1, 4096, 300_000] {
        pair.sim.fails("a write", pair.to_b.write(&src.region, 0..len, &remote, 0), REFUSALS)?;
    }
    let pages = Pages::new([1, 0]);
    pair.sim.fails("pages", pair.to_b.write_pages(&src.region, &pages, &remote, &pages, 4096), REFUSALS)?;
    pair.sim.settle()?;
    dst.check("the region")
}

fn reads_after_it(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let dst = CheckedRegion::new(&pair.a, 300_000, Access::LOCAL, context.seed)?;
    let src = CheckedRegion::new(&pair.b, 300_000, FULL_ACCESS, context.seed + 1)?;
    let remote = src.import(&pair.to_b)?;
    pair.sim.done(src.region.revoke()?)?;
    for len in [1, 300_000] {
        pair.sim.fails("a read", pair.to_b.read(&dst.region, 0..len, &remote, 0), REFUSALS)?;
    }
    dst.check("the reader's memory")
}

fn import_after_it(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, 4096, FULL_ACCESS, context.seed + 1)?;
    let descriptor = dst.region.descriptor();
    pair.sim.done(dst.region.revoke()?)?;
    match pair.to_b.import(&descriptor) {
        Err(error) => drop(ensure_err::<()>("the import", Err(error), REFUSALS)?),
        Ok(remote) => {
            pair.sim.fails("a write", pair.to_b.write(&src.region, 0..4096, &remote, 0), REFUSALS)?;
        }
    }
    dst.check("the region")
}

fn in_flight(context: &TrialContext) -> TestResult {
    let len = context.amount(3 << 20, 1 << 20);
    // Each round revokes after one more turn.
    for turns in context.attempts(8) {
        let pair = SimPair::new(&context.with_seed(context.seed + turns))?;
        let src = CheckedRegion::new(&pair.a, len, Access::LOCAL, context.seed)?;
        let mut dst = CheckedRegion::new(&pair.b, len, FULL_ACCESS, context.seed + 1)?;
        let remote = dst.import(&pair.to_b)?;
        let mut op = pair.to_b.write(&src.region, 0..len, &remote, 0)?;
        for _ in 0..turns {
            pair.sim.step();
        }
        pair.sim.done(dst.region.revoke()?)?;
        // Now only the owner writes the memory.
        dst.fill(context.seed + 2)?;
        if let Err(error) = pair.sim.result(&mut op)? {
            ensure_err::<()>("the write", Err(error), REFUSALS)?;
        }
        pair.sim.settle()?;
        dst.check(&format!("revoked after {turns} turns"))?;
    }
    Ok(())
}

fn pages_in_flight(context: &TrialContext) -> TestResult {
    const COUNT: u32 = 600;
    for turns in context.attempts(12) {
        let pair = SimPair::new(&context.with_seed(context.seed + turns))?;
        let src = CheckedRegion::new(&pair.a, 512 * COUNT as usize, Access::LOCAL, context.seed)?;
        let mut dst = CheckedRegion::new(&pair.b, 512 * COUNT as usize, FULL_ACCESS, context.seed + 1)?;
        let remote = dst.import(&pair.to_b)?;
        let pages = Pages::new((0..COUNT).rev().collect::<Vec<_>>());
        let mut op = pair.to_b.write_pages(&src.region, &pages, &remote, &pages, 512)?;
        for _ in 0..turns {
            pair.sim.tick();
        }
        pair.sim.done(dst.region.revoke()?)?;
        dst.fill(context.seed + 2)?;
        if let Err(error) = pair.sim.result(&mut op)? {
            ensure_err::<()>("the pages", Err(error), REFUSALS)?;
        }
        pair.sim.settle()?;
        dst.check(&format!("revoked after {turns} turns"))?;
    }
    Ok(())
}

/// The initiator keeps writing and drops operations at random.
fn under_a_flood(context: &TrialContext) -> TestResult {
    for seed in context.seeds(12) {
        let mut random = fastrand::Rng::with_seed(seed);
        let pair = SimPair::new(&context.with_seed(seed))?;
        let src = CheckedRegion::new(&pair.a, 64 << 10, Access::LOCAL, seed)?;
        let mut dst = CheckedRegion::new(&pair.b, 64 << 10, FULL_ACCESS, seed + 1)?;
        let remote = dst.import(&pair.to_b)?;
        let (mut held, mut revoke) = (Vec::new(), None);
        for round in 0..60 {
            if round == 30 {
                revoke = Some(dst.region.revoke()?);
            }
            let from = random.usize(..src.len());
            let range = from..random.usize(from + 1..=src.len());
            match pair.to_b.write(&src.region, range, &remote, 0) {
                Ok(op) if random.bool() => held.push(op),
                Ok(op) => drop(op),
                Err(error) => drop(ensure_err::<()>("a write", Err(error), REFUSALS)?),
            }
            if random.bool() && !held.is_empty() {
                drop(held.swap_remove(random.usize(..held.len())));
            }
            for _ in 0..random.u8(..3) {
                pair.sim.tick();
            }
            if let Some(mut revoking) = revoke.take() {
                match revoking.try_result() {
                    None => revoke = Some(revoking),
                    Some(result) => {
                        result?;
                        // Now only the owner writes the memory, whatever requests are still outstanding.
                        dst.fill(seed + 2)?;
                    }
                }
            }
        }
        if let Some(revoking) = revoke {
            pair.sim.done(revoking)?;
            dst.fill(seed + 2)?;
        }
        dst.check("revoked under a flood")?;
        drop(held);
        pair.sim.settle()?;
        dst.check("after the flood")?;
    }
    Ok(())
}

fn spares_other_regions(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 400_000, Access::LOCAL, context.seed)?;
    let gone = CheckedRegion::new(&pair.b, 400_000, FULL_ACCESS, context.seed + 1)?;
    let mut stays = CheckedRegion::new(&pair.b, 400_000, FULL_ACCESS, context.seed + 2)?;
    let (remote_gone, remote) = (gone.import(&pair.to_b)?, stays.import(&pair.to_b)?);
    let under_way = pair.to_b.write(&src.region, 0..400_000, &remote, 0)?;
    pair.sim.step();
    pair.sim.done(gone.region.revoke()?)?;
    pair.sim.done(under_way)?;
    pair.sim.fails("the revoked one", pair.to_b.write(&src.region, 0..8, &remote_gone, 0), REFUSALS)?;
    stays.expect_from(0, &src, 0..400_000);
    pair.sim.done(pair.to_b.write(&src.region, 500..600, &remote, 50)?)?;
    stays.expect_from(50, &src, 500..600);
    stays.check("the region that stays")?;
    gone.check("the revoked region")
}

fn may_be_repeated(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let mut checked = CheckedRegion::new(&pair.b, 4096, FULL_ACCESS, context.seed)?;
    let both = [checked.region.revoke()?, checked.region.revoke()?];
    pair.sim.all_done(both.into())?;
    pair.sim.done(checked.region.clone().revoke()?)?;
    checked.fill(context.seed + 1)?;
    checked.check("still the owner's")
}

/// Later regions get keys that an old descriptor does not match.
fn a_key_is_not_reused(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    for round in 0..50 {
        let old = CheckedRegion::new(&pair.b, 4096, FULL_ACCESS, context.seed)?;
        let (descriptor, remote) = (old.region.descriptor(), old.import(&pair.to_b)?);
        if round % 2 == 0 {
            pair.sim.done(old.region.revoke()?)?;
        }
        drop(old);
        pair.sim.step();
        let new = CheckedRegion::new(&pair.b, 4096, FULL_ACCESS, context.seed + round)?;
        pair.sim.fails("an old import", pair.to_b.write(&src.region, 0..4096, &remote, 0), REFUSALS)?;
        if let Ok(again) = pair.to_b.import(&descriptor) {
            pair.sim.fails("an old key", pair.to_b.write(&src.region, 0..4096, &again, 0), REFUSALS)?;
        }
        new.check("the new region")?;
    }
    Ok(())
}

fn target_dropped(context: &TrialContext) -> TestResult {
    for turns in context.attempts(6) {
        let pair = SimPair::new(&context.with_seed(context.seed + turns))?;
        let src = CheckedRegion::new(&pair.a, 1 << 20, Access::LOCAL, context.seed)?;
        let dst = CheckedRegion::new(&pair.b, 1 << 20, FULL_ACCESS, context.seed + 1)?;
        let remote = dst.import(&pair.to_b)?;
        let mut op = pair.to_b.write(&src.region, 0..1 << 20, &remote, 0)?;
        for _ in 0..turns {
            pair.sim.step();
        }
        drop(dst);
        if let Err(error) = pair.sim.result(&mut op)? {
            ensure_err::<()>("the write", Err(error), REFUSALS)?;
        }
        pair.sim.settle()?;
        // The peer itself still works.
        let mut next = CheckedRegion::new(&pair.b, 1 << 20, FULL_ACCESS, context.seed + 2)?;
        let remote = next.import(&pair.to_b)?;
        pair.sim.done(pair.to_b.write(&src.region, 0..1 << 20, &remote, 0)?)?;
        next.expect_from(0, &src, 0..1 << 20);
        next.check("the next region")?;
    }
    Ok(())
}

fn source_dropped(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let mut dst = CheckedRegion::new(&pair.b, 1 << 20, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let src = CheckedRegion::new(&pair.a, 1 << 20, Access::LOCAL, context.seed)?;
    let op = pair.to_b.write(&src.region, 0..1 << 20, &remote, 0)?;
    dst.expect_from(0, &src, 0..1 << 20);
    drop((src, remote));
    // The device must not read from a later owner of the freed memory.
    let other = CheckedRegion::new(&pair.a, 1 << 20, Access::LOCAL, context.seed + 5)?;
    pair.sim.done(op)?;
    dst.check("from a region its owner let go")?;
    ensure(other.matches(), "the next region was changed")
}

/// Tries each operation of an owner on its own revoked region, and returns the results.
fn uses(
    fabric: &TrialFabric,
    peer: &Peer,
    own: &Region,
    remote: &RemoteRegion,
    prepared: &PreparedTransfer,
) -> TestResult<Vec<(&'static str, Result<Op, Error>)>> {
    let (len, pages) = (own.len(), Pages::new([1, 0]));
    let with_imm = WriteOptions::new().imm(5);
    let when_due = WriteOptions::new().when(Arc::new(AtomicU32::new(1)), 1);
    let group = PeerGroup::new([peer.clone()])?;
    let part = [ScatterPart::new(remote, 0..8, 0)];
    Ok(vec![
        ("a small write", peer.write(own, 0..8, remote, 0)),
        ("a large write", peer.write(own, 0..len, remote, 0)),
        ("a write with an imm", peer.write_with(own, 0..8, remote, 0, &with_imm)),
        ("an imm with no bytes of it", peer.write_with(own, 0..0, remote, 0, &with_imm)),
        ("a triggered write", peer.write_with(own, 0..8, remote, 0, &when_due)),
        ("pages", peer.write_pages(own, &pages, remote, &pages, 4096)),
        ("prepared pages", prepared.post()),
        ("prepared pages with an imm", prepared.post_with_imm(6)),
        ("prepared pages with a trigger", prepared.post_when(Arc::new(AtomicU32::new(1)), 1)),
        ("a scatter", group.scatter(own, &part, &WriteOptions::new())),
        ("a small read", peer.read(own, 0..8, remote, 0)),
        ("a large read", peer.read(own, 0..len, remote, 0)),
        ("a message", peer.send(own, 0..8)),
        ("a message of no bytes", peer.send(own, 0..0)),
        ("a receive", fabric.recv(own, 0..64)),
    ])
}

/// Fails unless each operation fails at the call.
fn are_refused(uses: Vec<(&'static str, Result<Op, Error>)>) -> TestResult {
    for (what, result) in uses {
        ensure_err(what, result.map(drop), &[ErrorKind::Revoked])?;
    }
    Ok(())
}

/// An owner may copy into and out of its revoked region, and nothing else.
fn refuses_the_owner(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let mut own = CheckedRegion::new(&pair.a, 300_000, FULL_ACCESS, context.seed)?;
    let far = CheckedRegion::new(&pair.b, 300_000, FULL_ACCESS, context.seed + 1)?;
    let (remote, pages) = (far.import(&pair.to_b)?, Pages::new([1, 0]));
    let options = WriteOptions::new().imm(7);
    let prepared = pair.to_b.prepare_write_pages(&own.region, &pages, &remote, &pages, 4096, &options)?;
    pair.sim.done(own.region.revoke()?)?;
    are_refused(uses(&pair.a, &pair.to_b, &own.region, &remote, &prepared)?)?;
    ensure_err(
        "an explanation",
        prepared_explanation(&pair.to_b, &own.region, &remote),
        &[ErrorKind::Revoked],
    )?;
    pair.sim.settle()?;
    ensure_eq("imms", (0..10).map(|imm| pair.to_a.imm(imm).count()).sum::<u64>(), 0)?;
    far.check("the other side")?;
    own.fill(context.seed + 2)?;
    own.check("the owner's own copies")
}

fn prepared_explanation(peer: &Peer, own: &Region, remote: &RemoteRegion) -> Result<(), Error> {
    peer.explain_write(own, 0..8, remote, 0, &WriteOptions::new()).map(drop)
}

/// Writes, reads, a triggered write and a receive are outstanding when their region is revoked. Each round revokes
/// after one more turn.
fn ends_what_the_owner_does(context: &TrialContext) -> TestResult {
    let len = context.amount(2 << 20, 1 << 20);
    for turns in context.attempts(8) {
        let pair = SimPair::new(&context.with_seed(context.seed + turns))?;
        let mut own = CheckedRegion::new(&pair.a, len, FULL_ACCESS, context.seed)?;
        let mut far = CheckedRegion::new(&pair.b, len, FULL_ACCESS, context.seed + 1)?;
        let remote = far.import(&pair.to_b)?;
        let waits = WriteOptions::new().when(Arc::new(AtomicU32::new(0)), 1);
        let mut triggered = pair.to_b.write_with(&own.region, 0..len, &remote, 0, &waits)?;
        let mut receive = pair.a.recv(&own.region, 0..4096)?;
        let mut ops = vec![
            pair.to_b.write(&own.region, 0..len / 2, &remote, 0)?,
            pair.to_b.read(&own.region, len / 2..len, &remote, len / 2)?,
        ];
        for _ in 0..turns {
            pair.sim.step();
        }
        pair.sim.done(own.region.revoke()?)?;
        own.fill(context.seed + 2)?;
        for op in &mut ops {
            if let Err(error) = pair.sim.result(op)? {
                ensure_err::<()>("an outstanding operation", Err(error), &[ErrorKind::Revoked])?;
            }
        }
        ensure_err("the triggered write", pair.sim.result(&mut triggered)?, &[ErrorKind::Revoked])?;
        ensure_err("the receive", pair.sim.result(&mut receive)?, &[ErrorKind::Revoked])?;
        pair.sim.settle()?;
        own.check(&format!("revoked after {turns} turns"))?;
        // Both sides still work.
        drop(own);
        far.accept()?;
        let next = CheckedRegion::new(&pair.a, 100_000, FULL_ACCESS, context.seed + 3)?;
        pair.sim.done(pair.to_b.write(&next.region, 0..100_000, &remote, 7)?)?;
        far.expect_from(7, &next, 0..100_000);
        far.check("from the next region")?;
    }
    Ok(())
}

fn refuses_in_real_time(context: &TrialContext) -> TestResult {
    let mut pair = ConnectedPair::kept_or_new(context)?;
    let ConnectedPair { fabric, peer, helper } = &mut pair;
    helper.command("alloc far 300000 2")?;
    let remote = within(LIMIT, "a lookup", peer.region("far"))??;
    let mut own = CheckedRegion::new(fabric, 300_000, FULL_ACCESS, 1)?;
    let (pages, options) = (Pages::new([1, 0]), WriteOptions::new().imm(7));
    let prepared = peer.prepare_write_pages(&own.region, &pages, &remote, &pages, 4096, &options)?;
    own.revoke_and_wait(fabric)?;
    are_refused(uses(fabric, peer, &own.region, &remote, &prepared)?)?;
    own.fill(3)?;
    own.check("the owner's own copies")?;
    helper.command("check-all far")?;
    pair.keep(context);
    Ok(())
}

/// The owner revokes its region while it writes from the region and reads into it, and most of these requests are
/// posted. The library keeps the memory until the device is done with it, and no byte lands after the revocation.
fn amid_own_traffic(context: &TrialContext) -> TestResult {
    const LEN: usize = 2 << 20;
    let mut pair = ConnectedPair::kept_or_new(context)?;
    let ConnectedPair { fabric, peer, helper } = &mut pair;
    helper.command(&format!("alloc far {LEN} 2"))?;
    let remote = within(LIMIT, "a lookup", peer.region("far"))??;
    let pages = Pages::new((0..(LEN / 8192) as u32).rev().collect::<Vec<_>>());
    for round in 0..10 {
        let mut own = CheckedRegion::new(fabric, LEN, FULL_ACCESS, round)?;
        let mut ops = Vec::new();
        for _ in 0..4 {
            ops.push(peer.write_pages(&own.region, &pages, &remote, &pages, 8192)?);
            ops.push(peer.read(&own.region, 0..LEN / 2, &remote, LEN / 2)?);
            ops.push(peer.write(&own.region, 0..LEN, &remote, 0)?);
        }
        own.revoke_and_wait(fabric)?;
        own.fill(100 + round)?;
        for mut op in ops {
            if let Err(error) = op.wait(LIMIT) {
                ensure_err::<()>("an outstanding operation", Err(error), &[ErrorKind::Revoked])?;
            }
        }
        own.check("after the revocation")?;
        // The next region usually gets the same memory and keys.
        drop(own);
        let next = CheckedRegion::new(fabric, LEN, FULL_ACCESS, 50 + round)?;
        peer.write(&next.region, 0..LEN, &remote, 0)?.wait(LIMIT)?;
        helper.command(&format!("check far 0 {LEN} {}", 50 + round))?;
    }
    pair.keep(context);
    Ok(())
}

/// Revokes a region with a posted receive.
fn takes_a_receive_back(context: &TrialContext) -> TestResult {
    let mut pair = ConnectedPair::kept_or_new(context)?;
    let ConnectedPair { fabric, peer, helper } = &mut pair;
    helper.command("alloc far 4096 2")?;
    let own = CheckedRegion::new(fabric, 4096, FULL_ACCESS, 1)?;
    let mut receive = fabric.recv(&own.region, 0..4096)?;
    // The engine has posted the receive once a later operation has completed.
    let next = CheckedRegion::new(fabric, 4096, FULL_ACCESS, 3)?;
    let remote = within(LIMIT, "a lookup", peer.region("far"))??;
    peer.write(&next.region, 0..4096, &remote, 0)?.wait(LIMIT)?;
    own.revoke_and_wait(fabric)?;
    ensure_err("the receive", receive.wait(LIMIT), &[ErrorKind::Revoked])?;
    let mut receive = fabric.recv(&next.region, 0..4096)?;
    helper.command("send far 0 64 -")?;
    ensure_eq("bytes", receive.wait(LIMIT)?.bytes, 64)?;
    own.check("the revoked region")?;
    pair.keep(context);
    Ok(())
}
