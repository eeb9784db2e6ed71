//! Receive pools, which post their buffers again.

use std::time::Duration;

use transport_core::spi::Operations;
use transport_core::{Access, ErrorKind, Message, Op, RecvPool, SendOptions};

use crate::check::{TestResult, TrialFailure, ensure, ensure_eq, ensure_err};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::sim_harness::{SimHarness, SimPair};
use crate::trial::{ALL_PATHS, Trial, TrialContext};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("pool::reposts_itself", reposts_itself).on(ALL_PATHS).needs(Operations::SEND),
    Trial::new("pool::kept_messages_keep_their_bytes", kept_messages).on(ALL_PATHS).needs(Operations::SEND),
    Trial::new("pool::goes_on_after_too_large", goes_on_after_too_large)
        .on(ALL_PATHS)
        .needs(Operations::SEND),
    Trial::new("pool::from_many_peers", from_many_peers).on(ALL_PATHS).needs(Operations::SEND),
    Trial::new("pool::dropped_with_messages", dropped_with_messages).on(ALL_PATHS).needs(Operations::SEND),
    Trial::new("pool::refuses_nonsense", refuses_nonsense).needs(Operations::SEND),
    Trial::new("pool::ends_with_its_fabric", ends_with_its_fabric).on(ALL_PATHS).needs(Operations::SEND),
];

#[track_caller]
fn next(sim: &SimHarness, pool: &RecvPool) -> TestResult<Result<Message, transport_core::Error>> {
    let mut message = None;
    sim.until("a message", || {
        message = pool.try_next();
        message.is_some()
    })?;
    message.ok_or_else(|| TrialFailure::new("no message"))
}

/// Ten times as many messages as buffers.
fn reposts_itself(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let pool = pair.b.recv_pool(4, 300)?;
    let src = CheckedRegion::new(&pair.a, 12_000, Access::LOCAL, context.seed)?;
    let size = |number: usize| 1 + number * 37 % 300;
    let ops: Result<Vec<Op>, _> = (0..40)
        .map(|number| {
            let options = SendOptions::new().imm(number as u32);
            pair.to_b.send_with(&src.region, number * 300..number * 300 + size(number), &options)
        })
        .collect();
    let mut seen = [false; 40];
    for _ in 0..40 {
        let message = next(&pair.sim, &pool)??;
        let number = message.imm().unwrap_or(u32::MAX) as usize;
        ensure(
            seen.get(number) == Some(&false),
            format!("message {number} arrived twice, or was never sent"),
        )?;
        seen[number] = true;
        ensure_eq("sender", message.peer(), pair.to_a.id())?;
        ensure(
            message.to_vec() == src.bytes(number * 300..number * 300 + size(number)),
            "a message has wrong bytes",
        )?;
    }
    pair.sim.all_done(ops?)?;
    ensure(pool.try_next().is_none(), "the pool has a 41st message")
}

fn kept_messages(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let pool = pair.b.recv_pool(3, 64)?;
    let src = CheckedRegion::new(&pair.a, 640, Access::LOCAL, context.seed)?;
    let mut ops = Vec::new();
    for number in 0..10 {
        ops.push(pair.to_b.send(&src.region, number * 64..(number + 1) * 64)?);
    }
    let kept = [next(&pair.sim, &pool)??, next(&pair.sim, &pool)??];
    let before = kept.each_ref().map(Message::to_vec);
    // All other messages use the one free buffer.
    for _ in 2..10 {
        next(&pair.sim, &pool)??;
    }
    pair.sim.all_done(ops)?;
    ensure_eq("kept messages", kept.each_ref().map(Message::to_vec), before)?;
    let mut short = [0; 10];
    ensure_eq("a short copy", kept[0].copy_out(&mut short), 10)?;
    ensure_eq("its bytes", &short[..], &kept[0].to_vec()[..10])
}

fn goes_on_after_too_large(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let pool = pair.b.recv_pool(2, 100)?;
    let src = CheckedRegion::new(&pair.a, 200, Access::LOCAL, context.seed)?;
    for _ in 0..5 {
        // More failures than buffers: each failure must free its buffer.
        let mut op = pair.to_b.send(&src.region, 0..101)?;
        ensure_err("101 bytes", next(&pair.sim, &pool)?.map(drop), &[ErrorKind::TooLarge])?;
        let _ = pair.sim.result(&mut op)?;
    }
    pair.sim.done(pair.to_b.send(&src.region, 0..100)?)?;
    let message = next(&pair.sim, &pool)??;
    ensure(message.to_vec() == src.bytes(0..100), "a message has wrong bytes")
}

fn from_many_peers(context: &TrialContext) -> TestResult {
    let sim = SimHarness::new(context);
    let hub = sim.open(&Default::default())?;
    let pool = hub.recv_pool(2, 64)?;
    let mut senders = Vec::new();
    let mut ops = Vec::new();
    let peers = context.amount(6, 3);
    for number in 0..peers {
        let sender = sim.open(&Default::default())?;
        let (to_hub, from_sender) = sender.connect_local(&hub)?;
        let src = CheckedRegion::new(&sender, 64, Access::LOCAL, context.seed + number)?;
        for _ in 0..20 {
            ops.push(to_hub.send(&src.region, 0..64)?);
        }
        senders.push((from_sender.id(), src, 0));
    }
    for _ in 0..20 * peers {
        let message = next(&sim, &pool)??;
        let sender = senders.iter_mut().find(|(id, ..)| *id == message.peer());
        let (_, src, count) = sender.ok_or_else(|| TrialFailure::new("a message has an unknown sender"))?;
        *count += 1;
        ensure(message.to_vec() == src.bytes(0..64), "a message has another sender's bytes")?;
    }
    ensure(senders.iter().all(|(.., count)| *count == 20), "a sender's messages are missing")?;
    sim.all_done(ops)
}

fn dropped_with_messages(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let pool = pair.b.recv_pool(4, 64)?;
    let src = CheckedRegion::new(&pair.a, 64, Access::LOCAL, context.seed)?;
    let mut ops = Vec::new();
    for _ in 0..3 {
        ops.push(pair.to_b.send(&src.region, 0..64)?);
    }
    let held = next(&pair.sim, &pool)??;
    pair.sim.all_done(ops)?;
    drop(pool);
    pair.sim.settle()?;
    // A message stays valid after its pool is dropped. Later messages go to the next receive.
    ensure(held.to_vec() == src.bytes(0..64), "a message has wrong bytes")?;
    drop(held);
    let mut dst = CheckedRegion::new(&pair.b, 64, FULL_ACCESS, context.seed + 1)?;
    let mut receive = pair.b.recv(&dst.region, 0..64)?;
    pair.b.step();
    pair.sim.done(pair.to_b.send(&src.region, 0..64)?)?;
    pair.sim.result(&mut receive)??;
    dst.expect_from(0, &src, 0..64);
    dst.check("a receive after the pool")
}

fn refuses_nonsense(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    for (count, size) in [(0, 64), (4, 0), (usize::MAX, 2)] {
        let pool = pair.b.recv_pool(count, size);
        ensure_err(&format!("{count} buffers of {size}"), pool.map(drop), &[ErrorKind::InvalidRequest])?;
    }
    Ok(())
}

fn ends_with_its_fabric(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let pool = pair.b.recv_pool(4, 64)?;
    let dst = CheckedRegion::new(&pair.b, 64, FULL_ACCESS, context.seed)?;
    let mut receive = pair.b.recv(&dst.region, 0..64)?;
    pair.sim.settle()?;
    ensure_err(
        "no message",
        pool.next().wait(Duration::from_millis(5)).map(drop),
        &[ErrorKind::DeadlineExceeded],
    )?;
    pair.b.close();
    ensure_err("the pool", pool.next().wait(limit::HANG).map(drop), &[ErrorKind::Closed])?;
    ensure_err("a receive", receive.wait(limit::HANG), &[ErrorKind::Closed, ErrorKind::Cancelled]).map(drop)
}
