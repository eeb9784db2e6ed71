//! Requests that can never succeed: they fail with the right error kind, and no byte moves.

use transport_core::spi::Operations;
use transport_core::{Access, Descriptor, ErrorKind, Op, Pages, WriteOptions};

use crate::check::{TestResult, ensure, ensure_eq, ensure_err};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::sim_harness::{SimHarness, SimPair};
use crate::trial::{Trial, TrialContext};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("refusal::out_of_bounds", out_of_bounds),
    Trial::new("refusal::out_of_bounds_reads", out_of_bounds_reads).needs(Operations::READ),
    Trial::new("refusal::out_of_bounds_messages", out_of_bounds_messages).needs(Operations::SEND),
    Trial::new("refusal::page_lists", page_lists),
    Trial::new("refusal::pages_out_of_bounds", pages_out_of_bounds),
    Trial::new("refusal::no_right_to_write", no_right_to_write),
    Trial::new("refusal::no_right_to_read", no_right_to_read).needs(Operations::READ),
    Trial::new("refusal::another_peers_region", another_peers_region),
    Trial::new("refusal::another_fabrics_region", another_fabrics_region),
    Trial::new("refusal::an_earlier_incarnation", an_earlier_incarnation),
    Trial::new("refusal::own_memory", own_memory),
];

const LEN: usize = 10_000;

/// A pair with a source and a destination.
struct RefusalPair {
    pair: SimPair,
    src: CheckedRegion,
    dst: CheckedRegion,
    remote: transport_core::RemoteRegion,
}

impl RefusalPair {
    fn new(context: &TrialContext, access: Access) -> TestResult<Self> {
        let pair = SimPair::new(context)?;
        let src = CheckedRegion::new(&pair.a, LEN, FULL_ACCESS, context.seed)?;
        let dst = CheckedRegion::new(&pair.b, LEN, access, context.seed + 1)?;
        let remote = dst.import(&pair.to_b)?;
        Ok(Self { pair, src, dst, remote })
    }

    #[track_caller]
    fn ensure_refused(
        &self,
        what: &str,
        op: Result<Op, transport_core::Error>,
        kind: ErrorKind,
    ) -> TestResult {
        self.pair.sim.fails(what, op, &[kind]).map(drop)
    }

    /// Fails unless both regions are unchanged and a valid write works.
    #[track_caller]
    fn check_unchanged(self) -> TestResult {
        let Self { pair, src, mut dst, remote } = self;
        pair.sim.settle()?;
        src.check("the source")?;
        dst.check("the destination")?;
        if remote.access().contains(Access::REMOTE_WRITE) {
            pair.sim.done(pair.to_b.write(&src.region, 0..LEN, &remote, 0)?)?;
            dst.expect_from(0, &src, 0..LEN);
            dst.check("after a valid write")?;
        }
        Ok(())
    }
}

#[allow(clippy::reversed_empty_ranges, reason = "the trial submits such ranges")]
fn out_of_bounds(context: &TrialContext) -> TestResult {
    let fixture = RefusalPair::new(context, FULL_ACCESS)?;
    let imm = WriteOptions::new().imm(1);
    let write = |range, at| fixture.pair.to_b.write(&fixture.src.region, range, &fixture.remote, at);
    for (range, at) in [
        (0..LEN + 1, 0),
        (LEN..LEN + 1, 0),
        (5..3, 0),
        (0..usize::MAX, 0),
        (usize::MAX - 1..usize::MAX, 0),
        (0..LEN, 1),
        (0..1, LEN),
        (0..1, usize::MAX),
        (0..2, usize::MAX - 1),
    ] {
        fixture.ensure_refused(&format!("{range:?} to {at}"), write(range, at), ErrorKind::OutOfBounds)?;
    }
    let beyond = fixture.pair.to_b.write_with(&fixture.src.region, 0..0, &fixture.remote, LEN + 1, &imm);
    fixture.ensure_refused("an imm beyond the end", beyond, ErrorKind::OutOfBounds)?;
    fixture.ensure_refused("an empty range", write(4..4, 0), ErrorKind::InvalidRequest)?;
    ensure_eq("imms", fixture.pair.to_a.imm(1).count(), 0)?;
    fixture.check_unchanged()
}

fn out_of_bounds_reads(context: &TrialContext) -> TestResult {
    let fixture = RefusalPair::new(context, FULL_ACCESS)?;
    let read = |range, at| fixture.pair.to_b.read(&fixture.src.region, range, &fixture.remote, at);
    for (range, at) in [(0..LEN + 1, 0), (LEN..LEN + 1, 0), (0..LEN, 1), (0..1, LEN), (0..2, usize::MAX - 1)]
    {
        fixture.ensure_refused(&format!("{range:?} from {at}"), read(range, at), ErrorKind::OutOfBounds)?;
    }
    fixture.ensure_refused("an empty range", read(4..4, 0), ErrorKind::InvalidRequest)?;
    fixture.check_unchanged()
}

fn out_of_bounds_messages(context: &TrialContext) -> TestResult {
    let fixture = RefusalPair::new(context, FULL_ACCESS)?;
    fixture.ensure_refused(
        "a message",
        fixture.pair.to_b.send(&fixture.src.region, LEN - 1..LEN + 1),
        ErrorKind::OutOfBounds,
    )?;
    fixture.ensure_refused(
        "a receive",
        fixture.pair.b.recv(&fixture.dst.region, LEN - 1..LEN + 1),
        ErrorKind::OutOfBounds,
    )?;
    fixture.ensure_refused(
        "an empty receive",
        fixture.pair.b.recv(&fixture.dst.region, 3..3),
        ErrorKind::InvalidRequest,
    )?;
    let foreign = fixture.pair.b.recv(&fixture.src.region, 0..10);
    fixture.ensure_refused("a receive into another fabric's region", foreign, ErrorKind::InvalidRequest)?;
    fixture.check_unchanged()
}

fn page_lists(context: &TrialContext) -> TestResult {
    let fixture = RefusalPair::new(context, FULL_ACCESS)?;
    let lists: [(&[u32], &[u32], usize); 5] =
        [(&[], &[], 64), (&[0], &[], 64), (&[], &[0], 64), (&[0, 1], &[0], 64), (&[0], &[0], 0)];
    for (from, to, page) in lists {
        let (from, to) = (Pages::new(from), Pages::new(to));
        let op = fixture.pair.to_b.write_pages(&fixture.src.region, &from, &fixture.remote, &to, page);
        fixture.ensure_refused(&format!("{from:?} to {to:?} of {page}"), op, ErrorKind::InvalidRequest)?;
    }
    fixture.check_unchanged()
}

fn pages_out_of_bounds(context: &TrialContext) -> TestResult {
    let fixture = RefusalPair::new(context, FULL_ACCESS)?;
    let good = Pages::new([0, 1]);
    let bad = [
        Pages::new([0, 100]),
        Pages::new([100, 0]),
        Pages::new([0, u32::MAX]),
        Pages::new([0, 1]).offset(LEN),
        Pages::new([0, 1]).offset(LEN - 199),
        Pages::new([0, 1]).offset(usize::MAX),
        Pages::new([0, 1]).stride(usize::MAX),
        Pages::new([0, 1]).stride(usize::MAX).offset(usize::MAX),
        Pages::new([0, u32::MAX]).stride(usize::MAX / 2),
        // The offset would wrap to a small number in a 64-bit multiplication.
        Pages::new([0, 1 << 31]).stride(1 << 33),
    ];
    for bad in &bad {
        let source = fixture.pair.to_b.write_pages(&fixture.src.region, bad, &fixture.remote, &good, 100);
        fixture.ensure_refused(&format!("from {bad:?}"), source, ErrorKind::OutOfBounds)?;
        let target = fixture.pair.to_b.write_pages(&fixture.src.region, &good, &fixture.remote, bad, 100);
        fixture.ensure_refused(&format!("to {bad:?}"), target, ErrorKind::OutOfBounds)?;
    }
    let whole = fixture.pair.to_b.write_pages(&fixture.src.region, &good, &fixture.remote, &good, usize::MAX);
    fixture.ensure_refused("a page of all there is", whole, ErrorKind::OutOfBounds)?;
    fixture.check_unchanged()
}

fn no_right_to_write(context: &TrialContext) -> TestResult {
    nothing_allowed(context)?;
    let fixture = RefusalPair::new(context, Access::REMOTE_READ)?;
    let to_b = &fixture.pair.to_b;
    let pages = Pages::new([0, 2]);
    fixture.ensure_refused(
        "a write",
        to_b.write(&fixture.src.region, 0..LEN, &fixture.remote, 0),
        ErrorKind::RemoteAccess,
    )?;
    let imm = to_b.write_with(&fixture.src.region, 0..8, &fixture.remote, 0, &WriteOptions::new().imm(3));
    fixture.ensure_refused("a write with imm", imm, ErrorKind::RemoteAccess)?;
    let paged = to_b.write_pages(&fixture.src.region, &pages, &fixture.remote, &pages, 64);
    fixture.ensure_refused("a paged write", paged, ErrorKind::RemoteAccess)?;
    ensure_eq("imms", fixture.pair.to_a.imm(3).count(), 0)?;
    fixture.check_unchanged()
}

fn no_right_to_read(context: &TrialContext) -> TestResult {
    let fixture = RefusalPair::new(context, Access::REMOTE_WRITE)?;
    for len in [8, LEN] {
        let read = fixture.pair.to_b.read(&fixture.src.region, 0..len, &fixture.remote, 0);
        fixture.ensure_refused("a read", read, ErrorKind::RemoteAccess)?;
    }
    fixture.check_unchanged()
}

/// A peer's import of a local region fails, or later operations on it.
fn nothing_allowed(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, LEN, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, LEN, Access::LOCAL, context.seed + 1)?;
    match pair.to_b.import(&dst.region.descriptor()) {
        Err(error) => drop(ensure_err::<()>("a local region", Err(error), &[ErrorKind::RemoteAccess])?),
        Ok(remote) => {
            let write = pair.to_b.write(&src.region, 0..LEN, &remote, 0);
            pair.sim.fails("a write", write, &[ErrorKind::RemoteAccess])?;
        }
    }
    pair.sim.settle()?;
    dst.check("a local region")
}

fn another_peers_region(context: &TrialContext) -> TestResult {
    let fixture = RefusalPair::new(context, FULL_ACCESS)?;
    let third = fixture.pair.sim.open(&Default::default())?;
    let (to_third, _) = fixture.pair.a.connect_local(&third)?;
    let theirs = CheckedRegion::new(&third, LEN, FULL_ACCESS, context.seed + 7)?;
    let remote = theirs.import(&to_third)?;
    let wrong = fixture.pair.to_b.write(&fixture.src.region, 0..LEN, &remote, 0);
    fixture.ensure_refused("one peer's region through another", wrong, ErrorKind::InvalidRequest)?;
    let import = fixture.pair.to_b.import(&theirs.region.descriptor());
    ensure_err("one peer's descriptor through another", import.map(drop), &[ErrorKind::Revoked])?;
    theirs.check("the third fabric's region")?;
    fixture.check_unchanged()
}

fn another_fabrics_region(context: &TrialContext) -> TestResult {
    let fixture = RefusalPair::new(context, FULL_ACCESS)?;
    let to_b = &fixture.pair.to_b;
    let foreign = to_b.write(&fixture.dst.region, 0..8, &fixture.remote, 0);
    fixture.ensure_refused("a source of another fabric", foreign, ErrorKind::InvalidRequest)?;
    let pages = Pages::new([0, 2]);
    let paged = to_b.write_pages(&fixture.dst.region, &pages, &fixture.remote, &pages, 64);
    fixture.ensure_refused("pages of another fabric", paged, ErrorKind::InvalidRequest)?;
    if fixture.pair.capabilities().operations.contains(Operations::READ) {
        let read = to_b.read(&fixture.dst.region, 0..8, &fixture.remote, 0);
        fixture.ensure_refused("a read into another fabric", read, ErrorKind::InvalidRequest)?;
    }
    fixture.check_unchanged()
}

fn an_earlier_incarnation(context: &TrialContext) -> TestResult {
    let sim = SimHarness::new(context);
    let a = sim.open(&Default::default())?;
    let before = sim.open(&Default::default())?;
    let old = CheckedRegion::new(&before, 4096, FULL_ACCESS, context.seed)?.region.descriptor().to_bytes();
    before.close();
    let after = sim.open(&Default::default())?;
    let new = CheckedRegion::new(&after, 4096, FULL_ACCESS, context.seed)?;
    let (to_b, _) = a.connect_local(&after)?;
    ensure(before.incarnation() != after.incarnation(), "two openings of a fabric have one incarnation")?;
    ensure_err(
        "an old descriptor",
        to_b.import(&Descriptor::from_bytes(&old)?).map(drop),
        &[ErrorKind::Revoked],
    )?;
    new.import(&to_b)?;
    new.check("the new region")
}

/// The owner's own copies are checked against the bounds too.
fn own_memory(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let checked = CheckedRegion::new(&pair.a, 100, FULL_ACCESS, context.seed)?;
    let mut bytes = [0; 8];
    for at in [93, 100, usize::MAX, usize::MAX - 7] {
        ensure_err("copy_in", checked.region.copy_in(at, &bytes), &[ErrorKind::OutOfBounds])?;
        ensure_err("copy_out", checked.region.copy_out(at, &mut bytes), &[ErrorKind::OutOfBounds])?;
    }
    ensure_err("an empty region", pair.a.alloc(0, FULL_ACCESS).map(drop), &[ErrorKind::InvalidRequest])?;
    checked.check("the region")
}
