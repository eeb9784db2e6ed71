//! Requests that can never succeed: refused with the right kind, and nothing moves.

use transport_core::spi::Operations;
use transport_core::{Access, Descriptor, ErrorKind, Op, Pages, WriteOptions};

use crate::check::{TestResult, ensure, ensure_err, ensure_eq};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::sim_harness::{SimHarness, Pair};
use crate::trial::{Context, Trial};

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

/// A source, a destination and whether anything moved.
struct Bench {
    pair: Pair,
    src: CheckedRegion,
    dst: CheckedRegion,
    remote: transport_core::RemoteRegion,
}

impl Bench {
    fn new(context: &Context, access: Access) -> TestResult<Self> {
        let pair = Pair::new(context)?;
        let src = CheckedRegion::new(&pair.a, LEN, FULL_ACCESS, context.seed)?;
        let dst = CheckedRegion::new(&pair.b, LEN, access, context.seed + 1)?;
        let remote = dst.import(&pair.to_b)?;
        Ok(Self { pair, src, dst, remote })
    }

    #[track_caller]
    fn refuses(&self, what: &str, op: Result<Op, transport_core::Error>, kind: ErrorKind) -> TestResult {
        self.pair.sim.fails(what, op, &[kind]).map(drop)
    }

    /// After all that was refused: not a byte differs, and the next good write works.
    #[track_caller]
    fn unharmed(self) -> TestResult {
        let Self { pair, src, mut dst, remote } = self;
        pair.sim.settle()?;
        src.check("the source")?;
        dst.check("the destination")?;
        if remote.access().contains(Access::REMOTE_WRITE) {
            pair.sim.done(pair.to_b.write(&src.region, 0..LEN, &remote, 0)?)?;
            dst.expect_from(0, &src, 0..LEN);
            dst.check("a good write after it")?;
        }
        Ok(())
    }
}

#[allow(clippy::reversed_empty_ranges, reason = "refusing those is the point")]
fn out_of_bounds(context: &Context) -> TestResult {
    let bench = Bench::new(context, FULL_ACCESS)?;
    let imm = WriteOptions::new().imm(1);
    let write = |range, at| bench.pair.to_b.write(&bench.src.region, range, &bench.remote, at);
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
        bench.refuses(&format!("{range:?} to {at}"), write(range, at), ErrorKind::OutOfBounds)?;
    }
    let beyond = bench.pair.to_b.write_with(&bench.src.region, 0..0, &bench.remote, LEN + 1, &imm);
    bench.refuses("an imm beyond the end", beyond, ErrorKind::OutOfBounds)?;
    bench.refuses("an empty range", write(4..4, 0), ErrorKind::InvalidRequest)?;
    ensure_eq("imms", bench.pair.to_a.imm(1).count(), 0)?;
    bench.unharmed()
}

fn out_of_bounds_reads(context: &Context) -> TestResult {
    let bench = Bench::new(context, FULL_ACCESS)?;
    let read = |range, at| bench.pair.to_b.read(&bench.src.region, range, &bench.remote, at);
    for (range, at) in [(0..LEN + 1, 0), (LEN..LEN + 1, 0), (0..LEN, 1), (0..1, LEN), (0..2, usize::MAX - 1)]
    {
        bench.refuses(&format!("{range:?} from {at}"), read(range, at), ErrorKind::OutOfBounds)?;
    }
    bench.refuses("an empty range", read(4..4, 0), ErrorKind::InvalidRequest)?;
    bench.unharmed()
}

fn out_of_bounds_messages(context: &Context) -> TestResult {
    let bench = Bench::new(context, FULL_ACCESS)?;
    bench.refuses(
        "a message",
        bench.pair.to_b.send(&bench.src.region, LEN - 1..LEN + 1),
        ErrorKind::OutOfBounds,
    )?;
    bench.refuses(
        "a receive",
        bench.pair.b.recv(&bench.dst.region, LEN - 1..LEN + 1),
        ErrorKind::OutOfBounds,
    )?;
    bench.refuses(
        "an empty receive",
        bench.pair.b.recv(&bench.dst.region, 3..3),
        ErrorKind::InvalidRequest,
    )?;
    let foreign = bench.pair.b.recv(&bench.src.region, 0..10);
    bench.refuses("a receive into another fabric's region", foreign, ErrorKind::InvalidRequest)?;
    bench.unharmed()
}

fn page_lists(context: &Context) -> TestResult {
    let bench = Bench::new(context, FULL_ACCESS)?;
    let lists: [(&[u32], &[u32], usize); 5] =
        [(&[], &[], 64), (&[0], &[], 64), (&[], &[0], 64), (&[0, 1], &[0], 64), (&[0], &[0], 0)];
    for (from, to, page) in lists {
        let (from, to) = (Pages::new(from), Pages::new(to));
        let op = bench.pair.to_b.write_pages(&bench.src.region, &from, &bench.remote, &to, page);
        bench.refuses(&format!("{from:?} to {to:?} of {page}"), op, ErrorKind::InvalidRequest)?;
    }
    bench.unharmed()
}

fn pages_out_of_bounds(context: &Context) -> TestResult {
    let bench = Bench::new(context, FULL_ACCESS)?;
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
        // Wraps to a small number if multiplied in 64 bits.
        Pages::new([0, 1 << 31]).stride(1 << 33),
    ];
    for bad in &bad {
        let source = bench.pair.to_b.write_pages(&bench.src.region, bad, &bench.remote, &good, 100);
        bench.refuses(&format!("from {bad:?}"), source, ErrorKind::OutOfBounds)?;
        let target = bench.pair.to_b.write_pages(&bench.src.region, &good, &bench.remote, bad, 100);
        bench.refuses(&format!("to {bad:?}"), target, ErrorKind::OutOfBounds)?;
    }
    let whole = bench.pair.to_b.write_pages(&bench.src.region, &good, &bench.remote, &good, usize::MAX);
    bench.refuses("a page of all there is", whole, ErrorKind::OutOfBounds)?;
    bench.unharmed()
}

fn no_right_to_write(context: &Context) -> TestResult {
    nothing_allowed(context)?;
    let bench = Bench::new(context, Access::REMOTE_READ)?;
    let to_b = &bench.pair.to_b;
    let pages = Pages::new([0, 2]);
    bench.refuses(
        "a write",
        to_b.write(&bench.src.region, 0..LEN, &bench.remote, 0),
        ErrorKind::RemoteAccess,
    )?;
    let imm = to_b.write_with(&bench.src.region, 0..8, &bench.remote, 0, &WriteOptions::new().imm(3));
    bench.refuses("a write with imm", imm, ErrorKind::RemoteAccess)?;
    let paged = to_b.write_pages(&bench.src.region, &pages, &bench.remote, &pages, 64);
    bench.refuses("a paged write", paged, ErrorKind::RemoteAccess)?;
    ensure_eq("imms", bench.pair.to_a.imm(3).count(), 0)?;
    bench.unharmed()
}

fn no_right_to_read(context: &Context) -> TestResult {
    let bench = Bench::new(context, Access::REMOTE_WRITE)?;
    for len in [8, LEN] {
        let read = bench.pair.to_b.read(&bench.src.region, 0..len, &bench.remote, 0);
        bench.refuses("a read", read, ErrorKind::RemoteAccess)?;
    }
    bench.unharmed()
}

/// A local region is refused at its import, or later.
fn nothing_allowed(context: &Context) -> TestResult {
    let pair = Pair::new(context)?;
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

fn another_peers_region(context: &Context) -> TestResult {
    let bench = Bench::new(context, FULL_ACCESS)?;
    let third = bench.pair.sim.open(&Default::default())?;
    let (to_third, _) = bench.pair.a.connect_local(&third)?;
    let theirs = CheckedRegion::new(&third, LEN, FULL_ACCESS, context.seed + 7)?;
    let remote = theirs.import(&to_third)?;
    let wrong = bench.pair.to_b.write(&bench.src.region, 0..LEN, &remote, 0);
    bench.refuses("one peer's region through another", wrong, ErrorKind::InvalidRequest)?;
    let import = bench.pair.to_b.import(&theirs.region.descriptor());
    ensure_err("one peer's descriptor through another", import.map(drop), &[ErrorKind::Revoked])?;
    theirs.check("the third fabric's region")?;
    bench.unharmed()
}

fn another_fabrics_region(context: &Context) -> TestResult {
    let bench = Bench::new(context, FULL_ACCESS)?;
    let to_b = &bench.pair.to_b;
    let foreign = to_b.write(&bench.dst.region, 0..8, &bench.remote, 0);
    bench.refuses("a source of another fabric", foreign, ErrorKind::InvalidRequest)?;
    let pages = Pages::new([0, 2]);
    let paged = to_b.write_pages(&bench.dst.region, &pages, &bench.remote, &pages, 64);
    bench.refuses("pages of another fabric", paged, ErrorKind::InvalidRequest)?;
    if bench.pair.capabilities().operations.contains(Operations::READ) {
        let read = to_b.read(&bench.dst.region, 0..8, &bench.remote, 0);
        bench.refuses("a read into another fabric", read, ErrorKind::InvalidRequest)?;
    }
    bench.unharmed()
}

fn an_earlier_incarnation(context: &Context) -> TestResult {
    let sim = SimHarness::new(context);
    let a = sim.open(&Default::default())?;
    let before = sim.open(&Default::default())?;
    let old = CheckedRegion::new(&before, 4096, FULL_ACCESS, context.seed)?.region.descriptor().to_bytes();
    before.close();
    let after = sim.open(&Default::default())?;
    let new = CheckedRegion::new(&after, 4096, FULL_ACCESS, context.seed)?;
    let (to_b, _) = a.connect_local(&after)?;
    ensure(before.incarnation() != after.incarnation(), "two openings have one incarnation")?;
    ensure_err(
        "an old descriptor",
        to_b.import(&Descriptor::from_bytes(&old)?).map(drop),
        &[ErrorKind::Revoked],
    )?;
    new.import(&to_b)?;
    new.check("the new region")
}

/// The owner's own copies are bounded as well.
fn own_memory(context: &Context) -> TestResult {
    let pair = Pair::new(context)?;
    let checked = CheckedRegion::new(&pair.a, 100, FULL_ACCESS, context.seed)?;
    let mut bytes = [0; 8];
    for at in [93, 100, usize::MAX, usize::MAX - 7] {
        ensure_err("copy_in", checked.region.copy_in(at, &bytes), &[ErrorKind::OutOfBounds])?;
        ensure_err("copy_out", checked.region.copy_out(at, &mut bytes), &[ErrorKind::OutOfBounds])?;
    }
    ensure_err("an empty region", pair.a.alloc(0, FULL_ACCESS).map(drop), &[ErrorKind::InvalidRequest])?;
    checked.check("the region")
}
