//! Several transports of several rail groups each, as every fabric of more than one backend has them:
//! each link is metered by its own peer's grant, whatever transports come before it.

use std::sync::Arc;
use std::time::Duration;

use transport_core::observe::{GrantOf, WaitReason};
use transport_core::spi::Operations;
use transport_core::{Access, Grant, GrantPolicy, GrantRequest, Op, Pages, Peer, SendOptions, WriteOptions};

use super::forgery::Wire;
use super::grant::{ALL, Dial};
use crate::check::{Verdict, ensure, same};
use crate::end::End;
use crate::ground::{Ground, OPEN};
use crate::lab::{LABEL, Lab, Options, Pair};
use crate::process::{Child, LIMIT, several};
use crate::subject::Variant;
use crate::trial::{ALL_PATHS, Context, Trial};

const METERED: Operations = Operations::WRITE_IMM.union(Operations::SEND);

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("groups::imms_are_metered_by_their_own_link", imms).on(ALL_PATHS).rails(2).needs(METERED),
    Trial::new("groups::messages_are_metered_by_their_own_link", messages)
        .on(ALL_PATHS)
        .rails(2)
        .needs(METERED),
    Trial::new("groups::bytes_are_metered_by_their_own_link", bytes)
        .on(&[Variant::Plain, Variant::Queued, Variant::Partial])
        .rails(2)
        .needs(Operations::READ),
    Trial::new("groups::a_receive_is_posted_where_the_peer_is", receives)
        .on(ALL_PATHS)
        .rails(2)
        .needs(Operations::SEND),
    Trial::new("groups::another_transports_grant_is_not_used", not_anothers)
        .on(ALL_PATHS)
        .rails(2)
        .needs(METERED),
    Trial::new("groups::between_processes", between_processes)
        .process()
        .rails(2)
        .needs(METERED.union(Operations::READ)),
];

/// What `a` opens: two transports that `b` does not have come first.
const OURS: &[&str] = &["one", "two", LABEL];
/// What `b` opens.
const THEIRS: &[&str] = &["three", LABEL];

fn open(lab: &Lab, labels: &[&str], admission: Option<Arc<dyn GrantPolicy>>) -> Verdict<End> {
    lab.open(&Options { labels, rails: Some(2), apart: true, admission, ..Options::default() })
}

/// A pair that shares the last transport of each side alone; both sides grant what `dial` says.
fn pair(context: &Context, dial: &Arc<Dial>) -> Verdict<Pair> {
    let lab = Lab::new(context);
    let (a, b) = (open(&lab, OURS, Some(dial.clone()))?, open(&lab, THEIRS, Some(dial.clone()))?);
    let (to_b, to_a) = a.connect_local(&b)?;
    Ok(Pair { lab, a, b, to_b, to_a })
}

/// Both directions of a pair: who begins, their view of the other, the other, the other's view of them.
fn ways(pair: &Pair) -> [(&End, &Peer, &End, &Peer); 2] {
    [(&pair.a, &pair.to_b, &pair.b, &pair.to_a), (&pair.b, &pair.to_a, &pair.a, &pair.to_b)]
}

fn imms(context: &Context) -> Verdict {
    const PAGES: u32 = 40;
    let pair = pair(context, &Dial::at([ALL, 3, 0]))?;
    for (from, to, other, back) in ways(&pair) {
        let src = Ground::new(from, 4096, Access::LOCAL, context.seed)?;
        let mut dst = Ground::new(other, PAGES as usize * 64, OPEN, context.seed + 1)?;
        let remote = dst.import(to)?;
        let pages = (Pages::new(vec![1; PAGES as usize]), Pages::new((0..PAGES).collect::<Vec<_>>()));
        let mut ops = Vec::new();
        for _ in 0..50 {
            ops.push(to.write_imm(1)?);
        }
        for options in [WriteOptions::new().imm(1).per_wr(), WriteOptions::new().imm(1)] {
            ops.push(to.write_pages_with(&src.region, &pages.0, &remote, &pages.1, 64, &options)?);
            ops.push(to.write_with(&src.region, 64..128, &remote, 0, &options)?);
        }
        pair.lab.all_done(ops)?;
        pair.lab.until("the imms", || back.imm(1).count() == 50 + u64::from(PAGES) + 3)?;
        (0..PAGES as usize).for_each(|page| dst.expect_from(page * 64, &src, 64..128));
        dst.check("pages with imms")?;
    }
    pair.lab.settle()
}

fn messages(context: &Context) -> Verdict {
    let pair = pair(context, &Dial::at([ALL, 0, 2]))?;
    for (from, to, other, _) in ways(&pair) {
        let src = Ground::new(from, 64, Access::LOCAL, context.seed)?;
        let pool = other.recv_pool(64, 64)?;
        let mut ops = Vec::new();
        for number in 0..30 {
            ops.push(to.send_with(&src.region, 0..64, &SendOptions::new().imm(number))?);
        }
        pair.lab.all_done(ops)?;
        pair.lab.settle()?;
        let mut imms = Vec::new();
        while let Some(message) = pool.try_next() {
            let message = message?;
            ensure(message.to_vec() == src.bytes(0..64), "a message has other bytes than were sent")?;
            imms.push(message.imm());
        }
        imms.sort_unstable();
        same("imms of the messages", imms, (0..30).map(Some).collect())?;
    }
    Ok(())
}

/// Single receives: the first transport of the receiver reaches nobody.
fn receives(context: &Context) -> Verdict {
    let pair = pair(context, &Dial::at([ALL, ALL, ALL]))?;
    for (from, to, other, back) in ways(&pair) {
        let src = Ground::new(from, 256, Access::LOCAL, context.seed)?;
        let mut dst = Ground::new(other, 256, OPEN, context.seed + 1)?;
        let mut receive = other.recv(&dst.region, 0..256)?;
        pair.lab.done(to.send(&src.region, 0..256)?)?;
        let got = pair.lab.result(&mut receive)??;
        same("bytes and sender", (got.bytes, got.peer), (256, Some(back.id())))?;
        dst.expect_from(0, &src, 0..256);
        dst.check("a message")?;
    }
    pair.lab.settle()
}

/// A window of bytes that the groups of a transport share, and reads, which take nothing of it.
fn bytes(context: &Context) -> Verdict {
    const LEN: usize = 5 << 20;
    let pair = pair(context, &Dial::at([1 << 20, 0, 0]))?;
    for (from, to, other, _) in ways(&pair) {
        let mut src = Ground::new(from, LEN, OPEN, context.seed)?;
        let mut dst = Ground::new(other, LEN, OPEN, context.seed + 1)?;
        let remote = dst.import(to)?;
        pair.lab.done(to.write(&src.region, 0..LEN, &remote, 0)?)?;
        dst.expect_from(0, &src, 0..LEN);
        dst.check("written through a window")?;
        dst.fill(context.seed + 2)?;
        pair.lab.done(to.read(&src.region, 0..LEN, &remote, 0)?)?;
        src.expect_from(0, &dst, 0..LEN);
        src.check("read")?;
    }
    pair.lab.settle()
}

/// A few imms and messages over the last transport, no limit over the others.
struct LastIsScarce;

const SCARCE: Grant = Grant { bytes: ALL, imms: 3, messages: 2 };

impl GrantPolicy for LastIsScarce {
    fn grant(&self, request: &GrantRequest<'_>) -> Grant {
        if request.transport == LABEL { SCARCE } else { Grant::UNLIMITED }
    }
}

/// Both transports reach the peer. The bytes go over the second, whose grant is small; what the first one
/// allows is no concern of theirs, and a sender that took it would be ended by the receiver.
fn not_anothers(context: &Context) -> Verdict {
    const WRITES: usize = 300;
    let lab = Lab::new(context);
    let labels = &["one", LABEL];
    let (a, b) = (open(&lab, labels, None)?, open(&lab, labels, Some(Arc::new(LastIsScarce)))?);
    let (to_b, to_a) = a.connect_local(&b)?;
    let src = Ground::new(&a, 64, Access::LOCAL, context.seed)?;
    let mut dst = Ground::new(&b, WRITES * 64, OPEN, context.seed + 1)?;
    let mut wire = Wire::of(&dst)?;
    wire.entries.retain(|entry| entry.transport == LABEL);
    let remote = to_b.import(&wire.forge()?)?;
    let mut ops = Vec::new();
    for number in 0..WRITES {
        let options = WriteOptions::new().imm(5);
        ops.push(to_b.write_with(&src.region, 0..64, &remote, number * 64, &options)?);
        dst.expect_from(number * 64, &src, 0..64);
    }
    // The target looks at nothing, and grants nothing more.
    for _ in 0..200 {
        a.step();
        lab.clock.advance(Duration::from_micros(50));
    }
    let done = ops.iter_mut().map(Op::try_result).filter(Option::is_some).count();
    same("writes with an imm that a target took that looks at none", done as u64, SCARCE.imms)?;
    let dump = a.dump();
    let waits_for_imms = |wait: &WaitReason| matches!(wait, WaitReason::Grant { of: GrantOf::Imms, .. });
    let named = dump.operations().filter(|operation| operation.waits.iter().any(waits_for_imms)).count();
    same("operations that wait for imms, as the dump has them", named, WRITES - done)?;
    lab.until("the imms", || to_a.imm(5).count() == WRITES as u64 || !to_a.is_alive())?;
    ensure(to_a.is_alive(), "the target ended a sender that keeps to its grant")?;
    lab.settle()?;
    ops.retain_mut(|op| op.try_result().is_none());
    dst.check("what was written")
}

/// The same in real time between two processes, which share the last transport of each alone, as two hosts do.
fn between_processes(context: &Context) -> Verdict {
    const IMMS: usize = 500;
    const PAGES: u32 = 64;
    let windows = Grant { bytes: 1 << 20, imms: 8, messages: 4 };
    let fabric = several(context, OURS, windows)?;
    let mut child = Child::spawn_idle(context)?;
    child.ask(&format!("open-several {} 1048576 8 4", THEIRS.join(",")))?;
    let address = child.ask("listen")?;
    let to_child = child.meets(&fabric, &address)?;
    child.ask("alloc there 4194304 7")?;
    let remote = crate::check::within(LIMIT, "a lookup", to_child.region("there"))??;
    let src = Ground::new(&fabric, 4 << 20, OPEN, context.seed)?;
    child.tell(&format!("expect 1 {IMMS}"))?;
    let ops: Result<Vec<Op>, _> = (0..IMMS).map(|_| to_child.write_imm(1)).collect();
    finish(ops?)?;
    child.answer("expect 1")?;
    let (from, to): (Vec<u32>, Vec<u32>) = ((0..PAGES).collect(), (0..PAGES).rev().collect());
    let options = WriteOptions::new().imm(2).per_wr();
    let (from, to) = (Pages::new(from), Pages::new(to));
    finish(vec![to_child.write_pages_with(&src.region, &from, &remote, &to, 64 << 10, &options)?])?;
    child.ask(&format!("expect 2 {PAGES}"))?;
    let back = Ground::new(&fabric, 4 << 20, OPEN, context.seed + 1)?;
    finish(vec![to_child.read(&back.region, 0..4 << 20, &remote, 0)?])?;
    let mut page = vec![0; 64 << 10];
    for number in 0..PAGES as usize {
        back.region.copy_out(number << 16, &mut page)?;
        let other = (PAGES as usize - 1 - number) << 16;
        ensure(page == src.bytes(other..other + (64 << 10)), format!("page {number} has other bytes"))?;
    }
    // The other way, and messages both ways.
    child.tell(&format!("imms 3 {IMMS}"))?;
    let counter = to_child.imm(3);
    crate::check::within(LIMIT, "the helper's imms", counter.expect(IMMS as u64))??;
    child.answer("imms 3")?;
    child.ask("pool 16 64")?;
    let ops: Result<Vec<Op>, _> = (0..100).map(|_| to_child.send(&src.region, 0..64)).collect();
    child.ask("pooled 100 64")?;
    finish(ops?)?;
    let pool = fabric.recv_pool(16, 64)?;
    child.tell("sends there 0 64 100")?;
    for _ in 0..100 {
        same("bytes of a message", pool.next().wait(LIMIT)?.len(), 64)?;
    }
    child.answer("sends")?;
    ensure(to_child.is_alive(), "the peer is gone")
}

fn finish(ops: Vec<Op>) -> Verdict {
    for mut op in ops {
        op.wait(LIMIT)?;
    }
    Ok(())
}
