//! Peers that die, stop, lose their connection, or restart.

use limit::Limit;
use rustix::process::Signal;
use transport_core::spi::Operations;
use transport_core::{Descriptor, Error, ErrorKind, Op, PeerGroup};

use crate::backend_under_test::Variant;
use crate::check::{TestResult, ensure, ensure_eq, ensure_err, within};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::process::{ConnectedPair, HelperProcess, LIMIT, Proxy, short_timeout_fabric, worker_fabric};
use crate::trial::{Trial, TrialContext, TrialFabric};

/// Operations that complete at once, and operations that stay posted for long.
const PATHS: &[Variant] = &[Variant::Plain, Variant::Queued, Variant::Slow];

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("death::killed", killed).on(PATHS).needs(Operations::WRITE_IMM).process(),
    Trial::new("death::stopped", stopped).on(PATHS).needs(Operations::WRITE_IMM).process(),
    Trial::new("death::connection_cut", cut).on(PATHS).needs(Operations::WRITE_IMM).process(),
    Trial::new("death::connection_silent", silent).needs(Operations::WRITE_IMM).process(),
    Trial::new("death::says_goodbye", closes_orderly).on(PATHS).needs(Operations::WRITE_IMM).process(),
    Trial::new("death::our_end_is_seen_there", seen_there).process(),
    Trial::new("death::comes_back_as_another", comes_back).process(),
    Trial::new("death::a_frozen_peer_thaws", thaws).process(),
    Trial::new("death::killed_while_it_writes", killed_while_it_writes).on(PATHS).process(),
    Trial::new("death::another_goes_on", another_goes_on).needs(Operations::WRITE_IMM).process(),
];

/// Calls `end` on the peer while operations are outstanding. Every waiter must then get an error of one of `kinds`. No
/// waiter ends by a deadline, because the fabric has long deadlines only.
fn every_waiter(
    context: &TrialContext,
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
    // The peer posts no receive, so messages wait.
    if fabric.transports()[0].capabilities.operations.contains(Operations::SEND) {
        for _ in 0..200 {
            ops.push(peer.send(&src.region, 0..1000)?);
        }
    }
    let expected = peer.imm(1).expect(1);
    let barrier = PeerGroup::new([peer.clone()])?.barrier("nobody comes", LIMIT)?;
    let lookup = peer.region("far");
    end(&mut helper, &proxy)?;
    // Later writes fail too.
    let mut limit = Limit::of(LIMIT);
    let error = loop {
        match write().and_then(|mut op| op.wait(LIMIT)) {
            Ok(_) => ensure(!limit.is_over(), "writes to a closed peer still succeed")?,
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
    ensure_err("the peer", Err::<(), _>(within(LIMIT, "the close of the peer", peer.closed())?), kinds)?;
    if let Err(error) = within(LIMIT, "a lookup", lookup)? {
        ensure_err::<()>("a lookup", Err(error), kinds)?;
    }
    ensure(!peer.is_alive(), "the peer is alive after its close")?;
    ensure_err("a later imm", peer.write_imm(1).map(drop), kinds)?;
    // The fabric itself still works.
    HelperProcess::spawn_connected(context, &fabric)?;
    src.check("the source")
}

/// Fails if the operation still waits. A wait that timed out and an operation that expired both return
/// `DeadlineExceeded`, so this looks at the operation too.
#[track_caller]
fn ensure_over(op: &mut Op, result: &Result<transport_core::Outcome, Error>) -> TestResult {
    let over = result.is_ok() || result.as_ref().is_err_and(|error| error.operation() != "wait");
    ensure(over && op.try_result().is_none(), "an operation still waits for a closed peer")
}

fn killed(context: &TrialContext) -> TestResult {
    every_waiter(context, worker_fabric(context)?, &[ErrorKind::PeerDied], |helper, _| {
        helper.signal(Signal::KILL)
    })
}

fn stopped(context: &TrialContext) -> TestResult {
    every_waiter(context, short_timeout_fabric(context)?, &[ErrorKind::PeerDied], |helper, _| {
        helper.signal(Signal::STOP)
    })
}

fn cut(context: &TrialContext) -> TestResult {
    every_waiter(context, worker_fabric(context)?, &[ErrorKind::PeerDied, ErrorKind::Closed], |_, proxy| {
        proxy.cut();
        Ok(())
    })
}

fn silent(context: &TrialContext) -> TestResult {
    every_waiter(context, short_timeout_fabric(context)?, &[ErrorKind::PeerDied], |_, proxy| {
        proxy.stop_forwarding();
        Ok(())
    })
}

fn closes_orderly(context: &TrialContext) -> TestResult {
    let kinds = [ErrorKind::Closed, ErrorKind::PeerDied];
    every_waiter(context, worker_fabric(context)?, &kinds, |helper, _| helper.start("close"))
}

fn seen_there(context: &TrialContext) -> TestResult {
    let mut pair = ConnectedPair::new(context)?;
    pair.helper.start("wait-closed")?;
    pair.peer.disconnect();
    let kind = pair.helper.finish("wait-closed")?;
    ensure(kind == "Closed", format!("the peer sees a disconnect as {kind}"))?;
    let mut pair = ConnectedPair::new(context)?;
    pair.helper.start("wait-closed")?;
    // Dropping the last handle closes the fabric as well.
    let ConnectedPair { fabric, peer, mut helper } = pair;
    drop((fabric, peer));
    let kind = helper.finish("wait-closed")?;
    ensure(kind == "Closed", format!("the peer sees a dropped fabric as {kind}"))
}

fn comes_back(context: &TrialContext) -> TestResult {
    let ConnectedPair { fabric, peer, mut helper } = ConnectedPair::new(context)?;
    helper.command("alloc far 4096 1")?;
    let old = Descriptor::from_bytes(&helper.descriptor("far")?)?;
    peer.import(&old)?;
    drop(helper);
    let (mut helper, again) = HelperProcess::spawn_connected(context, &fabric)?;
    helper.command("alloc far 4096 1")?;
    ensure(again.incarnation() != peer.incarnation(), "a restarted peer has its old incarnation number")?;
    ensure_err("a descriptor of its former life", again.import(&old).map(drop), &[ErrorKind::Revoked])?;
    within(LIMIT, "a lookup", again.region("far"))??;
    helper.command("check-all far").map(drop)
}

/// A stopped peer continues after the other side has closed the connection. It gets the close, and none of its bytes
/// land.
fn thaws(context: &TrialContext) -> TestResult {
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

/// The helper dies while its writes to this process are outstanding. Afterwards only this process writes its memory.
fn killed_while_it_writes(context: &TrialContext) -> TestResult {
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

/// The first of two peers dies. More imms than fit any queue then go both ways between the other peer and this process.
///
/// EFA's provider of libfabric 1.17 crashed here: with queued requests, it looks at the first address.
fn another_goes_on(context: &TrialContext) -> TestResult {
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
