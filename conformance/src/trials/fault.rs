//! Devices that fail: all operations get typed errors, no byte lands in a wrong place, and no operation hangs.

use transport_core::spi::Operations;
use transport_core::{Access, ErrorKind, Op, Pages, WriteOptions};

use crate::backend_under_test::Variant;
use crate::check::{TestResult, ensure, ensure_eq, ensure_err};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::sim_harness::{Options, SimHarness, SimPair};
use crate::trial::{Trial, TrialContext};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("fault::device_lost", device_lost).on(&[Variant::Doomed]),
    Trial::new("fault::device_lost_ends_receives", device_lost_ends_receives)
        .on(&[Variant::Doomed])
        .needs(Operations::SEND),
    Trial::new("fault::device_lost_before_the_imm", device_lost_before_the_imm)
        .on(&[Variant::Doomed])
        .needs(Operations::WRITE_IMM),
    Trial::new("fault::a_failed_request_fails_its_operation", a_failed_request).on(&[Variant::Faulty]),
    Trial::new("fault::no_imm_behind_a_failure", no_imm_behind_a_failure)
        .on(&[Variant::Faulty])
        .needs(Operations::WRITE_IMM),
];

/// Checks that each 64-byte page of `dst` has its new or its old bytes, and returns the number of pages with new bytes.
#[track_caller]
fn pages_moved(src: &CheckedRegion, dst: &CheckedRegion) -> TestResult<usize> {
    let mut actual = vec![0; dst.len()];
    dst.region.copy_out(0, &mut actual)?;
    let mut moved = 0;
    for at in (0..dst.len()).step_by(64) {
        let page = &actual[at..at + 64];
        let new = page == src.bytes(at..at + 64);
        ensure(new || page == dst.bytes(at..at + 64), format!("the page at {at} is only partly written"))?;
        moved += usize::from(new);
    }
    Ok(moved)
}

fn device_lost(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 400 * 64, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, 400 * 64, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let pages = Pages::new((0..400).rev().collect::<Vec<_>>());
    let mut ops = Vec::new();
    for _ in 0..3 {
        ops.push(pair.to_b.write_pages(&src.region, &pages, &remote, &pages, 64)?);
    }
    for mut op in ops {
        ensure_err(
            "under way when its device was lost",
            pair.sim.result(&mut op)?,
            &[ErrorKind::DeviceLost],
        )?;
    }
    // Later operations may succeed if rails are left, and must fail if none is.
    let rails = pair.a.transports()[0].devices.len();
    // Each round has a write for every rail, but for those that are passed over because a rail before them is lost.
    for _ in 0..=2 * Variant::LOST_AFTER {
        let late: Vec<_> = (0..rails + 8).map(|_| pair.to_b.write(&src.region, 0..64, &remote, 0)).collect();
        for late in late {
            let result = match late {
                Ok(mut op) => pair.sim.result(&mut op)?.map(drop),
                Err(error) => Err(error),
            };
            if let Err(error) = result {
                ensure_err::<()>("later", Err(error), &[ErrorKind::DeviceLost])?;
            }
        }
    }
    pair.sim.fails(
        "with no device left",
        pair.to_b.write(&src.region, 0..64, &remote, 0),
        &[ErrorKind::DeviceLost],
    )?;
    pair.sim.settle()?;
    let most = rails * Variant::LOST_AFTER as usize;
    ensure(pages_moved(&src, &dst)? <= most, "more pages were written than requests ran")?;
    src.check("the source")
}

fn device_lost_ends_receives(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, 4096, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let into = CheckedRegion::new(&pair.a, 4096, Access::LOCAL, context.seed + 2)?;
    let mut receive = pair.a.recv(&into.region, 0..4096)?;
    pair.sim.step();
    // Some are refused at the call if all devices are lost early.
    let writes = pair.a.counters().len() as u64 * (Variant::LOST_AFTER + 20);
    let ops: Vec<_> =
        (0..writes).filter_map(|_| pair.to_b.write(&src.region, 0..64, &remote, 0).ok()).collect();
    for mut op in ops {
        let _ = pair.sim.result(&mut op)?;
    }
    ensure_err("a receive of a lost device", pair.sim.result(&mut receive)?, &[ErrorKind::DeviceLost])?;
    into.check("its buffer")
}

/// The last device is lost after the bytes. The imm cannot be sent, and must not hang.
fn device_lost_before_the_imm(context: &TrialContext) -> TestResult {
    let lost = Variant::LOST_AFTER as usize;
    for pages in lost.saturating_sub(2)..=lost + 2 {
        let options = Options { rails: Some(1), ..Options::default() };
        let pair = SimHarness::new(context).pair_of(&options, &options)?;
        let src = CheckedRegion::new(&pair.a, 64 * pages, Access::LOCAL, context.seed)?;
        let dst = CheckedRegion::new(&pair.b, 64 * pages, FULL_ACCESS, context.seed + 1)?;
        let remote = dst.import(&pair.to_b)?;
        let list = Pages::new((0..pages as u32).rev().collect::<Vec<_>>());
        let options = WriteOptions::new().imm(3);
        let mut op = pair.to_b.write_pages_with(&src.region, &list, &remote, &list, 64, &options)?;
        let result = pair.sim.result(&mut op)?;
        pair.sim.settle()?;
        let imms = pair.to_a.imm(3).count();
        // Each page is one request, and the imm is one more.
        ensure_eq(
            &format!("{pages} pages and their imm succeed"),
            (result.is_ok(), imms),
            (pages < lost, u64::from(pages < lost)),
        )?;
        if let Err(error) = result {
            ensure_err::<()>("the write", Err(error), &[ErrorKind::DeviceLost])?;
        }
        ensure(imms == 0 || pages_moved(&src, &dst)? == pages, "an imm arrived before its bytes")?;
    }
    Ok(())
}

fn a_failed_request(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 300 * 64, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, 300 * 64, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let ops: Result<Vec<Op>, _> = (0..300)
        .map(|slot| pair.to_b.write(&src.region, slot * 64..slot * 64 + 64, &remote, slot * 64))
        .collect();
    let (mut done, mut failed) = (0, 0);
    for mut op in ops? {
        match pair.sim.result(&mut op)? {
            Ok(_) => done += 1,
            Err(error) => {
                ensure_err::<()>("a request", Err(error), &[ErrorKind::Io])?;
                failed += 1;
            }
        }
    }
    ensure(failed > 0 && done > failed, format!("{done} writes completed and {failed} failed"))?;
    ensure_eq("pages there", pages_moved(&src, &dst)?, done)?;
    // A paged write with one failed request fails as a whole.
    let pages = Pages::new((0..300).rev().collect::<Vec<_>>());
    pair.sim.fails(
        "300 pages",
        pair.to_b.write_pages(&src.region, &pages, &remote, &pages, 64),
        &[ErrorKind::Io],
    )?;
    pair.sim.settle()
}

fn no_imm_behind_a_failure(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    // The write has at least two failed requests on every rail.
    let count = pair.a.counters().len() * 2 * Variant::FAULT_EVERY as usize;
    let src = CheckedRegion::new(&pair.a, count * 64, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, count * 64, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let pages = Pages::new((0..count as u32).rev().collect::<Vec<_>>());
    for imm in 0..5 {
        let op = pair.to_b.write_pages_with(
            &src.region,
            &pages,
            &remote,
            &pages,
            64,
            &WriteOptions::new().imm(imm),
        );
        pair.sim.fails("all pages", op, &[ErrorKind::Io])?;
        pair.sim.settle()?;
        ensure_eq("imms of a failed write", pair.to_a.imm(imm).count(), 0)?;
    }
    Ok(())
}
