//! Operations as futures: any executor can run them, the last waker is woken, and blocking waits drive them.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::task::{Context as Task, Poll, Wake, Waker};
use std::time::Duration;

use transport_core::spi::Operations;
use transport_core::{Access, ErrorKind, Op, WriteOptions, wait};

use crate::backend_under_test::Variant;
use crate::check::{TestResult, TrialFailure, ensure, ensure_eq, ensure_err};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::sim_harness::{Options, SimHarness, SimPair};
use crate::trial::{ALL_PATHS, Trial, TrialContext};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("futures::wait_drives", wait_drives).on(&[
        Variant::Plain,
        Variant::Queued,
        Variant::SmallQueue,
    ]),
    Trial::new("futures::any_wait_drives", any_wait_drives).on(ALL_PATHS).needs(Operations::WRITE_IMM),
    Trial::new("futures::wait_gives_up_and_may_go_on", wait_gives_up).on(&[Variant::Slow]),
    Trial::new("futures::wakes_the_last_waker", wakes_the_last_waker).on(&[Variant::Slow]),
    Trial::new("futures::result_is_handed_out_once", handed_out_once).on(ALL_PATHS),
    Trial::new("futures::detached_goes_on", detached_goes_on).on(ALL_PATHS),
    Trial::new("futures::wakers_that_panic_lose_no_completion", wakers_that_panic).on(&[
        Variant::Queued,
        Variant::SmallQueue,
        Variant::Partial,
    ]),
    Trial::new("futures::wakers_that_panic_in_a_revocation", panics_in_a_revocation).on(ALL_PATHS),
];

/// A user's waker that panics.
pub(super) struct PanickingWaker;

impl Wake for PanickingWaker {
    fn wake(self: Arc<Self>) {
        std::panic::resume_unwind(Box::new("the user's waker"));
    }
}

/// Polls an operation with a waker that panics.
fn poll_with_panicking_waker(op: &mut Op) -> TestResult {
    let waker = Waker::from(Arc::new(PanickingWaker));
    ensure(Pin::new(op).poll(&mut Task::from_waker(&waker)).is_pending(), "ready at once")
}

/// Ticks until `count` wakers have panicked. Fails after many ticks.
fn tick_past_panics(sim: &SimHarness, count: u32) -> TestResult {
    let mut panics = 0;
    for _ in 0..100_000 {
        panics += u32::from(catch_unwind(AssertUnwindSafe(|| sim.tick())).is_err());
        if panics == count {
            return Ok(());
        }
    }
    Err(TrialFailure::new(format!("{panics} panics of wakers, want {count}")))
}

/// A waker that counts its wakeups.
#[derive(Default)]
pub(super) struct WakeCounter(AtomicUsize);

impl WakeCounter {
    pub(super) fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Wake for WakeCounter {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

pub(super) fn counting_waker() -> (Arc<WakeCounter>, Waker) {
    let wakes = Arc::new(WakeCounter::default());
    (wakes.clone(), Waker::from(wakes))
}

/// Two connected fabrics whose clock moves at each read, so that a blocking wait ends.
fn ticking(context: &TrialContext) -> TestResult<SimPair> {
    let options = Options { ticking: true, ..Options::default() };
    SimHarness::new(context).pair_of(&options, &options)
}

/// A blocking wait on a caller-driven fabric drives the fabric itself.
fn wait_drives(context: &TrialContext) -> TestResult {
    const fn sendable<T: Send + 'static>() {}
    sendable::<Op>();
    let pair = ticking(context)?;
    let src = CheckedRegion::new(&pair.a, 2_000_000, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, 2_000_000, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    for size in [10, 10_000, 1_900_000] {
        let outcome = pair.to_b.write(&src.region, 0..size, &remote, 1)?.wait(limit::HANG)?;
        ensure_eq("bytes", outcome.bytes, size as u64)?;
        dst.expect_from(1, &src, 0..size);
        dst.check("after the wait")?;
    }
    Ok(())
}

/// The blocking wait on any future drives every fabric that the future uses.
fn any_wait_drives(context: &TrialContext) -> TestResult {
    const LIMIT: Duration = limit::HANG;
    let pair = ticking(context)?;
    let src = CheckedRegion::new(&pair.a, 300_000, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, 300_000, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let never = wait(pair.to_a.imm(9).expect(1), Duration::from_millis(1));
    ensure_err("an imm that no peer sends", never, &[ErrorKind::DeadlineExceeded])?;
    (0..3).try_for_each(|imm| {
        let options = WriteOptions::new().imm(imm);
        let arrives = pair.to_a.imm(imm).expect(1);
        let write = pair.to_b.write_with(&src.region, 0..300_000, &remote, 0, &options)?;
        let both = async { Ok::<_, transport_core::Error>((write.await?, arrives.await?)) };
        ensure_eq("bytes", wait(both, LIMIT)??.0.bytes, 300_000)
    })?;
    dst.expect_from(0, &src, 0..300_000);
    dst.check("after the wait")
}

fn wait_gives_up(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, 4096, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let mut op = pair.to_b.write(&src.region, 0..4096, &remote, 0)?;
    ensure_err("a short wait", op.wait(Duration::from_millis(1)), &[ErrorKind::DeadlineExceeded])?;
    dst.check("before the latency is over")?;
    pair.sim.result(&mut op)??;
    dst.expect_from(0, &src, 0..4096);
    dst.check("after it")
}

fn wakes_the_last_waker(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, 4096, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let mut op = std::pin::pin!(pair.to_b.write(&src.region, 0..4096, &remote, 0)?);
    let ((early, first), (late, second)) = (counting_waker(), counting_waker());
    ensure(op.as_mut().poll(&mut Task::from_waker(&first)).is_pending(), "ready at once")?;
    ensure(op.as_mut().poll(&mut Task::from_waker(&second)).is_pending(), "ready at once")?;
    pair.sim.settle()?;
    ensure_eq("wakes of the task that left", early.count(), 0)?;
    ensure(late.count() > 0, "the waiting task was not woken")?;
    match op.as_mut().poll(&mut Task::from_waker(&second)) {
        Poll::Ready(outcome) => ensure_eq("bytes", outcome?.bytes, 4096),
        Poll::Pending => Err(TrialFailure::new("the operation is pending after its wakeup")),
    }
}

fn handed_out_once(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, 4096, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let mut op = pair.to_b.write(&src.region, 0..4096, &remote, 0)?;
    pair.sim.result(&mut op)??;
    ensure(op.try_result().is_none(), "the operation returned a second result")?;
    ensure_err("a second wait", op.wait(Duration::from_millis(5)), &[ErrorKind::Closed])?;
    ensure_err("a second poll", pollster::block_on(op), &[ErrorKind::Closed]).map(drop)
}

fn detached_goes_on(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 700_000, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, 700_000, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    pair.to_b.write(&src.region, 0..600_000, &remote, 50_000)?.detach();
    dst.expect_from(50_000, &src, 0..600_000);
    // The trial holds neither region nor operation any more.
    drop((src, remote));
    pair.sim.settle()?;
    dst.check("a detached write")
}

/// Many operations complete in one poll, and the wakers of some panic. All complete, their memory is released, and as
/// many new operations as before can be posted.
fn wakers_that_panic(context: &TrialContext) -> TestResult {
    const COUNT: usize = 200;
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, COUNT * 64, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, COUNT * 64, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    for _ in 0..3 {
        let ops: Result<Vec<Op>, _> = (0..COUNT)
            .map(|at| pair.to_b.write(&src.region, at * 64..at * 64 + 64, &remote, at * 64))
            .collect();
        let mut ops = ops?;
        // One waker per run of requests panics, and one in the middle of a run.
        let watched = [0, 32, 64, 77];
        for at in watched {
            poll_with_panicking_waker(&mut ops[at])?;
        }
        tick_past_panics(&pair.sim, watched.len() as u32)?;
        pair.sim.all_done(ops)?;
        pair.sim.settle()?;
    }
    dst.expect_from(0, &src, 0..COUNT * 64);
    dst.check("three times")?;
    pair.sim.done(src.region.revoke()?).map(drop)
}

/// A revocation ends operations whose wakers panic. The revocation completes all the same, and so do all operations on
/// the region.
fn panics_in_a_revocation(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let own = CheckedRegion::new(&pair.a, 8192, FULL_ACCESS, context.seed)?;
    let mut receives = Vec::new();
    for at in 0..4 {
        let mut receive = pair.a.recv(&own.region, at * 64..at * 64 + 64)?;
        poll_with_panicking_waker(&mut receive)?;
        receives.push(receive);
    }
    let waits = || WriteOptions::new().when(Arc::new(AtomicU32::new(0)), 1);
    let far = CheckedRegion::new(&pair.b, 8192, FULL_ACCESS, context.seed + 1)?;
    let remote = far.import(&pair.to_b)?;
    let mut triggered = Vec::new();
    for _ in 0..4 {
        let mut op = pair.to_b.write_with(&own.region, 0..64, &remote, 0, &waits())?;
        poll_with_panicking_waker(&mut op)?;
        triggered.push(op);
    }
    pair.sim.step();
    let revoked = own.region.revoke()?;
    tick_past_panics(&pair.sim, 8)?;
    pair.sim.done(revoked)?;
    for op in receives.iter_mut().chain(&mut triggered) {
        ensure_err("what used the region", pair.sim.result(op)?, &[ErrorKind::Revoked])?;
    }
    pair.sim.settle()
}
