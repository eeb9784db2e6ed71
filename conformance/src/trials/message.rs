//! Messages into single receives.

use transport_core::spi::Operations;
use transport_core::{Access, ErrorKind, Op, SendOptions};

use crate::check::{Verdict, ensure, refused, same};
use crate::ground::{Ground, OPEN};
use crate::lab::{Lab, Options, Pair};
use crate::trial::{ALL_PATHS, Context, Trial};

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

fn every_size(context: &Context) -> Verdict {
    let pair = Pair::new(context)?;
    let most = pair.to_b.max_message() as usize;
    let src = Ground::new(&pair.a, most + 100, Access::LOCAL, context.seed)?;
    let mut dst = Ground::new(&pair.b, most + 100, OPEN, context.seed + 1)?;
    let mut sizes = vec![0, 1, 2, 63, 4095, 4096, 4097, most / 2, most - 1, most];
    sizes.retain(|size| *size <= most);
    for size in context.some(sizes) {
        // The receive may be larger than the message.
        let mut receive = pair.b.recv(&dst.region, 17..(17 + size + 50).min(dst.len()))?;
        pair.b.step();
        let sent = pair.lab.done(pair.to_b.send(&src.region, 5..5 + size)?)?;
        same("bytes sent", sent.bytes, size as u64)?;
        let got = pair.lab.result(&mut receive)??;
        same("bytes received", got.bytes, size as u64)?;
        same("imm", got.imm, None)?;
        same("sender", got.peer, Some(pair.to_a.id()))?;
        dst.expect_from(17, &src, 5..5 + size);
        dst.check(&format!("a message of {size} bytes"))?;
    }
    Ok(())
}

fn too_large_is_refused(context: &Context) -> Verdict {
    let pair = Pair::new(context)?;
    let most = pair.to_b.max_message() as usize;
    let src = Ground::new(&pair.a, most + 1, Access::LOCAL, context.seed)?;
    let dst = Ground::new(&pair.b, most + 1, OPEN, context.seed + 1)?;
    let mut receive = pair.b.recv(&dst.region, 0..most + 1)?;
    refused("one byte too many", pair.to_b.send(&src.region, 0..most + 1), &[ErrorKind::TooLarge])?;
    pair.lab.settle()?;
    ensure(receive.try_result().is_none(), "something was received")?;
    dst.check("after a refused message")
}

fn carries_imm(context: &Context) -> Verdict {
    let pair = Pair::new(context)?;
    let src = Ground::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    let mut dst = Ground::new(&pair.b, 4096, OPEN, context.seed + 1)?;
    for (imm, size) in [(0, 10), (u32::MAX, 4096), (7, 0)] {
        let mut receive = pair.b.recv(&dst.region, 0..4096)?;
        pair.lab.done(pair.to_b.send_with(&src.region, 0..size, &SendOptions::new().imm(imm))?)?;
        let got = pair.lab.result(&mut receive)??;
        same("imm and bytes", (got.imm, got.bytes), (Some(imm), size as u64))?;
        dst.expect_from(0, &src, 0..size);
        dst.check("the message")?;
        same("the imm is the receive's, not the counter's", pair.to_a.imm(imm).count(), 0)?;
    }
    Ok(())
}

fn waits_for_a_receive(context: &Context) -> Verdict {
    let pair = Pair::new(context)?;
    let src = Ground::new(&pair.a, 1000, Access::LOCAL, context.seed)?;
    let mut dst = Ground::new(&pair.b, 1000, OPEN, context.seed + 1)?;
    let op = pair.to_b.send(&src.region, 0..1000)?;
    for _ in 0..200 {
        pair.lab.tick();
    }
    dst.check("before the receive")?;
    let mut receive = pair.b.recv(&dst.region, 0..1000)?;
    same("bytes", pair.lab.result(&mut receive)??.bytes, 1000)?;
    pair.lab.done(op)?;
    dst.expect_from(0, &src, 0..1000);
    dst.check("after it")
}

fn receive_too_small(context: &Context) -> Verdict {
    let pair = Pair::new(context)?;
    let src = Ground::new(&pair.a, 200, Access::LOCAL, context.seed)?;
    let mut dst = Ground::new(&pair.b, 300, OPEN, context.seed + 1)?;
    let mut small = pair.b.recv(&dst.region, 50..149)?;
    pair.b.step();
    let mut op = pair.to_b.send(&src.region, 0..100)?;
    refused("a receive of 99 bytes", pair.lab.result(&mut small)?, &[ErrorKind::TooLarge])?;
    // Whether the sender learns of it is the transport's affair; ending is not.
    let _ = pair.lab.result(&mut op)?;
    for (at, byte) in contents(&dst)?.into_iter().enumerate().filter(|(at, _)| !(50..149).contains(at)) {
        same(&format!("byte {at} outside of the receive"), byte, dst.bytes(at..at + 1)[0])?;
    }
    dst.accept()?;
    let mut receive = pair.b.recv(&dst.region, 150..250)?;
    pair.lab.done(pair.to_b.send(&src.region, 100..200)?)?;
    pair.lab.result(&mut receive)??;
    dst.expect_from(150, &src, 100..200);
    dst.check("the next message")
}

fn contents(ground: &Ground) -> Verdict<Vec<u8>> {
    let mut bytes = vec![0; ground.len()];
    ground.region.copy_out(0, &mut bytes)?;
    Ok(bytes)
}

fn receive_taken_back(context: &Context) -> Verdict {
    let pair = Pair::new(context)?;
    let src = Ground::new(&pair.a, 100, Access::LOCAL, context.seed)?;
    let lost = Ground::new(&pair.b, 100, OPEN, context.seed + 1)?;
    let mut dst = Ground::new(&pair.b, 100, OPEN, context.seed + 2)?;
    let cancelled = pair.b.recv(&lost.region, 0..100)?;
    let dropped = pair.b.recv(&lost.region, 0..100)?;
    pair.lab.settle()?;
    drop(dropped);
    let mut cancel = cancelled.cancel();
    refused("a receive taken back", cancel.wait(limit::HANG), &[ErrorKind::Cancelled])?;
    pair.lab.settle()?;
    let mut receive = pair.b.recv(&dst.region, 0..100)?;
    pair.lab.done(pair.to_b.send(&src.region, 0..100)?)?;
    pair.lab.result(&mut receive)??;
    dst.expect_from(0, &src, 0..100);
    dst.check("the receive that stayed")?;
    lost.check("the ones taken back")
}

fn names_its_sender(context: &Context) -> Verdict {
    let lab = Lab::new(context);
    let hub = lab.open(&Default::default())?;
    let dst = Ground::new(&hub, 64, OPEN, context.seed)?;
    let mut spokes = Vec::new();
    for _ in 0..context.amount(5, 3) {
        let spoke = lab.open(&Default::default())?;
        let (to_hub, from_spoke) = spoke.connect_local(&hub)?;
        let src = Ground::new(&spoke, 64, Access::LOCAL, context.seed + 1)?;
        spokes.push((to_hub, from_spoke.id(), src));
    }
    for (number, (to_hub, id, src)) in spokes.iter().enumerate().rev() {
        let mut receive = hub.recv(&dst.region, 0..64)?;
        let options = SendOptions::new().imm(number as u32);
        lab.done(to_hub.send_with(&src.region, 0..64, &options)?)?;
        let got = lab.result(&mut receive)??;
        same("sender and imm", (got.peer, got.imm), (Some(*id), Some(number as u32)))?;
    }
    Ok(())
}

/// Many messages before the first receive: the sender is held back, nothing is lost.
fn more_than_any_queue(context: &Context) -> Verdict {
    const SIZE: usize = 100;
    let count = context.amount(1300, 300);
    let options = Options { max_operations: 2048, ..Options::default() };
    let pair = Lab::new(context).pair_of(&options, &options)?;
    let src = Ground::new(&pair.a, SIZE * count, Access::LOCAL, context.seed)?;
    let dst = Ground::new(&pair.b, SIZE * count, OPEN, context.seed + 1)?;
    let slot = |number: usize| number * SIZE..(number + 1) * SIZE;
    let mut sends = Vec::new();
    for number in 0..count {
        sends.push(pair.to_b.send_with(&src.region, slot(number), &SendOptions::new().imm(number as u32))?);
    }
    for _ in 0..100 {
        pair.lab.tick();
    }
    let receives: Result<Vec<Op>, _> =
        (0..count).map(|number| pair.b.recv(&dst.region, slot(number))).collect();
    let mut seen = vec![false; count];
    let mut bytes = vec![0; SIZE];
    for (number, mut receive) in receives?.into_iter().enumerate() {
        let imm = pair.lab.result(&mut receive)??.imm.unwrap_or(u32::MAX) as usize;
        ensure(seen.get(imm) == Some(&false), format!("message {imm} came twice, or never was"))?;
        seen[imm] = true;
        dst.region.copy_out(number * SIZE, &mut bytes)?;
        ensure(bytes == src.bytes(slot(imm)), format!("message {imm} is damaged"))?;
    }
    pair.lab.all_done(sends)
}
