//! Warming up: every rail answers, nothing is delivered, and no operation hangs.

use std::sync::Arc;
use std::time::Duration;

use transport_core::{Access, ErrorKind, Workers};

use crate::backend_under_test::Variant;
use crate::check::{TestResult, TrialFailure, ensure_eq, ensure_err};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::process::{ConnectedPair, LIMIT};
use crate::sim_harness::{Options, SimHarness, SimPair, builder};
use crate::trial::{ALL_PATHS, Trial, TrialContext};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("warm_up::every_rail_answers", every_rail).on(ALL_PATHS),
    Trial::new("warm_up::ends_by_its_deadline", deadline).on(&[Variant::Slow]),
    Trial::new("warm_up::peer_goes", goes).on(&[Variant::Queued, Variant::Slow]),
    Trial::new("warm_up::between_processes", processes).process(),
    Trial::new("warm_up::of_eager_workers", eager).rails(2),
];

fn every_rail(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 100_000, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, 100_000, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let rails = pair.a.transports()[0].devices.len() as u32;
    for round in 1..4 {
        let outcome = pair.sim.done(pair.to_b.warm_up()?)?;
        ensure_eq("bytes and requests", (outcome.bytes, outcome.work_requests), (0, rails))?;
        let posts: Vec<_> = pair.a.counters().iter().map(|rail| rail.posts).collect();
        ensure_eq("posts of each rail", posts, vec![round; rails as usize])?;
        pair.sim.done(pair.to_a.warm_up()?)?;
    }
    pair.sim.settle()?;
    ensure_eq(
        "imms",
        (0..64).map(|imm| pair.to_a.imm(imm).count() + pair.to_b.imm(imm).count()).sum::<u64>(),
        0,
    )?;
    dst.check("warmed up")?;
    src.check("warmed up")?;
    pair.sim.done(pair.to_b.write(&src.region, 0..90_000, &remote, 5)?)?;
    dst.expect_from(5, &src, 0..90_000);
    dst.check("a write after it")
}

fn deadline(context: &TrialContext) -> TestResult {
    let ours = Options { deadline: Duration::from_secs(1), ..Options::default() };
    let pair = SimHarness::new(context).pair_of(&ours, &Options::default())?;
    pair.sim.fails("a warm-up", pair.to_b.warm_up(), &[ErrorKind::DeadlineExceeded])?;
    pair.sim.settle()
}

fn goes(context: &TrialContext) -> TestResult {
    let gone = &[ErrorKind::PeerDied, ErrorKind::Closed];
    let pair = SimPair::new(context)?;
    let mut op = pair.to_b.warm_up()?;
    pair.to_a.disconnect();
    ensure_err("a warm-up", pair.sim.result(&mut op)?, gone)?;
    ensure_err("the next", pair.to_b.warm_up().map(drop), gone)?;
    pair.sim.settle()
}

/// Workers that write every request at once, over two rails.
fn eager(context: &TrialContext) -> TestResult {
    let sim = SimHarness::new(context);
    let options = Options { rails: Some(2), ..Options::default() };
    let open = |number| {
        let builder = builder(context, &options)?.workers(Workers::per_group().eager()).caller_driven();
        let fabric = builder.clock(Arc::new(sim.clock.clone())).seed(number).incarnation(number).open()?;
        sim.drive(&fabric);
        Ok::<_, TrialFailure>(fabric)
    };
    let (a, b) = (open(1)?, open(2)?);
    let (to_b, _to_a) = a.connect_local(&b)?;
    let outcome = sim.done(to_b.warm_up()?)?;
    ensure_eq("bytes and requests", (outcome.bytes, outcome.work_requests), (0, 2))
}

fn processes(context: &TrialContext) -> TestResult {
    let ConnectedPair { fabric, peer, mut helper } = ConnectedPair::new(context)?;
    helper.command("alloc far 3000000 1")?;
    let src = CheckedRegion::new(&fabric, 3_000_000, Access::LOCAL, 2)?;
    let remote = crate::check::within(LIMIT, "a lookup", peer.region("far"))??;
    peer.warm_up()?.wait(LIMIT)?;
    helper.command("check-all far")?;
    peer.write(&src.region, 0..3_000_000, &remote, 0)?.wait(LIMIT)?;
    helper.command("check far 0 3000000 2").map(drop)
}
