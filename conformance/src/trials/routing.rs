//! Several transports: the preferred one is used if it reaches the peer, and explanations name the choice.

use transport_core::{Access, ErrorKind, Fabric, WriteOptions};

use super::forgery::WireDescriptor;
use crate::check::{TestResult, ensure, ensure_eq, ensure_err};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::sim_harness::{Options, SimHarness};
use crate::trial::{ALL_PATHS, Trial, TrialContext, TrialFabric};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("routing::prefers_the_first", prefers_the_first).on(ALL_PATHS),
    Trial::new("routing::takes_what_the_peer_has", takes_what_the_peer_has).on(ALL_PATHS),
    Trial::new("routing::preference_is_each_sides_own", preference_is_each_sides_own).on(ALL_PATHS),
    Trial::new("routing::takes_what_the_descriptor_has", takes_what_the_descriptor_has).on(ALL_PATHS),
    Trial::new("routing::nothing_in_common", nothing_in_common),
    Trial::new("routing::labels_are_checked", labels_are_checked),
];

fn open(sim: &SimHarness, labels: &[&str]) -> TestResult<TrialFabric> {
    // In each of many runs a transport has one rail group.
    let rails = sim.context.seed_sweep.then_some(4);
    sim.open(&Options { labels, rails, ..Options::default() })
}

/// The number of bytes that left over a transport, by device or by direct copy.
fn bytes_over(fabric: &Fabric, label: &str) -> u64 {
    let of_label = fabric.counters().into_iter().filter(|rail| rail.transport == label);
    of_label.map(|rail| rail.bytes + rail.direct_bytes).sum()
}

/// Checks that small and large writes use exactly this transport.
#[track_caller]
fn goes_over(sim: &SimHarness, from: &TrialFabric, to: &TrialFabric, label: &str) -> TestResult {
    let (peer, back) = from.connect_local(to)?;
    let src = CheckedRegion::new(from, 600_000, Access::LOCAL, 1)?;
    let mut dst = CheckedRegion::new(to, 600_000, FULL_ACCESS, 2)?;
    let remote = dst.import(&peer)?;
    let before: Vec<_> =
        from.transports().iter().map(|info| (info.label.clone(), bytes_over(from, &info.label))).collect();
    for len in [8, 600_000] {
        sim.done(peer.write_with(&src.region, 0..len, &remote, 0, &WriteOptions::new().imm(1))?)?;
    }
    dst.expect_from(0, &src, 0..600_000);
    dst.check(label)?;
    sim.until("two imms", || back.imm(1).count() == 2)?;
    for (other, before) in before {
        let moved = bytes_over(from, &other) - before;
        ensure_eq(&format!("bytes over {other}"), moved, if other == label { 600_008 } else { 0 })?;
    }
    for info in from.transports() {
        ensure(
            peer.explain().contains(&info.label),
            format!("{} is not explained:\n{}", info.label, peer.explain()),
        )?;
    }
    Ok(())
}

fn prefers_the_first(context: &TrialContext) -> TestResult {
    let sim = SimHarness::new(context);
    let (a, b) = (open(&sim, &["one", "two"])?, open(&sim, &["one", "two"])?);
    let region = CheckedRegion::new(&b, 4096, FULL_ACCESS, 1)?;
    let wire = WireDescriptor::of(&region)?;
    for label in ["one", "two"] {
        ensure(wire.entries.iter().any(|entry| entry.transport == label), format!("no entry for {label}"))?;
    }
    goes_over(&sim, &a, &b, "one")?;
    goes_over(&sim, &b, &a, "one")
}

fn takes_what_the_peer_has(context: &TrialContext) -> TestResult {
    let sim = SimHarness::new(context);
    let a = open(&sim, &["one", "two", "three"])?;
    let (b, c) = (open(&sim, &["two"])?, open(&sim, &["three", "four"])?);
    goes_over(&sim, &a, &b, "two")?;
    goes_over(&sim, &b, &a, "two")?;
    goes_over(&sim, &a, &c, "three")?;
    goes_over(&sim, &c, &a, "three")
}

fn preference_is_each_sides_own(context: &TrialContext) -> TestResult {
    let sim = SimHarness::new(context);
    let (a, b) = (open(&sim, &["one", "two"])?, open(&sim, &["two", "one"])?);
    goes_over(&sim, &a, &b, "one")?;
    goes_over(&sim, &b, &a, "two")
}

/// Writes through a descriptor without an entry for the preferred transport use another transport.
fn takes_what_the_descriptor_has(context: &TrialContext) -> TestResult {
    let sim = SimHarness::new(context);
    let (a, b) = (open(&sim, &["one", "two"])?, open(&sim, &["one", "two"])?);
    let (to_b, _) = a.connect_local(&b)?;
    let src = CheckedRegion::new(&a, 300_000, Access::LOCAL, 1)?;
    let mut dst = CheckedRegion::new(&b, 300_000, FULL_ACCESS, 2)?;
    let mut wire = WireDescriptor::of(&dst)?;
    wire.entries.retain(|entry| entry.transport == "two");
    let remote = to_b.import(&wire.to_descriptor()?)?;
    sim.done(to_b.write(&src.region, 0..300_000, &remote, 0)?)?;
    dst.expect_from(0, &src, 0..300_000);
    dst.check("by the second transport")?;
    ensure_eq("bytes over each", (bytes_over(&a, "one"), bytes_over(&a, "two")), (0, 300_000))
}

fn nothing_in_common(context: &TrialContext) -> TestResult {
    let sim = SimHarness::new(context);
    let (a, b) = (open(&sim, &["one"])?, open(&sim, &["two"])?);
    let error =
        ensure_err("no transport in common", a.connect_local(&b).map(drop), &[ErrorKind::Unreachable])?;
    ensure(error.context().contains("one"), format!("the error does not name the transport: {error}"))?;
    // The slots that the attempt reserved are free again.
    for _ in 0..context.amount(300, 3) {
        ensure_err("still none", a.connect_local(&b).map(drop), &[ErrorKind::Unreachable])?;
        sim.step();
    }
    let c = open(&sim, &["two", "one"])?;
    goes_over(&sim, &a, &c, "one")
}

fn labels_are_checked(context: &TrialContext) -> TestResult {
    let sim = SimHarness::new(context);
    let long = "x".repeat(65);
    for labels in [&[][..], &[""], &["one", "one"], &[long.as_str()]] {
        let builder = crate::sim_harness::builder(context, &Options { labels, ..Options::default() })?;
        ensure_err(
            &format!("labels {labels:?}"),
            builder.caller_driven().open().map(drop),
            &[ErrorKind::InvalidRequest],
        )?;
    }
    drop(sim);
    Ok(())
}
