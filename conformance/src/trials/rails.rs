//! Rails: the engine uses all rails, also if the sides have different numbers of rails.

use transport_core::spi::Operations;
use transport_core::{Access, Fabric, Pages, WriteOptions};

use crate::backend_under_test::Variant;
use crate::check::{TestResult, ensure, ensure_eq};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::sim_harness::{Options, SimHarness, SimPair};
use crate::trial::{ALL_PATHS, Trial, TrialContext};

const PATHS: &[Variant] = &[Variant::Queued, Variant::SmallQueue, Variant::Partial, Variant::Reorder];

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("rails::all_share_large_work", all_share_large_work).on(PATHS).rails(4),
    Trial::new("rails::unequal_numbers", unequal_numbers).on(ALL_PATHS).rails(4).needs(Operations::WRITE_IMM),
    Trial::new("rails::single_writes_take_turns", single_writes_take_turns).on(&[Variant::Queued]).rails(4),
];

fn unequal(context: &TrialContext, ours: u32, theirs: u32) -> TestResult<SimPair> {
    let options = |rails| Options { rails: Some(rails), ..Options::default() };
    SimHarness::new(context).pair_of(&options(ours), &options(theirs))
}

fn posts(fabric: &Fabric) -> Vec<u64> {
    fabric.counters().iter().map(|rail| rail.posts).collect()
}

fn all_share_large_work(context: &TrialContext) -> TestResult {
    let pair = unequal(context, 4, 4)?;
    let src = CheckedRegion::new(&pair.a, 400 * 4096, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, 400 * 4096, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let pages = Pages::new((0..400).rev().collect::<Vec<_>>());
    pair.sim.done(pair.to_b.write_pages(&src.region, &pages, &remote, &pages, 4096)?)?;
    dst.expect_from(0, &src, 0..400 * 4096);
    dst.check("400 pages over four rails")?;
    ensure_eq("pages per rail", posts(&pair.a), vec![100; 4])
}

fn unequal_numbers(context: &TrialContext) -> TestResult {
    for (ours, theirs) in context.sample([(4, 2), (2, 4), (1, 4), (4, 1), (3, 2)]) {
        let pair = unequal(context, ours, theirs)?;
        let mut src = CheckedRegion::new(&pair.a, 2 << 20, FULL_ACCESS, context.seed)?;
        let mut dst = CheckedRegion::new(&pair.b, 2 << 20, FULL_ACCESS, context.seed + 1)?;
        let (remote, back) = (dst.import(&pair.to_b)?, src.import(&pair.to_a)?);
        let options = WriteOptions::new().imm(9);
        pair.sim.done(pair.to_b.write_with(&src.region, 0..1 << 20, &remote, 0, &options)?)?;
        dst.expect_from(0, &src, 0..1 << 20);
        let pages = Pages::new((0..100).rev().collect::<Vec<_>>()).offset(1 << 20);
        pair.sim.done(pair.to_a.write_pages_with(&dst.region, &pages, &back, &pages, 4096, &options)?)?;
        src.expect_from(1 << 20, &dst, 1 << 20..(1 << 20) + 100 * 4096);
        dst.check(&format!("{ours} rails to {theirs}"))?;
        src.check(&format!("{theirs} rails to {ours}"))?;
        pair.sim.settle()?;
        ensure_eq("imms", (pair.to_a.imm(9).count(), pair.to_b.imm(9).count()), (1, 1))?;
        let posts = posts(&pair.b);
        ensure(
            posts.iter().all(|posts| *posts >= 100 / u64::from(theirs) / 2),
            format!("{theirs} rails to {ours} carried 100 pages as {posts:?}"),
        )?;
    }
    Ok(())
}

/// Many writes of one request each must not all use the first rail.
fn single_writes_take_turns(context: &TrialContext) -> TestResult {
    let pair = unequal(context, 4, 4)?;
    let src = CheckedRegion::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, 4096, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let ops: Result<Vec<_>, _> = (0..80).map(|_| pair.to_b.write(&src.region, 0..4096, &remote, 0)).collect();
    pair.sim.all_done(ops?)?;
    let posts = posts(&pair.a);
    ensure(
        posts.iter().all(|posts| *posts == 20),
        format!("80 single writes went over four rails as {posts:?}"),
    )
}
