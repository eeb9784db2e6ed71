//! Reads, for backends that support them.

use transport_core::Access;
use transport_core::spi::Operations;

use super::write::sizes;
use crate::check::{TestResult, ensure_eq};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::sim_harness::SimPair;
use crate::trial::{ALL_PATHS, Trial, TrialContext};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("read::every_size", every_size).on(ALL_PATHS).needs(Operations::READ),
    Trial::new("read::many_at_once", many_at_once).on(ALL_PATHS).needs(Operations::READ),
    Trial::new("read::sees_an_earlier_write", sees_an_earlier_write).on(ALL_PATHS).needs(Operations::READ),
];

fn every_size(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let sizes: Vec<_> = context.sample(sizes(&pair)).collect();
    let room = sizes.iter().max().copied().unwrap_or(0) + 100;
    let mut dst = CheckedRegion::new(&pair.a, room, Access::LOCAL, context.seed)?;
    let src = CheckedRegion::new(&pair.b, room, Access::REMOTE_READ, context.seed + 1)?;
    let remote = src.import(&pair.to_b)?;
    for (number, size) in sizes.into_iter().enumerate() {
        let (from, to) = (11 + number, 3 + 2 * number);
        let outcome = pair.sim.done(pair.to_b.read(&dst.region, to..to + size, &remote, from)?)?;
        ensure_eq("bytes", outcome.bytes, size as u64)?;
        dst.expect_from(to, &src, from..from + size);
        dst.check(&format!("{size} bytes"))?;
        dst.fill(context.seed + 2 + number as u64)?;
    }
    src.check("the source")
}

fn many_at_once(context: &TrialContext) -> TestResult {
    const SLOT: usize = 5000;
    let pair = SimPair::new(context)?;
    let mut random = fastrand::Rng::with_seed(context.seed);
    let mut dst = CheckedRegion::new(&pair.a, 200 * SLOT, Access::LOCAL, context.seed)?;
    let src = CheckedRegion::new(&pair.b, 100_000, Access::REMOTE_READ, context.seed + 1)?;
    let remote = src.import(&pair.to_b)?;
    let mut ops = Vec::new();
    for slot in 0..200 {
        let size = random.usize(1..=SLOT);
        let from = random.usize(0..=src.len() - size);
        let to = slot * SLOT + random.usize(0..=SLOT - size);
        ops.push(pair.to_b.read(&dst.region, to..to + size, &remote, from)?);
        dst.expect_from(to, &src, from..from + size);
    }
    pair.sim.all_done(ops)?;
    dst.check("200 reads")
}

fn sees_an_earlier_write(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 300_000, Access::LOCAL, context.seed)?;
    let mut back = CheckedRegion::new(&pair.a, 300_000, Access::LOCAL, context.seed + 1)?;
    let mut there = CheckedRegion::new(&pair.b, 300_000, FULL_ACCESS, context.seed + 2)?;
    let remote = there.import(&pair.to_b)?;
    // A completed write is visible to all readers, on any data path.
    for size in [100, 4096, 290_000] {
        pair.sim.done(pair.to_b.write(&src.region, 0..size, &remote, 9)?)?;
        pair.sim.done(pair.to_b.read(&back.region, 17..17 + size, &remote, 9)?)?;
        there.expect_from(9, &src, 0..size);
        back.expect_from(17, &src, 0..size);
        there.check("there")?;
        back.check("read back")?;
    }
    Ok(())
}
