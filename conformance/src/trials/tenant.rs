//! Tenants of one fabric: a peer of one tenant cannot change another tenant's memory.

use transport_core::{Access, Error, ErrorKind, Fabric, Listener, Op, Peer, RemoteRegion, Token};

use super::forgery::WireDescriptor;
use crate::backend_under_test::TransferSide;
use crate::check::{TestResult, TrialFailure, ensure, ensure_eq, ensure_err, within};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::process::{LIMIT, token_fabric};
use crate::sim_harness::{Options, SimHarness};
use crate::trial::{ALL_PATHS, Trial, TrialContext, TrialFabric};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("tenant::a_stolen_descriptor", stolen_descriptor).on(ALL_PATHS),
    Trial::new("tenant::a_forged_key", forged_key).on(ALL_PATHS),
    Trial::new("tenant::counters_are_apart", counters_are_apart),
    Trial::new("tenant::one_listener_and_no_names_in_common", one_listener).process(),
    Trial::new("tenant::a_stolen_descriptor_over_sockets", stolen_over_sockets).process(),
];

const LEN: usize = 300_000;
/// The error kinds of another tenant's descriptor, at its import or at the operation.
const REFUSALS: &[ErrorKind] = &[ErrorKind::RemoteAccess, ErrorKind::Revoked];

fn token(name: &str) -> TestResult<Token> {
    Ok(Token::new(format!("the token of {name} only"))?)
}

/// A fabric with the tenants a and b, and a client that is a peer of a.
struct TwoTenants {
    sim: SimHarness,
    parent: TrialFabric,
    a: TrialFabric,
    b: TrialFabric,
    client: TrialFabric,
    to_a: Peer,
}

impl TwoTenants {
    #[track_caller]
    fn new(context: &TrialContext) -> TestResult<Self> {
        let sim = SimHarness::new(context);
        let parent = sim.open(&Options { token: Some(token("parent")?), ..Options::default() })?;
        let (a, b) = (parent.tenant("a", token("a")?)?, parent.tenant("b", token("b")?)?);
        let [a, b] = [a, b].map(|tenant| parent.same_side(tenant).on_side(TransferSide::Target));
        [&a, &b].into_iter().for_each(|tenant| sim.drive(tenant));
        let client = sim.open(&Options::default())?.on_side(TransferSide::Source);
        let (to_a, from_client) = client.connect_local(&a)?;
        ensure_eq("the tenant", from_client.tenant(), "a")?;
        Ok(Self { sim, parent, a, b, client, to_a })
    }
}

/// Submits a small and a large write.
fn writes<'a>(
    peer: &'a Peer,
    from: &'a CheckedRegion,
    to: &'a RemoteRegion,
) -> impl Iterator<Item = Result<Op, Error>> {
    [8, 100_000].into_iter().map(|len| peer.write(&from.region, 0..len, to, 0))
}

/// The descriptor of `checked`, changed so that it seems to belong to fabric `of`.
#[track_caller]
fn forged(checked: &CheckedRegion, of: &Fabric, flip: u64) -> TestResult<transport_core::Descriptor> {
    let mut wire = WireDescriptor::of(checked)?;
    wire.set_owner_and_keys(of.incarnation(), flip);
    wire.to_descriptor()
}

fn stolen_descriptor(context: &TrialContext) -> TestResult {
    let fixture = TwoTenants::new(context)?;
    let src = CheckedRegion::new(&fixture.client, LEN, Access::LOCAL, context.seed)?;
    for (number, owner) in [&fixture.b, &fixture.parent].into_iter().enumerate() {
        let theirs = CheckedRegion::new(owner, LEN, FULL_ACCESS, context.seed + 1 + number as u64)?;
        let stolen = fixture.to_a.import(&theirs.region.descriptor());
        ensure_err("a descriptor of another fabric", stolen.map(drop), &[ErrorKind::Revoked])?;
        // The descriptor claims to belong to the client's tenant, which has no such key, or uses it for its own memory.
        match fixture.to_a.import(&forged(&theirs, &fixture.a, 0)?) {
            Err(error) => {
                drop(ensure_err::<()>("a descriptor forged for this tenant", Err(error), REFUSALS)?)
            }
            Ok(remote) => {
                for op in writes(&fixture.to_a, &src, &remote) {
                    fixture.sim.fails("a write through it", op, REFUSALS)?;
                }
            }
        }
        fixture.sim.settle()?;
        theirs.check("another fabric's region")?;
    }
    src.check("the source")
}

fn forged_key(context: &TrialContext) -> TestResult {
    let fixture = TwoTenants::new(context)?;
    let src = CheckedRegion::new(&fixture.client, LEN, Access::LOCAL, context.seed)?;
    let theirs = CheckedRegion::new(&fixture.b, LEN, FULL_ACCESS, context.seed + 1)?;
    let parents = CheckedRegion::new(&fixture.parent, LEN, FULL_ACCESS, context.seed + 2)?;
    // The client's tenant has a region too, whose key may be the same number.
    let mut own = CheckedRegion::new(&fixture.a, LEN, FULL_ACCESS, context.seed + 3)?;
    let mut random = fastrand::Rng::with_seed(context.seed);
    let flips = (0..64).map(|bit| 1 << bit).chain((0..64).map(|_| random.u64(..))).chain([0]);
    for flip in flips {
        for target in [&theirs, &parents] {
            let Ok(remote) = fixture.to_a.import(&forged(target, &fixture.a, flip)?) else { continue };
            for op in writes(&fixture.to_a, &src, &remote).flatten() {
                // The write may land only where the client may write anyway.
                let mut op = op;
                let _ = fixture.sim.result(&mut op)?;
            }
        }
    }
    fixture.sim.settle()?;
    theirs.check("the other tenant's region")?;
    parents.check("the parent's region")?;
    src.check("the source")?;
    own.accept()?;
    ensure(own.len() == LEN, "the own region")
}

fn counters_are_apart(context: &TrialContext) -> TestResult {
    let fixture = TwoTenants::new(context)?;
    let src = CheckedRegion::new(&fixture.client, LEN, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&fixture.a, LEN, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&fixture.to_a)?;
    fixture.sim.done(fixture.to_a.write(&src.region, 0..LEN, &remote, 0)?)?;
    dst.expect_from(0, &src, 0..LEN);
    dst.check("the tenant's region")?;
    let back = CheckedRegion::new(&fixture.client, LEN, FULL_ACCESS, context.seed + 2)?;
    let (_, to_client) = fixture.client.connect_local(&fixture.a)?;
    let returned = back.import(&to_client)?;
    fixture.sim.done(to_client.write(&dst.region, 0..LEN, &returned, 0)?)?;
    let bytes = |fabric: &Fabric| -> u64 {
        fabric.counters().iter().map(|rail| rail.bytes + rail.direct_bytes).sum()
    };
    ensure_eq("bytes of the tenant", bytes(&fixture.a), LEN as u64)?;
    ensure_eq("bytes of the others", (bytes(&fixture.b), bytes(&fixture.parent)), (0, 0))
}

/// Connects over TCP. Returns the client's peer and the listener's peer.
#[track_caller]
fn meet(client: &Fabric, listener: &Listener) -> TestResult<(Peer, Peer)> {
    let there = within(LIMIT, "connecting", client.connect(&listener.local_addr()))??;
    let here = within(LIMIT, "accepting", listener.accept())??;
    Ok((there, here))
}

fn one_listener(context: &TrialContext) -> TestResult {
    let parent = token_fabric(context, token("parent")?)?;
    let (a, b) = (parent.tenant("a", token("a")?)?, parent.tenant("b", token("b")?)?);
    let [a, b] = [a, b].map(|tenant| parent.same_side(tenant).on_side(TransferSide::Target));
    let listener = within(LIMIT, "listening", parent.listen("0"))??;
    let [region_a, region_b] = [&a, &b].map(|tenant| CheckedRegion::new(tenant, LEN, FULL_ACCESS, 1));
    let (region_a, region_b) = (region_a?, region_b?);
    a.publish("kv", &region_a.region)?;
    b.publish("kv of b", &region_b.region)?;
    let (client_a, client_b) = (token_fabric(context, token("a")?)?, token_fabric(context, token("b")?)?);
    let (to_b, from_b) = meet(&client_b, &listener)?;
    let (to_a, from_a) = meet(&client_a, &listener)?;
    ensure_eq("tenants", (from_a.tenant(), from_b.tenant()), ("a", "b"))?;
    let lookup = |peer: &Peer, name: &str| within(LIMIT, "a lookup", peer.region(name));
    lookup(&to_a, "kv")??;
    lookup(&to_b, "kv of b")??;
    ensure_err("b's name asked by a's peer", lookup(&to_a, "kv of b")?.map(drop), &[ErrorKind::NotFound])?;
    ensure_err("a's name asked by b's peer", lookup(&to_b, "kv")?.map(drop), &[ErrorKind::NotFound])?;
    let unknown = token_fabric(context, token("nobody")?)?;
    let denied = within(LIMIT, "a client with an unknown token", unknown.connect(&listener.local_addr()))?;
    ensure_err("a client with an unknown token", denied.map(drop), &[ErrorKind::Permission])?;
    a.close();
    let end = within(LIMIT, "the close of a's peer", to_a.closed())?;
    ensure_eq("its kind", end.kind(), ErrorKind::Closed)?;
    ensure(to_b.is_alive(), "the other tenant's peer is closed too")
}

fn stolen_over_sockets(context: &TrialContext) -> TestResult {
    let parent = token_fabric(context, token("parent")?)?;
    let (a, b) = (parent.tenant("a", token("a")?)?, parent.tenant("b", token("b")?)?);
    let [a, b] = [a, b].map(|tenant| parent.same_side(tenant).on_side(TransferSide::Target));
    let listener = within(LIMIT, "listening", parent.listen("0"))??;
    let client = token_fabric(context, token("a")?)?;
    let (to_a, _from_client) = meet(&client, &listener)?;
    let src = CheckedRegion::new(&client, LEN, Access::LOCAL, 1)?;
    let theirs = CheckedRegion::new(&b, LEN, FULL_ACCESS, 2)?;
    let stolen = to_a.import(&theirs.region.descriptor());
    ensure_err("a stolen descriptor", stolen.map(drop), &[ErrorKind::Revoked])?;
    match to_a.import(&forged(&theirs, &a, 0)?) {
        Err(error) => drop(ensure_err::<()>("a forged descriptor", Err(error), REFUSALS)?),
        Ok(remote) => {
            for op in writes(&to_a, &src, &remote) {
                let done = op.and_then(|mut op| op.wait(LIMIT));
                ensure_err("a write through it", done.map(drop), REFUSALS)?;
            }
        }
    }
    theirs.check("the other tenant's region").map_err(|_| TrialFailure::new("a peer of a wrote to b"))
}
