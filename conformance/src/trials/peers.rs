//! Peers that connect and disconnect.

use std::pin::pin;

use transport_core::spi::Operations;
use transport_core::{Access, Error, ErrorKind, Op, Peer, WriteOptions};

use crate::backend_under_test::{TransferSide, Variant};
use crate::check::{TestResult, TrialFailure, ensure, ensure_eq, ensure_err, poll_once};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::process::{LIMIT, worker_fabric};
use crate::sim_harness::{Options, SimHarness, SimPair};
use crate::trial::{ALL_PATHS, Trial, TrialContext};

/// The data paths, and operations that stay posted for long.
const PATHS: &[Variant] = &[
    Variant::Plain,
    Variant::Queued,
    Variant::SmallQueue,
    Variant::Partial,
    Variant::Reorder,
    Variant::Slow,
];
/// The error kinds of an operation whose peer is closed.
const GONE: &[ErrorKind] = &[ErrorKind::PeerDied, ErrorKind::Closed];

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("peers::disconnected_while_writing", disconnected).on(PATHS).needs(Operations::WRITE_IMM),
    Trial::new("peers::disconnected_by_the_target", disconnected_by_target).on(PATHS),
    Trial::new("peers::fabric_closed_while_writing", fabric_closed).on(PATHS),
    Trial::new("peers::target_closed_while_writing", target_closed).on(PATHS),
    Trial::new("peers::closed_fabric_refuses", closed_fabric_refuses),
    Trial::new("peers::come_and_go", come_and_go).on(&[Variant::Plain, Variant::Queued]),
    Trial::new("peers::one_goes_others_stay", one_goes).on(PATHS),
    Trial::new("peers::two_connections_of_one_pair", two_connections)
        .on(ALL_PATHS)
        .needs(Operations::WRITE_IMM),
    Trial::new("peers::pages_over_two_connections", pages_over_two_connections)
        .needs(Operations::READ)
        .process(),
    Trial::new("peers::everyone_to_everyone", everyone).on(ALL_PATHS).needs(Operations::WRITE_IMM),
];

/// The reason why a peer is closed, if it is.
fn close_reason(peer: &Peer) -> Option<Error> {
    poll_once(pin!(peer.closed()))
}

/// Waits for every operation, which must succeed or fail because the peer is closed. Returns the number of failures.
#[track_caller]
fn all_end(sim: &SimHarness, ops: Vec<Op>) -> TestResult<usize> {
    let mut failed = 0;
    for mut op in ops {
        if let Err(error) = sim.result(&mut op)? {
            ensure_err::<()>("an operation", Err(error), GONE)?;
            failed += 1;
        }
    }
    Ok(failed)
}

struct ActiveTransfers {
    pair: SimPair,
    src: CheckedRegion,
    dst: CheckedRegion,
    ops: Vec<Op>,
}

/// Submits large writes and runs `turns` turns.
fn load(context: &TrialContext, turns: u64) -> TestResult<ActiveTransfers> {
    let pair = SimPair::new(&context.with_seed(context.seed + turns))?;
    let src = CheckedRegion::new(&pair.a, 2 << 20, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, 2 << 20, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let ops: Result<Vec<Op>, _> =
        (0..6).map(|_| pair.to_b.write(&src.region, 0..2 << 20, &remote, 0)).collect();
    for _ in 0..turns {
        pair.sim.step();
    }
    Ok(ActiveTransfers { ops: ops?, pair, src, dst })
}

fn disconnected(context: &TrialContext) -> TestResult {
    for turns in context.attempts(6) {
        let ActiveTransfers { pair, src, mut dst, ops } = load(context, turns)?;
        ensure(
            close_reason(&pair.to_b).is_none() && pair.to_b.is_alive(),
            "the peer is closed before its disconnect",
        )?;
        pair.to_b.disconnect();
        // All kinds of waiters end at once, without a turn.
        ensure_err(
            "the peer",
            Err::<(), _>(
                close_reason(&pair.to_b).ok_or_else(|| TrialFailure::new("the peer has no close reason"))?,
            ),
            GONE,
        )?;
        ensure(!pair.to_b.is_alive(), "the peer is alive after its disconnect")?;
        ensure_err("an expected imm", pair.to_b.imm(1).expect(1).wait(limit::HANG), GONE)?;
        let failed = all_end(&pair.sim, ops)?;
        // Waiters are told at once. The engine counts an operation once the device has ended its requests.
        pair.sim.settle()?;
        let counters = pair.a.operation_counters();
        let counted: u64 =
            counters.iter().flat_map(|transport| &transport.errors).map(|(_, count)| count).sum();
        ensure_eq("operations counted as failed", counted, failed as u64)?;
        ensure_err("a write to it", pair.to_b.write_imm(1).map(drop), GONE)?;
        ensure_err("an import", pair.to_b.import(&dst.region.descriptor()).map(drop), GONE)?;
        dst.fill(context.seed + 3)?;
        pair.sim.settle()?;
        dst.check("after the end")?;
        src.check("the source")?;
    }
    Ok(())
}

fn disconnected_by_target(context: &TrialContext) -> TestResult {
    for turns in context.attempts(6) {
        let ActiveTransfers { pair, mut dst, ops, .. } = load(context, turns)?;
        pair.to_a.disconnect();
        pair.b.step();
        pair.b.step();
        all_end(&pair.sim, ops)?;
        dst.fill(context.seed + 3)?;
        pair.sim.settle()?;
        dst.check("the target let go")?;
        pair.sim.fails("a late imm", pair.to_b.write_imm(1), GONE)?;
    }
    Ok(())
}

fn fabric_closed(context: &TrialContext) -> TestResult {
    for turns in context.attempts(6) {
        let ActiveTransfers { pair, mut dst, ops, src } = load(context, turns)?;
        pair.a.close();
        // The closed fabric moves no byte any more and needs no further step.
        dst.fill(context.seed + 3)?;
        for mut op in ops {
            let result = op.try_result().ok_or_else(|| {
                TrialFailure::new("an operation has no result although its fabric is closed")
            })?;
            if let Err(error) = result {
                ensure_err::<()>("an operation", Err(error), &[ErrorKind::Closed])?;
            }
        }
        drop(src);
        pair.sim.settle()?;
        dst.check("after the initiator closed")?;
    }
    Ok(())
}

fn target_closed(context: &TrialContext) -> TestResult {
    for turns in context.attempts(6) {
        let ActiveTransfers { pair, mut dst, ops, src } = load(context, turns)?;
        pair.b.close();
        let failed = all_end(&pair.sim, ops)?;
        dst.fill(context.seed + 3)?;
        pair.sim.settle()?;
        dst.check("after the target closed")?;
        src.check("the source")?;
        let slow = context.variant == Variant::Slow;
        ensure(!slow || failed == 6, "a write to a closed fabric succeeded")?;
    }
    Ok(())
}

fn closed_fabric_refuses(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 64, FULL_ACCESS, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, 64, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    pair.a.close();
    pair.a.close();
    let closed = &[ErrorKind::Closed];
    ensure_err("alloc", pair.a.alloc(64, FULL_ACCESS).map(drop), closed)?;
    ensure_err("recv", pair.a.recv(&src.region, 0..64).map(drop), closed)?;
    ensure_err("recv_pool", pair.a.recv_pool(1, 64).map(drop), closed)?;
    ensure_err("connect_local", pair.a.connect_local(&pair.b).map(drop), closed)?;
    ensure_err("connect_local from there", pair.b.connect_local(&pair.a).map(drop), closed)?;
    ensure_err("write", pair.to_b.write(&src.region, 0..64, &remote, 0).map(drop), closed)?;
    ensure_err("write_imm", pair.to_b.write_imm(1).map(drop), closed)?;
    ensure_eq("outstanding", pair.a.step().outstanding, 0)?;
    // The owner can still use its memory.
    src.check("a region of a closed fabric")?;
    drop(pair.a);
    src.check("a region of a dropped fabric")
}

/// Connections that ended use no resources.
fn come_and_go(context: &TrialContext) -> TestResult {
    let sim = SimHarness::new(context);
    let (a, b) = (sim.open(&Options::default())?, sim.open(&Options::default())?);
    let src = CheckedRegion::new(&a, 4096, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&b, 4096, FULL_ACCESS, context.seed + 1)?;
    let mut last = None;
    for round in 0..context.amount(300, 3) {
        let (to_b, to_a) = a.connect_local(&b)?;
        ensure(last != Some(to_b.id()), "a peer id was used again")?;
        last = Some(to_b.id());
        let remote = dst.import(&to_b)?;
        let at = round % 4000;
        sim.done(to_b.write(&src.region, at..at + 90, &remote, at)?)?;
        dst.expect_from(at, &src, at..at + 90);
        to_b.disconnect();
        to_a.disconnect();
        for _ in 0..3 {
            sim.step();
        }
    }
    dst.check("connections that came and went")
}

fn one_goes(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let other = pair.sim.open(&Options::default())?;
    let (to_other, _) = pair.a.connect_local(&other)?;
    let src = CheckedRegion::new(&pair.a, 1 << 20, Access::LOCAL, context.seed)?;
    let gone = CheckedRegion::new(&pair.b, 1 << 20, FULL_ACCESS, context.seed + 1)?;
    let mut stays = CheckedRegion::new(&other, 1 << 20, FULL_ACCESS, context.seed + 2)?;
    let (to_gone, to_stays) = (gone.import(&pair.to_b)?, stays.import(&to_other)?);
    let (mut lost, mut kept) = (Vec::new(), Vec::new());
    for part in (0..8).map(|part| part << 17) {
        lost.push(pair.to_b.write(&src.region, part..part + 100_000, &to_gone, part)?);
        kept.push(to_other.write(&src.region, part..part + 100_000, &to_stays, part)?);
        stays.expect_from(part, &src, part..part + 100_000);
    }
    pair.sim.step();
    pair.to_b.disconnect();
    pair.sim.all_done(kept)?;
    all_end(&pair.sim, lost)?;
    stays.check("the peer that stays")
}

fn two_connections(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let (second, second_back) = pair.a.connect_local(&pair.b)?;
    ensure(second.id() != pair.to_b.id(), "two connections share a peer id")?;
    let src = CheckedRegion::new(&pair.a, 200_000, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, 400_000, FULL_ACCESS, context.seed + 1)?;
    for (number, (peer, back)) in [(&pair.to_b, &pair.to_a), (&second, &second_back)].into_iter().enumerate()
    {
        let remote = dst.import(peer)?;
        let options = WriteOptions::new().imm(number as u32);
        pair.sim.done(peer.write_with(&src.region, 0..200_000, &remote, number * 200_000, &options)?)?;
        dst.expect_from(number * 200_000, &src, 0..200_000);
        pair.sim.until("its imm", || back.imm(number as u32).count() == 1)?;
    }
    ensure_eq("imms of the other", (pair.to_a.imm(1).count(), second_back.imm(0).count()), (0, 0))?;
    dst.check("both")?;
    pair.to_b.disconnect();
    pair.sim.settle()?;
    let remote = dst.import(&second)?;
    pair.sim.done(second.write(&src.region, 100..200, &remote, 7)?)?;
    dst.expect_from(7, &src, 100..200);
    dst.check("the second after the first")
}

/// Small pages by two connections of the same two fabrics at once, and back. A device may know only the fabric that an
/// arrival is from.
fn pages_over_two_connections(context: &TrialContext) -> TestResult {
    const PAGE: usize = 700;
    const PAGES: usize = 64;
    let (a, b) = (worker_fabric(context)?, worker_fabric(context)?.on_side(TransferSide::Target));
    let (first, second) = (a.connect_local(&b)?.0, a.connect_local(&b)?.0);
    let peers = [&first, &second];
    let len = PAGE * PAGES;
    let mut src = CheckedRegion::new(&a, 2 * len, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&b, 2 * len, FULL_ACCESS, context.seed + 1)?;
    let all_done = |ops: Vec<Op>| ops.into_iter().try_for_each(|mut op| op.wait(LIMIT).map(drop));
    for round in 0..50 {
        src.fill(context.seed + 2 + round)?;
        let mut ops = Vec::new();
        for page in 0..2 * PAGES {
            let (peer, range) = (peers[page % 2], page * PAGE..(page + 1) * PAGE);
            ops.push(peer.write(&src.region, range.clone(), &dst.import(peer)?, range.start)?);
            dst.expect_from(range.start, &src, range);
        }
        all_done(ops)?;
        dst.check("written by both")?;
        dst.fill(context.seed + 40 + round)?;
        let mut ops = Vec::new();
        for page in 0..2 * PAGES {
            let (peer, range) = (peers[page % 2], page * PAGE..(page + 1) * PAGE);
            ops.push(peer.read(&src.region, range.clone(), &dst.import(peer)?, range.start)?);
            src.expect_from(range.start, &dst, range);
        }
        all_done(ops)?;
        src.check("read by both")?;
    }
    Ok(())
}

fn everyone(context: &TrialContext) -> TestResult {
    const PART: usize = 20_000;
    let fabrics = context.amount(6, 3);
    let sim = SimHarness::new(context);
    let mut nodes = Vec::new();
    for number in 0..fabrics {
        let fabric = sim.open(&Options::default())?;
        let checked =
            CheckedRegion::new(&fabric, (fabrics + 1) * PART, FULL_ACCESS, context.seed + number as u64)?;
        nodes.push((fabric, checked));
    }
    let (mut ops, mut backs) = (Vec::new(), Vec::new());
    for from in 0..fabrics {
        for to in (0..fabrics).filter(|to| *to != from) {
            let (peer, back) = nodes[from].0.connect_local(&nodes[to].0)?;
            let remote = nodes[to].1.import(&peer)?;
            let options = WriteOptions::new().imm(from as u32);
            // The last part is the source of all writes. Part i is the destination of fabric i.
            let source = fabrics * PART..(fabrics + 1) * PART;
            ops.push(peer.write_with(
                &nodes[from].1.region,
                source.clone(),
                &remote,
                from * PART,
                &options,
            )?);
            let bytes = nodes[from].1.bytes(source).to_vec();
            nodes[to].1.expect(from * PART, &bytes);
            backs.push((from, back));
        }
    }
    sim.all_done(ops)?;
    sim.settle()?;
    backs.iter().try_for_each(|(from, back)| ensure_eq("imms", back.imm(*from as u32).count(), 1))?;
    nodes.iter().try_for_each(|(_, checked)| checked.check("a fabric"))
}
