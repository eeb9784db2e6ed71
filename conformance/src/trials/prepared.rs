//! Prepared writes: they are checked once and posted many times, and a post still fails when it must.

use transport_core::spi::Operations;
use transport_core::{
    Access, ErrorKind, LocalList, Pages, PreparedTransfer, ReadOptions, RemoteList, WriteOptions,
};

use crate::check::{TestResult, ensure, ensure_eq, ensure_err};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::process::NOTIFICATION_MEMORY;
use crate::sim_harness::{Options, SimHarness, SimPair};
use crate::trial::{ALL_PATHS, Trial, TrialContext};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("prepared::posted_many_times", posted_many_times).on(ALL_PATHS),
    Trial::new("prepared::several_under_way", several_under_way).on(ALL_PATHS),
    Trial::new("prepared::its_imm_and_others", its_imm_and_others).on(ALL_PATHS),
    Trial::new("prepared::of_one_request", of_one_request).on(ALL_PATHS).needs(Operations::all()),
    Trial::new("prepared::refused_once_revoked", refused_once_revoked),
    Trial::new("prepared::refused_once_the_peer_is_gone", refused_once_gone),
];

const PAGE: usize = 1024;
const COUNT: usize = 40;

/// Pages in reverse order.
fn lists() -> (Pages, Pages) {
    (
        Pages::new((0..COUNT as u32).collect::<Vec<_>>()),
        Pages::new((0..COUNT as u32).rev().collect::<Vec<_>>()),
    )
}

fn regions(context: &TrialContext, pair: &SimPair) -> TestResult<(CheckedRegion, CheckedRegion)> {
    let src = CheckedRegion::new(&pair.a, COUNT * PAGE, Access::LOCAL, context.seed)?;
    Ok((src, CheckedRegion::new(&pair.b, COUNT * PAGE, FULL_ACCESS, context.seed + 1)?))
}

/// Prepares a write of all pages of `src` to those of `dst`, in reverse order.
fn prepare(
    pair: &SimPair,
    src: &CheckedRegion,
    dst: &CheckedRegion,
    options: &WriteOptions,
) -> TestResult<PreparedTransfer> {
    let ((from, to), remote) = (lists(), dst.import(&pair.to_b)?);
    Ok(pair.to_b.prepare_write_pages(&src.region, &from, &remote, &to, PAGE, options)?)
}

/// Expects in `dst` the reversed pages of `src`.
fn expect(dst: &mut CheckedRegion, src: &CheckedRegion) {
    for page in 0..COUNT {
        dst.expect_from((COUNT - 1 - page) * PAGE, src, page * PAGE..(page + 1) * PAGE);
    }
}

fn posted_many_times(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let (mut src, mut dst) = regions(context, &pair)?;
    let prepared = prepare(&pair, &src, &dst, &WriteOptions::new())?;
    ensure_eq("bytes", prepared.bytes(), (COUNT * PAGE) as u64)?;
    for round in 0..20 {
        src.fill(context.seed + 10 + round)?;
        let outcome = pair.sim.done(prepared.post()?)?;
        ensure_eq("bytes", outcome.bytes, prepared.bytes())?;
        expect(&mut dst, &src);
        dst.check(&format!("round {round}"))?;
    }
    Ok(())
}

fn several_under_way(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let (src, mut dst) = regions(context, &pair)?;
    let prepared = prepare(&pair, &src, &dst, &WriteOptions::new())?;
    let ops = (0..16).map(|_| prepared.post()).collect::<Result<_, _>>()?;
    pair.sim.all_done(ops)?;
    expect(&mut dst, &src);
    dst.check("sixteen at once")
}

fn its_imm_and_others(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let (src, dst) = regions(context, &pair)?;
    let prepare = |options: &WriteOptions| prepare(&pair, &src, &dst, options);
    let last = prepare(&WriteOptions::new().imm(7))?;
    let each = prepare(&WriteOptions::new().imm(8).per_wr())?;
    pair.sim.all_done(vec![last.post()?, last.post_with_imm(9)?, each.post()?, last.post()?])?;
    let count = |imm| pair.to_a.imm(imm).count();
    pair.sim.until("the imms", || count(7) == 2 && count(9) == 1 && count(8) == COUNT as u64)?;
    let without = prepare(&WriteOptions::new())?;
    ensure_err("an imm it was not prepared for", without.post_with_imm(1), &[ErrorKind::InvalidRequest])?;
    ensure(format!("{last:?}").contains("40"), "the Debug text lacks the number of pages")
}

/// A transfer of one request, which may run in the calling thread: its bytes, its imm, its notification, and both ways.
fn of_one_request(context: &TrialContext) -> TestResult {
    let options = Options { notifications: Some(NOTIFICATION_MEMORY), ..Options::default() };
    let pair = SimHarness::new(context).pair_of(&options, &options)?;
    let (mut src, mut dst) = regions(context, &pair)?;
    let remote = dst.import(&pair.to_b)?;
    let options = WriteOptions::new().imm(3);
    let page = pair.to_b.prepare_write_pages(&src.region, [3], &remote, [5], PAGE, &options)?;
    let (mut local, mut there) = (LocalList::new(), RemoteList::new());
    local.push(&src.region, 100, 50)?;
    there.push(&remote, 200, 50)?;
    let entry = pair.to_b.prepare_write_list(&local, .., &there, .., &WriteOptions::new())?;
    for round in 0..3 {
        src.fill(context.seed + 20 + round)?;
        ensure_eq("a page", pair.sim.done(page.post()?)?.bytes, PAGE as u64)?;
        pair.sim.done(page.post_with_imm(4)?)?;
        dst.expect_from(5 * PAGE, &src, 3 * PAGE..4 * PAGE);
        ensure_eq("an entry", pair.sim.done(entry.post_and_notify(*b"entry")?)?.bytes, 50)?;
        dst.expect_from(200, &src, 100..150);
        dst.check(&format!("round {round}"))?;
        let taken = pair.sim.output("a notification", pair.b.notifications()?.next())??;
        ensure_eq("the notification", taken.bytes, b"entry".to_vec())?;
        let count = |imm| pair.to_a.imm(imm).count();
        pair.sim.until("the imms", || count(3) == round + 1 && count(4) == round + 1)?;
    }
    dst.fill(context.seed + 30)?;
    let back = pair.to_b.prepare_read_list(&local, .., &there, .., &ReadOptions::new())?;
    pair.sim.done(back.post()?)?;
    src.expect_from(100, &dst, 200..250);
    src.check("read back")
}

fn refused_once_revoked(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let (src, mut dst) = regions(context, &pair)?;
    let prepared = prepare(&pair, &src, &dst, &WriteOptions::new())?;
    pair.sim.done(prepared.post()?)?;
    expect(&mut dst, &src);
    pair.sim.done(dst.region.revoke()?)?;
    dst.fill(context.seed + 5)?;
    pair.sim.fails("a post after revoke", prepared.post(), &[ErrorKind::Revoked, ErrorKind::RemoteAccess])?;
    dst.check("after revoke")
}

fn refused_once_gone(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let (src, dst) = regions(context, &pair)?;
    let prepared = prepare(&pair, &src, &dst, &WriteOptions::new())?;
    pair.to_b.disconnect();
    let gone = [ErrorKind::Closed, ErrorKind::PeerDied];
    pair.sim.fails("a post to a gone peer", prepared.post(), &gone).map(drop)
}
