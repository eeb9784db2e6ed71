//! Grants: a receiver limits what its peers send, and no peer waits for another peer's grant.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use transport_core::observe::{GrantOf, WaitReason};
use transport_core::spi::Operations;
use transport_core::{
    Access, ErrorKind, Fabric, Grant, GrantPolicy, GrantRequest, Op, Pages, SendOptions, WriteOptions,
};

use crate::backend_under_test::Variant;
use crate::check::{TestResult, ensure, ensure_eq, ensure_err, within};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::process::LIMIT;
use crate::sim_harness::{Options, SimHarness, SimPair, builder};
use crate::trial::{ALL_PATHS, Trial, TrialContext};

const IMM_AND_SEND: Operations = Operations::WRITE_IMM.union(Operations::SEND);

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("grant::without_one_it_waits_and_ends_at_its_deadline", ends_at_deadline)
        .on(ALL_PATHS)
        .needs(IMM_AND_SEND),
    Trial::new("grant::renews_as_imms_are_taken", imms_renew).on(ALL_PATHS).needs(Operations::WRITE_IMM),
    Trial::new("grant::renews_as_messages_are_taken", messages_renew).on(ALL_PATHS).needs(Operations::SEND),
    Trial::new("grant::of_who_gave_up_is_the_next_ones", given_up).on(ALL_PATHS).needs(Operations::WRITE_IMM),
    Trial::new("grant::of_what_failed_comes_back", failures_give_back)
        .on(&[Variant::Faulty])
        .needs(Operations::WRITE_IMM),
    Trial::new("grant::waits_end_with_the_peer", ends_with_the_peer)
        .on(ALL_PATHS)
        .needs(Operations::WRITE_IMM),
    Trial::new("grant::crosses_the_control_connection", over_sockets).process().needs(Operations::WRITE_IMM),
];

/// A grant policy whose windows the trial changes: bytes, imms, messages.
pub(super) struct AdjustableGrant([AtomicU64; 3]);

impl AdjustableGrant {
    pub(super) fn new(windows: [u64; 3]) -> Arc<Self> {
        Arc::new(Self(windows.map(AtomicU64::new)))
    }

    pub(super) fn set(&self, windows: [u64; 3]) {
        self.0.iter().zip(windows).for_each(|(at, to)| at.store(to, Ordering::SeqCst));
    }
}

impl GrantPolicy for AdjustableGrant {
    fn grant(&self, _: &GrantRequest<'_>) -> Grant {
        let [bytes, imms, messages] = self.0.each_ref().map(|at| at.load(Ordering::SeqCst));
        Grant { bytes, imms, messages }
    }
}

pub(super) const ALL: u64 = u64::MAX;

/// A pair whose target grants the windows of `grant`.
#[track_caller]
pub(super) fn pair_of(context: &TrialContext, grant: &Arc<AdjustableGrant>) -> TestResult<SimPair> {
    let theirs = Options { grant_policy: Some(grant.clone()), ..Options::default() };
    SimHarness::new(context).pair_of(&Options::default(), &theirs)
}

/// Runs turns of `a` alone: the target polls nothing.
fn step_initiator_only(pair: &SimPair) {
    for _ in 0..50 {
        pair.a.step();
        pair.sim.clock.advance(Duration::from_micros(50));
    }
}

/// Runs turns of `a` alone until `wanted` of `ops` have completed, then more turns for those that should not complete.
/// Returns how many completed. The turns that one needs depend on the device: a GPU copies in real time.
fn completed_by_initiator_only(pair: &SimPair, ops: &mut Vec<Op>, wanted: usize) -> TestResult<usize> {
    let (start, mut completed) = (Instant::now(), 0);
    while completed < wanted && start.elapsed() < LIMIT {
        step_initiator_only(pair);
        completed += take_completed(ops)?;
    }
    step_initiator_only(pair);
    Ok(completed + take_completed(ops)?)
}

fn take_completed(ops: &mut Vec<Op>) -> TestResult<usize> {
    let before = ops.len();
    let mut failed = Ok(());
    ops.retain_mut(|op| match op.try_result() {
        None => true,
        Some(result) => {
            failed = std::mem::replace(&mut failed, Ok(())).and(result.map(drop));
            false
        }
    });
    failed?;
    Ok(before - ops.len())
}

fn grant_waits(fabric: &Fabric) -> u64 {
    fabric.counters().iter().map(|rail| rail.grant_waits).sum()
}

fn ends_at_deadline(context: &TrialContext) -> TestResult {
    let pair = pair_of(context, &AdjustableGrant::new([ALL, 0, 0]))?;
    let other = pair.sim.open(&Options::default())?;
    let (to_other, from_other) = pair.a.connect_local(&other)?;
    let src = CheckedRegion::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, 8192, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let (from, to) = (Pages::new([0, 1]), Pages::new([3, 2]));
    let limit = Duration::from_secs(5);
    let options = WriteOptions::new().imm(7).deadline(limit);
    let mut late = vec![
        pair.to_b.write_with(&src.region, 0..64, &remote, 0, &options)?,
        pair.to_b.write_pages_with(&src.region, &from, &remote, &to, 64, &options.clone().per_wr())?,
        pair.to_b.send_with(&src.region, 0..64, &SendOptions::new().deadline(limit))?,
    ];
    // Operations to other peers do not wait, nor do operations that need no imms or messages.
    pair.sim.done(to_other.write_imm(9)?)?;
    pair.sim.until("the imm", || from_other.imm(9).count() == 1)?;
    pair.sim.done(pair.to_b.write(&src.region, 64..4096, &remote, 4096)?)?;
    dst.expect_from(4096, &src, 64..4096);
    for op in &mut late {
        ensure(op.try_result().is_none(), "the operation completed without a grant")?;
    }
    let dump = pair.a.dump();
    for (kind, of) in [("write", GrantOf::Imms), ("write_pages", GrantOf::Imms), ("send", GrantOf::Messages)]
    {
        let named = dump.operations().any(|operation| {
            let waits = |wait: &WaitReason| matches!(wait, WaitReason::Grant { of: what, .. } if *what == of);
            operation.kind.name() == kind && operation.waits.iter().any(waits)
        });
        ensure(named, format!("the dump does not say that {kind} waits for a grant of {of:?}: {dump}"))?;
    }
    ensure(
        dump.to_string().contains("a grant of more imms by the peer"),
        "the text of the dump does not name the grant",
    )?;
    ensure(grant_waits(&pair.a) >= 3, "no rail counts the waits for a grant")?;
    pair.sim.clock.advance(limit);
    pair.sim.step();
    for op in &mut late {
        ensure_err("an operation", pair.sim.result(op)?, &[ErrorKind::DeadlineExceeded])?;
    }
    pair.sim.settle()?;
    ensure_eq("imms", pair.to_a.imm(7).count(), 0)?;
    dst.check("after the deadlines")
}

fn imms_renew(context: &TrialContext) -> TestResult {
    const WINDOW: usize = 3;
    const PAGES: u32 = 100;
    let pair = pair_of(context, &AdjustableGrant::new([ALL, WINDOW as u64, 0]))?;
    let src = CheckedRegion::new(&pair.a, 64, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, PAGES as usize * 64, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let mut ops = Vec::new();
    for _ in 0..50 {
        ops.push(pair.to_b.write_imm(1)?);
    }
    let completed = completed_by_initiator_only(&pair, &mut ops, WINDOW)?;
    ensure_eq("imms that a target took that polls nothing", completed, WINDOW)?;
    let (from, to) = (Pages::new(vec![0; PAGES as usize]), Pages::new((0..PAGES).collect::<Vec<_>>()));
    for options in [WriteOptions::new().imm(1).per_wr(), WriteOptions::new().imm(1)] {
        ops.push(pair.to_b.write_pages_with(&src.region, &from, &remote, &to, 64, &options)?);
        ops.push(pair.to_b.write_with(&src.region, 0..64, &remote, 0, &options)?);
    }
    pair.sim.all_done(ops)?;
    pair.sim.settle()?;
    ensure_eq("imms", pair.to_a.imm(1).count(), 50 + u64::from(PAGES) + 3)
}

fn messages_renew(context: &TrialContext) -> TestResult {
    const WINDOW: usize = 2;
    let pair = pair_of(context, &AdjustableGrant::new([ALL, 0, WINDOW as u64]))?;
    let src = CheckedRegion::new(&pair.a, 64, Access::LOCAL, context.seed)?;
    let pool = pair.b.recv_pool(64, 64)?;
    pair.sim.settle()?;
    let mut ops = Vec::new();
    for number in 0..30 {
        // The imm of a message belongs to the message and uses no credit for imms.
        ops.push(pair.to_b.send_with(&src.region, 0..64, &SendOptions::new().imm(number))?);
    }
    let completed = completed_by_initiator_only(&pair, &mut ops, WINDOW)?;
    ensure_eq("messages that a target took that polls nothing", completed, WINDOW)?;
    pair.sim.all_done(ops)?;
    pair.sim.settle()?;
    ensure_eq("messages", std::iter::from_fn(|| pool.try_next()).filter(Result::is_ok).count(), 30)
}

fn given_up(context: &TrialContext) -> TestResult {
    let grant = AdjustableGrant::new([ALL, 0, ALL]);
    let pair = pair_of(context, &grant)?;
    let mut ops = Vec::new();
    for imm in 0..5 {
        ops.push(pair.to_b.write_imm(imm)?);
    }
    step_initiator_only(&pair);
    let last = ops.pop();
    for op in ops {
        let mut cancel = op.cancel();
        ensure_err("a cancelled operation", cancel.wait(limit::HANG), &[ErrorKind::Cancelled])?;
    }
    grant.set([ALL, 1, ALL]);
    pair.to_a.regrant();
    pair.sim.all_done(last.into_iter().collect())?;
    pair.sim.settle()?;
    for (imm, count) in [(0, 0), (3, 0), (4, 1)] {
        ensure_eq(&format!("imm {imm}"), pair.to_a.imm(imm).count(), count)?;
    }
    Ok(())
}

fn failures_give_back(context: &TrialContext) -> TestResult {
    let pair = pair_of(context, &AdjustableGrant::new([ALL, 2, ALL]))?;
    let (mut failed, all) = (0, 20 * Variant::FAULT_EVERY);
    for _ in 0..all {
        let mut op = pair.to_b.write_imm(1)?;
        failed += u64::from(pair.sim.result(&mut op)?.is_err());
    }
    pair.sim.settle()?;
    ensure(failed > 2, "too few operations failed, so the trial shows nothing")?;
    ensure_eq("imms", pair.to_a.imm(1).count(), all - failed)
}

fn ends_with_the_peer(context: &TrialContext) -> TestResult {
    for ours in [true, false] {
        let pair = pair_of(context, &AdjustableGrant::new([ALL, 0, 0]))?;
        let mut op = pair.to_b.write_imm(1)?;
        step_initiator_only(&pair);
        ensure(op.try_result().is_none(), "the operation completed without a grant")?;
        if ours {
            pair.to_b.disconnect()
        } else {
            pair.to_a.disconnect()
        }
        ensure_err("an operation", pair.sim.result(&mut op)?, &[ErrorKind::PeerDied, ErrorKind::Closed])?;
        pair.sim.settle()?;
        // The closed peer's share is free: the next connection gets a whole share.
        let (to_b, _) = pair.a.connect_local(&pair.b)?;
        ensure(to_b.is_alive(), "the next connection is closed")?;
    }
    Ok(())
}

/// Thousands of imms go through a window of eight. Each new grant is a frame between two threads.
fn over_sockets(context: &TrialContext) -> TestResult {
    const IMMS: usize = 4000;
    let grant = AdjustableGrant::new([ALL, 8, ALL]);
    let target = builder(context, &Options::default())?.grant_policy(grant).open()?;
    let fabric = builder(context, &Options { max_operations: IMMS, ..Options::default() })?.open()?;
    let listener = within(LIMIT, "listening", target.listen("0"))??;
    let to_target = within(LIMIT, "connecting", fabric.connect(&listener.local_addr()))??;
    let from_us = within(LIMIT, "accepting", listener.accept())??;
    let mut ops = Vec::with_capacity(IMMS);
    for _ in 0..IMMS {
        ops.push(to_target.write_imm(3)?);
    }
    within(LIMIT, "all imms", from_us.imm(3).expect(IMMS as u64))??;
    for mut op in ops {
        op.wait(LIMIT)?;
    }
    ensure(grant_waits(&fabric) > 0, "no operation waited for a grant")
}
