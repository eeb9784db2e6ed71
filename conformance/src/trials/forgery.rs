//! Forged descriptors: they are refused and change no memory.

use serde::{Deserialize, Serialize};
use transport_core::spi::Operations;
use transport_core::{Access, Descriptor, ErrorKind, MemoryKind, RemoteRegion};

use crate::check::{TestResult, TrialFailure, ensure, ensure_err, within};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::process::{ConnectedPair, LIMIT};
use crate::sim_harness::SimPair;
use crate::trial::{Trial, TrialContext};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("forgery::damaged_bytes", damaged_bytes),
    Trial::new("forgery::another_key", another_key),
    Trial::new("forgery::more_rights", more_rights).needs(Operations::READ),
    Trial::new("forgery::more_bytes", more_bytes),
    Trial::new("forgery::unknown_transports_are_skipped", unknown_transports),
    Trial::new("forgery::amid_others", amid_others).process(),
];

/// The encoded fields of a descriptor, after its four magic bytes.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct WireDescriptor {
    incarnation: u64,
    region: u64,
    len: u64,
    access: u32,
    kind: MemoryKind,
    pub(super) entries: Vec<WireEntry>,
}

/// The entry of one transport in a descriptor.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct WireEntry {
    pub(super) transport: String,
    domain: u64,
    rail: u16,
    key: ForgedKey,
}

#[derive(Clone, Serialize, Deserialize)]
struct ForgedKey {
    base: u64,
    key: u64,
    len: u64,
}

impl WireDescriptor {
    #[track_caller]
    pub(super) fn of(checked: &CheckedRegion) -> TestResult<Self> {
        Self::read(&checked.region.descriptor().to_bytes())
    }

    #[track_caller]
    fn read(bytes: &[u8]) -> TestResult<Self> {
        postcard::from_bytes(&bytes[4..])
            .map_err(|error| TrialFailure::new(format!("the format of descriptors has changed: {error}")))
    }

    #[track_caller]
    pub(super) fn to_descriptor(&self) -> TestResult<Descriptor> {
        let bytes = postcard::to_extend(self, b"mrD\x01".to_vec())
            .map_err(|error| TrialFailure::new(error.to_string()))?;
        Ok(Descriptor::from_bytes(&bytes)?)
    }

    /// Sets the incarnation of the owner, and XORs every key with `flip`.
    pub(super) fn set_owner_and_keys(&mut self, incarnation: u64, flip: u64) {
        self.incarnation = incarnation;
        self.keys().for_each(|key| key.key ^= flip);
    }

    fn keys(&mut self) -> impl Iterator<Item = &mut ForgedKey> {
        self.entries.iter_mut().map(|entry| &mut entry.key)
    }
}

fn damaged_bytes(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let dst = CheckedRegion::new(&pair.b, 4096, FULL_ACCESS, context.seed)?;
    let good = dst.region.descriptor().to_bytes();
    let mut bad: Vec<Vec<u8>> = (0..good.len()).map(|len| good[..len].to_vec()).collect();
    bad.push([&good[..], b"x"].concat());
    bad.push([b"mrX\x01", &good[4..]].concat());
    bad.push(vec![0xff; 1 << 20]);
    for bytes in bad {
        let what = format!("{} of {} bytes", bytes.len(), good.len());
        ensure_err(&what, Descriptor::from_bytes(&bytes), &[ErrorKind::Protocol])?;
    }
    let later = [b"mrD\x02", &good[4..]].concat();
    ensure_err("a later version", Descriptor::from_bytes(&later), &[ErrorKind::Version]).map(drop)
}

/// The error kinds of a forged descriptor, at its import or at the operation.
const REFUSALS: &[ErrorKind] = &[ErrorKind::RemoteAccess, ErrorKind::Revoked];

/// Tries to write and read through a forged descriptor, small and large.
#[track_caller]
fn try_all(pair: &SimPair, src: &CheckedRegion, what: &str, forged: &Descriptor, at: usize) -> TestResult {
    let remote: RemoteRegion = match pair.to_b.import(forged) {
        Ok(remote) => remote,
        Err(error) => return ensure_err::<()>(what, Err(error), REFUSALS).map(drop),
    };
    for len in [8, 4000] {
        if remote.access().contains(Access::REMOTE_WRITE) {
            pair.sim.fails(what, pair.to_b.write(&src.region, 0..len, &remote, at), REFUSALS)?;
        }
        if remote.access().contains(Access::REMOTE_READ)
            && pair.capabilities().operations.contains(Operations::READ)
        {
            pair.sim.fails(what, pair.to_b.read(&src.region, 0..len, &remote, at), REFUSALS)?;
        }
    }
    Ok(())
}

fn another_key(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, 4096, FULL_ACCESS, context.seed + 1)?;
    // A local region with a similar key, which peers must not change.
    let neighbour = CheckedRegion::new(&pair.b, 4096, Access::LOCAL, context.seed + 2)?;
    let good = WireDescriptor::of(&dst)?;
    let mut random = fastrand::Rng::with_seed(context.seed);
    let forgeries = (0..64).map(|bit| 1 << bit).chain((0..64).map(|_| random.u64(1..)));
    for flip in forgeries {
        let mut wire = good.clone();
        wire.keys().for_each(|key| key.key ^= flip);
        try_all(&pair, &src, &format!("key with {flip:#x} flipped"), &wire.to_descriptor()?, 0)?;
    }
    pair.sim.settle()?;
    src.check("the source")?;
    dst.check("the region")?;
    neighbour.check("its neighbour")
}

fn more_rights(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    for (access, forged) in [
        (Access::REMOTE_READ, Access::REMOTE_WRITE),
        (Access::REMOTE_WRITE, Access::REMOTE_READ),
        (Access::LOCAL, Access::REMOTE_WRITE),
        (Access::LOCAL, Access::REMOTE_READ),
    ] {
        let dst = CheckedRegion::new(&pair.b, 4096, access, context.seed + 1)?;
        let mut wire = WireDescriptor::of(&dst)?;
        wire.access = forged.bits();
        try_all(&pair, &src, &format!("{access:?} forged to {forged:?}"), &wire.to_descriptor()?, 0)?;
        pair.sim.settle()?;
        src.check("the source")?;
        dst.check("the region")?;
    }
    Ok(())
}

fn more_bytes(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, 4096, FULL_ACCESS, context.seed + 1)?;
    for len in [4097, 1 << 20, u64::MAX / 2] {
        let mut wire = WireDescriptor::of(&dst)?;
        wire.len = len;
        wire.keys().for_each(|key| key.len = len);
        for at in [4096, 4095, len as usize - 4000] {
            try_all(
                &pair,
                &src,
                &format!("4096 bytes forged to {len}, at {at}"),
                &wire.to_descriptor()?,
                at,
            )?;
        }
    }
    pair.sim.settle()?;
    src.check("the source")?;
    dst.check("the region")
}

fn unknown_transports(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let src = CheckedRegion::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, 4096, FULL_ACCESS, context.seed + 1)?;
    let good = WireDescriptor::of(&dst)?;
    let strange = good.entries.iter().map(|entry| WireEntry { transport: "strange".into(), ..entry.clone() });
    let both = WireDescriptor {
        entries: strange.clone().chain(good.entries.iter().cloned()).collect(),
        ..good.clone()
    };
    let remote = pair.to_b.import(&both.to_descriptor()?)?;
    pair.sim.done(pair.to_b.write(&src.region, 0..4096, &remote, 0)?)?;
    dst.expect_from(0, &src, 0..4096);
    dst.check("past an unknown entry")?;
    let only = WireDescriptor { entries: strange.collect(), ..good.clone() };
    let error = ensure_err(
        "only unknown entries",
        pair.to_b.import(&only.to_descriptor()?).map(drop),
        &[ErrorKind::Unreachable],
    )?;
    ensure(!error.context().is_empty(), "the error gives no reason")?;
    let none = WireDescriptor { entries: Vec::new(), ..good };
    ensure_err("no entry", pair.to_b.import(&none.to_descriptor()?).map(drop), &[ErrorKind::Unreachable])
        .map(drop)
}

/// An operation with a wrong key fails alone, among many with right keys, even if the device must recover from it.
fn amid_others(context: &TrialContext) -> TestResult {
    const PIECES: usize = 64;
    const PIECE: usize = 64 << 10;
    const WRONG: usize = 20;
    let ConnectedPair { fabric, peer, mut helper } = ConnectedPair::new(context)?;
    let mut src = CheckedRegion::new(&fabric, PIECES * PIECE, FULL_ACCESS, 1)?;
    helper.command(&format!("alloc far {} 2", PIECES * PIECE))?;
    let good = within(LIMIT, "a lookup", peer.region("far"))??;
    let mut wire = WireDescriptor::read(&helper.descriptor("far")?)?;
    wire.keys().for_each(|key| key.key ^= 1 << 20);
    let bad = match peer.import(&wire.to_descriptor()?) {
        Ok(bad) => bad,
        Err(error) => return ensure_err::<()>("the wrong key", Err(error), REFUSALS).map(drop),
    };
    for seed in 3..8 {
        src.fill(seed)?;
        let write = |piece: usize, remote| {
            let range = piece * PIECE..(piece + 1) * PIECE;
            peer.write(&src.region, range.clone(), remote, range.start)
        };
        let before: Vec<_> = (0..WRONG).map(|piece| write(piece, &good)).collect();
        let wrong = write(WRONG, &bad);
        let behind: Vec<_> = (WRONG..PIECES).map(|piece| write(piece, &good)).collect();
        ensure_err("the wrong key", wrong.and_then(|mut op| op.wait(LIMIT)), REFUSALS)?;
        for op in before.into_iter().chain(behind) {
            op?.wait(LIMIT)?;
        }
        helper.command(&format!("check far 0 {} {seed}", PIECES * PIECE))?;
    }
    src.check("the source")
}
