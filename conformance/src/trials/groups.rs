//! Several transports with several rail groups each, as every fabric with more than one backend has them. The grant of
//! each link limits that link alone, whatever transports come before it.

use std::sync::Arc;
use std::time::Duration;

use transport_core::observe::{GrantOf, WaitReason};
use transport_core::spi::Operations;
use transport_core::{Access, Grant, GrantPolicy, GrantRequest, Op, Pages, Peer, SendOptions, WriteOptions};

use super::forgery::WireDescriptor;
use super::grant::{ALL, AdjustableGrant};
use crate::backend_under_test::Variant;
use crate::check::{TestResult, ensure, ensure_eq};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::process::{HelperProcess, LIMIT, multi_transport_fabric};
use crate::sim_harness::{LABEL, Options, SimHarness, SimPair};
use crate::trial::{ALL_PATHS, Trial, TrialContext, TrialFabric};

const METERED: Operations = Operations::WRITE_IMM.union(Operations::SEND);

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("groups::imms_are_metered_by_their_own_link", imms).on(ALL_PATHS).rails(2).needs(METERED),
    Trial::new("groups::messages_are_metered_by_their_own_link", messages)
        .on(ALL_PATHS)
        .rails(2)
        .needs(METERED),
    Trial::new("groups::bytes_are_metered_by_their_own_link", bytes)
        .on(&[Variant::Plain, Variant::Queued, Variant::Partial])
        .rails(2)
        .needs(Operations::READ),
    Trial::new("groups::a_receive_is_posted_where_the_peer_is", receives)
        .on(ALL_PATHS)
        .rails(2)
        .needs(Operations::SEND),
    Trial::new("groups::another_transports_grant_is_not_used", not_anothers)
        .on(ALL_PATHS)
        .rails(2)
        .needs(METERED),
    Trial::new("groups::between_processes", between_processes)
        .process()
        .rails(2)
        .needs(METERED.union(Operations::READ)),
];

/// The transports of `a`: the first two are not in `b`.
const OURS: &[&str] = &["one", "two", LABEL];
/// The transports of `b`.
const THEIRS: &[&str] = &["three", LABEL];

fn open(
    sim: &SimHarness,
    labels: &[&str],
    grant_policy: Option<Arc<dyn GrantPolicy>>,
) -> TestResult<TrialFabric> {
    sim.open(&Options { labels, rails: Some(2), group_per_rail: true, grant_policy, ..Options::default() })
}

/// A pair that shares the last transport of each side only. Both sides grant the windows of `grant`.
fn pair(context: &TrialContext, grant: &Arc<AdjustableGrant>) -> TestResult<SimPair> {
    let sim = SimHarness::new(context);
    let (a, b) = (open(&sim, OURS, Some(grant.clone()))?, open(&sim, THEIRS, Some(grant.clone()))?);
    let (to_b, to_a) = a.connect_local(&b)?;
    Ok(SimPair { sim, a, b, to_b, to_a })
}

/// Both directions of a pair: the initiator, its peer, the target, and the target's peer.
fn directions(pair: &SimPair) -> [(&TrialFabric, &Peer, &TrialFabric, &Peer); 2] {
    [(&pair.a, &pair.to_b, &pair.b, &pair.to_a), (&pair.b, &pair.to_a, &pair.a, &pair.to_b)]
}

fn imms(context: &TrialContext) -> TestResult {
    const PAGES: u32 = 40;
    let pair = pair(context, &AdjustableGrant::new([ALL, 3, 0]))?;
    for (from, to, other, back) in directions(&pair) {
        let src = CheckedRegion::new(from, 4096, Access::LOCAL, context.seed)?;
        let mut dst = CheckedRegion::new(other, PAGES as usize * 64, FULL_ACCESS, context.seed + 1)?;
        let remote = dst.import(to)?;
        let pages = (Pages::new(vec![1; PAGES as usize]), Pages::new((0..PAGES).collect::<Vec<_>>()));
        let mut ops = Vec::new();
        for _ in 0..50 {
            ops.push(to.write_imm(1)?);
        }
        for options in [WriteOptions::new().imm(1).per_wr(), WriteOptions::new().imm(1)] {
            ops.push(to.write_pages_with(&src.region, &pages.0, &remote, &pages.1, 64, &options)?);
            ops.push(to.write_with(&src.region, 64..128, &remote, 0, &options)?);
        }
        pair.sim.all_done(ops)?;
        pair.sim.until("the imms", || back.imm(1).count() == 50 + u64::from(PAGES) + 3)?;
        (0..PAGES as usize).for_each(|page| dst.expect_from(page * 64, &src, 64..128));
        dst.check("pages with imms")?;
    }
    pair.sim.settle()
}

fn messages(context: &TrialContext) -> TestResult {
    let pair = pair(context, &AdjustableGrant::new([ALL, 0, 2]))?;
    for (from, to, other, _) in directions(&pair) {
        let src = CheckedRegion::new(from, 64, Access::LOCAL, context.seed)?;
        let pool = other.recv_pool(64, 64)?;
        let mut ops = Vec::new();
        for number in 0..30 {
            ops.push(to.send_with(&src.region, 0..64, &SendOptions::new().imm(number))?);
        }
        pair.sim.all_done(ops)?;
        pair.sim.settle()?;
        let mut imms = Vec::new();
        while let Some(message) = pool.try_next() {
            let message = message?;
            ensure(message.to_vec() == src.bytes(0..64), "a message has wrong bytes")?;
            imms.push(message.imm());
        }
        imms.sort_unstable();
        ensure_eq("imms of the messages", imms, (0..30).map(Some).collect())?;
    }
    Ok(())
}

/// Single receives. The receiver's first transport reaches no peer.
fn receives(context: &TrialContext) -> TestResult {
    let pair = pair(context, &AdjustableGrant::new([ALL, ALL, ALL]))?;
    for (from, to, other, back) in directions(&pair) {
        let src = CheckedRegion::new(from, 256, Access::LOCAL, context.seed)?;
        let mut dst = CheckedRegion::new(other, 256, FULL_ACCESS, context.seed + 1)?;
        let mut receive = other.recv(&dst.region, 0..256)?;
        pair.sim.done(to.send(&src.region, 0..256)?)?;
        let got = pair.sim.result(&mut receive)??;
        ensure_eq("bytes and sender", (got.bytes, got.peer), (256, Some(back.id())))?;
        dst.expect_from(0, &src, 0..256);
        dst.check("a message")?;
    }
    pair.sim.settle()
}

/// The rail groups of a transport share one window of bytes. Reads use no credit of it.
fn bytes(context: &TrialContext) -> TestResult {
    const LEN: usize = 5 << 20;
    let pair = pair(context, &AdjustableGrant::new([1 << 20, 0, 0]))?;
    for (from, to, other, _) in directions(&pair) {
        let mut src = CheckedRegion::new(from, LEN, FULL_ACCESS, context.seed)?;
        let mut dst = CheckedRegion::new(other, LEN, FULL_ACCESS, context.seed + 1)?;
        let remote = dst.import(to)?;
        pair.sim.done(to.write(&src.region, 0..LEN, &remote, 0)?)?;
        dst.expect_from(0, &src, 0..LEN);
        dst.check("written through a window")?;
        dst.fill(context.seed + 2)?;
        pair.sim.done(to.read(&src.region, 0..LEN, &remote, 0)?)?;
        src.expect_from(0, &dst, 0..LEN);
        src.check("read")?;
    }
    pair.sim.settle()
}

/// Grants a few imms and messages over the last transport, and grants the other transports without limit.
struct LimitedLastTransport;

const LIMITED: Grant = Grant { bytes: ALL, imms: 3, messages: 2 };

impl GrantPolicy for LimitedLastTransport {
    fn grant(&self, applicant: &GrantRequest<'_>) -> Grant {
        if applicant.transport == LABEL { LIMITED } else { Grant::UNLIMITED }
    }
}

/// Both transports reach the peer. The bytes go over the second transport, whose grant is small. They must not use the
/// first transport's grant: the receiver would close the connection to such a sender.
fn not_anothers(context: &TrialContext) -> TestResult {
    const WRITES: usize = 300;
    let sim = SimHarness::new(context);
    let labels = &["one", LABEL];
    let (a, b) = (open(&sim, labels, None)?, open(&sim, labels, Some(Arc::new(LimitedLastTransport)))?);
    let (to_b, to_a) = a.connect_local(&b)?;
    let src = CheckedRegion::new(&a, 64, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&b, WRITES * 64, FULL_ACCESS, context.seed + 1)?;
    let mut wire = WireDescriptor::of(&dst)?;
    wire.entries.retain(|entry| entry.transport == LABEL);
    let remote = to_b.import(&wire.to_descriptor()?)?;
    let mut ops = Vec::new();
    for number in 0..WRITES {
        let options = WriteOptions::new().imm(5);
        ops.push(to_b.write_with(&src.region, 0..64, &remote, number * 64, &options)?);
        dst.expect_from(number * 64, &src, 0..64);
    }
    // The target polls nothing and grants nothing more.
    for _ in 0..200 {
        a.step();
        sim.clock.advance(Duration::from_micros(50));
    }
    let done = ops.iter_mut().map(Op::try_result).filter(Option::is_some).count();
    ensure_eq("completed writes with an imm, while the target does not poll", done as u64, LIMITED.imms)?;
    let dump = a.dump();
    let waits_for_imms = |wait: &WaitReason| matches!(wait, WaitReason::Grant { of: GrantOf::Imms, .. });
    let named = dump.operations().filter(|operation| operation.waits.iter().any(waits_for_imms)).count();
    ensure_eq("operations that wait for imms in the dump", named, WRITES - done)?;
    sim.until("the imms", || to_a.imm(5).count() == WRITES as u64 || !to_a.is_alive())?;
    ensure(to_a.is_alive(), "the target closed a sender that keeps to its grant")?;
    sim.settle()?;
    ops.retain_mut(|op| op.try_result().is_none());
    dst.check("what was written")
}

/// The same in real time between two processes, which share the last transport of each only, as two hosts do.
fn between_processes(context: &TrialContext) -> TestResult {
    const IMMS: usize = 500;
    const PAGES: u32 = 64;
    let windows = Grant { bytes: 1 << 20, imms: 8, messages: 4 };
    let fabric = multi_transport_fabric(context, OURS, windows)?;
    let mut helper = HelperProcess::spawn_idle(context)?;
    helper.command(&format!("open-multi {} 1048576 8 4", THEIRS.join(",")))?;
    let address = helper.command("listen")?;
    let to_child = helper.connect(&fabric, &address)?;
    helper.command("alloc there 4194304 7")?;
    let remote = crate::check::within(LIMIT, "a lookup", to_child.region("there"))??;
    let src = CheckedRegion::new(&fabric, 4 << 20, FULL_ACCESS, context.seed)?;
    helper.start(&format!("expect 1 {IMMS}"))?;
    let ops: Result<Vec<Op>, _> = (0..IMMS).map(|_| to_child.write_imm(1)).collect();
    finish(ops?)?;
    helper.finish("expect 1")?;
    let (from, to): (Vec<u32>, Vec<u32>) = ((0..PAGES).collect(), (0..PAGES).rev().collect());
    let options = WriteOptions::new().imm(2).per_wr();
    let (from, to) = (Pages::new(from), Pages::new(to));
    finish(vec![to_child.write_pages_with(&src.region, &from, &remote, &to, 64 << 10, &options)?])?;
    helper.command(&format!("expect 2 {PAGES}"))?;
    let back = CheckedRegion::new(&fabric, 4 << 20, FULL_ACCESS, context.seed + 1)?;
    finish(vec![to_child.read(&back.region, 0..4 << 20, &remote, 0)?])?;
    let mut page = vec![0; 64 << 10];
    for number in 0..PAGES as usize {
        back.region.copy_out(number << 16, &mut page)?;
        let other = (PAGES as usize - 1 - number) << 16;
        ensure(page == src.bytes(other..other + (64 << 10)), format!("page {number} has wrong bytes"))?;
    }
    // The other direction, and messages in both directions.
    helper.start(&format!("imms 3 {IMMS}"))?;
    let counter = to_child.imm(3);
    crate::check::within(LIMIT, "the helper's imms", counter.expect(IMMS as u64))??;
    helper.finish("imms 3")?;
    helper.command("pool 16 64")?;
    let ops: Result<Vec<Op>, _> = (0..100).map(|_| to_child.send(&src.region, 0..64)).collect();
    helper.command("wait-pool 100 64")?;
    finish(ops?)?;
    let pool = fabric.recv_pool(16, 64)?;
    helper.start("sends there 0 64 100")?;
    for _ in 0..100 {
        ensure_eq("bytes of a message", pool.next().wait(LIMIT)?.len(), 64)?;
    }
    helper.finish("sends")?;
    ensure(to_child.is_alive(), "the peer is closed")
}

fn finish(ops: Vec<Op>) -> TestResult {
    for mut op in ops {
        op.wait(LIMIT)?;
    }
    Ok(())
}
