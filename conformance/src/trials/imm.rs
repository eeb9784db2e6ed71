//! Immediate data: an imm arrives after its bytes, exactly once, and is never lost.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use transport_core::spi::Operations;
use transport_core::{Access, ErrorKind, Pages, WriteOptions, imm_count};

use crate::backend_under_test::Variant;
use crate::check::{TestResult, ensure, ensure_eq, ensure_err, poll_once};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::sim_harness::{Options, SimHarness, SimPair};
use crate::trial::{ALL_PATHS, Trial, TrialContext};

use super::futures::{PanickingWaker, counting_waker};

/// The bytes of each rail become visible before later arrivals over that rail, and no other event shows when they are
/// visible.
const LATE: &[Variant] = &[Variant::Late];

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("imm::after_all_bytes", after_all_bytes).on(ALL_PATHS).needs(Operations::WRITE_IMM),
    Trial::new("imm::after_all_pages", after_all_pages).on(ALL_PATHS).needs(Operations::WRITE_IMM),
    Trial::new("imm::after_late_bytes", after_all_bytes).on(LATE).needs(Operations::WRITE_IMM),
    Trial::new("imm::after_late_pages", after_all_pages).on(LATE).needs(Operations::WRITE_IMM),
    Trial::new("imm::one_per_page", one_per_page).on(ALL_PATHS).needs(Operations::WRITE_IMM),
    Trial::new("imm::one_per_started_mib", one_per_started_mib).on(ALL_PATHS).needs(Operations::WRITE_IMM),
    Trial::new("imm::accumulates_and_is_taken", accumulates_and_is_taken)
        .on(ALL_PATHS)
        .needs(Operations::WRITE_IMM),
    Trial::new("imm::all_32_bits", all_32_bits).on(ALL_PATHS).needs(Operations::WRITE_IMM),
    Trial::new("imm::more_than_any_queue", more_than_any_queue).on(ALL_PATHS).needs(Operations::WRITE_IMM),
    Trial::new("imm::called_and_streamed", called_and_streamed).on(ALL_PATHS).needs(Operations::WRITE_IMM),
    Trial::new("imm::wakes_who_expects_it", wakes_who_expects_it).on(ALL_PATHS).needs(Operations::WRITE_IMM),
    Trial::new("imm::a_waker_that_panics", a_waker_that_panics).on(ALL_PATHS).needs(Operations::WRITE_IMM),
];

fn after_all_bytes(context: &TrialContext) -> TestResult {
    for seed in context.seeds(6) {
        let pair = SimPair::new(&context.with_seed(seed))?;
        let src = CheckedRegion::new(&pair.a, 1_500_000, Access::LOCAL, seed)?;
        let mut dst = CheckedRegion::new(&pair.b, 1_500_000, FULL_ACCESS, seed + 1)?;
        let remote = dst.import(&pair.to_b)?;
        for (imm, size) in (0..).zip([1, 4096, 300_000, 1_400_000]) {
            dst.fill(seed + 10 + u64::from(imm))?;
            let mut op =
                pair.to_b.write_with(&src.region, 3..3 + size, &remote, 7, &WriteOptions::new().imm(imm))?;
            dst.expect_from(7, &src, 3..3 + size);
            announced(&pair, &dst, imm)?;
            pair.sim.result(&mut op)??;
        }
        exactly_once(&pair, 0..4)?;
    }
    Ok(())
}

fn after_all_pages(context: &TrialContext) -> TestResult {
    const PAGES: u32 = 150;
    for seed in context.seeds(6) {
        let pair = SimPair::new(&context.with_seed(seed))?;
        let src = CheckedRegion::new(&pair.a, PAGES as usize * 512, Access::LOCAL, seed)?;
        let mut dst = CheckedRegion::new(&pair.b, PAGES as usize * 512, FULL_ACCESS, seed + 1)?;
        let remote = dst.import(&pair.to_b)?;
        let mut list: Vec<_> = (0..PAGES).collect();
        fastrand::Rng::with_seed(seed).shuffle(&mut list);
        let (from, to) = (Pages::new(list.clone()), Pages::new((0..PAGES).collect::<Vec<_>>()));
        let options = WriteOptions::new().imm(99);
        let mut op = pair.to_b.write_pages_with(&src.region, &from, &remote, &to, 512, &options)?;
        for (to, from) in list.iter().map(|index| *index as usize * 512).enumerate() {
            dst.expect_from(to * 512, &src, from..from + 512);
        }
        announced(&pair, &dst, 99)?;
        pair.sim.result(&mut op)??;
        exactly_once(&pair, 99..100)?;
    }
    Ok(())
}

/// Ticks until the imm has arrived, and fails unless all bytes are visible at that moment.
fn announced(pair: &SimPair, dst: &CheckedRegion, imm: u32) -> TestResult {
    let counter = pair.to_a.imm(imm);
    pair.sim.until("the imm", || counter.count() > 0)?;
    dst.check("the bytes that the imm announced")
}

fn exactly_once(pair: &SimPair, imms: std::ops::Range<u32>) -> TestResult {
    pair.sim.settle()?;
    imms.into_iter().try_for_each(|imm| ensure_eq("arrivals of one imm", pair.to_a.imm(imm).count(), 1))
}

fn one_per_page(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, 200 * 256, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let mut sum = 0;
    for count in [1, 2, 17, 200] {
        let from = Pages::new(vec![3; count]);
        let to = Pages::new((0..count as u32).collect::<Vec<_>>());
        let options = WriteOptions::new().imm(8).per_wr();
        pair.sim.done(pair.to_b.write_pages_with(&src.region, &from, &remote, &to, 256, &options)?)?;
        (0..count).for_each(|page| dst.expect_from(page * 256, &src, 768..1024));
        sum += count as u64;
        pair.sim.until("an imm per page", || pair.to_a.imm(8).count() >= sum)?;
        dst.check("the pages")?;
    }
    pair.sim.settle()?;
    ensure_eq("imms", pair.to_a.imm(8).count(), sum)
}

fn one_per_started_mib(context: &TrialContext) -> TestResult {
    const MIB: usize = 1 << 20;
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 3 * MIB + 10, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, 3 * MIB + 10, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    for (imm, size) in context.sample((0..).zip([1, MIB - 1, MIB, MIB + 1, 3 * MIB, 3 * MIB + 1])) {
        let options = WriteOptions::new().imm(imm).per_wr();
        pair.sim.done(pair.to_b.write_with(&src.region, 1..1 + size, &remote, 5, &options)?)?;
        dst.expect_from(5, &src, 1..1 + size);
        let want = imm_count(size as u64);
        ensure_eq("imm_count", want, size.div_ceil(MIB) as u64)?;
        pair.sim.until("the imms", || pair.to_a.imm(imm).count() >= want)?;
        dst.check("the bytes")?;
        pair.sim.settle()?;
        ensure_eq("imms", pair.to_a.imm(imm).count(), want)?;
    }
    Ok(())
}

fn accumulates_and_is_taken(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    for _ in 0..10 {
        pair.sim.done(pair.to_b.write_imm(77)?)?;
    }
    // The trial asked for imm 77 only after its arrival.
    let counter = pair.to_a.imm(77);
    pair.sim.until("ten imms", || counter.count() == 10)?;
    pollster::block_on(counter.expect(10))?;
    pollster::block_on(counter.expect(0))?;
    ensure(!counter.try_take(11), "took 11 of 10")?;
    ensure(counter.try_take(4), "could not take 4 of 10")?;
    ensure(counter.try_take(0), "could not take nothing")?;
    ensure_eq("left", counter.count(), 6)?;
    ensure_err(
        "seven of six",
        counter.expect(7).wait(Duration::from_millis(1)),
        &[ErrorKind::DeadlineExceeded],
    )?;
    ensure(counter.try_take(6), "could not take the rest")?;
    ensure_eq("left", pair.to_a.imm(77).count(), 0)
}

fn all_32_bits(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let imms: Vec<_> = (0..32).map(|bit| 1 << bit).chain([0, u32::MAX, 0x8000_0001, 0xdead_beef]).collect();
    for imm in &imms {
        pair.sim.done(pair.to_b.write_imm(*imm)?)?;
    }
    pair.sim.settle()?;
    imms.iter()
        .try_for_each(|imm| ensure_eq(&format!("arrivals of {imm:#x}"), pair.to_a.imm(*imm).count(), 1))
}

/// The receiver does not poll for a while. The engine holds the sender back, and no imm is lost.
fn more_than_any_queue(context: &TrialContext) -> TestResult {
    let count = context.amount(3500, 1050);
    let options = Options { max_operations: 4096, ..Options::default() };
    let pair = SimHarness::new(context).pair_of(&options, &options)?;
    let mut ops = Vec::new();
    for imm in 0..count {
        ops.push(pair.to_b.write_imm(imm % 7)?);
    }
    for _ in 0..50 {
        pair.a.step();
    }
    pair.sim.all_done(ops)?;
    pair.sim.settle()?;
    let counts: Vec<_> = (0..7).map(|imm| pair.to_a.imm(imm).count()).collect();
    ensure_eq("imms of each value", counts, vec![u64::from(count) / 7; 7])
}

/// Callback and stream get each arrival once, and the close of the peer.
fn called_and_streamed(context: &TrialContext) -> TestResult {
    const IMMS: u64 = 100;
    let pair = SimPair::new(context)?;
    let (sender, calls) = std::sync::mpsc::channel();
    for n in [IMMS + 1, IMMS, 1, 0] {
        let sender = sender.clone();
        let tell = move |result: Result<(), _>| _ = sender.send((n, result.is_ok()));
        pair.to_a.imm(6).on_reached(n, tell);
    }
    let ops: Result<Vec<_>, _> =
        (0..2 * IMMS).map(|at| pair.to_b.write_imm(if at % 2 == 0 { 6 } else { 7 })).collect();
    let mut arrivals = pair.to_a.imm(7).arrivals();
    let mut taken = 0;
    let mut failed = None;
    pair.sim.until("all arrivals", || {
        match poll_once(pin!(arrivals.next())) {
            Some(Ok(count)) => taken += count,
            Some(Err(error)) => failed = Some(error),
            None => {}
        }
        taken >= IMMS || failed.is_some()
    })?;
    ensure(failed.is_none(), format!("{failed:?}"))?;
    pair.sim.all_done(ops?)?;
    pair.sim.settle()?;
    ensure_eq(
        "taken and left",
        (taken, pair.to_a.imm(7).count(), pair.to_a.imm(6).count()),
        (IMMS, 0, IMMS),
    )?;
    ensure(poll_once(pin!(arrivals.next())).is_none(), "the stream has one arrival too many")?;
    let called = || calls.try_iter().collect::<Vec<_>>();
    ensure_eq("calls", called(), vec![(0, true), (1, true), (IMMS, true)])?;
    pair.to_b.disconnect();
    pair.sim.settle()?;
    ensure_eq("calls at the end", called(), vec![(IMMS + 1, false)])?;
    let end = arrivals.next().wait(limit::HANG);
    ensure_err("arrivals at the end", end.map(drop), &[ErrorKind::Closed, ErrorKind::PeerDied]).map(drop)
}

fn wakes_who_expects_it(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let (wakes, waker) = counting_waker();
    let mut expected = std::pin::pin!(pair.to_a.imm(4).expect(3));
    let mut task = std::task::Context::from_waker(&waker);
    for _ in 0..3 {
        ensure(expected.as_mut().poll(&mut task).is_pending(), "the wait ended before the third imm")?;
        pair.sim.done(pair.to_b.write_imm(4)?)?;
        pair.sim.done(pair.to_b.write_imm(5)?)?;
        pair.sim.settle()?;
    }
    ensure_eq("wakes", wakes.count(), 1)?;
    match expected.as_mut().poll(&mut task) {
        Poll::Ready(result) => Ok(result?),
        Poll::Pending => Err(crate::check::TrialFailure::new("the wait is pending after the third imm")),
    }
}

/// The user's waker panics in a turn that takes several imms. Each imm counts once all the same, also those behind the
/// panic, other waiters are woken, and the fabric goes on.
fn a_waker_that_panics(context: &TrialContext) -> TestResult {
    const COUNT: u64 = 20;
    let pair = SimPair::new(context)?;
    let (wakes, waits) = counting_waker();
    let mut panicking = pin!(pair.to_a.imm(1).expect(3));
    let mut other = pin!(pair.to_a.imm(1).expect(3));
    let panics = Waker::from(Arc::new(PanickingWaker));
    ensure(
        panicking.as_mut().poll(&mut std::task::Context::from_waker(&panics)).is_pending(),
        "ready at once",
    )?;
    ensure(other.as_mut().poll(&mut std::task::Context::from_waker(&waits)).is_pending(), "ready at once")?;
    let ops: Result<Vec<_>, _> = (0..COUNT).map(|_| pair.to_b.write_imm(1)).collect();
    // As many imms as possible are outstanding before the other side polls.
    for _ in 0..4 {
        pair.a.step();
    }
    let mut panics = 0;
    // The waker may panic in any of these turns.
    for _ in 0..100_000 {
        panics += u32::from(catch_unwind(AssertUnwindSafe(|| pair.sim.tick())).is_err());
        if pair.to_a.imm(1).count() >= COUNT {
            break;
        }
    }
    pair.sim.all_done(ops?)?;
    pair.sim.settle()?;
    ensure_eq("imms", pair.to_a.imm(1).count(), COUNT)?;
    ensure_eq("panics", panics, 1)?;
    ensure(wakes.count() > 0, "the other waiter was not woken")?;
    ensure(poll_once(panicking.as_mut()).is_some(), "the wait is not ready although its imms arrived")?;
    // The connection still works.
    pair.sim.done(pair.to_b.write_imm(1)?)?;
    pair.sim.settle()?;
    ensure_eq("imms", pair.to_a.imm(1).count(), COUNT + 1)
}
