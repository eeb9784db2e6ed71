//! Completions in any order, and runs that are the same for the same seed.

use std::time::Duration;

use transport_core::spi::Operations;
use transport_core::{Access, Pages, WriteOptions};

use crate::backend_under_test::Variant;
use crate::check::{TestResult, ensure, ensure_eq};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::sim_harness::SimPair;
use crate::trial::{ALL_PATHS, Trial, TrialContext};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("order::any_order_same_bytes", any_order).on(&[Variant::Reorder]).needs(Operations::WRITE_IMM),
    Trial::new("order::completions_do_overtake", completions_do_overtake).on(&[Variant::Reorder]),
    Trial::new("order::one_seed_one_hash", one_seed)
        .on(ALL_PATHS)
        .needs(Operations::WRITE_IMM.union(Operations::READ)),
    Trial::new("order::another_seed_another_hash", another_seed)
        .on(&[Variant::Reorder, Variant::Partial])
        .needs(Operations::WRITE_IMM.union(Operations::READ)),
];

/// Runs a mixed load and returns the event hashes of both fabrics.
fn load(context: &TrialContext) -> TestResult<(u64, u64)> {
    let pair = SimPair::new(context)?;
    let mut random = fastrand::Rng::with_seed(77);
    let parts = context.amount(16, 6);
    let src = CheckedRegion::new(&pair.a, parts << 16, Access::LOCAL, 1)?;
    let mut dst = CheckedRegion::new(&pair.b, parts << 16, FULL_ACCESS, 2)?;
    let back = CheckedRegion::new(&pair.a, parts << 16, Access::LOCAL, 3)?;
    let remote = dst.import(&pair.to_b)?;
    let mut ops = Vec::new();
    for part in 0..parts {
        let start = part << 16;
        let mut list: Vec<_> = (0..64).collect();
        random.shuffle(&mut list);
        let to = Pages::new(list.clone()).offset(start);
        let from = Pages::new((0..64).collect::<Vec<_>>()).offset(start);
        let options = WriteOptions::new().imm(part as u32);
        ops.push(pair.to_b.write_pages_with(&src.region, &from, &remote, &to, 512, &options)?);
        for (item, page) in list.into_iter().enumerate() {
            dst.expect_from(start + page as usize * 512, &src, start + item * 512..start + (item + 1) * 512);
        }
        ops.push(pair.to_b.write(&src.region, start + 40_000..start + 60_000, &remote, start + 40_000)?);
        dst.expect_from(start + 40_000, &src, start + 40_000..start + 60_000);
        ops.push(pair.to_b.write_imm(100)?);
        // Reads from the end of each part, to which no operation writes.
        ops.push(pair.to_b.read(&back.region, start..start + 5000, &remote, start + 60_000)?);
    }
    pair.sim.all_done(ops)?;
    pair.sim.settle()?;
    dst.check("a mixed load")?;
    (0..parts).try_for_each(|part| ensure_eq("imms of a part", pair.to_a.imm(part as u32).count(), 1))?;
    ensure_eq("imms alone", pair.to_a.imm(100).count(), parts as u64)?;
    Ok((pair.a.event_hash(), pair.b.event_hash()))
}

fn any_order(context: &TrialContext) -> TestResult {
    context.seeds(12).try_for_each(|seed| load(&context.with_seed(seed)).map(drop))
}

/// Without overtaking completions the variant would show nothing.
fn completions_do_overtake(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 64, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, 64, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let mut ops = Vec::new();
    for number in 0..64 {
        ops.push((number, pair.to_b.write(&src.region, number..number + 1, &remote, number)?));
    }
    let mut order = Vec::new();
    pair.sim.until("64 writes", || {
        ops.retain_mut(|(number, op)| op.try_result().is_none() || (order.push(*number), false).1);
        // Completions of the same clock step have no visible order.
        pair.sim.clock.advance(Duration::from_nanos(100));
        ops.is_empty()
    })?;
    ensure(!order.is_sorted(), "64 writes completed in the order of posting")
}

fn one_seed(context: &TrialContext) -> TestResult {
    for seed in context.seeds(3) {
        let context = context.with_seed(seed);
        ensure_eq("the hashes of two runs of one seed", load(&context)?, load(&context)?)?;
    }
    Ok(())
}

fn another_seed(context: &TrialContext) -> TestResult {
    let seeds = context.amount(4, 2);
    let hashes: TestResult<Vec<_>> =
        (context.seed..context.seed + seeds).map(|seed| load(&context.with_seed(seed))).collect();
    let mut hashes = hashes?;
    hashes.sort_unstable();
    hashes.dedup();
    ensure_eq("different hashes, one per seed", hashes.len() as u64, seeds)
}
