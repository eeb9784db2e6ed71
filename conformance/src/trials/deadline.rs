//! Deadlines: the operation ends at once, and the engine keeps its memory until the device is done with it.

use std::time::Duration;

use transport_core::spi::Operations;
use transport_core::{Access, Clock, ErrorKind, Op, ReadOptions, SendOptions, WriteOptions};

use crate::backend_under_test::Variant;
use crate::check::{TestResult, TrialFailure, ensure, ensure_eq, ensure_err};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::sim_harness::{Options, SimHarness, SimPair};
use crate::trial::{ALL_PATHS, Trial, TrialContext};

const SLOW: &[Variant] = &[Variant::Slow];
const NANO: Duration = Duration::from_nanos(1);

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("deadline::answers_on_time_and_holds_the_memory", answers_on_time).on(SLOW),
    Trial::new("deadline::every_operation_has_one", every_operation)
        .on(SLOW)
        .needs(Operations::WRITE_IMM.union(Operations::READ).union(Operations::SEND)),
    Trial::new("deadline::the_fabrics_default", the_default).on(SLOW),
    Trial::new("deadline::of_what_waits_behind", of_what_waits_behind).on(SLOW),
    Trial::new("deadline::messages_without_receives", messages_without_receives)
        .on(ALL_PATHS)
        .needs(Operations::SEND),
    Trial::new("deadline::already_over", already_over).on(&[
        Variant::Queued,
        Variant::SmallQueue,
        Variant::Slow,
    ]),
    Trial::new("deadline::never_is_never", never_is_never).on(SLOW),
];

#[track_caller]
fn expired(op: &mut Op) -> TestResult {
    let result =
        op.try_result().ok_or_else(|| TrialFailure::new("the operation has no result at its deadline"))?;
    ensure_err("the operation", result, &[ErrorKind::DeadlineExceeded]).map(drop)
}

fn answers_on_time(context: &TrialContext) -> TestResult {
    let limit = Variant::SLOW / 10;
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, 4096, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let options = WriteOptions::new().deadline(limit);
    let begun = pair.sim.clock.now();
    let mut op = pair.to_b.write_with(&src.region, 0..4096, &remote, 0, &options)?;
    pair.post(1)?;
    pair.sim.clock.advance(limit - NANO - pair.sim.clock.now().since(begun));
    pair.sim.step();
    ensure(op.try_result().is_none(), "the operation ended before its deadline")?;
    pair.sim.clock.advance(NANO);
    pair.sim.step();
    expired(&mut op)?;
    drop(op);
    // Posted work cannot be recalled: the engine keeps its memory, and its bytes may still land.
    ensure_eq("under way after the answer", pair.a.step().outstanding, 1)?;
    dst.check("at the deadline")?;
    dst.expect_from(0, &src, 0..4096);
    drop((src, remote));
    pair.sim.clock.advance(Variant::SLOW);
    pair.sim.settle()?;
    dst.check("after the late completion")
}

fn every_operation(context: &TrialContext) -> TestResult {
    let limit = Variant::SLOW / 10;
    let options = Options { deadline: limit, ..Options::default() };
    let pair = SimHarness::new(context).pair_of(&options, &options)?;
    let ours = CheckedRegion::new(&pair.a, 8192, Access::LOCAL, context.seed)?;
    let theirs = CheckedRegion::new(&pair.b, 8192, FULL_ACCESS, context.seed + 1)?;
    let remote = theirs.import(&pair.to_b)?;
    let pages = transport_core::Pages::new([0, 1]);
    let read = ReadOptions::new().deadline(limit);
    let send = SendOptions::new().deadline(limit);
    let mut ops = vec![
        pair.to_b.write(&ours.region, 0..64, &remote, 0)?,
        pair.to_b.write_imm(1)?,
        pair.to_b.write_pages(&ours.region, &pages, &remote, &pages, 4096)?,
        pair.to_b.read_with(&ours.region, 0..64, &remote, 0, &read)?,
        pair.to_b.send_with(&ours.region, 0..64, &send)?,
    ];
    pair.sim.step();
    pair.sim.clock.advance(limit);
    pair.sim.step();
    ops.iter_mut().try_for_each(expired)?;
    drop(ops);
    pair.sim.settle()
}

fn the_default(context: &TrialContext) -> TestResult {
    let limit = Variant::SLOW / 5;
    let options = Options { deadline: limit, ..Options::default() };
    let pair = SimHarness::new(context).pair_of(&options, &options)?;
    let src = CheckedRegion::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, 4096, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let mut ordinary = pair.to_b.write(&src.region, 0..4096, &remote, 0)?;
    let longer = WriteOptions::new().deadline(Variant::SLOW * 3);
    let default_fabric = pair.to_b.write_with(&src.region, 0..4096, &remote, 0, &longer)?;
    pair.sim.step();
    pair.sim.clock.advance(limit - NANO);
    pair.sim.step();
    ensure(ordinary.try_result().is_none(), "the operation ended before its deadline")?;
    pair.sim.clock.advance(NANO);
    pair.sim.step();
    expired(&mut ordinary)?;
    pair.sim.done(default_fabric).map(drop)
}

/// The engine drops an operation that was never posted at its deadline, and no byte moves.
fn of_what_waits_behind(context: &TrialContext) -> TestResult {
    // The second write waits for all rails of its group.
    let options = Options { rails: Some(16), ..Options::default() };
    let pair = SimHarness::new(context).pair_of(&options, &options)?;
    let depth = pair.capabilities().send_depth as usize * pair.a.transports()[0].devices.len();
    let src = CheckedRegion::new(&pair.a, 64, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, 128, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    // The first write fills every queue. All its pages go to the same offset.
    let pages = transport_core::Pages::new(vec![0; depth]);
    let first = pair.to_b.write_pages(&src.region, &pages, &remote, &pages, 64)?;
    pair.post(depth as u64)?;
    let options = WriteOptions::new().deadline(Variant::SLOW / 10);
    let mut behind = pair.to_b.write_with(&src.region, 0..64, &remote, 64, &options)?;
    pair.sim.step();
    pair.sim.clock.advance(Variant::SLOW / 10);
    pair.sim.step();
    expired(&mut behind)?;
    pair.sim.done(first)?;
    pair.sim.settle()?;
    let mut second = [0; 64];
    dst.region.copy_out(64, &mut second)?;
    ensure(second == dst.bytes(64..128), "a write that was never posted moved bytes")
}

fn messages_without_receives(context: &TrialContext) -> TestResult {
    let options = Options { max_operations: 2048, ..Options::default() };
    let pair = SimHarness::new(context).pair_of(&options, &options)?;
    let src = CheckedRegion::new(&pair.a, 1000, Access::LOCAL, context.seed)?;
    let limit = Duration::from_secs(1);
    let options = SendOptions::new().deadline(limit);
    let ops: Result<Vec<Op>, _> =
        (0..context.amount(2000, 150)).map(|_| pair.to_b.send_with(&src.region, 0..1000, &options)).collect();
    let mut ops = ops?;
    for _ in 0..200 {
        pair.sim.step();
    }
    let mut sent = 0;
    ops.retain_mut(|op| match op.try_result() {
        Some(Ok(_)) => (sent += 1, false).1,
        _ => true,
    });
    ensure(!ops.is_empty(), "all messages completed, although no receive was posted")?;
    pair.sim.clock.advance(limit);
    pair.sim.step();
    for op in &mut ops {
        match pair.sim.result(op)? {
            Ok(_) => sent += 1,
            Err(error) => drop(ensure_err::<()>("a message", Err(error), &[ErrorKind::DeadlineExceeded])?),
        }
    }
    drop(ops);
    // Each message that was reported as sent arrives, even if late.
    let pool = pair.b.recv_pool(4, 1000)?;
    let mut arrived = 0;
    for _ in 0..context.amount(4000, 1000) {
        pair.sim.tick();
        if let Some(message) = pool.try_next() {
            ensure(message?.to_vec() == src.bytes(0..1000), "a message has wrong bytes")?;
            arrived += 1;
        }
    }
    ensure(arrived >= sent, format!("{arrived} of {sent} sent messages arrived"))
}

fn already_over(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 1 << 20, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, 1 << 20, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let options = WriteOptions::new().deadline(Duration::ZERO);
    let mut op = match pair.to_b.write_with(&src.region, 0..1 << 20, &remote, 0, &options) {
        Ok(op) => op,
        Err(error) => {
            return ensure_err::<()>("no time at all", Err(error), &[ErrorKind::DeadlineExceeded]).map(drop);
        }
    };
    pair.sim.step();
    pair.sim.step();
    // The operation may have been quick enough, but it must not wait any longer.
    if let Err(error) =
        op.try_result().ok_or_else(|| TrialFailure::new("the operation neither completed nor expired"))?
    {
        ensure_err::<()>("no time at all", Err(error), &[ErrorKind::DeadlineExceeded])?;
    }
    pair.sim.settle()
}

fn never_is_never(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, 4096, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let options = WriteOptions::new().deadline(Duration::MAX);
    let op = pair.to_b.write_with(&src.region, 0..4096, &remote, 0, &options)?;
    pair.sim.done(op)?;
    dst.expect_from(0, &src, 0..4096);
    dst.check("without a deadline")
}
