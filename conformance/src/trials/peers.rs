//! Peers that come and go.

use std::future::Future;

use transport_core::spi::Operations;
use transport_core::{Access, Error, ErrorKind, Op, Peer, WriteOptions};

use crate::check::{Failure, Verdict, ensure, refused, same};
use crate::ground::{Ground, OPEN};
use crate::lab::{Lab, Options, Pair};
use crate::subject::Variant;
use crate::trial::{ALL_PATHS, Context, Trial};

/// The data path, and work that is posted for long.
const PATHS: &[Variant] = &[
    Variant::Plain,
    Variant::Queued,
    Variant::SmallQueue,
    Variant::Partial,
    Variant::Reorder,
    Variant::Slow,
];
/// How an operation may end when its peer goes.
const GONE: &[ErrorKind] = &[ErrorKind::PeerDied, ErrorKind::Closed];

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("peers::disconnected_while_writing", disconnected).on(PATHS).needs(Operations::WRITE_IMM),
    Trial::new("peers::disconnected_by_the_target", disconnected_by_target).on(PATHS),
    Trial::new("peers::fabric_closed_while_writing", fabric_closed).on(PATHS),
    Trial::new("peers::target_closed_while_writing", target_closed).on(PATHS),
    Trial::new("peers::closed_fabric_refuses", closed_fabric_refuses),
    Trial::new("peers::come_and_go", come_and_go).on(&[Variant::Plain, Variant::Queued]),
    Trial::new("peers::one_goes_others_stay", one_goes).on(PATHS),
    Trial::new("peers::two_connections_of_one_pair", two_connections)
        .on(ALL_PATHS)
        .needs(Operations::WRITE_IMM),
    Trial::new("peers::everyone_to_everyone", everyone).on(ALL_PATHS).needs(Operations::WRITE_IMM),
];

/// The reason why a peer is gone, if it is.
fn death(peer: &Peer) -> Option<Error> {
    let closed = std::pin::pin!(peer.closed());
    let mut task = std::task::Context::from_waker(std::task::Waker::noop());
    match closed.poll(&mut task) {
        std::task::Poll::Ready(error) => Some(error),
        std::task::Poll::Pending => None,
    }
}

/// Every operation ends: done, or because the peer went.
#[track_caller]
fn all_end(lab: &Lab, ops: Vec<Op>) -> Verdict<usize> {
    let mut failed = 0;
    for mut op in ops {
        if let Err(error) = lab.result(&mut op)? {
            refused::<()>("an operation", Err(error), GONE)?;
            failed += 1;
        }
    }
    Ok(failed)
}

struct Load {
    pair: Pair,
    src: Ground,
    dst: Ground,
    ops: Vec<Op>,
}

/// Large writes, `turns` turns after they were submitted.
fn load(context: &Context, turns: u64) -> Verdict<Load> {
    let pair = Pair::new(&context.with_seed(context.seed + turns))?;
    let src = Ground::new(&pair.a, 2 << 20, Access::LOCAL, context.seed)?;
    let dst = Ground::new(&pair.b, 2 << 20, OPEN, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let ops: Result<Vec<Op>, _> =
        (0..6).map(|_| pair.to_b.write(&src.region, 0..2 << 20, &remote, 0)).collect();
    for _ in 0..turns {
        pair.lab.turn();
    }
    Ok(Load { ops: ops?, pair, src, dst })
}

fn disconnected(context: &Context) -> Verdict {
    for turns in context.tries(6) {
        let Load { pair, src, mut dst, ops } = load(context, turns)?;
        ensure(death(&pair.to_b).is_none() && pair.to_b.is_alive(), "dead before it went")?;
        pair.to_b.disconnect();
        // Waiters of every sort end at once, without a turn of time.
        refused(
            "the peer",
            Err::<(), _>(death(&pair.to_b).ok_or_else(|| Failure::new("still there"))?),
            GONE,
        )?;
        ensure(!pair.to_b.is_alive(), "alive after it was disconnected")?;
        refused("an expected imm", pair.to_b.imm(1).expect(1).wait(limit::HANG), GONE)?;
        all_end(&pair.lab, ops)?;
        pair.lab.settle()?;
        refused("a write to it", pair.to_b.write_imm(1).map(drop), GONE)?;
        refused("an import", pair.to_b.import(&dst.region.descriptor()).map(drop), GONE)?;
        dst.fill(context.seed + 3)?;
        pair.lab.settle()?;
        dst.check("after the end")?;
        src.check("the source")?;
    }
    Ok(())
}

fn disconnected_by_target(context: &Context) -> Verdict {
    for turns in context.tries(6) {
        let Load { pair, mut dst, ops, .. } = load(context, turns)?;
        pair.to_a.disconnect();
        pair.b.step();
        pair.b.step();
        all_end(&pair.lab, ops)?;
        dst.fill(context.seed + 3)?;
        pair.lab.settle()?;
        dst.check("the target let go")?;
        pair.lab.fails("a late imm", pair.to_b.write_imm(1), GONE)?;
    }
    Ok(())
}

fn fabric_closed(context: &Context) -> Verdict {
    for turns in context.tries(6) {
        let Load { pair, mut dst, ops, src } = load(context, turns)?;
        pair.a.close();
        // Nothing of it moves any more, and nobody needs to step it.
        dst.fill(context.seed + 3)?;
        for mut op in ops {
            let result = op.try_result().ok_or_else(|| Failure::new("an operation outlives its fabric"))?;
            if let Err(error) = result {
                refused::<()>("an operation", Err(error), &[ErrorKind::Closed])?;
            }
        }
        drop(src);
        pair.lab.settle()?;
        dst.check("after the initiator closed")?;
    }
    Ok(())
}

fn target_closed(context: &Context) -> Verdict {
    for turns in context.tries(6) {
        let Load { pair, mut dst, ops, src } = load(context, turns)?;
        pair.b.close();
        let failed = all_end(&pair.lab, ops)?;
        dst.fill(context.seed + 3)?;
        pair.lab.settle()?;
        dst.check("after the target closed")?;
        src.check("the source")?;
        let slow = context.variant == Variant::Slow;
        ensure(!slow || failed == 6, "a write to a closed fabric succeeded")?;
    }
    Ok(())
}

fn closed_fabric_refuses(context: &Context) -> Verdict {
    let pair = Pair::new(context)?;
    let src = Ground::new(&pair.a, 64, OPEN, context.seed)?;
    let dst = Ground::new(&pair.b, 64, OPEN, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    pair.a.close();
    pair.a.close();
    let closed = &[ErrorKind::Closed];
    refused("alloc", pair.a.alloc(64, OPEN).map(drop), closed)?;
    refused("recv", pair.a.recv(&src.region, 0..64).map(drop), closed)?;
    refused("recv_pool", pair.a.recv_pool(1, 64).map(drop), closed)?;
    refused("connect_local", pair.a.connect_local(&pair.b).map(drop), closed)?;
    refused("connect_local from there", pair.b.connect_local(&pair.a).map(drop), closed)?;
    refused("write", pair.to_b.write(&src.region, 0..64, &remote, 0).map(drop), closed)?;
    refused("write_imm", pair.to_b.write_imm(1).map(drop), closed)?;
    same("outstanding", pair.a.step().outstanding, 0)?;
    // Its memory is still its owner's.
    src.check("a region of a closed fabric")?;
    drop(pair.a);
    src.check("a region of a dropped fabric")
}

/// Nothing is used up by connections that ended.
fn come_and_go(context: &Context) -> Verdict {
    let lab = Lab::new(context);
    let (a, b) = (lab.open(&Options::default())?, lab.open(&Options::default())?);
    let src = Ground::new(&a, 4096, Access::LOCAL, context.seed)?;
    let mut dst = Ground::new(&b, 4096, OPEN, context.seed + 1)?;
    let mut last = None;
    for round in 0..context.amount(300, 3) {
        let (to_b, to_a) = a.connect_local(&b)?;
        ensure(last != Some(to_b.id()), "a peer's number was used again")?;
        last = Some(to_b.id());
        let remote = dst.import(&to_b)?;
        let at = round % 4000;
        lab.done(to_b.write(&src.region, at..at + 90, &remote, at)?)?;
        dst.expect_from(at, &src, at..at + 90);
        to_b.disconnect();
        to_a.disconnect();
        for _ in 0..3 {
            lab.turn();
        }
    }
    dst.check("connections that came and went")
}

fn one_goes(context: &Context) -> Verdict {
    let pair = Pair::new(context)?;
    let other = pair.lab.open(&Options::default())?;
    let (to_other, _) = pair.a.connect_local(&other)?;
    let src = Ground::new(&pair.a, 1 << 20, Access::LOCAL, context.seed)?;
    let gone = Ground::new(&pair.b, 1 << 20, OPEN, context.seed + 1)?;
    let mut stays = Ground::new(&other, 1 << 20, OPEN, context.seed + 2)?;
    let (to_gone, to_stays) = (gone.import(&pair.to_b)?, stays.import(&to_other)?);
    let (mut lost, mut kept) = (Vec::new(), Vec::new());
    for part in (0..8).map(|part| part << 17) {
        lost.push(pair.to_b.write(&src.region, part..part + 100_000, &to_gone, part)?);
        kept.push(to_other.write(&src.region, part..part + 100_000, &to_stays, part)?);
        stays.expect_from(part, &src, part..part + 100_000);
    }
    pair.lab.turn();
    pair.to_b.disconnect();
    pair.lab.all_done(kept)?;
    all_end(&pair.lab, lost)?;
    stays.check("the peer that stays")
}

fn two_connections(context: &Context) -> Verdict {
    let pair = Pair::new(context)?;
    let (second, second_back) = pair.a.connect_local(&pair.b)?;
    ensure(second.id() != pair.to_b.id(), "two connections share a number")?;
    let src = Ground::new(&pair.a, 200_000, Access::LOCAL, context.seed)?;
    let mut dst = Ground::new(&pair.b, 400_000, OPEN, context.seed + 1)?;
    for (number, (peer, back)) in [(&pair.to_b, &pair.to_a), (&second, &second_back)].into_iter().enumerate()
    {
        let remote = dst.import(peer)?;
        let options = WriteOptions::new().imm(number as u32);
        pair.lab.done(peer.write_with(&src.region, 0..200_000, &remote, number * 200_000, &options)?)?;
        dst.expect_from(number * 200_000, &src, 0..200_000);
        pair.lab.until("its imm", || back.imm(number as u32).count() == 1)?;
    }
    same("imms of the other", (pair.to_a.imm(1).count(), second_back.imm(0).count()), (0, 0))?;
    dst.check("both")?;
    pair.to_b.disconnect();
    pair.lab.settle()?;
    let remote = dst.import(&second)?;
    pair.lab.done(second.write(&src.region, 100..200, &remote, 7)?)?;
    dst.expect_from(7, &src, 100..200);
    dst.check("the second after the first")
}

fn everyone(context: &Context) -> Verdict {
    const PART: usize = 20_000;
    let fabrics = context.amount(6, 3);
    let lab = Lab::new(context);
    let mut nodes = Vec::new();
    for number in 0..fabrics {
        let fabric = lab.open(&Options::default())?;
        let ground = Ground::new(&fabric, (fabrics + 1) * PART, OPEN, context.seed + number as u64)?;
        nodes.push((fabric, ground));
    }
    let (mut ops, mut backs) = (Vec::new(), Vec::new());
    for from in 0..fabrics {
        for to in (0..fabrics).filter(|to| *to != from) {
            let (peer, back) = nodes[from].0.connect_local(&nodes[to].0)?;
            let remote = nodes[to].1.import(&peer)?;
            let options = WriteOptions::new().imm(from as u32);
            // The last part is everyone's source, part i comes from fabric i.
            let source = fabrics * PART..(fabrics + 1) * PART;
            ops.push(peer.write_with(
                &nodes[from].1.region,
                source.clone(),
                &remote,
                from * PART,
                &options,
            )?);
            let bytes = nodes[from].1.bytes(source).to_vec();
            nodes[to].1.expect(from * PART, &bytes);
            backs.push((from, back));
        }
    }
    lab.all_done(ops)?;
    lab.settle()?;
    backs.iter().try_for_each(|(from, back)| same("imms", back.imm(*from as u32).count(), 1))?;
    nodes.iter().try_for_each(|(_, ground)| ground.check("a fabric"))
}
