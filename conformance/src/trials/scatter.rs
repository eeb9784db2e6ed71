//! Scatter: one source, several peers.

use std::time::Duration;

use transport_core::spi::Operations;
use transport_core::{Access, ErrorKind, Peer, PeerGroup, RemoteRegion, ScatterPart, WriteOptions};

use crate::backend_under_test::Variant;
use crate::check::{TestResult, ensure, ensure_eq, ensure_err};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::sim_harness::{Options, SimHarness};
use crate::trial::{ALL_PATHS, Trial, TrialContext, TrialFabric};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("scatter::each_peer_gets_its_part", parts).on(ALL_PATHS).needs(Operations::WRITE_IMM),
    Trial::new("scatter::evenly", evenly).on(ALL_PATHS).needs(Operations::WRITE_IMM),
    Trial::new("scatter::an_imm_per_request", per_wr).on(ALL_PATHS).needs(Operations::WRITE_IMM),
    Trial::new("scatter::all_or_nothing", all_or_nothing).on(ALL_PATHS).needs(Operations::WRITE_IMM),
    Trial::new("scatter::room_for_all_or_none", room),
    Trial::new("scatter::one_peer_dies", one_dies).on(ALL_PATHS),
    Trial::new("scatter::is_cancelled_whole", cancelled).on(&[Variant::Slow]),
    Trial::new("scatter::groups_are_checked", checked),
    Trial::new("scatter::an_imm_to_all", imm_to_all).on(ALL_PATHS).needs(Operations::WRITE_IMM),
];

/// The length of the source and of each target.
const LEN: usize = 1 << 20;

/// One fabric that scatters to three others.
struct ScatterFabrics {
    sim: SimHarness,
    a: TrialFabric,
    src: CheckedRegion,
    group: PeerGroup,
    /// Each target's peer, which is the source.
    back: Vec<Peer>,
    there: Vec<CheckedRegion>,
    remote: Vec<RemoteRegion>,
}

impl ScatterFabrics {
    #[track_caller]
    fn new(context: &TrialContext, ours: &Options<'_>) -> TestResult<Self> {
        let sim = SimHarness::new(context);
        let a = sim.open(ours)?;
        let (mut peers, mut back, mut there, mut remote) = (vec![], vec![], vec![], vec![]);
        for number in 1..=3 {
            let b = sim.open(&Options::default())?;
            let (to, from) = a.connect_local(&b)?;
            let checked = CheckedRegion::new(&b, LEN, FULL_ACCESS, context.seed + number)?;
            remote.push(checked.import(&to)?);
            peers.push(to);
            back.push(from);
            there.push(checked);
        }
        let src = CheckedRegion::new(&a, LEN, Access::LOCAL, context.seed)?;
        Ok(Self { sim, a, src, group: PeerGroup::new(peers)?, back, there, remote })
    }

    /// Fails unless all targets have the expected bytes.
    #[track_caller]
    fn check(&self, what: &str) -> TestResult {
        self.there.iter().try_for_each(|checked| checked.check(what))
    }

    /// The number of arrivals of `imm` at each target.
    fn imms(&self, imm: u32) -> Vec<u64> {
        self.back.iter().map(|back| back.imm(imm).count()).collect()
    }
}

fn parts(context: &TrialContext) -> TestResult {
    let mut fixture = ScatterFabrics::new(context, &Options::default())?;
    // A part of a few bytes, one of many, and an empty one with an imm alone.
    let ranges = [10..700, 3000..900_001, 5..5];
    let parts = ranges.iter().zip(&fixture.remote).enumerate().rev();
    let parts: Vec<_> =
        parts.map(|(at, (range, dst))| ScatterPart::new(dst, range.clone(), at + 1)).collect();
    let options = WriteOptions::new().imm(7);
    let outcome = fixture.sim.done(fixture.group.scatter(&fixture.src.region, &parts, &options)?)?;
    ensure_eq("bytes", outcome.bytes, 690 + 897_001)?;
    for (at, range) in ranges.into_iter().enumerate() {
        fixture.there[at].expect_from(at + 1, &fixture.src, range);
    }
    fixture.sim.until("an imm each", || fixture.imms(7).iter().all(|count| *count > 0))?;
    fixture.check("with its imm")?;
    fixture.sim.settle()?;
    ensure_eq("imms", fixture.imms(7), vec![1, 1, 1])?;
    // Several parts for one peer, none for the others.
    let parts =
        [0, 1, 2].map(|at| ScatterPart::new(&fixture.remote[1], at * 1000..at * 1000 + 77, at * 5000));
    let twice = fixture.group.scatter(&fixture.src.region, &parts, &options).map(drop);
    ensure_err("one imm for two parts", twice, &[ErrorKind::InvalidRequest])?;
    let op = fixture.group.scatter(&fixture.src.region, &parts, &WriteOptions::new())?;
    ensure_eq("bytes", fixture.sim.done(op)?.bytes, 3 * 77)?;
    for at in 0..3 {
        fixture.there[1].expect_from(at * 5000, &fixture.src, at * 1000..at * 1000 + 77);
    }
    fixture.sim.settle()?;
    ensure_eq("imms", fixture.imms(7), vec![1, 1, 1])?;
    fixture.check("three parts of one peer")
}

fn evenly(context: &TrialContext) -> TestResult {
    let mut fixture = ScatterFabrics::new(context, &Options::default())?;
    for (round, range) in [3..1_000_004, 100..105, 9..11, 8..8].into_iter().enumerate() {
        let imm = WriteOptions::new().imm(round as u32);
        let op =
            fixture.group.scatter_evenly(&fixture.src.region, range.clone(), &fixture.remote, 9, &imm)?;
        ensure_eq("bytes", fixture.sim.done(op)?.bytes, range.len() as u64)?;
        for (at, checked) in fixture.there.iter_mut().enumerate() {
            checked.expect_from(9, &fixture.src, fixture.group.share(at, range.clone()));
        }
        fixture.sim.settle()?;
        ensure_eq("imms", fixture.imms(round as u32), vec![1, 1, 1])?;
        fixture.check("its share")?;
    }
    let wrong = [ErrorKind::InvalidRequest, ErrorKind::OutOfBounds];
    let (src, plain) = (&fixture.src.region, WriteOptions::new());
    let evenly =
        |range, dst: &[RemoteRegion]| fixture.group.scatter_evenly(src, range, dst, 0, &plain).map(drop);
    ensure_err("no bytes for any peer", evenly(8..8, &fixture.remote), &wrong)?;
    ensure_err("a region too few", evenly(0..9, &fixture.remote[1..]), &wrong)?;
    let mut mixed = fixture.remote.clone();
    mixed.swap(0, 1);
    ensure_err("another order", evenly(0..9, &mixed), &wrong)?;
    ensure_err("beyond the source", evenly(0..LEN + 1, &fixture.remote), &wrong)?;
    ensure_err("a range backwards", evenly(std::ops::Range { start: 9, end: 8 }, &fixture.remote), &wrong)?;
    fixture.check("after a refused scatter")
}

fn per_wr(context: &TrialContext) -> TestResult {
    let mut fixture = ScatterFabrics::new(context, &Options::default())?;
    let options = WriteOptions::new().imm(3).per_wr();
    let parts = [(0, 0..LEN), (1, 0..100), (1, 100..300)];
    let parts = parts.map(|(to, range)| ScatterPart::new(&fixture.remote[to], range.clone(), range.start));
    fixture.sim.done(fixture.group.scatter(&fixture.src.region, &parts, &options)?)?;
    fixture.there[0].expect_from(0, &fixture.src, 0..LEN);
    fixture.there[1].expect_from(0, &fixture.src, 0..300);
    fixture.sim.settle()?;
    ensure_eq("imms", fixture.imms(3), vec![transport_core::imm_count(LEN as u64), 2, 0])?;
    fixture.check("three parts")
}

fn all_or_nothing(context: &TrialContext) -> TestResult {
    let fixture = ScatterFabrics::new(context, &Options::default())?;
    let (options, good) =
        (WriteOptions::new().imm(1), |at: usize| ScatterPart::new(&fixture.remote[at], 0..50, 0));
    let stranger = fixture.sim.open(&Options::default())?;
    let (to, _) = fixture.a.connect_local(&stranger)?;
    let strange = CheckedRegion::new(&stranger, 64, FULL_ACCESS, 1)?.import(&to)?;
    let bad = [
        (
            "beyond the source",
            ScatterPart::new(&fixture.remote[2], LEN - 1..LEN + 1, 0),
            ErrorKind::OutOfBounds,
        ),
        ("beyond the target", ScatterPart::new(&fixture.remote[2], 0..50, LEN - 49), ErrorKind::OutOfBounds),
        ("a peer of no group", ScatterPart::new(&strange, 0..50, 0), ErrorKind::InvalidRequest),
    ];
    for (what, bad, kind) in bad {
        let scatter =
            fixture.group.scatter(&fixture.src.region, &[good(0), good(1), bad], &options).map(drop);
        let error = ensure_err(what, scatter, &[kind])?;
        ensure(error.context().contains("part 2"), format!("the error does not name the part: {error}"))?;
    }
    let scatter =
        |parts: &[ScatterPart<'_>]| fixture.group.scatter(&fixture.src.region, parts, &options).map(drop);
    ensure_err("no parts", scatter(&[]), &[ErrorKind::InvalidRequest])?;
    fixture.group.peers()[2].disconnect();
    ensure_err(
        "a peer that is gone",
        scatter(&[good(0), good(2)]),
        &[ErrorKind::Closed, ErrorKind::PeerDied],
    )?;
    ensure_err(
        "an imm to it",
        fixture.group.write_imm(1).map(drop),
        &[ErrorKind::Closed, ErrorKind::PeerDied],
    )?;
    fixture.sim.settle()?;
    ensure_eq("imms", fixture.imms(1), vec![0, 0, 0])?;
    fixture.check("after a refused scatter")
}

fn room(context: &TrialContext) -> TestResult {
    let fixture =
        ScatterFabrics::new(context, &Options { max_operations: 3, rails: Some(16), ..Options::default() })?;
    let scatter = |count: usize| {
        let parts = (0..count).map(|at| ScatterPart::new(&fixture.remote[at % 3], 0..LEN, 0));
        fixture.group.scatter(&fixture.src.region, &parts.collect::<Vec<_>>(), &WriteOptions::new())
    };
    for _ in 0..3 {
        ensure_err("four parts in three places", scatter(4).map(drop), &[ErrorKind::Busy])?;
        // A refused scatter uses no slot.
        fixture.sim.done(scatter(3)?)?;
    }
    fixture.sim.settle()
}

fn one_dies(context: &TrialContext) -> TestResult {
    for turns in context.attempts(5) {
        let mut fixture = ScatterFabrics::new(&context.with_seed(context.seed + turns), &Options::default())?;
        let parts: Vec<_> = fixture.remote.iter().map(|dst| ScatterPart::new(dst, 0..LEN, 0)).collect();
        let mut op = fixture.group.scatter(&fixture.src.region, &parts, &WriteOptions::new())?;
        for _ in 0..turns {
            fixture.sim.step();
        }
        fixture.group.peers()[1].disconnect();
        if let Err(error) = fixture.sim.result(&mut op)? {
            ensure_err::<()>("a scatter", Err(error), &[ErrorKind::Closed, ErrorKind::PeerDied])?;
        } else {
            // On a plain device the write may have run in this thread, before the close.
            let may = turns > 0 || context.variant == Variant::Plain;
            ensure(may, "a write to a closed peer succeeded")?;
        }
        // The result comes once all parts have ended: the other targets have all their bytes.
        for at in [0, 2] {
            fixture.there[at].expect_from(0, &fixture.src, 0..LEN);
            fixture.there[at].check("a peer that stays")?;
        }
        fixture.sim.settle()?;
    }
    Ok(())
}

fn cancelled(context: &TrialContext) -> TestResult {
    let mut fixture =
        ScatterFabrics::new(context, &Options { deadline: Duration::from_secs(2), ..Options::default() })?;
    for how in ["cancel", "drop"] {
        let parts: Vec<_> = fixture.remote.iter().map(|dst| ScatterPart::new(dst, 0..LEN, 0)).collect();
        let op = fixture.group.scatter(&fixture.src.region, &parts, &WriteOptions::new())?;
        fixture.sim.step();
        if how == "cancel" {
            let result = fixture.sim.output("a cancel", op.cancel())?;
            ensure_err("a cancelled scatter", result, &[ErrorKind::Cancelled, ErrorKind::DeadlineExceeded])?;
        } else {
            drop(op);
            for peer in fixture.group.peers() {
                // Only the end of the drain counts here, not its result.
                let _ = fixture.sim.output("a drain", peer.drain()?)?;
            }
        }
        // From here on only the targets write their memory.
        for (at, checked) in fixture.there.iter_mut().enumerate() {
            checked.fill(context.seed + 50 + at as u64)?;
        }
        fixture.sim.settle()?;
        fixture.check("after a scatter was given up")?;
    }
    Ok(())
}

fn checked(context: &TrialContext) -> TestResult {
    let fixture = ScatterFabrics::new(context, &Options::default())?;
    let peers = fixture.group.peers();
    let invalid = &[ErrorKind::InvalidRequest];
    ensure_err("no peers", PeerGroup::new([]).map(drop), invalid)?;
    ensure_err(
        "a peer twice",
        PeerGroup::new([peers[0].clone(), peers[1].clone(), peers[0].clone()]).map(drop),
        invalid,
    )?;
    ensure_err(
        "two fabrics",
        PeerGroup::new([peers[0].clone(), fixture.back[0].clone()]).map(drop),
        invalid,
    )?;
    ensure_eq(
        "places",
        peers.iter().map(|peer| fixture.group.position(peer.id())).collect(),
        vec![Some(0), Some(1), Some(2)],
    )
}

fn imm_to_all(context: &TrialContext) -> TestResult {
    let fixture = ScatterFabrics::new(context, &Options::default())?;
    for _ in 0..3 {
        fixture.sim.done(fixture.group.write_imm(9)?)?;
    }
    fixture.sim.until("three each", || fixture.imms(9) == [3, 3, 3])?;
    fixture.sim.settle()?;
    ensure_eq("imms", fixture.imms(9), vec![3, 3, 3])?;
    fixture.check("imms alone")
}
