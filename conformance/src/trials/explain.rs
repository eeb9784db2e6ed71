//! Explanations: a request does what its explanation says.

use transport_core::spi::Operations;
use transport_core::{
    Access, Error, ErrorKind, Explanation, LocalList, Op, Pages, RailCounters, ReadOptions, RemoteList,
    SendOptions, WriteOptions,
};

use crate::backend_under_test::Variant;
use crate::check::{TestResult, TrialFailure, ensure, ensure_eq, ensure_err};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::sim_harness::{LABEL, Options, SimHarness, SimPair};
use crate::trial::{ALL_PATHS, Trial, TrialContext};

const ALL: Operations = Operations::all();

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("explain::of_every_request", of_every_request).on(ALL_PATHS).needs(ALL),
    Trial::new("explain::behind_what_is_queued", queued).on(&[Variant::Plain]),
    Trial::new("explain::of_a_lost_rail", lost_rail).on(&[Variant::Doomed]),
    Trial::new("explain::why_not_another_transport", transports),
    Trial::new("explain::refuses_as_the_request", refusals),
];

const LEN: usize = 5 << 20;

/// Submits the request. Each rail must do exactly what the explanation says.
#[track_caller]
fn check_explanation(
    pair: &SimPair,
    explanation: Result<Explanation, Error>,
    request: impl FnOnce() -> Result<Op, Error>,
) -> TestResult<Explanation> {
    let (explanation, before) = (explanation?, pair.a.counters());
    let mut op = request()?;
    let outcome = pair.sim.result(&mut op)??;
    let rails = |of: &dyn Fn(&RailCounters) -> (u64, u64)| {
        let after = pair.a.counters();
        let each = before.iter().zip(&after).map(|(before, after)| (of(before), of(after)));
        each.map(|(before, after)| (after.0 - before.0, after.1 - before.1)).collect::<Vec<_>>()
    };
    let (posted, direct) =
        (rails(&|rail| (rail.posts, rail.bytes)), rails(&|rail| (rail.direct, rail.direct_bytes)));
    let mut plan: Vec<_> = explanation.rails.iter().map(|rail| (rail.requests, rail.bytes)).collect();
    let nothing = vec![(0, 0); plan.len()];
    let at_once = explanation.queued.is_none();
    let (mut moved, rest) = if at_once { (direct, posted) } else { (posted, direct) };
    // Rails take over from others that refuse requests at random. Nobody can foresee that.
    if rails(&|rail| (rail.taken_over, 0)) != nothing {
        let sum = |rails: &[(u64, u64)]| {
            vec![rails.iter().fold((0, 0), |sum, rail| (sum.0 + rail.0, sum.1 + rail.1))]
        };
        (moved, plan) = (sum(&moved), sum(&plan));
    }
    ensure_eq(&format!("requests and bytes of each rail of\n{explanation}\n"), moved, plan)?;
    ensure_eq("requests the other way", rest, nothing)?;
    ensure_eq("bytes", explanation.bytes, outcome.bytes)?;
    let receipt = op.receipt().ok_or_else(|| TrialFailure::new("no receipt"))?;
    ensure_eq("the receipt's bytes", receipt.bytes, explanation.bytes)?;
    let requests = explanation.rails.iter().map(|rail| rail.requests).sum::<u64>();
    ensure_eq("work requests", u64::from(outcome.work_requests), if at_once { 0 } else { requests })?;
    Ok(explanation)
}

/// The only explanation of a transfer whose regions lie on the same rails.
fn only_part(parts: Result<Vec<Explanation>, Error>) -> Result<Explanation, Error> {
    let mut parts = parts?;
    assert_eq!(parts.len(), 1, "the transfer has one part");
    Ok(parts.remove(0))
}

/// A pair with one rail group: an explanation does not say which of several groups takes the next request, nor which
/// completes last.
fn one_group(context: &TrialContext) -> TestResult<SimPair> {
    let options = Options { rails: Some(4), ..Options::default() };
    SimHarness::new(context).pair_of(&options, &options)
}

fn of_every_request(context: &TrialContext) -> TestResult {
    let pair = one_group(context)?;
    let near = CheckedRegion::new(&pair.a, LEN, FULL_ACCESS, context.seed)?;
    let far = CheckedRegion::new(&pair.b, LEN, FULL_ACCESS, context.seed + 1)?;
    let (to, src, remote) = (&pair.to_b, &near.region, far.import(&pair.to_b)?);
    let plain = WriteOptions::new();
    let mut at_once = 0;
    for len in [1, 5000, 700_000, LEN] {
        for options in
            [plain.clone(), plain.clone().imm(1), plain.clone().imm(2).per_wr(), plain.clone().cold()]
        {
            let explanation = to.explain_write(src, 0..len, &remote, 0, &options);
            let explanation =
                check_explanation(&pair, explanation, || to.write_with(src, 0..len, &remote, 0, &options))?;
            at_once += u32::from(explanation.queued.is_none());
            ensure_eq("an imm", explanation.imm.is_some(), options.imm.is_some())?;
            ensure_eq("the path", explanation.path, Some(remote.path().into()))?;
        }
        let explanation = to.explain_read(src, 0..len, &remote, 0, &ReadOptions::new());
        check_explanation(&pair, explanation, || to.read(src, 0..len, &remote, 0))?;
    }
    let (from, onto) =
        (Pages::new((0..77).collect::<Vec<_>>()), Pages::new((1..78).rev().collect::<Vec<_>>()));
    for options in [plain.clone(), plain.clone().imm(3), plain.clone().imm(4).per_wr()] {
        let explanation = to.explain_write_pages(src, &from, &remote, &onto, 4096, &options);
        check_explanation(&pair, explanation, || {
            to.write_pages_with(src, &from, &remote, &onto, 4096, &options)
        })?;
        let prepared = to.prepare_write_pages(src, &from, &remote, &onto, 4096, &options)?;
        for _ in 0..3 {
            check_explanation(&pair, only_part(prepared.explain()), || prepared.post())?;
        }
        // One request, which may run in the calling thread.
        let prepared = to.prepare_write_pages(src, [5], &remote, [2], 4096, &options)?;
        check_explanation(&pair, only_part(prepared.explain()), || prepared.post())?;
    }
    let inbox = CheckedRegion::new(&pair.b, 100, FULL_ACCESS, 1)?;
    for options in [SendOptions::new(), SendOptions::new().imm(9)] {
        pair.b.recv(&inbox.region, 0..100)?.detach();
        let explanation = check_explanation(&pair, to.explain_send(src, 0..100, &options), || {
            to.send_with(src, 0..100, &options)
        })?;
        ensure_eq("the path of a message", explanation.path, None)?;
    }
    let reads = ReadOptions::new();
    let explanation = to.explain_read_pages(src, &onto, &remote, &from, 4096, &reads);
    check_explanation(&pair, explanation, || to.read_pages(src, &onto, &remote, &from, 4096))?;
    let (mut mine, mut theirs) = (LocalList::new(), RemoteList::new());
    mine.push_strided(src, 7, 512, 90, 1024)?;
    theirs.push_strided(&remote, 3, 512, 90, 513)?;
    for options in [plain.clone(), plain.clone().imm(3), plain.clone().imm(4).per_wr()] {
        let explanation = only_part(to.explain_write_list(&mine, .., &theirs, .., &options));
        check_explanation(&pair, explanation, || to.write_list(&mine, .., &theirs, .., &options))?;
    }
    let explanation = only_part(to.explain_read_list(&mine, 0..50, &theirs, 0..50, &reads));
    check_explanation(&pair, explanation, || to.read_list(&mine, 0..50, &theirs, 0..50, &reads))?;
    if context.variant != Variant::Plain {
        ensure_eq("what runs in this thread, past a link model", at_once, 0)?;
    }
    Ok(())
}

/// A small write that would run at once waits for earlier operations, and its explanation says so.
fn queued(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let near = CheckedRegion::new(&pair.a, LEN, FULL_ACCESS, context.seed)?;
    let far = CheckedRegion::new(&pair.b, LEN, FULL_ACCESS, context.seed + 1)?;
    let (to, src, remote) = (&pair.to_b, &near.region, far.import(&pair.to_b)?);
    let page = Pages::new([0]);
    let before = to.write_pages(src, &page, &remote, &page, 4096)?;
    let small = to.explain_write(src, 0..10, &remote, 0, &WriteOptions::new())?;
    let why = small.queued.unwrap_or_default();
    let way = to.explain_write(src, 0..LEN, &remote, 0, &WriteOptions::new())?.queued.unwrap_or_default();
    // Writes of staged memory always go through the worker.
    ensure(why.starts_with("1 operations") || way == why, format!("{why:?}, of a large one {way:?}"))?;
    pair.sim.done(before).map(drop)
}

fn lost_rail(context: &TrialContext) -> TestResult {
    let pair = one_group(context)?;
    let near = CheckedRegion::new(&pair.a, LEN, FULL_ACCESS, context.seed)?;
    let far = CheckedRegion::new(&pair.b, LEN, FULL_ACCESS, context.seed + 1)?;
    let (to, src, remote) = (&pair.to_b, &near.region, far.import(&pair.to_b)?);
    let explain = || to.explain_write(src, 0..LEN, &remote, 0, &WriteOptions::new());
    ensure(
        explain()?.rails.iter().all(|rail| rail.unusable.is_none()),
        "the explanation calls a rail lost before the device was lost",
    )?;
    for _ in 0..Variant::LOST_AFTER + 1 {
        let _ = pair.sim.result(&mut to.write(src, 0..LEN, &remote, 0)?)?;
    }
    let explanation = explain()?;
    for rail in &explanation.rails {
        ensure_eq("why", rail.unusable, Some("its device is lost"))?;
        ensure_eq("requests", rail.requests, 0)?;
    }
    ensure(explanation.to_string().contains("its device is lost"), explanation.to_string())
}

fn transports(context: &TrialContext) -> TestResult {
    let sim = SimHarness::new(context);
    let ours = sim.open(&Options { labels: &["first", LABEL, "third"], ..Options::default() })?;
    let theirs = sim.open(&Options { labels: &[LABEL, "third"], ..Options::default() })?;
    let (to, _) = ours.connect_local(&theirs)?;
    let (near, far) =
        (CheckedRegion::new(&ours, 64, FULL_ACCESS, 1)?, CheckedRegion::new(&theirs, 64, FULL_ACCESS, 2)?);
    let remote = far.import(&to)?;
    let explanation = to.explain_write(&near.region, 0..64, &remote, 0, &WriteOptions::new())?;
    let taken: Vec<_> =
        explanation.transports.iter().map(|choice| (&*choice.transport, choice.taken)).collect();
    ensure_eq("transports", taken, vec![("first", false), (LABEL, true), ("third", false)])?;
    let text = explanation.to_string();
    for words in
        ["no transport of this label", "later in order of preference", "the first that has the region"]
    {
        ensure(text.contains(words), format!("the explanation lacks {words:?}:\n{text}"))?;
    }
    Ok(())
}

fn refusals(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let near = CheckedRegion::new(&pair.a, 64, Access::LOCAL, 1)?;
    let far = CheckedRegion::new(&pair.b, 64, Access::REMOTE_WRITE, 2)?;
    let (to, src, remote) = (&pair.to_b, &near.region, far.import(&pair.to_b)?);
    let plain = WriteOptions::new();
    let explain = |range| to.explain_write(src, range, &remote, 0, &plain).map(drop);
    ensure_err("beyond", explain(0..65), &[ErrorKind::OutOfBounds])?;
    ensure_err("nothing", explain(5..5), &[ErrorKind::InvalidRequest])?;
    let read = to.explain_read(src, 0..8, &remote, 0, &ReadOptions::new()).map(drop);
    ensure_err("no right", read, &[ErrorKind::RemoteAccess, ErrorKind::Unsupported])?;
    let page = Pages::new([0]);
    let prepared = to.prepare_write_pages(src, &page, &remote, &page, 64, &plain)?;
    to.disconnect();
    let gone = &[ErrorKind::Closed, ErrorKind::PeerDied];
    ensure_err("a peer that is gone", explain(0..8), gone)?;
    ensure_err("a prepared write to it", prepared.explain().map(drop), gone).map(drop)
}
