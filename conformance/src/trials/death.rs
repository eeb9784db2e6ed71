//! Peers that die, freeze, lose their connection, or come back as another.

use limit::Limit;
use rustix::process::Signal;
use transport_core::spi::Operations;
use transport_core::{Descriptor, Error, ErrorKind, Op, PeerGroup};

use crate::backend_under_test::Variant;
use crate::check::{TestResult, ensure, ensure_eq, ensure_err, within};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::process::{ConnectedPair, HelperProcess, LIMIT, Proxy, short_timeout_fabric, worker_fabric};
use crate::trial::{Context, Trial};
use crate::trial_fabric::TrialFabric;

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
    fabric: TrialFabric,
    kinds: &[ErrorKind],
    end: impl FnOnce(&mut HelperProcess, &Proxy) -> TestResult,
) -> TestResult {
    let mut helper = HelperProcess::spawn(context)?;
    let proxy = Proxy::to(&helper.command("listen")?)?;
    let peer = helper.connect(&fabric, proxy.address())?;
    helper.command(&format!("alloc far {} 1", 4 << 20))?;
    let src = CheckedRegion::new(&fabric, 4 << 20, FULL_ACCESS, 2)?;
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
    end(&mut helper, &proxy)?;
    // Who goes on writing learns of it too.
    let mut limit = Limit::of(LIMIT);
    let error = loop {
        match write().and_then(|mut op| op.wait(LIMIT)) {
            Ok(_) => ensure(!limit.is_over(), "writes to a peer that is gone still succeed")?,
            Err(error) => break error,
        }
    };
    ensure_err::<()>("a write", Err(error), kinds)?;
    for mut op in ops {
        let result = op.wait(LIMIT);
        ensure_over(&mut op, &result)?;
        if let Err(error) = result {
            ensure_err::<()>("an operation under way", Err(error), kinds)?;
        }
    }
    ensure_err("an expected imm", expected.wait(LIMIT), kinds)?;
    ensure_err("a barrier", within(LIMIT, "a barrier", barrier)?, kinds)?;
    ensure_err("the peer", Err::<(), _>(within(LIMIT, "the peer's end", peer.closed())?), kinds)?;
    if let Err(error) = within(LIMIT, "a lookup", lookup)? {
        ensure_err::<()>("a lookup", Err(error), kinds)?;
    }
    ensure(!peer.is_alive(), "alive after its end")?;
    ensure_err("a later imm", peer.write_imm(1).map(drop), kinds)?;
    // The fabric itself is well.
    HelperProcess::spawn_connected(context, &fabric)?;
    src.check("the source")
}

/// A wait that gave up says `DeadlineExceeded`, and so does an operation: tell them apart.
#[track_caller]
fn ensure_over(op: &mut Op, result: &Result<transport_core::Outcome, Error>) -> TestResult {
    let over = result.is_ok() || result.as_ref().is_err_and(|error| error.operation() != "wait");
    ensure(over && op.try_result().is_none(), "an operation still waits for a peer that is gone")
}

fn killed(context: &Context) -> TestResult {
    every_waiter(context, worker_fabric(context)?, &[ErrorKind::PeerDied], |helper, _| {
        helper.signal(Signal::KILL)
    })
}

fn stopped(context: &Context) -> TestResult {
    every_waiter(context, short_timeout_fabric(context)?, &[ErrorKind::PeerDied], |helper, _| {
        helper.signal(Signal::STOP)
    })
}

fn cut(context: &Context) -> TestResult {
    every_waiter(context, worker_fabric(context)?, &[ErrorKind::PeerDied, ErrorKind::Closed], |_, proxy| {
        proxy.cut();
        Ok(())
    })
}

fn silent(context: &Context) -> TestResult {
    every_waiter(context, short_timeout_fabric(context)?, &[ErrorKind::PeerDied], |_, proxy| {
        proxy.stop_forwarding();
        Ok(())
    })
}

fn says_goodbye(context: &Context) -> TestResult {
    let kinds = [ErrorKind::Closed, ErrorKind::PeerDied];
    every_waiter(context, worker_fabric(context)?, &kinds, |helper, _| helper.start("close"))
}

fn seen_there(context: &Context) -> TestResult {
    let mut pair = ConnectedPair::new(context)?;
    pair.helper.start("wait-closed")?;
    pair.peer.disconnect();
    let kind = pair.helper.finish("wait-closed")?;
    ensure(kind == "Closed", format!("a disconnect is seen as {kind}"))?;
    let mut pair = ConnectedPair::new(context)?;
    pair.helper.start("wait-closed")?;
    // The last handle goes: that closes the fabric as well.
    let ConnectedPair { fabric, peer, mut helper } = pair;
    drop((fabric, peer));
    let kind = helper.finish("wait-closed")?;
    ensure(kind == "Closed", format!("a dropped fabric is seen as {kind}"))
}

fn comes_back(context: &Context) -> TestResult {
    let ConnectedPair { fabric, peer, mut helper } = ConnectedPair::new(context)?;
    helper.command("alloc far 4096 1")?;
    let old = Descriptor::from_bytes(&helper.descriptor("far")?)?;
    peer.import(&old)?;
    drop(helper);
    let (mut helper, again) = HelperProcess::spawn_connected(context, &fabric)?;
    helper.command("alloc far 4096 1")?;
    ensure(again.incarnation() != peer.incarnation(), "a restarted peer has its old incarnation")?;
    ensure_err("a descriptor of its former life", again.import(&old).map(drop), &[ErrorKind::Revoked])?;
    within(LIMIT, "a lookup", again.region("far"))??;
    helper.command("check-all far").map(drop)
}

/// It comes back after we gave it up: it learns so, and nothing of its is let in.
fn thaws(context: &Context) -> TestResult {
    let fabric = short_timeout_fabric(context)?;
    let (mut helper, peer) = HelperProcess::spawn_connected(context, &fabric)?;
    let mut near = CheckedRegion::new(&fabric, 1 << 20, FULL_ACCESS, 1)?;
    fabric.publish("near", &near.region)?;
    helper.command(&format!("alloc far {} 2", 1 << 20))?;
    helper.command("write far 0 1000 near 0 -")?;
    helper.signal(Signal::STOP)?;
    within(LIMIT, "the end of a frozen peer", peer.closed())?;
    near.fill(3)?;
    helper.signal(Signal::CONT)?;
    helper.expect_error("write far 0 1000 near 0 -", &["PeerDied", "Closed"])?;
    helper.command("wait-closed")?;
    near.check("memory that a thawed peer may not touch")
}

/// The helper dies with its writes to us under way: our memory is ours again.
fn killed_while_it_writes(context: &Context) -> TestResult {
    let mut pair = ConnectedPair::new(context)?;
    let mut near = CheckedRegion::new(&pair.fabric, 4 << 20, FULL_ACCESS, 1)?;
    pair.fabric.publish("near", &near.region)?;
    pair.helper.command(&format!("alloc far {} 2", 4 << 20))?;
    for _ in 0..50 {
        pair.helper.start(&format!("write far 0 {} near 0 -", 4 << 20))?;
    }
    pair.helper.signal(Signal::KILL)?;
    ensure_err::<()>("the peer", Err(pair.wait_closed(LIMIT)?), &[ErrorKind::PeerDied])?;
    near.revoke_and_wait(&pair.fabric)?;
    near.fill(3)?;
    near.check("after a revocation")
}

/// The first of two peers dies; with the other, more than fits any queue goes both ways at once.
///
/// EFA's provider of 1.17 crashed there: with requests queued, it looks at the first address.
fn another_goes_on(context: &Context) -> TestResult {
    let ConnectedPair { fabric, peer: first, helper } = ConnectedPair::new(context)?;
    let (mut other, peer) = HelperProcess::spawn_connected(context, &fabric)?;
    drop(helper);
    ensure_err::<()>("the first", Err(within(LIMIT, "its end", first.closed())?), &[ErrorKind::PeerDied])?;
    for round in 1..=3 {
        other.start("imms 4 4000")?;
        let ops: Result<Vec<_>, _> = (0..4000).map(|_| peer.write_imm(3)).collect();
        for mut op in ops? {
            op.wait(LIMIT)?;
        }
        other.finish("imms 4 4000")?;
        let sum = 4000 * round;
        peer.imm(4).expect(sum).wait(LIMIT)?;
        ensure_eq("imms there", other.command(&format!("expect 3 {sum}"))?, sum.to_string())?;
    }
    Ok(())
}
