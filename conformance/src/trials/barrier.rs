//! Barriers: peers wait for each other, in virtual time and between processes.

use std::pin::Pin;
use std::time::Duration;

use rustix::process::Signal;
use transport_core::{Barrier, Error, ErrorKind, Peer, PeerGroup};

use crate::check::{TestResult, ensure, ensure_eq, ensure_err, poll_once, within};
use crate::process::{HelperProcess, LIMIT, short_timeout_fabric, worker_fabric};
use crate::sim_harness::{Options, SimHarness, SimPair};
use crate::trial::{Trial, TrialContext, TrialFabric};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("barrier::whoever_comes_first", order),
    Trial::new("barrier::all_of_three", three),
    Trial::new("barrier::names_do_not_cross", names),
    Trial::new("barrier::late", late),
    Trial::new("barrier::given_up_and_taken_up", taken_up),
    Trial::new("barrier::peer_goes", goes),
    Trial::new("barrier::between_processes", processes).process(),
    Trial::new("barrier::helper_dies", dies).process(),
];

const LONG: Duration = Duration::from_secs(60);

/// Returns the barrier's result if it has one.
fn try_result(barrier: &mut Barrier) -> Option<Result<(), Error>> {
    poll_once(Pin::new(barrier))
}

#[track_caller]
fn passes(mut barrier: Barrier) -> TestResult {
    ensure(
        try_result(&mut barrier).is_some_and(|result| result.is_ok()),
        "all peers have arrived, but this one still waits",
    )
}

#[track_caller]
fn waits(barrier: &mut Barrier) -> TestResult {
    ensure(try_result(barrier).is_none(), "the barrier passed before all peers arrived")
}

fn group(peer: &Peer) -> TestResult<PeerGroup> {
    Ok(PeerGroup::new([peer.clone()])?)
}

fn order(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let groups = [group(&pair.to_b)?, group(&pair.to_a)?];
    for round in 0..100 {
        let first = round % 2;
        let mut early = groups[first].barrier("round", LONG)?;
        waits(&mut early)?;
        pair.sim.settle()?;
        waits(&mut early)?;
        let late = groups[1 - first].barrier("round", LONG)?;
        if round % 3 == 0 {
            // The side that arrived last is the first at the next barrier, before the other side has polled.
            passes(late)?;
            let mut next = groups[1 - first].barrier("round", LONG)?;
            waits(&mut next)?;
            passes(early)?;
            passes(groups[first].barrier("round", LONG)?)?;
            passes(next)?;
        } else {
            passes(early)?;
            passes(late)?;
        }
    }
    // A barrier is no user traffic: it sends no imms and posts no requests.
    ensure_eq("imms", (0..256).map(|imm| pair.to_a.imm(imm).count()).sum::<u64>(), 0)?;
    ensure_eq("requests", pair.a.counters().iter().map(|rail| rail.posts + rail.direct).sum::<u64>(), 0)
}

/// Opens three fabrics and connects each with both others. Returns the fabrics and their groups.
fn triangle(context: &TrialContext) -> TestResult<(SimHarness, Vec<TrialFabric>, Vec<PeerGroup>)> {
    let sim = SimHarness::new(context);
    let fabrics: Vec<_> = (0..3).map(|_| sim.open(&Options::default())).collect::<TestResult<_>>()?;
    let mut peers: Vec<Vec<Peer>> = vec![vec![]; 3];
    for (one, other) in [(0, 1), (1, 2), (2, 0)] {
        let (to, from) = fabrics[one].connect_local(&fabrics[other])?;
        peers[one].push(to);
        peers[other].push(from);
    }
    let groups = peers.into_iter().map(PeerGroup::new).collect::<Result<_, _>>()?;
    Ok((sim, fabrics, groups))
}

fn three(context: &TrialContext) -> TestResult {
    let (_lab, _fabrics, groups) = triangle(context)?;
    for last in [0, 1, 2, 0] {
        let others = (0..3).filter(|at| *at != last);
        let mut early: Vec<_> = others.map(|at| groups[at].barrier(7, LONG)).collect::<Result<_, _>>()?;
        early.iter_mut().try_for_each(waits)?;
        passes(groups[last].barrier(7, LONG)?)?;
        early.into_iter().try_for_each(passes)?;
    }
    Ok(())
}

fn names(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let (ours, theirs) = (group(&pair.to_b)?, group(&pair.to_a)?);
    let (mut one, two) = (ours.barrier("one", LONG)?, ours.barrier(2, LONG)?);
    ensure_err("the same again", ours.barrier("one", LONG).map(drop), &[ErrorKind::Busy])?;
    passes(theirs.barrier("2", LONG)?)?;
    waits(&mut one)?;
    passes(two)?;
    let mut three = theirs.barrier("three", LONG)?;
    waits(&mut three)?;
    waits(&mut one)?;
    passes(theirs.barrier("one", LONG)?)?;
    passes(one)?;
    for name in ["", &"x".repeat(256)] {
        ensure_err("a name", ours.barrier(name, LONG).map(drop), &[ErrorKind::InvalidRequest])?;
    }
    Ok(())
}

/// The barrier ends at its deadline by the fabric's own clock, without other traffic.
fn late(context: &TrialContext) -> TestResult {
    let (sim, fabrics, groups) = triangle(context)?;
    let begun = sim.clock.clone();
    let now = || transport_core::Clock::now(&begun);
    for limit in [Duration::from_millis(1), Duration::from_secs(20)] {
        let start = now();
        let mut barrier = groups[0].barrier("never", limit)?;
        drop(groups[1].barrier("never", limit)?);
        waits(&mut barrier)?;
        fabrics[0].step();
        ensure(fabrics[0].due() <= start.after(limit), "the fabric is not due at the deadline")?;
        let mut result = None;
        sim.until("a deadline", || {
            result = try_result(&mut barrier);
            result.is_some()
        })?;
        let error = ensure_err("a barrier", result.unwrap_or(Ok(())), &[ErrorKind::DeadlineExceeded])?;
        ensure(
            error.context().contains("1 of 2 peers"),
            format!("the error does not count the missing peers: {error}"),
        )?;
        ensure(now() >= start.after(limit), "the barrier ended before its deadline")?;
        ensure_err("its second result", try_result(&mut barrier).unwrap_or(Ok(())), &[ErrorKind::Closed])?;
    }
    Ok(())
}

fn taken_up(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let (ours, theirs) = (group(&pair.to_b)?, group(&pair.to_a)?);
    for _ in 0..3 {
        // The barrier is dropped before and after a poll; it arrived once.
        drop(ours.barrier("a", LONG)?);
        waits(&mut ours.barrier("a", LONG)?)?;
        passes(theirs.barrier("a", LONG)?)?;
        let mut again = theirs.barrier("a", LONG)?;
        waits(&mut again)?;
        passes(ours.barrier("a", LONG)?)?;
        waits(&mut again)?;
        passes(ours.barrier("a", LONG)?)?;
        passes(again)?;
    }
    Ok(())
}

fn goes(context: &TrialContext) -> TestResult {
    let gone = &[ErrorKind::PeerDied, ErrorKind::Closed];
    let (_lab, fabrics, groups) = triangle(context)?;
    let mut barrier = groups[0].barrier("a", LONG)?;
    // A peer may leave after it has arrived.
    drop(groups[1].barrier("a", LONG)?);
    waits(&mut barrier)?;
    fabrics[1].close();
    waits(&mut barrier)?;
    fabrics[2].close();
    ensure_err("a barrier", try_result(&mut barrier).unwrap_or(Ok(())), gone)?;
    ensure_err("the next", groups[0].barrier("b", LONG).map(drop), gone)?;
    let (_lab, fabrics, groups) = triangle(context)?;
    let mut barrier = groups[0].barrier("a", LONG)?;
    fabrics[0].close();
    ensure_err("a barrier of a closed fabric", try_result(&mut barrier).unwrap_or(Ok(())), gone).map(drop)
}

/// Starts helpers and makes a group of them.
fn helper_group(
    context: &TrialContext,
    fabric: TrialFabric,
    count: usize,
) -> TestResult<(TrialFabric, Vec<HelperProcess>, PeerGroup)> {
    let mut children = Vec::new();
    let mut peers = Vec::new();
    for _ in 0..count {
        let (helper, peer) = HelperProcess::spawn_connected(context, &fabric)?;
        peers.push(peer);
        children.push(helper);
    }
    Ok((fabric, children, PeerGroup::new(peers)?))
}

fn processes(context: &TrialContext) -> TestResult {
    let (_fabric, mut children, group) = helper_group(context, worker_fabric(context)?, 3)?;
    for round in 0..20 {
        let (before, after) = children.split_at_mut(round % 4);
        before.iter_mut().try_for_each(|helper| helper.start("barrier round"))?;
        let barrier = group.barrier("round", LIMIT)?;
        after.iter_mut().try_for_each(|helper| helper.start("barrier round"))?;
        match round % 2 {
            0 => within(LIMIT, "a barrier", barrier)??,
            _ => barrier.wait()?,
        }
        children.iter_mut().try_for_each(|helper| helper.finish("barrier round").map(drop))?;
    }
    children[0].start("barrier last")?;
    let early = group.barrier("last", Duration::from_millis(50))?.wait();
    ensure_err("two are missing", early, &[ErrorKind::DeadlineExceeded])?;
    children[1..].iter_mut().try_for_each(|helper| helper.start("barrier last"))?;
    group.barrier("last", LIMIT)?.wait()?;
    children.iter_mut().try_for_each(|helper| helper.finish("barrier last").map(drop))
}

fn dies(context: &TrialContext) -> TestResult {
    for signal in [Signal::KILL, Signal::STOP] {
        // A kill closes the connection. A stop shows by silence alone.
        let fabric =
            if signal == Signal::KILL { worker_fabric(context)? } else { short_timeout_fabric(context)? };
        let (_fabric, mut children, group) = helper_group(context, fabric, 2)?;
        children[0].start("barrier a")?;
        let barrier = group.barrier("a", LIMIT)?;
        children[1].signal(signal)?;
        ensure_err("a barrier", barrier.wait(), &[ErrorKind::PeerDied])?;
        // The helper waits for this process alone, which has arrived.
        children[0].finish("barrier a")?;
    }
    Ok(())
}
