//! Cancelling and dropping operations: afterwards no byte moves, and all slots and memory are free again.

use std::pin::Pin;

use transport_core::spi::Operations;
use transport_core::{Access, ErrorKind, Fabric, Op, Pages, WriteOptions};

use crate::backend_under_test::Variant;
use crate::check::{TestResult, ensure, ensure_eq, ensure_err, poll_once};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::sim_harness::{Options, SimHarness, SimPair};
use crate::trial::{ALL_PATHS, Trial, TrialContext};

const QUEUED: &[Variant] =
    &[Variant::Queued, Variant::SmallQueue, Variant::Partial, Variant::Reorder, Variant::Slow];

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("cancel::before_posting", before_posting).on(QUEUED),
    Trial::new("cancel::at_any_turn", at_any_turn).on(QUEUED),
    Trial::new("cancel::returns_only_when_quiet", returns_only_when_quiet).on(&[Variant::Slow]),
    Trial::new("cancel::tears_down_at_the_deadline", tears_down_at_the_deadline).on(&[Variant::Slow]),
    Trial::new("cancel::after_the_end", after_the_end).on(ALL_PATHS),
    Trial::new("cancel::spares_other_operations", spares_other_operations).on(QUEUED),
    Trial::new("cancel::dropped_then_complete", dropped_then_complete).on(&[Variant::Slow]),
    Trial::new("cancel::slots_come_back", slots_come_back).on(QUEUED),
    Trial::new("cancel::no_imm_of_a_cancelled_write", no_imm).on(QUEUED).needs(Operations::WRITE_IMM),
];

const LEN: usize = 1 << 20;

fn before_posting(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, LEN, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, LEN, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let op = pair.to_b.write(&src.region, 0..LEN, &remote, 0)?;
    let result = pair.sim.output("a cancel", op.cancel())?;
    ensure_err("never posted", result, &[ErrorKind::Cancelled])?;
    pair.sim.settle()?;
    dst.check("a write that was never posted")
}

fn at_any_turn(context: &TrialContext) -> TestResult {
    const COUNT: u32 = 400;
    for turns in context.attempts(20) {
        let pair = SimPair::new(&context.with_seed(context.seed + turns))?;
        let mut src = CheckedRegion::new(&pair.a, 512 * COUNT as usize, Access::LOCAL, context.seed)?;
        let mut dst = CheckedRegion::new(&pair.b, 512 * COUNT as usize, FULL_ACCESS, context.seed + 1)?;
        let remote = dst.import(&pair.to_b)?;
        let pages = Pages::new((0..COUNT).rev().collect::<Vec<_>>());
        let op = pair.to_b.write_pages(&src.region, &pages, &remote, &pages, 512)?;
        for _ in 0..turns {
            pair.sim.tick();
        }
        let result = pair.sim.output("a cancel", op.cancel())?;
        let mut whole = Vec::new();
        match result {
            Ok(outcome) => {
                ensure_eq("bytes", outcome.bytes, u64::from(COUNT) * 512)?;
                dst.expect_from(0, &src, 0..src.len());
            }
            Err(error) => {
                ensure_err::<()>("the cancelled write", Err(error), &[ErrorKind::Cancelled])?;
                // Each page arrived whole or not at all: a cancel waits for posted work.
                whole = (0..COUNT as usize).map(|page| page * 512..(page + 1) * 512).collect();
            }
        }
        let mut actual = vec![0; dst.len()];
        dst.region.copy_out(0, &mut actual)?;
        for page in whole {
            let moved = &actual[page.clone()] == src.bytes(page.clone());
            ensure(
                moved || &actual[page.clone()] == dst.bytes(page.clone()),
                format!("half a page at {page:?}"),
            )?;
            if moved {
                dst.expect_from(page.start, &src, page);
            }
        }
        // Now only their owners write both regions.
        dst.check("when the cancel returned")?;
        src.fill(context.seed + 9)?;
        pair.sim.settle()?;
        dst.check("later")?;
    }
    Ok(())
}

fn returns_only_when_quiet(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, 4096, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let op = pair.to_b.write(&src.region, 0..4096, &remote, 0)?;
    pair.post(1)?;
    let mut cancel = op.cancel();
    pair.sim.clock.advance(Variant::SLOW / 2);
    for _ in 0..20 {
        pair.sim.step();
        ensure(poll_once(Pin::new(&mut cancel)).is_none(), "the cancel returned while the write was posted")?;
    }
    dst.check("while it is posted")?;
    pair.sim.clock.advance(Variant::SLOW);
    // Where the target takes part in the write, it needs a few turns.
    for _ in 0..8 {
        pair.sim.step();
    }
    ensure(
        poll_once(Pin::new(&mut cancel)).is_some(),
        "the cancel did not return after the write had ended",
    )?;
    dst.expect_from(0, &src, 0..4096);
    dst.check("posted work is awaited")
}

fn tears_down_at_the_deadline(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, LEN, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, LEN, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let options = WriteOptions::new().deadline(Variant::SLOW / 10);
    let op = pair.to_b.write_with(&src.region, 0..LEN, &remote, 0, &options)?;
    pair.post(1)?;
    let mut cancel = op.cancel();
    pair.sim.step();
    ensure(poll_once(Pin::new(&mut cancel)).is_none(), "the cancel returned while the write was posted")?;
    pair.sim.clock.advance(Variant::SLOW / 10);
    for _ in 0..10 {
        pair.sim.step();
    }
    let result = poll_once(Pin::new(&mut cancel))
        .ok_or_else(|| crate::check::TrialFailure::new("the cancel did not end at its deadline"))?;
    ensure_err("the write", result, &[ErrorKind::Cancelled])?;
    pair.sim.settle()?;
    dst.check("torn down before it arrived")
}

fn after_the_end(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, LEN, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, LEN, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    for len in [8, LEN] {
        let op = pair.to_b.write(&src.region, 0..len, &remote, 0)?;
        pair.sim.settle()?;
        ensure_eq("bytes", pair.sim.output("a cancel", op.cancel())??.bytes, len as u64)?;
        dst.expect_from(0, &src, 0..len);
        dst.check("a cancel that came too late")?;
    }
    Ok(())
}

fn spares_other_operations(context: &TrialContext) -> TestResult {
    const PART: usize = 3000;
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, PART * 60, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, PART * 60, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let part = |number: usize| number * PART..(number + 1) * PART;
    let mut kept = Vec::new();
    let mut cancels = Vec::new();
    for number in 0..60 {
        let op = pair.to_b.write(&src.region, part(number), &remote, number * PART)?;
        match number % 3 {
            0 => cancels.push((number, op.cancel())),
            _ => kept.push(op),
        }
    }
    for (number, cancel) in cancels {
        if pair.sim.output("a cancel", cancel)?.is_ok() {
            dst.expect_from(number * PART, &src, part(number));
        }
    }
    pair.sim.all_done(kept)?;
    (0..60)
        .filter(|number| number % 3 != 0)
        .for_each(|number| dst.expect_from(number * PART, &src, part(number)));
    pair.sim.settle()?;
    dst.check("what was not cancelled")
}

/// The trial drops the operation and its source while the write is posted. The device reads the source later.
fn dropped_then_complete(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, 4096, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let op = pair.to_b.write(&src.region, 0..4096, &remote, 0)?;
    pair.post(1)?;
    dst.expect_from(0, &src, 0..4096);
    drop((op, src, remote));
    pair.sim.step();
    ensure_eq("under way", pair.a.step().outstanding, 1)?;
    let other = CheckedRegion::new(&pair.a, 4096, Access::LOCAL, context.seed + 5)?;
    pair.sim.clock.advance(Variant::SLOW);
    pair.sim.settle()?;
    dst.check("posted before it was dropped")?;
    other.check("memory taken meanwhile")
}

fn slots_come_back(context: &TrialContext) -> TestResult {
    const SLOTS: usize = 16;
    let options = Options { max_operations: SLOTS, ..Options::default() };
    let pair = SimHarness::new(context).pair_of(&options, &options)?;
    let src = CheckedRegion::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, 4096, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let write = || pair.to_b.write(&src.region, 0..4096, &remote, 0);
    for round in 0..8 {
        let ops: Result<Vec<Op>, _> = (0..SLOTS).map(|_| write()).collect();
        for (number, op) in ops?.into_iter().enumerate() {
            step(&pair.a, number % 3);
            match (number + round) % 4 {
                0 => op.detach(),
                1 => drop(op.cancel()),
                _ => drop(op),
            }
        }
        pair.sim.settle()?;
    }
    Ok(())
}

fn step(fabric: &Fabric, turns: usize) {
    for _ in 0..turns {
        fabric.step();
    }
}

fn no_imm(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, LEN, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, LEN, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    for turns in context.attempts(10) {
        let imm = turns as u32;
        let op = pair.to_b.write_with(&src.region, 0..LEN, &remote, 0, &WriteOptions::new().imm(imm))?;
        step(&pair.a, turns as usize);
        let done = pair.sim.output("a cancel", op.cancel())?.is_ok();
        pair.sim.settle()?;
        let arrived = pair.to_a.imm(imm).count();
        // An imm that was posted already may still arrive, but only after all bytes.
        let complete = || {
            let mut actual = vec![0; LEN];
            dst.region.copy_out(0, &mut actual).is_ok() && actual == src.bytes(0..LEN)
        };
        ensure(!done || arrived == 1, "the write succeeded, but no imm arrived")?;
        ensure(arrived == 0 || complete(), "an imm arrived before its bytes")?;
        ensure(arrived <= 1, "more than one imm arrived")?;
    }
    Ok(())
}
