//! Receipts: what they say of an operation is what the rails have done.

use std::time::Duration;

use transport_core::spi::Operations;
use transport_core::{
    Access, ErrorKind, LocalList, Op, Pages, PathPolicy, RailCounters, ReadOptions, Receipt, RemoteList,
    RemoteRegion, Result, SendOptions, WriteOptions,
};

use crate::backend_under_test::Variant;
use crate::check::{TestResult, TrialFailure, ensure, ensure_eq, ensure_err, within};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::process::{ConnectedPair, LIMIT};
use crate::sim_harness::SimPair;
use crate::trial::{ALL_PATHS, Trial, TrialContext};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("receipts::add_up", add_up).on(ALL_PATHS).needs(Operations::all()),
    Trial::new("receipts::name_the_path", name_the_path).on(ALL_PATHS),
    Trial::new("receipts::tell_the_times", tell_the_times),
    Trial::new("receipts::only_of_success", only_of_success).needs(Operations::READ),
    Trial::new("receipts::between_processes", between_processes)
        .on(&[Variant::Plain, Variant::Queued])
        .needs(Operations::all())
        .process(),
];

const LEN: usize = 1 << 20;

/// A pair, and a region on each side.
struct Fixture {
    pair: SimPair,
    near: CheckedRegion,
    far: CheckedRegion,
    imported: RemoteRegion,
}

impl Fixture {
    fn new(context: &TrialContext) -> TestResult<Self> {
        let pair = SimPair::new(context)?;
        let near = CheckedRegion::new(&pair.a, LEN, FULL_ACCESS, context.seed)?;
        let far = CheckedRegion::new(&pair.b, LEN, FULL_ACCESS, context.seed + 1)?;
        let imported = far.import(&pair.to_b)?;
        Ok(Self { pair, near, far, imported })
    }

    /// An operation of a random kind and size.
    fn submit(&self, random: &mut fastrand::Rng) -> Result<Op> {
        let (to, near, far) = (&self.pair.to_b, &self.near.region, &self.imported);
        let imm = random.bool().then(|| random.u32(..));
        let plain = WriteOptions::new();
        let options = imm.map_or(plain.clone(), |imm| plain.imm(imm));
        let len = [1, 17, 4096, 70_000, LEN][random.usize(0..5)];
        let count = random.u32(1..100);
        let mut pages = || {
            let mut indices: Vec<u32> = (0..128).collect();
            random.shuffle(&mut indices);
            Pages::new(indices[..count as usize].to_vec())
        };
        let (from, onto) = (pages(), pages());
        let (mut mine, mut theirs) = (LocalList::new(), RemoteList::new());
        for index in 0..count as usize {
            // Some entries follow the one before them.
            let len = 100 + index % 3 * 28;
            mine.push(near, index * 128, len)?;
            theirs.push(far, index * 128, len)?;
        }
        match random.u32(0..7) {
            0 => to.write_with(near, 0..len, far, 0, &options),
            1 => to.write_pages_with(near, &from, far, &onto, 4096, &options),
            2 => to.write_list(&mine, .., &theirs, .., &options),
            3 => to.read(near, 0..len, far, 0),
            4 => to.read_pages(near, &onto, far, &from, 4096),
            5 => to.read_list(&mine, .., &theirs, .., &ReadOptions::new()),
            _ => {
                self.pair.b.recv(&self.far.region, 0..100)?.detach();
                to.send_with(near, 0..random.usize(0..100), &SendOptions::new())
            }
        }
    }

    /// Waits until `op` has succeeded. Returns its receipt, which agrees with the outcome.
    fn receipt(&self, op: &mut Op) -> TestResult<Receipt> {
        let outcome = self.pair.sim.result(op)??;
        let receipt = op.receipt().ok_or_else(|| TrialFailure::new("no receipt"))?;
        ensure_eq("bytes", receipt.bytes, outcome.bytes)?;
        ensure_eq("requests", receipt.work_requests, outcome.work_requests)?;
        ensure_eq("merged entries", receipt.merged, outcome.merged)?;
        ensure_eq("a receipt that is taken again", op.receipt().as_ref(), Some(&receipt))?;
        ensure(receipt.post <= receipt.transfer, format!("{receipt:?}"))?;
        Ok(receipt)
    }
}

/// Any operations: the bytes of the rails add up to those of the operation, and each rail has carried what the receipt
/// says of it.
fn add_up(context: &TrialContext) -> TestResult {
    let fixture = Fixture::new(context)?;
    let mut random = fastrand::Rng::with_seed(context.seed);
    for round in 0..context.amount(60, 15) {
        let before = fixture.pair.a.counters();
        let mut op = fixture.submit(&mut random)?;
        let receipt = fixture.receipt(&mut op)?;
        let what = format!("in round {round}, of {receipt:?}");
        let sum: u64 = receipt.rails.iter().map(|rail| rail.bytes).sum();
        ensure_eq(&format!("the bytes of all rails {what}"), sum, receipt.bytes)?;
        let at_once = |rail: &&_| -> bool { rail_of(rail).is_none() };
        let direct: u64 = receipt.rails.iter().filter(at_once).map(|rail| rail.bytes).sum();
        let mut counted_direct = 0;
        for (before, after) in before.iter().zip(fixture.pair.a.counters()) {
            counted_direct += after.direct_bytes - before.direct_bytes;
            let is_this = |rail: &&_| rail_of(rail) == Some((after.transport.as_str(), after.rail));
            let this = receipt.rails.iter().find(is_this);
            let bytes = this.map_or(0, |rail| rail.bytes);
            let of_rail = format!("the bytes of rail {} {what}", after.rail);
            ensure_eq(&of_rail, bytes, after.bytes - before.bytes)?;
            if let Some(this) = this {
                ensure_eq("the device", &this.device, &after.device)?;
            }
        }
        ensure_eq(&format!("the bytes of the calling thread {what}"), direct, counted_direct)?;
    }
    fixture.pair.sim.settle()
}

/// The transport and the number of a receipt's rail; `None` for the calling thread.
fn rail_of(rail: &transport_core::RailReceipt) -> Option<(&str, u32)> {
    rail.transport.as_deref().map(|transport| (transport, rail.rail))
}

/// The path of a receipt is the one that a policy has to allow.
fn name_the_path(context: &TrialContext) -> TestResult {
    let fixture = Fixture::new(context)?;
    let (to, near, far) = (&fixture.pair.to_b, &fixture.near.region, &fixture.imported);
    let pages = Pages::new((0..9).collect::<Vec<_>>());
    for at_once in [true, false] {
        let write = |paths| {
            let options = WriteOptions::new().path_policy(paths);
            match at_once {
                true => to.write_with(near, 0..64, far, 0, &options),
                false => to.write_pages_with(near, &pages, far, &pages, 4096, &options),
            }
        };
        let receipt = fixture.receipt(&mut write(PathPolicy::ANY)?)?;
        ensure(!receipt.rails.is_empty(), "no rail")?;
        for rail in &receipt.rails {
            fixture.pair.sim.done(write(PathPolicy::only(rail.path))?)?;
            for path in rail.path.iter() {
                let refused = write(PathPolicy::without(path)).map(Op::detach);
                ensure_err("without the path", refused, &[ErrorKind::Unreachable])?;
            }
        }
    }
    Ok(())
}

/// The times begin with the submission.
fn tell_the_times(context: &TrialContext) -> TestResult {
    const PAUSE: Duration = Duration::from_millis(3);
    let fixture = Fixture::new(context)?;
    let pages = Pages::new((0..40).collect::<Vec<_>>());
    let to = &fixture.pair.to_b;
    let mut op = to.write_pages(&fixture.near.region, &pages, &fixture.imported, &pages, 4096)?;
    ensure_eq("before the end", op.receipt(), None)?;
    fixture.pair.sim.clock.advance(PAUSE);
    let receipt = fixture.receipt(&mut op)?;
    ensure(receipt.post >= PAUSE && receipt.transfer < LIMIT, format!("{receipt:?}"))
}

/// An operation that fails, or that moves no bytes to a peer, has no receipt.
fn only_of_success(context: &TrialContext) -> TestResult {
    let fixture = Fixture::new(context)?;
    let (pair, near) = (&fixture.pair, &fixture.near.region);
    let secret = CheckedRegion::new(&pair.b, 64, Access::REMOTE_READ, context.seed + 2)?;
    let remote = secret.import(&pair.to_b)?;
    let pages = Pages::new([0]);
    let mut read = pair.to_b.read_pages(near, &pages, &remote, &pages, 64)?;
    fixture.receipt(&mut read)?;
    // The peer is closed before the engine takes the operation.
    let mut op = pair.to_b.read_pages(near, &pages, &remote, &pages, 64)?;
    pair.to_b.disconnect();
    let failed = pair.sim.result(&mut op)?;
    ensure(failed.is_err(), "the peer was closed")?;
    ensure_eq("the receipt of a failure", op.receipt(), None)?;
    let mut received = pair.b.recv(&fixture.far.region, 0..100)?;
    ensure_eq("the receipt of a receive", received.receipt(), None)?;
    ensure(received.try_result().is_none(), "nothing was sent")
}

/// Over real devices: each rail has carried what the receipt says of it.
fn between_processes(context: &TrialContext) -> TestResult {
    let mut pair = ConnectedPair::kept_or_new(context)?;
    let (fabric, peer) = (&pair.fabric, &pair.peer);
    let near = CheckedRegion::new(fabric, LEN, Access::LOCAL, 40)?;
    pair.helper.command(&format!("alloc receipts {LEN} 41"))?;
    let far = within(LIMIT, "a lookup", peer.region("receipts"))??;
    let (from, onto) =
        (Pages::new((0..100).collect::<Vec<_>>()), Pages::new((50..150).rev().collect::<Vec<_>>()));
    let near = &near.region;
    let submit: [&dyn Fn() -> Result<Op>; 4] = [
        &|| peer.write(near, 0..64, &far, 0),
        &|| peer.write(near, 0..LEN, &far, 0),
        &|| peer.write_pages(near, &from, &far, &onto, 4096),
        &|| peer.read_pages(near, &from, &far, &onto, 4096),
    ];
    for (number, submit) in submit.iter().enumerate() {
        let before = fabric.counters();
        let mut op = submit()?;
        let outcome = op.wait(LIMIT)?;
        let receipt = op.receipt().ok_or_else(|| TrialFailure::new("no receipt"))?;
        let what = format!("of operation {number}, {receipt:?}");
        let sum: u64 = receipt.rails.iter().map(|rail| rail.bytes).sum();
        ensure_eq(&format!("bytes {what}"), (sum, receipt.bytes), (outcome.bytes, outcome.bytes))?;
        for rail in receipt.rails.iter().filter(|rail| rail.transport.is_some()) {
            let after = fabric.counters();
            let mut counted = before.iter().zip(&after);
            let is_this = |(_, after): &(_, &RailCounters)| {
                rail_of(rail) == Some((after.transport.as_str(), after.rail)) && rail.device == after.device
            };
            let grown = counted.find(is_this).map(|(before, after)| after.bytes - before.bytes);
            ensure_eq(&format!("the bytes of a rail {what}"), grown, Some(rail.bytes))?;
        }
    }
    pair.keep(context);
    Ok(())
}
