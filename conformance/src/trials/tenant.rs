//! Tenants of one fabric: a peer of one can do nothing to another's memory.

use transport_core::{Access, Error, ErrorKind, Fabric, Listener, Op, Peer, RemoteRegion, Token};

use super::forgery::Wire;
use crate::check::{Failure, Verdict, ensure, refused, same, within};
use crate::end::End;
use crate::ground::{Ground, OPEN};
use crate::lab::{Lab, Options};
use crate::process::{LIMIT, guarded};
use crate::subject::Side;
use crate::trial::{ALL_PATHS, Context, Trial};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("tenant::a_stolen_descriptor", stolen_descriptor).on(ALL_PATHS),
    Trial::new("tenant::a_forged_key", forged_key).on(ALL_PATHS),
    Trial::new("tenant::counters_are_apart", counters_are_apart),
    Trial::new("tenant::one_listener_and_no_names_in_common", one_listener).process(),
    Trial::new("tenant::a_stolen_descriptor_over_sockets", stolen_over_sockets).process(),
];

const LEN: usize = 300_000;
/// Whatever a foreign descriptor is refused with, at import or at the operation.
const REFUSALS: &[ErrorKind] = &[ErrorKind::RemoteAccess, ErrorKind::Revoked];

fn token(name: &str) -> Verdict<Token> {
    Ok(Token::new(format!("the token of {name} and of nobody else"))?)
}

/// A parent, its tenants a and b, and a peer of a.
struct House {
    lab: Lab,
    parent: End,
    a: End,
    b: End,
    guest: End,
    to_a: Peer,
}

impl House {
    #[track_caller]
    fn new(context: &Context) -> Verdict<Self> {
        let lab = Lab::new(context);
        let parent = lab.open(&Options { token: Some(token("landlord")?), ..Options::default() })?;
        let (a, b) = (parent.tenant("a", token("a")?)?, parent.tenant("b", token("b")?)?);
        let [a, b] = [a, b].map(|tenant| parent.beside(tenant).at(Side::Target));
        [&a, &b].into_iter().for_each(|tenant| lab.drive(tenant));
        let guest = lab.open(&Options::default())?.at(Side::Source);
        let (to_a, from_guest) = guest.connect_local(&a)?;
        same("the tenant", from_guest.tenant(), "a")?;
        Ok(Self { lab, parent, a, b, guest, to_a })
    }
}

/// Small and large writes, each of which is refused or done.
fn writes<'a>(
    peer: &'a Peer,
    from: &'a Ground,
    to: &'a RemoteRegion,
) -> impl Iterator<Item = Result<Op, Error>> {
    [8, 100_000].into_iter().map(|len| peer.write(&from.region, 0..len, to, 0))
}

/// A descriptor of `ground` as if it were of another fabric.
#[track_caller]
fn forged(ground: &Ground, of: &Fabric, flip: u64) -> Verdict<transport_core::Descriptor> {
    let mut wire = Wire::of(ground)?;
    wire.claim(of.incarnation(), flip);
    wire.forge()
}

fn stolen_descriptor(context: &Context) -> Verdict {
    let house = House::new(context)?;
    let src = Ground::new(&house.guest, LEN, Access::LOCAL, context.seed)?;
    for (number, owner) in [&house.b, &house.parent].into_iter().enumerate() {
        let theirs = Ground::new(owner, LEN, OPEN, context.seed + 1 + number as u64)?;
        let stolen = house.to_a.import(&theirs.region.descriptor());
        refused("a descriptor of another fabric", stolen.map(drop), &[ErrorKind::Revoked])?;
        // As the victim's of its own landlord: no such key there, or one of its own.
        match house.to_a.import(&forged(&theirs, &house.a, 0)?) {
            Err(error) => drop(refused::<()>("one forged to be ours", Err(error), REFUSALS)?),
            Ok(remote) => {
                for op in writes(&house.to_a, &src, &remote) {
                    house.lab.fails("a write by it", op, REFUSALS)?;
                }
            }
        }
        house.lab.settle()?;
        theirs.check("another fabric's region")?;
    }
    src.check("the source")
}

fn forged_key(context: &Context) -> Verdict {
    let house = House::new(context)?;
    let src = Ground::new(&house.guest, LEN, Access::LOCAL, context.seed)?;
    let theirs = Ground::new(&house.b, LEN, OPEN, context.seed + 1)?;
    let parents = Ground::new(&house.parent, LEN, OPEN, context.seed + 2)?;
    // The guest's own landlord has a region too: keys may well be the same numbers.
    let mut own = Ground::new(&house.a, LEN, OPEN, context.seed + 3)?;
    let mut random = fastrand::Rng::with_seed(context.seed);
    let flips = (0..64).map(|bit| 1 << bit).chain((0..64).map(|_| random.u64(..))).chain([0]);
    for flip in flips {
        for victim in [&theirs, &parents] {
            let Ok(remote) = house.to_a.import(&forged(victim, &house.a, flip)?) else { continue };
            for op in writes(&house.to_a, &src, &remote).flatten() {
                // It may hit what the guest may write anyway, and nothing else.
                let mut op = op;
                let _ = house.lab.result(&mut op)?;
            }
        }
    }
    house.lab.settle()?;
    theirs.check("the other tenant's region")?;
    parents.check("the parent's region")?;
    src.check("the source")?;
    own.accept()?;
    ensure(own.len() == LEN, "the own region")
}

fn counters_are_apart(context: &Context) -> Verdict {
    let house = House::new(context)?;
    let src = Ground::new(&house.guest, LEN, Access::LOCAL, context.seed)?;
    let mut dst = Ground::new(&house.a, LEN, OPEN, context.seed + 1)?;
    let remote = dst.import(&house.to_a)?;
    house.lab.done(house.to_a.write(&src.region, 0..LEN, &remote, 0)?)?;
    dst.expect_from(0, &src, 0..LEN);
    dst.check("the tenant's region")?;
    let back = Ground::new(&house.guest, LEN, OPEN, context.seed + 2)?;
    let (_, to_guest) = house.guest.connect_local(&house.a)?;
    let returned = back.import(&to_guest)?;
    house.lab.done(to_guest.write(&dst.region, 0..LEN, &returned, 0)?)?;
    let bytes = |fabric: &Fabric| -> u64 {
        fabric.counters().iter().map(|rail| rail.bytes + rail.direct_bytes).sum()
    };
    same("bytes of the tenant", bytes(&house.a), LEN as u64)?;
    same("bytes of the others", (bytes(&house.b), bytes(&house.parent)), (0, 0))
}

/// Connects over TCP; the client's view and the listener's.
#[track_caller]
fn meet(client: &Fabric, listener: &Listener) -> Verdict<(Peer, Peer)> {
    let there = within(LIMIT, "connecting", client.connect(&listener.local_addr()))??;
    let here = within(LIMIT, "accepting", listener.accept())??;
    Ok((there, here))
}

fn one_listener(context: &Context) -> Verdict {
    let parent = guarded(context, token("landlord")?)?;
    let (a, b) = (parent.tenant("a", token("a")?)?, parent.tenant("b", token("b")?)?);
    let [a, b] = [a, b].map(|tenant| parent.beside(tenant).at(Side::Target));
    let listener = within(LIMIT, "listening", parent.listen("0"))??;
    let [region_a, region_b] = [&a, &b].map(|tenant| Ground::new(tenant, LEN, OPEN, 1));
    let (region_a, region_b) = (region_a?, region_b?);
    a.publish("kv", &region_a.region)?;
    b.publish("kv of b", &region_b.region)?;
    let (guest_a, guest_b) = (guarded(context, token("a")?)?, guarded(context, token("b")?)?);
    let (to_b, from_b) = meet(&guest_b, &listener)?;
    let (to_a, from_a) = meet(&guest_a, &listener)?;
    same("tenants", (from_a.tenant(), from_b.tenant()), ("a", "b"))?;
    let look = |peer: &Peer, name: &str| within(LIMIT, "a lookup", peer.region(name));
    look(&to_a, "kv")??;
    look(&to_b, "kv of b")??;
    refused("b's name asked by a's peer", look(&to_a, "kv of b")?.map(drop), &[ErrorKind::NotFound])?;
    refused("a's name asked by b's peer", look(&to_b, "kv")?.map(drop), &[ErrorKind::NotFound])?;
    let stranger = guarded(context, token("nobody")?)?;
    let denied = within(LIMIT, "a stranger", stranger.connect(&listener.local_addr()))?;
    refused("a stranger", denied.map(drop), &[ErrorKind::Permission])?;
    a.close();
    let end = within(LIMIT, "the end of a's peer", to_a.closed())?;
    same("its kind", end.kind(), ErrorKind::Closed)?;
    ensure(to_b.is_alive(), "the other tenant's peer ended too")
}

fn stolen_over_sockets(context: &Context) -> Verdict {
    let parent = guarded(context, token("landlord")?)?;
    let (a, b) = (parent.tenant("a", token("a")?)?, parent.tenant("b", token("b")?)?);
    let [a, b] = [a, b].map(|tenant| parent.beside(tenant).at(Side::Target));
    let listener = within(LIMIT, "listening", parent.listen("0"))??;
    let guest = guarded(context, token("a")?)?;
    let (to_a, _from_guest) = meet(&guest, &listener)?;
    let src = Ground::new(&guest, LEN, Access::LOCAL, 1)?;
    let theirs = Ground::new(&b, LEN, OPEN, 2)?;
    let stolen = to_a.import(&theirs.region.descriptor());
    refused("a stolen descriptor", stolen.map(drop), &[ErrorKind::Revoked])?;
    match to_a.import(&forged(&theirs, &a, 0)?) {
        Err(error) => drop(refused::<()>("a forged one", Err(error), REFUSALS)?),
        Ok(remote) => {
            for op in writes(&to_a, &src, &remote) {
                let done = op.and_then(|mut op| op.wait(LIMIT));
                refused("a write by it", done.map(drop), REFUSALS)?;
            }
        }
    }
    theirs.check("the other tenant's region").map_err(|_| Failure::new("a peer of a wrote to b"))
}
