//! Windows: the number of bytes that a peer may have outstanding.

use transport_core::{Access, Pages};

use super::grant::{ALL, AdjustableGrant, pair_of};
use crate::backend_under_test::Variant;
use crate::check::{TestResult, ensure, ensure_eq};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::sim_harness::{Options, SimHarness};
use crate::trial::{Trial, TrialContext};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("window::bounds_the_bytes_under_way", bytes_are_bounded).on(&[Variant::Slow]),
    Trial::new("window::of_no_bytes_is_a_pause", no_bytes_pause).on(&[Variant::Queued, Variant::SmallQueue]),
];

fn bytes_are_bounded(context: &TrialContext) -> TestResult {
    const PAGE: usize = 4096;
    let grant = AdjustableGrant::new([3 * PAGE as u64 + 100, ALL, ALL]);
    // Rail groups share the window. Here one group has all of it.
    let ours = Options { rails: Some(16), ..Options::default() };
    let theirs = Options { grant_policy: Some(grant.clone()), rails: Some(16), ..Options::default() };
    let pair = SimHarness::new(context).pair_of(&ours, &theirs)?;
    let src = CheckedRegion::new(&pair.a, 16 * PAGE, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, 16 * PAGE, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let pages = Pages::new((0..10).rev().collect::<Vec<_>>());
    let op = pair.to_b.write_pages(&src.region, &pages, &remote, &pages, PAGE)?;
    let posted = || pair.a.counters().iter().map(|rail| rail.bytes).sum::<u64>();
    for turns in 1..=3 {
        // Enough time for devices that accept nothing for a while, but less than a write takes.
        for _ in 0..40 {
            pair.sim.step();
            pair.sim.clock.advance(Variant::SLOW / 100);
        }
        ensure_eq("bytes posted", posted(), 3 * turns * PAGE as u64)?;
        pair.sim.clock.advance(Variant::SLOW);
    }
    let outcome = pair.sim.done(op)?;
    ensure_eq("requests", outcome.work_requests, 10)?;
    // One request of any size may always be outstanding.
    pair.sim.done(pair.to_b.write(&src.region, 0..16 * PAGE, &remote, 0)?)?;
    dst.expect_from(0, &src, 0..16 * PAGE);
    dst.check("both writes")
}

fn no_bytes_pause(context: &TrialContext) -> TestResult {
    let grant = AdjustableGrant::new([0, ALL, ALL]);
    let pair = pair_of(context, &grant)?;
    let src = CheckedRegion::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, 4096, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let mut op = pair.to_b.write(&src.region, 0..4096, &remote, 0)?;
    pair.sim.done(pair.to_b.write_imm(1)?)?;
    for _ in 0..100 {
        pair.sim.step();
    }
    ensure(op.try_result().is_none(), "the write completed without a grant")?;
    dst.check("while the target lets nothing in")?;
    grant.set([ALL, ALL, ALL]);
    pair.to_a.regrant();
    pair.sim.result(&mut op)??;
    dst.expect_from(0, &src, 0..4096);
    dst.check("after it does")
}
