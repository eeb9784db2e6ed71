//! Draining a peer: a drain waits for dropped operations too.

use std::pin::Pin;

use transport_core::{Access, Drain, ErrorKind, Op, Pages, WriteOptions};

use crate::backend_under_test::Variant;
use crate::check::{TestResult, TrialFailure, ensure, ensure_eq, ensure_err, poll_once};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::sim_harness::{Options, SimHarness, SimPair};
use crate::trial::{ALL_PATHS, Trial, TrialContext};

const PATHS: &[Variant] =
    &[Variant::Queued, Variant::SmallQueue, Variant::Partial, Variant::Reorder, Variant::Slow];

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("drain::nothing_moves_afterwards", nothing_moves_afterwards).on(PATHS),
    Trial::new("drain::returns_only_when_quiet", returns_only_when_quiet).on(&[Variant::Slow]),
    Trial::new("drain::tears_down_at_the_deadline", tears_down_at_the_deadline).on(&[Variant::Slow]),
    Trial::new("drain::spares_later_operations", spares_later_operations).on(&[Variant::Slow]),
    Trial::new("drain::gives_up_and_may_be_repeated", gives_up).on(&[Variant::Slow]),
    Trial::new("drain::of_an_idle_and_of_a_gone_peer", idle_and_gone).on(ALL_PATHS),
    Trial::new("drain::dropped_leaves_nothing_behind", dropped).on(&[Variant::Slow]),
];

#[track_caller]
fn drained(sim: &SimHarness, drain: Drain) -> TestResult {
    Ok(sim.output("a drain", drain)??)
}

/// Submits one write of 4 KiB. Returns the operation, its source and its destination.
fn one_write(
    context: &TrialContext,
    pair: &SimPair,
    options: &WriteOptions,
) -> TestResult<(Op, CheckedRegion, CheckedRegion)> {
    let src = CheckedRegion::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, 4096, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let op = pair.to_b.write_with(&src.region, 0..4096, &remote, 0, options)?;
    pair.post(1)?;
    Ok((op, src, dst))
}

/// Runs enough turns for all work that is due now, even if the target takes part in it. The clock does not move.
fn a_few_turns(pair: &SimPair) {
    for _ in 0..8 {
        pair.sim.step();
    }
}

fn nothing_moves_afterwards(context: &TrialContext) -> TestResult {
    const PAGE: usize = 512;
    const COUNT: u32 = 64;
    for seed in context.seeds(12) {
        let mut random = fastrand::Rng::with_seed(seed);
        let pair = SimPair::new(&context.with_seed(seed))?;
        let mut src = CheckedRegion::new(&pair.a, PAGE * COUNT as usize, Access::LOCAL, seed)?;
        let mut dst = CheckedRegion::new(&pair.b, PAGE * COUNT as usize, FULL_ACCESS, seed + 1)?;
        let remote = dst.import(&pair.to_b)?;
        for round in 0..4 {
            for _ in 0..random.u32(1..20) {
                let mut list: Vec<_> = (0..COUNT).collect();
                random.shuffle(&mut list);
                let pages = Pages::new(&list[..random.usize(1..list.len())]);
                let op = pair.to_b.write_pages(&src.region, &pages, &remote, &pages, PAGE)?;
                match random.u8(..4) {
                    0 => op.detach(),
                    1 => drop(op.cancel()),
                    _ => drop(op),
                }
                for _ in 0..random.u8(..3) {
                    pair.sim.tick();
                }
            }
            drained(&pair.sim, pair.to_b.drain()?)?;
            // Now only their owners write both regions.
            src.fill(seed + 100 + round)?;
            dst.fill(seed + 200 + round)?;
            for _ in 0..random.u8(..30) {
                pair.sim.tick();
            }
            dst.check("after the drain")?;
            src.check("after the drain")?;
        }
        pair.sim.settle()?;
        dst.check("in the end")?;
    }
    Ok(())
}

fn returns_only_when_quiet(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let (op, src, mut dst) = one_write(context, &pair, &WriteOptions::new())?;
    drop(op);
    let mut drain = pair.to_b.drain()?;
    pair.sim.clock.advance(Variant::SLOW / 2);
    for _ in 0..20 {
        pair.sim.step();
        ensure(poll_once(Pin::new(&mut drain)).is_none(), "the drain returned while the write was posted")?;
    }
    dst.check("while it is posted")?;
    pair.sim.clock.advance(Variant::SLOW);
    a_few_turns(&pair);
    ensure(poll_once(Pin::new(&mut drain)).is_some(), "the drain did not return after the write had ended")?;
    dst.expect_from(0, &src, 0..4096);
    dst.check("posted work is awaited")
}

fn tears_down_at_the_deadline(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let options = WriteOptions::new().deadline(Variant::SLOW / 10);
    let (op, _src, dst) = one_write(context, &pair, &options)?;
    drop(op);
    let mut drain = pair.to_b.drain()?;
    pair.sim.step();
    ensure(poll_once(Pin::new(&mut drain)).is_none(), "the drain returned while the write was posted")?;
    pair.sim.clock.advance(Variant::SLOW / 10);
    for _ in 0..10 {
        pair.sim.step();
    }
    poll_once(Pin::new(&mut drain))
        .ok_or_else(|| TrialFailure::new("the drain did not end at the write's deadline"))??;
    pair.sim.settle()?;
    dst.check("torn down before it arrived")
}

fn spares_later_operations(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let (op, src, dst) = one_write(context, &pair, &WriteOptions::new())?;
    drop(op);
    let mut drain = pair.to_b.drain()?;
    pair.sim.clock.advance(Variant::SLOW / 2);
    pair.sim.step();
    let remote = dst.import(&pair.to_b)?;
    let mut later = pair.to_b.write(&src.region, 0..4096, &remote, 0)?;
    pair.post(1)?;
    pair.sim.clock.advance(Variant::SLOW * 3 / 4);
    a_few_turns(&pair);
    ensure(poll_once(Pin::new(&mut drain)).is_some(), "the drain waits for a later operation")?;
    ensure(later.try_result().is_none(), "the later write has ended, so the trial shows nothing")?;
    pair.sim.done(later).map(drop)
}

fn gives_up(context: &TrialContext) -> TestResult {
    let options = Options { deadline: Variant::SLOW / 4, ..Options::default() };
    let pair = SimHarness::new(context).pair_of(&options, &options)?;
    let (mut op, src, mut dst) =
        one_write(context, &pair, &WriteOptions::new().deadline(Variant::SLOW * 10))?;
    let mut drain = pair.to_b.drain()?;
    pair.sim.step();
    pair.sim.clock.advance(Variant::SLOW / 4);
    pair.sim.step();
    let result = poll_once(Pin::new(&mut drain))
        .ok_or_else(|| TrialFailure::new("the drain did not end at its deadline"))?;
    ensure_err("the drain", result, &[ErrorKind::DeadlineExceeded])?;
    ensure(op.try_result().is_none(), "the write ended with the drain")?;
    dst.check("while it is posted")?;
    let again = pair.to_b.drain()?;
    pair.sim.step();
    pair.sim.clock.advance(Variant::SLOW / 5);
    pair.sim.step();
    drop(again);
    pair.sim.clock.advance(Variant::SLOW);
    drained(&pair.sim, pair.to_b.drain()?)?;
    ensure_eq("bytes", pair.sim.done(op)?.bytes, 4096)?;
    dst.expect_from(0, &src, 0..4096);
    dst.check("the write that was waited for")
}

fn idle_and_gone(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    ensure(
        matches!(poll_once(Pin::new(&mut pair.to_b.drain()?)), Some(Ok(()))),
        "the drain waits although no operation is outstanding",
    )?;
    let src = CheckedRegion::new(&pair.a, 1 << 20, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, 1 << 20, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    drop(pair.to_b.write(&src.region, 0..1 << 20, &remote, 0)?);
    pair.sim.step();
    pair.to_b.disconnect();
    drained(&pair.sim, pair.to_b.drain()?)?;
    dst.fill(context.seed + 2)?;
    pair.sim.settle()?;
    dst.check("after the drain of a peer that is gone")?;
    pair.a.close();
    ensure_err("of a closed fabric", pair.to_b.drain().map(drop), &[ErrorKind::Closed]).map(drop)
}

fn dropped(context: &TrialContext) -> TestResult {
    let options = Options { max_operations: 4, rails: Some(16), ..Options::default() };
    let pair = SimHarness::new(context).pair_of(&options, &options)?;
    let (op, _src, _dst) = one_write(context, &pair, &WriteOptions::new())?;
    for _ in 0..20 {
        drop(pair.to_b.drain()?);
        pair.sim.step();
    }
    ensure_eq("under way", pair.a.step().outstanding, 1)?;
    drop(op);
    // The trial drops the maximum number of operations, and a larger number of drains.
    let (src, dst) = (
        CheckedRegion::new(&pair.a, 64, Access::LOCAL, 1)?,
        CheckedRegion::new(&pair.b, 64, FULL_ACCESS, context.seed)?,
    );
    let remote = dst.import(&pair.to_b)?;
    let write = || pair.to_b.write(&src.region, 0..64, &remote, 0);
    for op in (0..3).map(|_| write()).collect::<Result<Vec<_>, _>>()? {
        // A write that is not posted ends when it is dropped, and frees its slot.
        pair.post(4)?;
        drop(op);
    }
    ensure_err("one write too many", write().map(drop), &[ErrorKind::Busy])?;
    let drains = (0..9).map(|_| pair.to_b.drain()).collect::<Result<Vec<_>, _>>()?;
    pair.sim.step();
    pair.sim.clock.advance(Variant::SLOW * 2);
    drains.into_iter().try_for_each(|drain| drained(&pair.sim, drain))?;
    drop(write()?);
    Ok(())
}
