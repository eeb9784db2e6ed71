//! Single writes: every size, many at once, both directions.

use transport_core::spi::Operations;
use transport_core::{Access, WriteOptions};

use crate::check::{TestResult, ensure_eq};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::sim_harness::{SimHarness, SimPair};
use crate::trial::{ALL_PATHS, Trial, TrialContext};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("write::every_size", every_size).on(ALL_PATHS),
    Trial::new("write::many_at_once", many_at_once).on(ALL_PATHS),
    Trial::new("write::both_directions", both_directions).on(ALL_PATHS),
    Trial::new("write::cold", cold).on(ALL_PATHS),
    Trial::new("write::imm_without_bytes", imm_without_bytes).on(ALL_PATHS).needs(Operations::WRITE_IMM),
    Trial::new("write::every_alignment", every_alignment),
    Trial::new("write::to_itself", to_itself).on(ALL_PATHS),
];

/// The sizes at which the data path changes, each with the sizes next to it.
pub(super) fn sizes(pair: &SimPair) -> Vec<usize> {
    let capabilities = pair.capabilities();
    let mut sizes = vec![1, 2, 3, 4095, 4096, 4097, 3 * (1 << 20) + 17];
    for edge in [capabilities.max_direct, u64::from(capabilities.max_inline), capabilities.chunk] {
        let edge = edge.min(4 << 20) as usize;
        sizes.extend([edge.saturating_sub(1), edge, edge + 1].into_iter().filter(|size| *size > 0));
    }
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

fn every_size(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let sizes: Vec<_> = context.sample(sizes(&pair)).collect();
    let room = sizes.iter().max().copied().unwrap_or(0) + 100;
    let src = CheckedRegion::new(&pair.a, room, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, room, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    for (number, size) in sizes.into_iter().enumerate() {
        let (from, to) = (7 + number, 13 + 2 * number);
        let outcome = pair.sim.done(pair.to_b.write(&src.region, from..from + size, &remote, to)?)?;
        ensure_eq("bytes", outcome.bytes, size as u64)?;
        dst.expect_from(to, &src, from..from + size);
        dst.check(&format!("{size} bytes"))?;
        dst.fill(context.seed + 2 + number as u64)?;
    }
    src.check("the source")
}

fn every_alignment(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 1024, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, 1024, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    // Each of many runs tries some of the 32 by 32 pairs; 64 seeds in a row try all.
    let step = context.amount(1, 8);
    let (first, second) = (context.seed as usize % step, context.seed as usize / step % step);
    for from in (first..32).step_by(step) {
        for to in (second..32).step_by(step) {
            for size in [1, 31, 64, 200] {
                pair.sim.done(pair.to_b.write(&src.region, from..from + size, &remote, to)?)?;
                dst.expect_from(to, &src, from..from + size);
                dst.check(&format!("{size} bytes from {from} to {to}"))?;
            }
        }
    }
    Ok(())
}

/// Slots of 8 KiB in random order. Each gets a write of random size at a random offset.
fn many_at_once(context: &TrialContext) -> TestResult {
    const SLOTS: usize = 400;
    const SLOT: usize = 8192;
    let pair = SimPair::new(context)?;
    let mut random = fastrand::Rng::with_seed(context.seed);
    let src = CheckedRegion::new(&pair.a, SLOTS * SLOT, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, SLOTS * SLOT, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let mut slots: Vec<_> = (0..SLOTS).collect();
    random.shuffle(&mut slots);
    let mut ops = Vec::new();
    for slot in slots {
        let size = random.usize(1..=SLOT);
        let to = slot * SLOT + random.usize(0..=SLOT - size);
        let from = random.usize(0..=src.len() - size);
        ops.push(pair.to_b.write(&src.region, from..from + size, &remote, to)?);
        dst.expect_from(to, &src, from..from + size);
    }
    pair.sim.all_done(ops)?;
    dst.check("400 writes")
}

fn both_directions(context: &TrialContext) -> TestResult {
    const PART: usize = 50_000;
    let pair = SimPair::new(context)?;
    let mut ours = CheckedRegion::new(&pair.a, 40 * PART, FULL_ACCESS, context.seed)?;
    let mut theirs = CheckedRegion::new(&pair.b, 40 * PART, FULL_ACCESS, context.seed + 1)?;
    let (there, here) = (theirs.import(&pair.to_b)?, ours.import(&pair.to_a)?);
    let mut ops = Vec::new();
    for part in (0..20).map(|part| part * PART) {
        // Lower halves are sources, upper halves are destinations.
        let upper = 20 * PART + part;
        ops.push(pair.to_b.write(&ours.region, part..part + PART, &there, upper)?);
        ops.push(pair.to_a.write(&theirs.region, part..part + PART, &here, upper)?);
        theirs.expect_from(upper, &ours, part..part + PART);
        ours.expect_from(upper, &theirs, part..part + PART);
    }
    pair.sim.all_done(ops)?;
    theirs.check("there")?;
    ours.check("here")
}

fn cold(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 1 << 20, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, 1 << 20, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    for size in context.sample([1, 63, 64, 65, 4096, 70_001, 900_000]) {
        let options = WriteOptions::new().cold();
        pair.sim.done(pair.to_b.write_with(&src.region, 5..5 + size, &remote, 11, &options)?)?;
        dst.expect_from(11, &src, 5..5 + size);
        dst.check(&format!("{size} cold bytes"))?;
    }
    Ok(())
}

fn imm_without_bytes(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 64, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, 64, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let outcome = pair.sim.done(pair.to_b.write_imm(5)?)?;
    ensure_eq("bytes of an imm alone", outcome.bytes, 0)?;
    // An empty range at the end of both regions is within bounds.
    let options = WriteOptions::new().imm(6);
    pair.sim.done(pair.to_b.write_with(&src.region, 64..64, &remote, 64, &options)?)?;
    pair.sim.until("both imms", || pair.to_a.imm(5).count() == 1 && pair.to_a.imm(6).count() == 1)?;
    pair.sim.settle()?;
    ensure_eq("imms of 5 and 6", (pair.to_a.imm(5).count(), pair.to_a.imm(6).count()), (1, 1))?;
    dst.check("no bytes")
}

fn to_itself(context: &TrialContext) -> TestResult {
    let sim = SimHarness::new(context);
    let fabric = sim.open(&Default::default())?;
    let (there, here) = fabric.connect_local(&fabric)?;
    let mut checked = CheckedRegion::new(&fabric, 1 << 20, FULL_ACCESS, context.seed)?;
    let remote = checked.import(&there)?;
    for size in [1, 4096, 400_000] {
        let options = WriteOptions::new().imm(size as u32);
        sim.done(there.write_with(&checked.region, 100..100 + size, &remote, 600_000, &options)?)?;
        let bytes = checked.bytes(100..100 + size).to_vec();
        checked.expect(600_000, &bytes);
        checked.check(&format!("{size} bytes to itself"))?;
        sim.until("the imm", || here.imm(size as u32).count() == 1)?;
    }
    ensure_eq("imms at the sending end", there.imm(1).count(), 0)
}
