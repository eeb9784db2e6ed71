//! Fairness: a large transfer does not starve other operations.

use transport_core::{Access, Op, Pages};

use crate::backend_under_test::Variant;
use crate::check::{TestResult, ensure};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::sim_harness::{Options, SimHarness, SimPair};
use crate::trial::{Trial, TrialContext};

/// The number of requests per rail of a large transfer that may be posted before a small write completes: the requests
/// in the queue, those of some turns, and those posted while the small write is outstanding.
const MAX_REQUESTS_BEFORE: u64 = 1000;
const PAGE: usize = 64;
/// The number of rails in each of many runs. Rails have separate queues, so a few show the behaviour of many.
const RAILS: u32 = 4;

const PATHS: &[Variant] = &[Variant::SmallQueue, Variant::Partial];

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("fair::small_beside_large_to_another_peer", to_another_peer).on(PATHS),
    Trial::new("fair::small_beside_large_to_one_peer", to_one_peer).on(PATHS),
    Trial::new("fair::many_operations_buy_no_more", many_operations).on(PATHS),
    Trial::new("fair::equal_transfers_end_together", equal_transfers).on(PATHS),
];

fn large(pair: &SimPair, src: &CheckedRegion, context: &TrialContext) -> TestResult<(CheckedRegion, Op)> {
    let dst = CheckedRegion::new(&pair.b, pages(context) as usize * PAGE, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let pages = Pages::new((0..pages(context)).rev().collect::<Vec<_>>());
    let op = pair.to_b.write_pages(&src.region, &pages, &remote, &pages, PAGE)?;
    Ok((dst, op))
}

/// The number of pages of a large transfer.
fn pages(context: &TrialContext) -> u32 {
    context.amount(20_000, 5_000)
}

/// Waits for `op`, and fails unless it completes early, before `large`.
#[track_caller]
fn finishes_early(pair: &SimPair, op: Op, large: &mut Op) -> TestResult {
    let before = pair.posts();
    pair.sim.done(op)?;
    let posts = (pair.posts() - before) / pair.a.counters().len() as u64;
    ensure(
        posts < MAX_REQUESTS_BEFORE,
        format!("{posts} requests per rail were posted before a small write completed"),
    )?;
    ensure(large.try_result().is_none(), "the large transfer completed first")
}

fn options(context: &TrialContext) -> Options<'static> {
    Options { rails: context.seed_sweep.then_some(RAILS), ..Options::default() }
}

fn pair(context: &TrialContext) -> TestResult<SimPair> {
    SimHarness::new(context).pair_of(&options(context), &options(context))
}

fn to_another_peer(context: &TrialContext) -> TestResult {
    let pair = pair(context)?;
    let other = pair.sim.open(&options(context))?;
    let (to_other, _) = pair.a.connect_local(&other)?;
    let src = CheckedRegion::new(&pair.a, pages(context) as usize * PAGE, Access::LOCAL, context.seed)?;
    let (mut dst, mut op) = large(&pair, &src, context)?;
    let mut small = CheckedRegion::new(&other, 4096, FULL_ACCESS, context.seed + 2)?;
    let remote = small.import(&to_other)?;
    for number in 0..context.amount(10, 2) {
        let write = to_other.write(&src.region, number..number + 100, &remote, number * 200)?;
        finishes_early(&pair, write, &mut op)?;
        small.expect_from(number * 200, &src, number..number + 100);
        small.check("the small write")?;
    }
    pair.sim.result(&mut op)??;
    dst.expect_from(0, &src, 0..pages(context) as usize * PAGE);
    dst.check("the large transfer")
}

fn to_one_peer(context: &TrialContext) -> TestResult {
    let pair = pair(context)?;
    let src = CheckedRegion::new(&pair.a, pages(context) as usize * PAGE, Access::LOCAL, context.seed)?;
    let (_dst, mut op) = large(&pair, &src, context)?;
    let small = CheckedRegion::new(&pair.b, 4096, FULL_ACCESS, context.seed + 2)?;
    let remote = small.import(&pair.to_b)?;
    for _ in 0..context.amount(10, 2) {
        let write = pair.to_b.write(&src.region, 0..100, &remote, 0)?;
        finishes_early(&pair, write, &mut op)?;
    }
    pair.sim.result(&mut op)?.map(drop).map_err(Into::into)
}

/// A peer with 100 large operations gets no more turns than a peer with one.
fn many_operations(context: &TrialContext) -> TestResult {
    let pair = pair(context)?;
    let other = pair.sim.open(&options(context))?;
    let (to_other, _) = pair.a.connect_local(&other)?;
    let src = CheckedRegion::new(&pair.a, PAGE, Access::LOCAL, context.seed)?;
    let busy = CheckedRegion::new(&pair.b, 500 * PAGE, FULL_ACCESS, context.seed + 1)?;
    let lone = CheckedRegion::new(&other, 500 * PAGE, FULL_ACCESS, context.seed + 1)?;
    let (to_busy, to_lone) = (busy.import(&pair.to_b)?, lone.import(&to_other)?);
    let (from, to) = (Pages::new(vec![0; 500]), Pages::new((0..500).collect::<Vec<_>>()));
    let mut ops = Vec::new();
    for _ in 0..context.amount(100, 10) {
        ops.push(pair.to_b.write_pages(&src.region, &from, &to_busy, &to, PAGE)?);
    }
    pair.sim.done(to_other.write_pages(&src.region, &from, &to_lone, &to, PAGE)?)?;
    let posts: u64 = pair.a.counters().iter().map(|rail| rail.posts).sum();
    // 500 requests of the second peer, as many of the first, and the requests that quanta and queues add.
    ensure(
        posts < 2000,
        format!("{posts} requests were posted before 500 requests of the second peer completed"),
    )?;
    pair.sim.all_done(ops)
}

fn equal_transfers(context: &TrialContext) -> TestResult {
    let sim = SimHarness::new(context);
    let hub = sim.open(&options(context))?;
    let src = CheckedRegion::new(&hub, PAGE, Access::LOCAL, context.seed)?;
    let (from, to) = (Pages::new(vec![0; 600]), Pages::new((0..600).collect::<Vec<_>>()));
    let mut ops = Vec::new();
    let mut kept = Vec::new();
    for _ in 0..5 {
        let spoke = sim.open(&options(context))?;
        let (to_spoke, _) = hub.connect_local(&spoke)?;
        let dst = CheckedRegion::new(&spoke, 600 * PAGE, FULL_ACCESS, context.seed + 1)?;
        let remote = dst.import(&to_spoke)?;
        ops.push(Some(to_spoke.write_pages(&src.region, &from, &remote, &to, PAGE)?));
        kept.push(dst);
    }
    let posts = || hub.counters().iter().map(|rail| rail.posts).sum::<u64>();
    let mut first = None;
    sim.until("five transfers", || {
        for op in &mut ops {
            if op.as_mut().and_then(Op::try_result).is_some() {
                *op = None;
                first.get_or_insert_with(posts);
            }
        }
        ops.iter().all(Option::is_none)
    })?;
    let first = first.unwrap_or(0);
    ensure(
        first > 3000 * 8 / 10,
        format!("the first of five equal transfers ended after {first} of 3000 requests"),
    )
}
