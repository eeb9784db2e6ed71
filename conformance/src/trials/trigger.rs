//! Triggered operations: they begin when a word reaches a value, not earlier, or end without beginning.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use transport_core::observe::WaitReason;
use transport_core::spi::Operations;
use transport_core::{Access, ErrorKind, OnPeerClosed, Op, Pages, WriteOptions};

use crate::check::{TestResult, TrialFailure, ensure, ensure_eq, ensure_err, within};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::process::{ConnectedPair, LIMIT};
use crate::sim_harness::SimPair;
use crate::trial::{ALL_PATHS, Trial, TrialContext};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("trigger::begins_when_the_word_is_there", begins).on(ALL_PATHS).needs(Operations::WRITE_IMM),
    Trial::new("trigger::already_there", already_there).on(ALL_PATHS),
    Trial::new("trigger::a_loop_of_steps_wraps_around", steps).on(ALL_PATHS),
    Trial::new("trigger::cancelled_before", cancelled).on(ALL_PATHS),
    Trial::new("trigger::ends_by_its_deadline", by_its_deadline),
    Trial::new("trigger::ends_with_its_peer", with_its_peer),
    Trial::new("trigger::ends_with_the_fabric", with_the_fabric),
    Trial::new("trigger::refused_once_revoked", once_revoked),
    Trial::new("trigger::by_a_mirrored_count", by_a_mirror).on(ALL_PATHS).needs(Operations::WRITE_IMM),
    Trial::new("trigger::a_sleeping_worker_finds_it", found_by_a_worker).process(),
    Trial::new("trigger::the_peer_is_killed_before", killed_before).process(),
];

/// Several chunks, and more bytes than run in the calling thread.
const LEN: usize = 700_000;

/// A pair with a source, a target, and the word of the trigger.
struct TriggerPair {
    pair: SimPair,
    src: CheckedRegion,
    dst: CheckedRegion,
    word: Arc<AtomicU32>,
}

impl TriggerPair {
    fn new(context: &TrialContext) -> TestResult<Self> {
        let pair = SimPair::new(context)?;
        let src = CheckedRegion::new(&pair.a, LEN, Access::LOCAL, context.seed)?;
        let dst = CheckedRegion::new(&pair.b, LEN, FULL_ACCESS, context.seed + 1)?;
        Ok(Self { pair, src, dst, word: Arc::default() })
    }

    /// Writes the whole source once the word has reached `value`.
    fn write_when(&self, value: u32, options: WriteOptions) -> TestResult<Op> {
        let (remote, options) = (self.dst.import(&self.pair.to_b)?, options.when(self.word.clone(), value));
        Ok(self.pair.to_b.write_with(&self.src.region, 0..LEN, &remote, 0, &options)?)
    }

    fn set(&self, value: u32) {
        self.word.store(value, Ordering::Release);
    }

    /// Ticks for some time, and fails if a request is posted or a byte moves.
    fn ensure_not_begun(&self) -> TestResult {
        let posts = self.pair.posts();
        (0..100).for_each(|_| _ = self.pair.sim.tick());
        ensure_eq("requests posted before the trigger", self.pair.posts(), posts)?;
        self.dst.check("before the trigger")
    }
}

fn begins(context: &TrialContext) -> TestResult {
    let mut fixture = TriggerPair::new(context)?;
    let mut op = fixture.write_when(3, WriteOptions::new().imm(9))?;
    fixture.ensure_not_begun()?;
    let dump = fixture.pair.a.dump();
    let waits: Vec<_> = dump.operations().flat_map(|operation| operation.waits.clone()).collect();
    ensure_eq("the wait in the dump", waits, vec![WaitReason::Trigger { value: 3, now: 0 }])?;
    fixture.set(2);
    fixture.ensure_not_begun()?;
    // Other operations to the same peer do not wait behind it.
    let other = CheckedRegion::new(&fixture.pair.b, 4096, FULL_ACCESS, context.seed + 2)?;
    let remote = other.import(&fixture.pair.to_b)?;
    for _ in 0..10 {
        fixture.pair.sim.done(fixture.pair.to_b.write(&fixture.src.region, 0..4096, &remote, 0)?)?;
    }
    ensure(op.try_result().is_none(), "the operation ended before its trigger")?;
    fixture.set(3);
    fixture.dst.expect_from(0, &fixture.src, 0..LEN);
    let counter = fixture.pair.to_a.imm(9);
    fixture.pair.sim.until("the imm", || counter.count() > 0)?;
    fixture.dst.check("the bytes that the imm announced")?;
    ensure_eq("bytes", fixture.pair.sim.result(&mut op)??.bytes, LEN as u64)?;
    ensure_eq("references to the word", Arc::strong_count(&fixture.word), 1)
}

fn already_there(context: &TrialContext) -> TestResult {
    let mut fixture = TriggerPair::new(context)?;
    fixture.set(8);
    for value in [8, 1, 0] {
        fixture.dst.fill(context.seed + u64::from(value))?;
        // A small write without a trigger would run in this thread.
        let remote = fixture.dst.import(&fixture.pair.to_b)?;
        let options = WriteOptions::new().when(fixture.word.clone(), value);
        let op = fixture.pair.to_b.write_with(&fixture.src.region, 0..64, &remote, 0, &options)?;
        ensure(op.id().is_some(), "the write ran in the calling thread")?;
        fixture.pair.sim.done(op)?;
        fixture.dst.expect_from(0, &fixture.src, 0..64);
        fixture.dst.check("after a trigger whose value was reached before")?;
    }
    Ok(())
}

/// Several writes wait for consecutive values. Each step of the word begins one write.
fn steps(context: &TrialContext) -> TestResult {
    const PAGE: usize = 4096;
    const FIRST: u32 = u32::MAX - 3;
    let mut fixture = TriggerPair::new(context)?;
    let (from, to) = (Pages::new([3, 1, 2]), Pages::new([0, 1, 2]));
    let remote = fixture.dst.import(&fixture.pair.to_b)?;
    let options = WriteOptions::new();
    let prepared =
        fixture.pair.to_b.prepare_write_pages(&fixture.src.region, &from, &remote, &to, PAGE, &options)?;
    fixture.set(FIRST);
    let ops = (1..=8).map(|step| prepared.post_when(fixture.word.clone(), FIRST.wrapping_add(step)));
    let mut ops: Vec<_> = ops.collect::<Result<_, _>>()?;
    for step in 1..=8_u32 {
        fixture.ensure_not_begun()?;
        fixture.src.fill(context.seed + 10 + u64::from(step))?;
        for (to, from) in [3, 1, 2].into_iter().enumerate() {
            fixture.dst.expect_from(to * PAGE, &fixture.src, from * PAGE..(from + 1) * PAGE);
        }
        fixture.set(FIRST.wrapping_add(step));
        fixture.pair.sim.done(ops.remove(0))?;
        fixture.dst.check("after a step")?;
        let early = ops.iter_mut().filter_map(Op::try_result).count();
        ensure_eq("operations of later steps that are over", early, 0)?;
    }
    Ok(())
}

fn cancelled(context: &TrialContext) -> TestResult {
    let fixture = TriggerPair::new(context)?;
    let (asked, dropped) =
        (fixture.write_when(1, WriteOptions::new())?, fixture.write_when(1, WriteOptions::new())?);
    let unseen = fixture.write_when(1, WriteOptions::new())?;
    // The trial cancels before and after the worker knows of the operation.
    drop(unseen);
    fixture.ensure_not_begun()?;
    drop(dropped);
    let mut cancel = asked.cancel();
    let mut result = None;
    fixture.pair.sim.until("a cancel", || {
        result = Some(cancel.wait(Duration::ZERO));
        !matches!(&result, Some(Err(error)) if error.kind() == ErrorKind::DeadlineExceeded)
    })?;
    ensure_err("a cancelled operation", result.unwrap_or(Ok(Default::default())), &[ErrorKind::Cancelled])?;
    fixture.set(1);
    fixture.pair.sim.settle()?;
    fixture.dst.check("after a trigger of nothing")?;
    ensure_eq("references to the word", Arc::strong_count(&fixture.word), 1)
}

fn by_its_deadline(context: &TrialContext) -> TestResult {
    let mut fixture = TriggerPair::new(context)?;
    let limit = Duration::from_secs(5);
    let mut op = fixture.write_when(1, WriteOptions::new().deadline(limit))?;
    let default_fabric = fixture.write_when(1, WriteOptions::new().deadline(Duration::MAX))?;
    fixture.pair.sim.step();
    fixture.pair.sim.clock.advance(limit - Duration::from_nanos(1));
    fixture.pair.sim.step();
    ensure(op.try_result().is_none(), "the operation ended before its deadline")?;
    fixture.pair.sim.clock.advance(Duration::from_nanos(1));
    fixture.pair.sim.step();
    let result =
        op.try_result().ok_or_else(|| TrialFailure::new("the operation has no result at its deadline"))?;
    ensure_err("an operation without its trigger", result, &[ErrorKind::DeadlineExceeded])?;
    fixture.dst.check("after the deadline")?;
    fixture.set(1);
    fixture.pair.sim.done(default_fabric)?;
    fixture.dst.expect_from(0, &fixture.src, 0..LEN);
    fixture.dst.check("after the trigger")
}

fn with_its_peer(context: &TrialContext) -> TestResult {
    let fixture = TriggerPair::new(context)?;
    let op = fixture.write_when(1, WriteOptions::new())?;
    fixture.ensure_not_begun()?;
    fixture.pair.to_a.disconnect();
    let gone = [ErrorKind::Closed, ErrorKind::PeerDied];
    fixture.pair.sim.fails("an operation to a peer that left", Ok(op), &gone)?;
    fixture.set(1);
    fixture.pair.sim.settle()?;
    fixture.dst.check("after the end")?;
    ensure_eq("references to the word", Arc::strong_count(&fixture.word), 1)
}

fn with_the_fabric(context: &TrialContext) -> TestResult {
    let fixture = TriggerPair::new(context)?;
    let (mut known, mut queued) = (fixture.write_when(1, WriteOptions::new())?, None);
    fixture.ensure_not_begun()?;
    queued.get_or_insert(fixture.write_when(1, WriteOptions::new())?);
    fixture.pair.a.close();
    for op in [Some(&mut known), queued.as_mut()].into_iter().flatten() {
        let result = op
            .try_result()
            .ok_or_else(|| TrialFailure::new("the operation has no result although its fabric is closed"))?;
        ensure_err("an operation of a closed fabric", result, &[ErrorKind::Closed])?;
    }
    ensure_eq("references to the word", Arc::strong_count(&fixture.word), 1)
}

fn once_revoked(context: &TrialContext) -> TestResult {
    let mut fixture = TriggerPair::new(context)?;
    let op = fixture.write_when(1, WriteOptions::new())?;
    fixture.ensure_not_begun()?;
    fixture.pair.sim.done(fixture.dst.region.revoke()?)?;
    fixture.dst.fill(context.seed + 5)?;
    fixture.set(1);
    let kinds = [ErrorKind::Revoked, ErrorKind::RemoteAccess];
    fixture.pair.sim.fails("a trigger after the revocation", Ok(op), &kinds)?;
    fixture.pair.sim.settle()?;
    fixture.dst.check("after the revocation")
}

/// A write triggers a write back without the caller: the second begins when the first has landed.
fn by_a_mirror(context: &TrialContext) -> TestResult {
    let fixture = TriggerPair::new(context)?;
    let mut back = CheckedRegion::new(&fixture.pair.a, LEN, FULL_ACCESS, context.seed + 3)?;
    let landed = fixture.pair.to_a.imm(1).mirror(fixture.word.clone(), OnPeerClosed::Keep);
    let options = WriteOptions::new().imm(2).when(fixture.word.clone(), 1);
    let theirs = back.import(&fixture.pair.to_a)?;
    let answer = fixture.pair.to_a.write_with(&fixture.dst.region, 0..LEN, &theirs, 0, &options)?;
    fixture.ensure_not_begun()?;
    let remote = fixture.dst.import(&fixture.pair.to_b)?;
    let options = WriteOptions::new().imm(1);
    let question = fixture.pair.to_b.write_with(&fixture.src.region, 0..LEN, &remote, 0, &options)?;
    back.expect_from(0, &fixture.src, 0..LEN);
    let counter = fixture.pair.to_b.imm(2);
    fixture.pair.sim.until("the answer", || counter.count() == 1)?;
    back.check("what came back")?;
    ensure_eq("arrivals", landed.total(), 1)?;
    fixture.pair.sim.all_done(vec![question, answer])
}

/// No event wakes the worker, so it has to poll the word.
fn found_by_a_worker(context: &TrialContext) -> TestResult {
    let ConnectedPair { fabric, peer, mut helper } = ConnectedPair::new(context)?;
    helper.command(&format!("alloc far {LEN} 1"))?;
    let (mut src, word) = (CheckedRegion::new(&fabric, LEN, FULL_ACCESS, 2)?, Arc::new(AtomicU32::new(0)));
    let remote = within(LIMIT, "a lookup", peer.region("far"))??;
    for step in 1..=3_u32 {
        src.fill(u64::from(step) + 1)?;
        let options = WriteOptions::new().when(word.clone(), step);
        let mut op = peer.write_with(&src.region, 0..LEN, &remote, 0, &options)?;
        // Longer than a worker polls without a pause, so that the worker sleeps.
        std::thread::sleep(Duration::from_millis(5));
        helper.command(&format!("check far 0 {LEN} {step}"))?;
        word.store(step, Ordering::Release);
        op.wait(LIMIT)?;
        helper.command(&format!("check far 0 {LEN} {}", step + 1))?;
    }
    Ok(())
}

fn killed_before(context: &TrialContext) -> TestResult {
    let ConnectedPair { fabric, peer, mut helper } = ConnectedPair::new(context)?;
    helper.command(&format!("alloc far {LEN} 1"))?;
    let (src, word) = (CheckedRegion::new(&fabric, LEN, FULL_ACCESS, 2)?, Arc::new(AtomicU32::new(0)));
    let remote = within(LIMIT, "a lookup", peer.region("far"))??;
    let options = WriteOptions::new().when(word.clone(), 1);
    let mut op = peer.write_with(&src.region, 0..LEN, &remote, 0, &options)?;
    helper.signal(Signal::KILL)?;
    ensure_err("an operation to a killed peer", op.wait(LIMIT), &[ErrorKind::PeerDied])?;
    word.store(1, Ordering::Release);
    let again = peer.write_with(&src.region, 0..LEN, &remote, 0, &options);
    ensure_err("a later one", again.map(drop), &[ErrorKind::PeerDied]).map(drop)
}
