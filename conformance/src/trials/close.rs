//! Closing a fabric: operations submitted before, during and after the close all end.

use transport_core::spi::Operations;
use transport_core::{Access, ErrorKind, Op, Pages};

use crate::backend_under_test::{TransferSide, Variant};
use crate::check::{TestResult, TrialFailure, ensure, ensure_eq, ensure_err, within};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::process::{LIMIT, worker_fabric};
use crate::sim_harness::SimPair;
use crate::trial::{Trial, TrialContext};

const CLOSED: &[ErrorKind] = &[ErrorKind::Closed];

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("close::everything_queued_ends", everything_queued_ends).on(&[
        Variant::Plain,
        Variant::Queued,
        Variant::Slow,
    ]),
    Trial::new("close::a_pool_in_use_says_so", a_pool_in_use_says_so).needs(Operations::SEND),
    Trial::new("close::a_posted_receive_says_so", a_posted_receive_says_so).needs(Operations::SEND),
    Trial::new("close::late_revoke_ends", late_revoke_ends).process(),
    Trial::new("close::meanwhile_submitted_ends", meanwhile_submitted_ends).process(),
];

/// More operations than an engine takes in a turn. None of them has begun.
fn everything_queued_ends(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 8192, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, 8192, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let pages = Pages::new([1, 0]);
    let mut ops = Vec::new();
    for _ in 0..1000 {
        ops.push(pair.to_b.write_pages(&src.region, &pages, &remote, &pages, 4096)?);
    }
    let cancelled = ops.pop().map(Op::cancel);
    pair.a.close();
    for mut op in ops {
        let result = op
            .try_result()
            .ok_or_else(|| TrialFailure::new("an operation has no result although its fabric is closed"))?;
        ensure_err("a queued operation", result, CLOSED)?;
    }
    let mut cancelled = cancelled.ok_or_else(|| TrialFailure::new("no operation"))?;
    ensure_err("a cancel", cancelled.wait(LIMIT), &[ErrorKind::Closed, ErrorKind::Cancelled])?;
    dst.check("the target, to which no write went")
}

/// The user holds every buffer of the pool, and none is posted. The pool reports the close all the same.
fn a_pool_in_use_says_so(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let pool = pair.b.recv_pool(2, 64)?;
    let src = CheckedRegion::new(&pair.a, 64, Access::LOCAL, context.seed)?;
    let sent = [pair.to_b.send(&src.region, 0..64)?, pair.to_b.send(&src.region, 0..64)?];
    let mut messages = Vec::new();
    pair.sim.until("both messages", || {
        messages.extend(pool.try_next());
        messages.len() == 2
    })?;
    pair.sim.all_done(sent.into())?;
    pair.b.close();
    let next = within(LIMIT, "the end of a pool", pool.next())?;
    ensure_err("next", next.map(drop), CLOSED)?;
    for message in messages {
        ensure(message?.to_vec() == src.bytes(0..64), "a message changed when its fabric closed")?;
    }
    drop(pool);
    Ok(())
}

/// A receive that the close takes back ends as `Closed`, not as `Cancelled`.
fn a_posted_receive_says_so(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let landing = CheckedRegion::new(&pair.b, 64, Access::LOCAL, context.seed)?;
    let mut op = pair.b.recv(&landing.region, 0..64)?;
    pair.sim.settle()?;
    pair.b.close();
    let result = op
        .try_result()
        .ok_or_else(|| TrialFailure::new("a receive has no result although its fabric is closed"))?;
    ensure_err("a posted receive", result, CLOSED)?;
    landing.check("the buffer, which received nothing")
}

fn late_revoke_ends(context: &TrialContext) -> TestResult {
    let fabric = worker_fabric(context)?;
    let checked = CheckedRegion::new(&fabric, 4096, FULL_ACCESS, context.seed)?;
    fabric.close();
    match checked.region.revoke() {
        // No peer can reach the region, so there is no operation to wait for.
        Ok(mut op) => ensure_eq("a late revoke", op.wait(LIMIT)?.bytes, 0),
        Err(error) => ensure_err::<()>("a late revoke", Err(error), CLOSED).map(drop),
    }
}

/// A thread submits operations while the fabric closes. Each operation ends.
fn meanwhile_submitted_ends(context: &TrialContext) -> TestResult {
    for round in 0..20 {
        let (a, b) = (worker_fabric(context)?, worker_fabric(context)?.on_side(TransferSide::Target));
        let src = CheckedRegion::new(&a, 8192, Access::LOCAL, context.seed + round)?;
        let dst = CheckedRegion::new(&b, 8192, FULL_ACCESS, context.seed)?;
        let (to_b, _) = a.connect_local(&b)?;
        let remote = dst.import(&to_b)?;
        let submitter = {
            let (src, to_b) = (src.region.clone(), to_b.clone());
            std::thread::spawn(move || {
                let pages = Pages::new([1, 0]);
                let submit = || to_b.write_pages(&src, &pages, &remote, &pages, 4096);
                let ops = std::iter::from_fn(|| submit().ok()).take(3000);
                ops.map(|mut op| op.wait(LIMIT)).filter_map(Result::err).collect::<Vec<_>>()
            })
        };
        a.close();
        let errors = submitter.join().map_err(|_| TrialFailure::new("the submitter panicked"))?;
        for error in errors {
            ensure_err::<()>("an operation", Err(error), CLOSED)?;
        }
    }
    Ok(())
}
