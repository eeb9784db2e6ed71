//! Path policies: bytes take no path that is not allowed, and a refusal says which it was.

use transport_core::spi::{Operations, Paths};
use transport_core::{
    Access, Error, ErrorKind, LocalList, Op, Pages, PathPolicy, ReadOptions, RemoteList, SendOptions,
    WriteOptions,
};

use crate::check::{TestResult, ensure, ensure_eq, ensure_err};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::sim_harness::{LABEL, Options, SimHarness, SimPair};
use crate::trial::{Trial, TrialContext};

const ALL: Operations = Operations::all();

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("paths::of_an_operation", of_an_operation).needs(ALL),
    Trial::new("paths::of_a_peer", of_a_peer).needs(ALL),
    Trial::new("paths::of_a_fabric", of_a_fabric).needs(ALL),
];

/// The paths that a write between two regions takes: those without which it is refused.
fn paths_of(write: impl Fn(PathPolicy) -> Result<Op, Error>) -> Paths {
    let is_taken = |path: &Paths| write(PathPolicy::without(*path)).map(Op::detach).is_err();
    Paths::all().iter().filter(is_taken).collect()
}

/// A pair, a region on each side and what a write between them takes.
struct Fixture {
    pair: SimPair,
    src: CheckedRegion,
    dst: CheckedRegion,
}

impl Fixture {
    fn new(context: &TrialContext) -> TestResult<Self> {
        let pair = SimPair::new(context)?;
        let src = CheckedRegion::new(&pair.a, 8192, Access::LOCAL, context.seed)?;
        let dst = CheckedRegion::new(&pair.b, 8192, FULL_ACCESS, context.seed + 1)?;
        Ok(Self { pair, src, dst })
    }

    /// Every operation that moves bytes between the regions, with these paths allowed by its options.
    fn operations(&self, paths: PathPolicy) -> TestResult<Vec<(&'static str, Result<Op, Error>)>> {
        let (peer, near, far) = (&self.pair.to_b, &self.src.region, self.dst.import(&self.pair.to_b)?);
        let (pages, write, read) =
            (Pages::new([0]), WriteOptions::new().path_policy(paths), ReadOptions::new().path_policy(paths));
        let (mut mine, mut theirs) = (LocalList::new(), RemoteList::new());
        mine.push(near, 0, 64)?;
        theirs.push(&far, 0, 64)?;
        Ok(vec![
            ("write", peer.write_with(near, 0..64, &far, 0, &write)),
            ("a write with an imm", peer.write_with(near, 0..64, &far, 0, &write.clone().imm(1))),
            ("write_pages", peer.write_pages_with(near, &pages, &far, &pages, 64, &write)),
            ("write_list", peer.write_list(&mine, .., &theirs, .., &write)),
            ("read", peer.read_with(near, 0..64, &far, 0, &read)),
            ("read_pages", peer.read_pages_with(near, &pages, &far, &pages, 64, &read)),
            ("read_list", peer.read_list(&mine, .., &theirs, .., &read)),
        ])
    }

    /// Fails unless all operations end well.
    fn all_done(&self, paths: PathPolicy) -> TestResult {
        self.operations(paths)?.into_iter().try_for_each(|(_, op)| self.pair.sim.done(op?).map(drop))
    }

    /// Fails unless all operations are refused, with a sentence that names the path and the transport.
    fn all_refused(&self, paths: PathPolicy, taken: Paths) -> TestResult {
        for (name, op) in self.operations(paths)? {
            let why = ensure_err(name, op, &[ErrorKind::Unreachable])?.to_string();
            ensure(why.contains(&taken.to_string()) && why.contains(LABEL), format!("{name}: {why}"))?;
        }
        Ok(())
    }
}

fn of_an_operation(context: &TrialContext) -> TestResult {
    let fixture = Fixture::new(context)?;
    let (peer, near, far) =
        (&fixture.pair.to_b, &fixture.src.region, fixture.dst.import(&fixture.pair.to_b)?);
    let write = |paths| peer.write_with(near, 0..64, &far, 0, &WriteOptions::new().path_policy(paths));
    let taken = paths_of(write);
    ensure(!taken.is_empty(), "no path is taken")?;
    fixture.all_done(PathPolicy::ANY)?;
    fixture.all_done(PathPolicy::only(taken))?;
    for path in taken.iter() {
        fixture.all_refused(PathPolicy::without(path), taken)?;
    }
    fixture.all_refused(PathPolicy::only(Paths::empty()), taken)?;
    // Messages take the transport's path.
    fixture.pair.b.recv(&fixture.dst.region, 0..64)?.detach();
    let send = |paths| peer.send_with(near, 0..64, &SendOptions::new().path_policy(paths));
    ensure_err("a message", send(PathPolicy::only(Paths::empty())), &[ErrorKind::Unreachable])?;
    fixture.pair.sim.done(send(PathPolicy::ANY)?)?;
    // The explanation is refused as the operation is.
    let options = WriteOptions::new().path_policy(PathPolicy::without(taken));
    let explained = peer.explain_write(near, 0..64, &far, 0, &options);
    ensure_err("an explanation", explained, &[ErrorKind::Unreachable]).map(drop)
}

/// A peer's policy applies to operations from then on, also to those that were prepared before.
fn of_a_peer(context: &TrialContext) -> TestResult {
    let fixture = Fixture::new(context)?;
    let (peer, near, far) =
        (&fixture.pair.to_b, &fixture.src.region, fixture.dst.import(&fixture.pair.to_b)?);
    let taken =
        paths_of(|paths| peer.write_with(near, 0..64, &far, 0, &WriteOptions::new().path_policy(paths)));
    let pages = Pages::new([0, 2]);
    let prepared = peer.prepare_write_pages(near, &pages, &far, &pages, 64, &WriteOptions::new())?;
    fixture.pair.sim.done(prepared.post()?)?;
    for path in taken.iter() {
        peer.set_path_policy(PathPolicy::without(path));
        fixture.all_refused(PathPolicy::ANY, taken)?;
        ensure_err("a prepared write", prepared.post(), &[ErrorKind::Unreachable])?;
    }
    peer.set_path_policy(PathPolicy::only(Paths::empty()));
    ensure_err("an imm", peer.write_imm(1), &[ErrorKind::Unreachable])?;
    // The other side's policy is its own.
    let back = CheckedRegion::new(&fixture.pair.a, 64, FULL_ACCESS, context.seed)?;
    let back = back.import(&fixture.pair.to_a)?;
    fixture.pair.sim.done(fixture.pair.to_a.write(&fixture.dst.region, 0..64, &back, 0)?)?;
    peer.set_path_policy(PathPolicy::ANY);
    fixture.all_done(PathPolicy::ANY)?;
    fixture.pair.sim.done(prepared.post()?).map(drop)
}

/// A fabric's policy applies to all its peers, and a peer's cannot widen it.
fn of_a_fabric(context: &TrialContext) -> TestResult {
    let fixture = Fixture::new(context)?;
    let (near, far) = (&fixture.src.region, fixture.dst.import(&fixture.pair.to_b)?);
    let write =
        |paths| fixture.pair.to_b.write_with(near, 0..64, &far, 0, &WriteOptions::new().path_policy(paths));
    let taken = paths_of(write);
    fixture.pair.sim.settle()?;
    let policy = PathPolicy::without(taken);
    let sim = SimHarness::new(context);
    let restricted = Options { path_policy: policy, ..Options::default() };
    let pair = sim.pair_of(&restricted, &Options::default())?;
    let strict = Fixture {
        src: CheckedRegion::new(&pair.a, 8192, Access::LOCAL, context.seed)?,
        dst: CheckedRegion::new(&pair.b, 8192, FULL_ACCESS, context.seed + 1)?,
        pair,
    };
    ensure_eq("the peer's policy", strict.pair.to_b.path_policy(), policy)?;
    strict.all_refused(PathPolicy::ANY, taken)?;
    strict.pair.to_b.set_path_policy(PathPolicy::ANY);
    strict.all_refused(PathPolicy::ANY, taken)
}
