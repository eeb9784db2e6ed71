//! Messages into single receives.

use transport_core::spi::Operations;
use transport_core::{Access, ErrorKind, Op, SendOptions};

use crate::check::{TestResult, ensure, ensure_eq, ensure_err};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::sim_harness::{Options, SimHarness, SimPair};
use crate::trial::{ALL_PATHS, Trial, TrialContext};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("message::every_size", every_size).on(ALL_PATHS).needs(Operations::SEND),
    Trial::new("message::too_large_is_refused", too_large_is_refused).on(ALL_PATHS).needs(Operations::SEND),
    Trial::new("message::carries_imm", carries_imm).on(ALL_PATHS).needs(Operations::SEND),
    Trial::new("message::waits_for_a_receive", waits_for_a_receive).on(ALL_PATHS).needs(Operations::SEND),
    Trial::new("message::receive_too_small", receive_too_small).on(ALL_PATHS).needs(Operations::SEND),
    Trial::new("message::receive_taken_back", receive_taken_back).on(ALL_PATHS).needs(Operations::SEND),
    Trial::new("message::names_its_sender", names_its_sender).on(ALL_PATHS).needs(Operations::SEND),
    Trial::new("message::more_than_any_queue", more_than_any_queue).on(ALL_PATHS).needs(Operations::SEND),
];

fn every_size(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let most = pair.to_b.max_message() as usize;
    let src = CheckedRegion::new(&pair.a, most + 100, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, most + 100, FULL_ACCESS, context.seed + 1)?;
    let mut sizes = vec![0, 1, 2, 63, 4095, 4096, 4097, most / 2, most - 1, most];
    sizes.retain(|size| *size <= most);
    for size in context.sample(sizes) {
        // A receive may be larger than its message.
        let mut receive = pair.b.recv(&dst.region, 17..(17 + size + 50).min(dst.len()))?;
        pair.b.step();
        let sent = pair.sim.done(pair.to_b.send(&src.region, 5..5 + size)?)?;
        ensure_eq("bytes sent", sent.bytes, size as u64)?;
        let got = pair.sim.result(&mut receive)??;
        ensure_eq("bytes received", got.bytes, size as u64)?;
        ensure_eq("imm", got.imm, None)?;
        ensure_eq("sender", got.peer, Some(pair.to_a.id()))?;
        dst.expect_from(17, &src, 5..5 + size);
        dst.check(&format!("a message of {size} bytes"))?;
    }
    Ok(())
}

fn too_large_is_refused(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let most = pair.to_b.max_message() as usize;
    let src = CheckedRegion::new(&pair.a, most + 1, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, most + 1, FULL_ACCESS, context.seed + 1)?;
    let mut receive = pair.b.recv(&dst.region, 0..most + 1)?;
    ensure_err("one byte too many", pair.to_b.send(&src.region, 0..most + 1), &[ErrorKind::TooLarge])?;
    pair.sim.settle()?;
    ensure(receive.try_result().is_none(), "the receive completed although the message was refused")?;
    dst.check("after a refused message")
}

fn carries_imm(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, 4096, FULL_ACCESS, context.seed + 1)?;
    for (imm, size) in [(0, 10), (u32::MAX, 4096), (7, 0)] {
        let mut receive = pair.b.recv(&dst.region, 0..4096)?;
        pair.sim.done(pair.to_b.send_with(&src.region, 0..size, &SendOptions::new().imm(imm))?)?;
        let got = pair.sim.result(&mut receive)??;
        ensure_eq("imm and bytes", (got.imm, got.bytes), (Some(imm), size as u64))?;
        dst.expect_from(0, &src, 0..size);
        dst.check("the message")?;
        ensure_eq("the imm is the receive's, not the counter's", pair.to_a.imm(imm).count(), 0)?;
    }
    Ok(())
}

fn waits_for_a_receive(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 1000, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, 1000, FULL_ACCESS, context.seed + 1)?;
    let op = pair.to_b.send(&src.region, 0..1000)?;
    for _ in 0..200 {
        pair.sim.tick();
    }
    dst.check("before the receive")?;
    let mut receive = pair.b.recv(&dst.region, 0..1000)?;
    ensure_eq("bytes", pair.sim.result(&mut receive)??.bytes, 1000)?;
    pair.sim.done(op)?;
    dst.expect_from(0, &src, 0..1000);
    dst.check("after it")
}

fn receive_too_small(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 200, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, 300, FULL_ACCESS, context.seed + 1)?;
    let mut small = pair.b.recv(&dst.region, 50..149)?;
    pair.b.step();
    let mut op = pair.to_b.send(&src.region, 0..100)?;
    ensure_err("a receive of 99 bytes", pair.sim.result(&mut small)?, &[ErrorKind::TooLarge])?;
    // Whether the sender gets an error depends on the transport, but its operation must end.
    let _ = pair.sim.result(&mut op)?;
    for (at, byte) in contents(&dst)?.into_iter().enumerate().filter(|(at, _)| !(50..149).contains(at)) {
        ensure_eq(&format!("byte {at} outside of the receive"), byte, dst.bytes(at..at + 1)[0])?;
    }
    dst.accept()?;
    let mut receive = pair.b.recv(&dst.region, 150..250)?;
    pair.sim.done(pair.to_b.send(&src.region, 100..200)?)?;
    pair.sim.result(&mut receive)??;
    dst.expect_from(150, &src, 100..200);
    dst.check("the next message")
}

fn contents(checked: &CheckedRegion) -> TestResult<Vec<u8>> {
    let mut bytes = vec![0; checked.len()];
    checked.region.copy_out(0, &mut bytes)?;
    Ok(bytes)
}

fn receive_taken_back(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 100, Access::LOCAL, context.seed)?;
    let lost = CheckedRegion::new(&pair.b, 100, FULL_ACCESS, context.seed + 1)?;
    let mut dst = CheckedRegion::new(&pair.b, 100, FULL_ACCESS, context.seed + 2)?;
    let cancelled = pair.b.recv(&lost.region, 0..100)?;
    let dropped = pair.b.recv(&lost.region, 0..100)?;
    pair.sim.settle()?;
    drop(dropped);
    let mut cancel = cancelled.cancel();
    ensure_err("a receive taken back", cancel.wait(limit::HANG), &[ErrorKind::Cancelled])?;
    pair.sim.settle()?;
    let mut receive = pair.b.recv(&dst.region, 0..100)?;
    pair.sim.done(pair.to_b.send(&src.region, 0..100)?)?;
    pair.sim.result(&mut receive)??;
    dst.expect_from(0, &src, 0..100);
    dst.check("the receive that stayed")?;
    lost.check("the ones taken back")
}

fn names_its_sender(context: &TrialContext) -> TestResult {
    let sim = SimHarness::new(context);
    let hub = sim.open(&Default::default())?;
    let dst = CheckedRegion::new(&hub, 64, FULL_ACCESS, context.seed)?;
    let mut spokes = Vec::new();
    for _ in 0..context.amount(5, 3) {
        let spoke = sim.open(&Default::default())?;
        let (to_hub, from_spoke) = spoke.connect_local(&hub)?;
        let src = CheckedRegion::new(&spoke, 64, Access::LOCAL, context.seed + 1)?;
        spokes.push((to_hub, from_spoke.id(), src));
    }
    for (number, (to_hub, id, src)) in spokes.iter().enumerate().rev() {
        let mut receive = hub.recv(&dst.region, 0..64)?;
        let options = SendOptions::new().imm(number as u32);
        sim.done(to_hub.send_with(&src.region, 0..64, &options)?)?;
        let got = sim.result(&mut receive)??;
        ensure_eq("sender and imm", (got.peer, got.imm), (Some(*id), Some(number as u32)))?;
    }
    Ok(())
}

/// Many messages before the first receive. The engine holds the sender back, and no message is lost.
fn more_than_any_queue(context: &TrialContext) -> TestResult {
    const SIZE: usize = 100;
    let count = context.amount(1300, 300);
    let options = Options { max_operations: 2048, ..Options::default() };
    let pair = SimHarness::new(context).pair_of(&options, &options)?;
    let src = CheckedRegion::new(&pair.a, SIZE * count, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, SIZE * count, FULL_ACCESS, context.seed + 1)?;
    let slot = |number: usize| number * SIZE..(number + 1) * SIZE;
    let mut sends = Vec::new();
    for number in 0..count {
        sends.push(pair.to_b.send_with(&src.region, slot(number), &SendOptions::new().imm(number as u32))?);
    }
    for _ in 0..100 {
        pair.sim.tick();
    }
    let receives: Result<Vec<Op>, _> =
        (0..count).map(|number| pair.b.recv(&dst.region, slot(number))).collect();
    let mut seen = vec![false; count];
    let mut bytes = vec![0; SIZE];
    for (number, mut receive) in receives?.into_iter().enumerate() {
        let imm = pair.sim.result(&mut receive)??.imm.unwrap_or(u32::MAX) as usize;
        ensure(seen.get(imm) == Some(&false), format!("message {imm} arrived twice, or was never sent"))?;
        seen[imm] = true;
        dst.region.copy_out(number * SIZE, &mut bytes)?;
        ensure(bytes == src.bytes(slot(imm)), format!("message {imm} has wrong bytes"))?;
    }
    pair.sim.all_done(sends)
}
