//! Full queues: the engine applies back-pressure and neither loses nor repeats a request.

use std::time::Duration;

use transport_core::spi::Operations;
use transport_core::{Access, ErrorKind, Op, Pages};

use crate::backend_under_test::Variant;
use crate::check::{TestResult, ensure, ensure_eq, ensure_err};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::sim_harness::{Options, SimHarness, SimPair};
use crate::trial::{ALL_PATHS, Trial, TrialContext};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("queue::more_operations_than_depth", more_operations)
        .on(&[Variant::SmallQueue, Variant::Partial]),
    Trial::new("queue::more_pages_than_depth", more_pages).on(&[Variant::SmallQueue, Variant::Partial]),
    Trial::new("queue::depth_is_respected", depth_is_respected).on(&[Variant::SmallQueue]),
    Trial::new("queue::every_request_once", every_request_once).on(ALL_PATHS),
    Trial::new("queue::a_full_table_says_busy", a_full_table).on(&[Variant::Queued, Variant::Slow]),
    Trial::new("queue::a_stalled_peer_holds_up_no_other", a_stalled_peer)
        .on(&[Variant::Plain, Variant::Queued, Variant::Reorder])
        .needs(Operations::WRITE_IMM),
];

fn more_operations(context: &TrialContext) -> TestResult {
    const SLOT: usize = 700;
    let count = context.amount(1000, 300);
    for seed in context.seeds(4) {
        let pair = SimPair::new(&context.with_seed(seed))?;
        let src = CheckedRegion::new(&pair.a, count * SLOT, Access::LOCAL, seed)?;
        let mut dst = CheckedRegion::new(&pair.b, count * SLOT, FULL_ACCESS, seed + 1)?;
        let remote = dst.import(&pair.to_b)?;
        let mut ops = Vec::new();
        for slot in (0..count).map(|slot| slot * SLOT) {
            ops.push(pair.to_b.write(&src.region, slot..slot + SLOT - 1, &remote, slot)?);
            dst.expect_from(slot, &src, slot..slot + SLOT - 1);
        }
        pair.sim.all_done(ops)?;
        dst.check("all writes")?;
    }
    Ok(())
}

fn more_pages(context: &TrialContext) -> TestResult {
    let count = context.amount(3000, 1200);
    for seed in context.seeds(4) {
        let pair = SimPair::new(&context.with_seed(seed))?;
        let src = CheckedRegion::new(&pair.a, count * 128, Access::LOCAL, seed)?;
        let mut dst = CheckedRegion::new(&pair.b, count * 128, FULL_ACCESS, seed + 1)?;
        let remote = dst.import(&pair.to_b)?;
        let (from, to) = (
            Pages::new((0..count as u32).rev().collect::<Vec<_>>()),
            Pages::new((0..count as u32).collect::<Vec<_>>()),
        );
        let outcome = pair.sim.done(pair.to_b.write_pages(&src.region, &from, &remote, &to, 128)?)?;
        ensure_eq("requests", outcome.work_requests, count as u32)?;
        (0..count).for_each(|page| {
            dst.expect_from(page * 128, &src, (count - 1 - page) * 128..(count - page) * 128)
        });
        dst.check("all pages")?;
    }
    Ok(())
}

/// No rail ever has more outstanding requests than its depth.
fn depth_is_respected(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 200 * 128, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, 200 * 128, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let pages = Pages::new((0..200).rev().collect::<Vec<_>>());
    let mut op = pair.to_b.write_pages(&src.region, &pages, &remote, &pages, 128)?;
    let depth = u64::from(pair.capabilities().send_depth);
    while op.try_result().is_none() {
        pair.sim.tick();
        for rail in pair.a.counters() {
            let outstanding = rail.posts - rail.completions - rail.errors;
            ensure(
                outstanding <= depth,
                format!("rail {} has {outstanding} requests of {depth}", rail.rail),
            )?;
        }
    }
    Ok(())
}

/// The device gets each request once: the engine does not post the accepted part of a batch again.
fn every_request_once(context: &TrialContext) -> TestResult {
    for seed in context.seeds(4) {
        let pair = SimPair::new(&context.with_seed(seed))?;
        let src = CheckedRegion::new(&pair.a, 64, Access::LOCAL, seed)?;
        let dst = CheckedRegion::new(&pair.b, 500 * 64, FULL_ACCESS, seed + 1)?;
        let remote = dst.import(&pair.to_b)?;
        let (from, to) = (Pages::new(vec![0; 500]), Pages::new((0..500).collect::<Vec<_>>()));
        let outcome = pair.sim.done(pair.to_b.write_pages(&src.region, &from, &remote, &to, 64)?)?;
        pair.sim.settle()?;
        let counters = pair.a.counters();
        let sum = |of: fn(&transport_core::RailCounters) -> u64| counters.iter().map(of).sum::<u64>();
        ensure_eq("requests", outcome.work_requests, 500)?;
        ensure_eq("posts", sum(|rail| rail.posts), 500)?;
        ensure_eq("completions", sum(|rail| rail.completions), 500)?;
        ensure_eq("errors", sum(|rail| rail.errors), 0)?;
        ensure_eq("bytes", sum(|rail| rail.bytes), 500 * 64)?;
    }
    Ok(())
}

fn a_full_table(context: &TrialContext) -> TestResult {
    // Each rail group has its own table.
    let options = Options { max_operations: 8, rails: Some(16), ..Options::default() };
    let pair = SimHarness::new(context).pair_of(&options, &options)?;
    let src = CheckedRegion::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, 9 * 4096, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let write = |slot: usize| pair.to_b.write(&src.region, 0..4096, &remote, slot * 4096);
    for _ in 0..5 {
        let ops: Result<Vec<Op>, _> = (0..8).map(write).collect();
        ensure_err("the ninth of eight", write(8), &[ErrorKind::Busy])?;
        (0..8).for_each(|slot| dst.expect_from(slot * 4096, &src, 0..4096));
        pair.sim.all_done(ops?)?;
        dst.check("the eight")?;
    }
    // One free slot is enough.
    let mut ops = (0..8).map(write).collect::<Result<Vec<_>, _>>()?;
    if let Some(first) = ops.pop() {
        pair.sim.done(first)?;
    }
    pair.sim.done(write(8)?)?;
    dst.expect_from(8 * 4096, &src, 0..4096);
    dst.check("the ninth at last")?;
    pair.sim.all_done(ops)
}

/// One peer posts no receives. Writes to it and to other peers go on.
fn a_stalled_peer(context: &TrialContext) -> TestResult {
    let options = Options { max_operations: 4096, ..Options::default() };
    let pair = SimHarness::new(context).pair_of(&options, &options)?;
    let other = pair.sim.open(&Options::default())?;
    let (to_other, _) = pair.a.connect_local(&other)?;
    let src = CheckedRegion::new(&pair.a, 2 << 20, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&other, 2 << 20, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&to_other)?;
    // `b` neither receives nor polls: its message rings are full soon.
    let mut stuck = Vec::new();
    for _ in 0..1500 {
        stuck.push(pair.to_b.write_imm(1)?);
    }
    while pair.a.step().events > 0 {
        pair.sim.clock.advance(Duration::from_micros(100));
    }
    let mut op = to_other.write(&src.region, 0..2 << 20, &remote, 0)?;
    let mut result = None;
    for _ in 0..20_000 {
        result = op.try_result();
        if result.is_some() {
            break;
        }
        pair.a.step();
        other.step();
        pair.sim.clock.advance(Duration::from_micros(1));
    }
    ensure(result.is_some(), "a peer that does not poll blocks another peer")?;
    dst.expect_from(0, &src, 0..2 << 20);
    dst.check("the other peer")?;
    drop(stuck);
    pair.sim.settle()
}
