//! Peers that die, freeze, lose their connection, or come back as another.

use limit::Limit;
use rustix::process::Signal;
use transport_core::spi::Operations;
use transport_core::{Descriptor, Error, ErrorKind, Op, PeerGroup};

use crate::check::{Verdict, ensure, refused, same, within};
use crate::end::End;
use crate::ground::{Ground, OPEN};
use crate::process::{Child, LIMIT, Meeting, Proxy, impatient, live};
use crate::subject::Variant;
use crate::trial::{Context, Trial};

/// Work that ends at once, and work that is posted for long.
const PATHS: &[Variant] = &[Variant::Plain, Variant::Queued, Variant::Slow];

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("death::killed", killed).on(PATHS).needs(Operations::WRITE_IMM).process(),
    Trial::new("death::stopped", stopped).on(PATHS).needs(Operations::WRITE_IMM).process(),
    Trial::new("death::connection_cut", cut).on(PATHS).needs(Operations::WRITE_IMM).process(),
    Trial::new("death::connection_silent", silent).needs(Operations::WRITE_IMM).process(),
    Trial::new("death::says_goodbye", says_goodbye).on(PATHS).needs(Operations::WRITE_IMM).process(),
    Trial::new("death::our_end_is_seen_there", seen_there).process(),
    Trial::new("death::comes_back_as_another", comes_back).process(),
    Trial::new("death::a_frozen_peer_thaws", thaws).process(),
    Trial::new("death::killed_while_it_writes", killed_while_it_writes).on(PATHS).process(),
    Trial::new("death::another_goes_on", another_goes_on).needs(Operations::WRITE_IMM).process(),
];

/// Does `end` to the peer in the middle of everything; every waiter must learn of
/// it, by an error of one of `kinds`: none by a deadline, of which the fabric has long ones only.
fn every_waiter(
    context: &Context,
    fabric: End,
    kinds: &[ErrorKind],
    end: impl FnOnce(&mut Child, &Proxy) -> Verdict,
) -> Verdict {
    let mut child = Child::spawn(context)?;
    let proxy = Proxy::to(&child.ask("listen")?)?;
    let peer = child.meets(&fabric, proxy.address())?;
    child.ask(&format!("alloc far {} 1", 4 << 20))?;
    let src = Ground::new(&fabric, 4 << 20, OPEN, 2)?;
    let remote = within(LIMIT, "a lookup", peer.region("far"))??;
    let write = || peer.write(&src.region, 0..4 << 20, &remote, 0);
    let mut ops: Vec<Op> = vec![write()?, write()?, write()?];
    // Nobody there receives: messages wait.
    if fabric.transports()[0].capabilities.operations.contains(Operations::SEND) {
        for _ in 0..200 {
            ops.push(peer.send(&src.region, 0..1000)?);
        }
    }
    let expected = peer.imm(1).expect(1);
    let barrier = PeerGroup::new([peer.clone()])?.barrier("nobody comes", LIMIT)?;
    let lookup = peer.region("far");
    end(&mut child, &proxy)?;
    // Who goes on writing learns of it too.
    let mut limit = Limit::of(LIMIT);
    let error = loop {
        match write().and_then(|mut op| op.wait(LIMIT)) {
            Ok(_) => ensure(!limit.is_over(), "writes to a peer that is gone still succeed")?,
            Err(error) => break error,
        }
    };
    refused::<()>("a write", Err(error), kinds)?;
    for mut op in ops {
        let result = op.wait(LIMIT);
        ensure_over(&mut op, &result)?;
        if let Err(error) = result {
            refused::<()>("an operation under way", Err(error), kinds)?;
        }
    }
    refused("an expected imm", expected.wait(LIMIT), kinds)?;
    refused("a barrier", within(LIMIT, "a barrier", barrier)?, kinds)?;
    refused("the peer", Err::<(), _>(within(LIMIT, "the peer's end", peer.closed())?), kinds)?;
    if let Err(error) = within(LIMIT, "a lookup", lookup)? {
        refused::<()>("a lookup", Err(error), kinds)?;
    }
    ensure(!peer.is_alive(), "alive after its end")?;
    refused("a later imm", peer.write_imm(1).map(drop), kinds)?;
    // The fabric itself is well.
    Child::met(context, &fabric)?;
    src.check("the source")
}

/// A wait that gave up says `DeadlineExceeded`, and so does an operation: tell them apart.
#[track_caller]
fn ensure_over(op: &mut Op, result: &Result<transport_core::Outcome, Error>) -> Verdict {
    let over = result.is_ok() || result.as_ref().is_err_and(|error| error.operation() != "wait");
    ensure(over && op.try_result().is_none(), "an operation still waits for a peer that is gone")
}

fn killed(context: &Context) -> Verdict {
    every_waiter(context, live(context)?, &[ErrorKind::PeerDied], |child, _| child.signal(Signal::KILL))
}

fn stopped(context: &Context) -> Verdict {
    every_waiter(context, impatient(context)?, &[ErrorKind::PeerDied], |child, _| child.signal(Signal::STOP))
}

fn cut(context: &Context) -> Verdict {
    every_waiter(context, live(context)?, &[ErrorKind::PeerDied, ErrorKind::Closed], |_, proxy| {
        proxy.cut();
        Ok(())
    })
}

fn silent(context: &Context) -> Verdict {
    every_waiter(context, impatient(context)?, &[ErrorKind::PeerDied], |_, proxy| {
        proxy.fall_silent();
        Ok(())
    })
}

fn says_goodbye(context: &Context) -> Verdict {
    let kinds = [ErrorKind::Closed, ErrorKind::PeerDied];
    every_waiter(context, live(context)?, &kinds, |child, _| child.tell("close"))
}

fn seen_there(context: &Context) -> Verdict {
    let mut meeting = Meeting::new(context)?;
    meeting.child.tell("ended")?;
    meeting.peer.disconnect();
    let kind = meeting.child.answer("ended")?;
    ensure(kind == "Closed", format!("a disconnect is seen as {kind}"))?;
    let mut meeting = Meeting::new(context)?;
    meeting.child.tell("ended")?;
    // The last handle goes: that closes the fabric as well.
    let Meeting { fabric, peer, mut child } = meeting;
    drop((fabric, peer));
    let kind = child.answer("ended")?;
    ensure(kind == "Closed", format!("a dropped fabric is seen as {kind}"))
}

fn comes_back(context: &Context) -> Verdict {
    let Meeting { fabric, peer, mut child } = Meeting::new(context)?;
    child.ask("alloc far 4096 1")?;
    let old = Descriptor::from_bytes(&child.descriptor("far")?)?;
    peer.import(&old)?;
    drop(child);
    let (mut child, again) = Child::met(context, &fabric)?;
    child.ask("alloc far 4096 1")?;
    ensure(again.incarnation() != peer.incarnation(), "a restarted peer has its old incarnation")?;
    refused("a descriptor of its former life", again.import(&old).map(drop), &[ErrorKind::Revoked])?;
    within(LIMIT, "a lookup", again.region("far"))??;
    child.ask("holds far").map(drop)
}

/// It comes back after we gave it up: it learns so, and nothing of its is let in.
fn thaws(context: &Context) -> Verdict {
    let fabric = impatient(context)?;
    let (mut child, peer) = Child::met(context, &fabric)?;
    let mut near = Ground::new(&fabric, 1 << 20, OPEN, 1)?;
    fabric.publish("near", &near.region)?;
    child.ask(&format!("alloc far {} 2", 1 << 20))?;
    child.ask("write far 0 1000 near 0 -")?;
    child.signal(Signal::STOP)?;
    within(LIMIT, "the end of a frozen peer", peer.closed())?;
    near.fill(3)?;
    child.signal(Signal::CONT)?;
    child.refuses("write far 0 1000 near 0 -", &["PeerDied", "Closed"])?;
    child.ask("ended")?;
    near.check("memory that a thawed peer may not touch")
}

/// The helper dies with its writes to us under way: our memory is ours again.
fn killed_while_it_writes(context: &Context) -> Verdict {
    let mut meeting = Meeting::new(context)?;
    let mut near = Ground::new(&meeting.fabric, 4 << 20, OPEN, 1)?;
    meeting.fabric.publish("near", &near.region)?;
    meeting.child.ask(&format!("alloc far {} 2", 4 << 20))?;
    for _ in 0..50 {
        meeting.child.tell(&format!("write far 0 {} near 0 -", 4 << 20))?;
    }
    meeting.child.signal(Signal::KILL)?;
    refused::<()>("the peer", Err(meeting.end(LIMIT)?), &[ErrorKind::PeerDied])?;
    near.take_back(&meeting.fabric)?;
    near.fill(3)?;
    near.check("after a revocation")
}

/// The first of two peers dies; with the other, more than fits any queue goes both ways at once.
///
/// EFA's provider of 1.17 crashed there: with requests queued, it looks at the first address.
fn another_goes_on(context: &Context) -> Verdict {
    let Meeting { fabric, peer: first, child } = Meeting::new(context)?;
    let (mut other, peer) = Child::met(context, &fabric)?;
    drop(child);
    refused::<()>("the first", Err(within(LIMIT, "its end", first.closed())?), &[ErrorKind::PeerDied])?;
    for round in 1..=3 {
        other.tell("imms 4 4000")?;
        let ops: Result<Vec<_>, _> = (0..4000).map(|_| peer.write_imm(3)).collect();
        for mut op in ops? {
            op.wait(LIMIT)?;
        }
        other.answer("imms 4 4000")?;
        let sum = 4000 * round;
        peer.imm(4).expect(sum).wait(LIMIT)?;
        same("imms there", other.ask(&format!("expect 3 {sum}"))?, sum.to_string())?;
    }
    Ok(())
}
