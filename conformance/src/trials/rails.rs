//! Rails: the engine uses all rails, also if the sides have different numbers of rails.

use transport_core::spi::Operations;
use transport_core::{Access, ErrorKind, Fabric, Pages, WriteOptions};

use crate::backend_under_test::Variant;
use crate::check::{TestResult, TrialFailure, ensure, ensure_eq, ensure_err};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::sim_harness::{Options, SimHarness, SimPair};
use crate::trial::{ALL_PATHS, Trial, TrialContext};

const PATHS: &[Variant] = &[Variant::Queued, Variant::SmallQueue, Variant::Partial, Variant::Reorder];

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("rails::all_share_large_work", all_share_large_work).on(PATHS).rails(4),
    Trial::new("rails::unequal_numbers", unequal_numbers).on(ALL_PATHS).rails(4).needs(Operations::WRITE_IMM),
    Trial::new("rails::single_writes_take_turns", single_writes_take_turns).on(&[Variant::Queued]).rails(4),
    Trial::new("rails::drained_devices_rest", drained_devices_rest).on(PATHS).rails(4),
    Trial::new("rails::drained_under_way", drained_under_way)
        .on(&[Variant::SmallQueue, Variant::Partial, Variant::Reorder, Variant::Unruly])
        .rails(4)
        .needs(Operations::WRITE_IMM),
];

fn unequal(context: &TrialContext, ours: u32, theirs: u32) -> TestResult<SimPair> {
    let options = |rails| Options { rails: Some(rails), ..Options::default() };
    SimHarness::new(context).pair_of(&options(ours), &options(theirs))
}

fn posts(fabric: &Fabric) -> Vec<u64> {
    fabric.counters().iter().map(|rail| rail.posts).collect()
}

/// Whether a rail has taken over what another one should have posted: devices that refuse requests at random fall behind.
fn takes_over(fabric: &Fabric) -> bool {
    fabric.counters().iter().any(|rail| rail.taken_over > 0)
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
    ensure_eq("pages of all rails", posts(&pair.a).iter().sum::<u64>(), 400)?;
    ensure(takes_over(&pair.a) || posts(&pair.a) == [100; 4], format!("pages per rail: {:?}", posts(&pair.a)))
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

/// New operations avoid a device that is taken out of service, as long as another one reaches the regions.
fn drained_devices_rest(context: &TrialContext) -> TestResult {
    let pair = unequal(context, 4, 4)?;
    let src = CheckedRegion::new(&pair.a, 400 * 4096, FULL_ACCESS, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, 400 * 4096, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let pages = Pages::new((0..400).rev().collect::<Vec<_>>());
    let devices = pair.a.transports()[0].devices.clone();
    ensure_err("no such device", pair.a.drain_device("nonsense").map(drop), &[ErrorKind::InvalidRequest])?;
    ensure_err("no such device", pair.a.restore_device("nonsense"), &[ErrorKind::InvalidRequest])?;
    let mut drain = |rails: &[usize], out: usize, total: [u64; 4]| -> TestResult {
        for rail in rails {
            pair.sim.output("the drain of an idle device", pair.a.drain_device(&devices[*rail].name)?)??;
        }
        pair.sim.done(pair.to_b.write_pages(&src.region, &pages, &remote, &pages, 4096)?)?;
        dst.expect_from(0, &src, 0..400 * 4096);
        dst.check("400 pages")?;
        let options = WriteOptions::default();
        let plan = pair.to_b.explain_write_pages(&src.region, &pages, &remote, &pages, 4096, &options)?;
        ensure_eq(
            "rails that explain leaves out",
            plan.rails.iter().filter(|rail| rail.unusable.is_some()).count(),
            out,
        )?;
        let posts = posts(&pair.a);
        // Rails also take over from others that refuse requests at random.
        let most = if takes_over(&pair.a) { u64::MAX } else { 2 };
        let fits =
            |(posts, total): (&u64, &u64)| posts.abs_diff(*total) <= most && (*total > 0 || *posts == 0);
        ensure(posts.iter().zip(&total).all(fits), format!("posts {posts:?}, expected about {total:?}"))
    };
    drain(&[1], 1, [133, 0, 133, 133])?;
    drain(&[0, 3], 3, [133, 0, 533, 133])?;
    Ok(())
}

/// What a running operation has not posted on a drained device goes over the others, once, and its imm comes last. A
/// device that is taken back takes part again.
fn drained_under_way(context: &TrialContext) -> TestResult {
    for restores in [false, true] {
        for steps in 0..6 {
            let pair = unequal(context, 4, 4)?;
            let src = CheckedRegion::new(&pair.a, 400 * 4096, FULL_ACCESS, context.seed)?;
            let mut dst = CheckedRegion::new(&pair.b, 3 * 400 * 4096, FULL_ACCESS, context.seed + 1)?;
            let remote = dst.import(&pair.to_b)?;
            let devices = pair.a.transports()[0].devices.clone();
            let pages = Pages::new((0..400).rev().collect::<Vec<_>>());
            let mut ops = Vec::new();
            for part in 0..3 {
                let options = WriteOptions::new().imm(5);
                let to = pages.clone().offset(part * 400 * 4096);
                let op = pair.to_b.write_pages_with(&src.region, &pages, &remote, &to, 4096, &options)?;
                dst.expect_from(part * 400 * 4096, &src, 0..400 * 4096);
                ops.push(op);
            }
            (0..steps).for_each(|_| _ = pair.sim.step());
            let before = posts(&pair.a);
            let drained = [0, 2].map(|rail| pair.a.drain_device(&devices[rail].name));
            pair.sim.step();
            if restores {
                pair.a.restore_device(&devices[0].name)?;
                pair.a.restore_device(&devices[2].name)?;
            }
            for mut op in ops {
                let outcome = pair.sim.result(&mut op)??;
                ensure_eq("requests", outcome.work_requests, 401)?;
                let receipt = op.receipt().ok_or_else(|| TrialFailure::new("no receipt"))?;
                let bytes: u64 = receipt.rails.iter().map(|rail| rail.bytes).sum();
                ensure_eq("bytes of all rails", bytes, 400 * 4096)?;
            }
            for drain in drained {
                pair.sim.output("a drain", drain?)??;
            }
            pair.sim.settle()?;
            dst.check(&format!("drained after {steps} steps"))?;
            ensure_eq("imms", pair.to_a.imm(5).count(), 3)?;
            let drained_posts = |posts: &[u64]| posts[0] + posts[2];
            let more = drained_posts(&posts(&pair.a)) - drained_posts(&before);
            // Their imms go over a rail that has carried bytes.
            ensure(restores || more <= 3, format!("drained devices posted {more} requests more"))?;
            let before = posts(&pair.a);
            ensure_eq("all posts", before.iter().sum::<u64>(), 3 * 401)?;
            pair.sim.done(pair.to_b.write_pages(&src.region, &pages, &remote, &pages, 4096)?)?;
            let after = posts(&pair.a);
            ensure_eq("the drained devices post", drained_posts(&after) > drained_posts(&before), restores)?;
        }
    }
    Ok(())
}
