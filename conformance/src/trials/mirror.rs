//! Mirrored imm counters: the word counts the arrivals, after their bytes, and reports the close of the peer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use limit::Limit;
use rustix::process::Signal;
use transport_core::spi::Operations;
use transport_core::{Access, ErrorKind, Mirror, OnPeerClosed, WriteOptions};

use crate::check::{TestResult, ensure, ensure_eq, ensure_err, within};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::process::{ConnectedPair, LIMIT};
use crate::sim_harness::SimPair;
use crate::trial::{ALL_PATHS, Trial, TrialContext};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("mirror::follows_every_arrival", follows).on(ALL_PATHS).needs(Operations::WRITE_IMM),
    Trial::new("mirror::says_when_bytes_are_there", after_its_bytes)
        .on(ALL_PATHS)
        .needs(Operations::WRITE_IMM),
    Trial::new("mirror::passes_when_the_peer_ends", passes_at_the_end).needs(Operations::WRITE_IMM),
    Trial::new("mirror::passes_when_the_peer_is_killed", killed).needs(Operations::WRITE_IMM).process(),
];

fn word() -> Arc<AtomicU32> {
    Arc::new(AtomicU32::new(0))
}

fn now(word: &AtomicU32) -> u32 {
    word.load(Ordering::Acquire)
}

fn follows(context: &TrialContext) -> TestResult {
    const EACH: u32 = 150;
    let pair = SimPair::new(context)?;
    let send = |imm: u32| -> TestResult {
        let ops: Result<Vec<_>, _> = (0..EACH).map(|_| pair.to_b.write_imm(imm)).collect();
        pair.sim.all_done(ops?)?;
        pair.sim.settle()
    };
    // Earlier arrivals count, except those that were taken.
    send(5)?;
    ensure(pair.to_a.imm(5).try_take(10), "could not take")?;
    let (five, six) = (word(), word());
    let mirrors = [
        pair.to_a.imm(5).mirror(five.clone(), OnPeerClosed::Keep),
        pair.to_a.imm(6).mirror(six.clone(), OnPeerClosed::Keep),
    ];
    ensure_eq("at first", (now(&five), now(&six)), (EACH - 10, 0))?;
    send(6)?;
    send(5)?;
    send(7)?;
    ensure(pair.to_a.imm(5).try_take(u64::from(EACH)), "could not take")?;
    ensure_eq("after more", (now(&five), now(&six)), (2 * EACH - 10, EACH))?;
    ensure_eq("totals", mirrors.map(|mirror| mirror.total()), [2 * u64::from(EACH) - 10, EACH.into()])?;
    send(5)?;
    ensure_eq("after the mirror was dropped", now(&five), 2 * EACH - 10)
}

fn after_its_bytes(context: &TrialContext) -> TestResult {
    const LEN: usize = 300_000;
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, LEN, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, LEN, FULL_ACCESS, context.seed + 1)?;
    let (remote, word) = (dst.import(&pair.to_b)?, word());
    let _mirror = pair.to_a.imm(1).mirror(word.clone(), OnPeerClosed::Keep);
    for round in 1..=5 {
        dst.fill(context.seed + 10 + u64::from(round))?;
        let op = pair.to_b.write_with(&src.region, 0..LEN, &remote, 0, &WriteOptions::new().imm(1))?;
        dst.expect_from(0, &src, 0..LEN);
        // At this moment all bytes must be visible.
        pair.sim.until("the word", || now(&word) == round)?;
        dst.check("the bytes that the word announced")?;
        pair.sim.done(op)?;
    }
    Ok(())
}

fn passes_at_the_end(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let (passing, keeping) = (word(), word());
    let mirrors = [
        pair.to_a.imm(1).mirror(passing.clone(), OnPeerClosed::Pass),
        pair.to_a.imm(1).mirror(keeping.clone(), OnPeerClosed::Keep),
    ];
    pair.sim.done(pair.to_b.write_imm(1)?)?;
    pair.sim.settle()?;
    ensure(
        mirrors.iter().all(|mirror| mirror.close_reason().is_none()),
        "a mirror reports an end before the close",
    )?;
    // The other side's fabric closes.
    pair.a.close();
    pair.sim.settle()?;
    ensure_eq("words at the end", (now(&passing), now(&keeping)), (1 + Mirror::PASS, 1))?;
    let gone = [ErrorKind::Closed, ErrorKind::PeerDied];
    mirrors.iter().try_for_each(|mirror| {
        ensure_eq("total", mirror.total(), 1)?;
        ensure_err("the end", mirror.close_reason().map_or(Ok(()), Err), &gone).map(drop)
    })
}

/// The word alone can release a GPU stream that waits for the peer.
fn killed(context: &TrialContext) -> TestResult {
    let ConnectedPair { peer, mut helper, fabric: _fabric } = ConnectedPair::new(context)?;
    let word = word();
    let mirror = peer.imm(4).mirror(word.clone(), OnPeerClosed::Pass);
    helper.command("imms 4 100")?;
    peer.imm(4).expect(100).wait(LIMIT)?;
    ensure_eq("the word", (now(&word), mirror.total()), (100, 100))?;
    helper.signal(Signal::KILL)?;
    within(LIMIT, "the end of the peer", peer.closed())?;
    // The library knows of the close before it has told all waiters.
    let mut limit = Limit::of(LIMIT);
    while now(&word) == 100 && !limit.is_over() {
        std::thread::yield_now();
    }
    ensure_eq("the word at the end", now(&word), 100 + Mirror::PASS)?;
    ensure_err::<()>("the end", mirror.close_reason().map_or(Ok(()), Err), &[ErrorKind::PeerDied]).map(drop)
}
