//! Several transports at once: preference, fallback by reachability, explanations.

use transport_core::{Access, ErrorKind, Fabric, WriteOptions};

use super::forgery::Wire;
use crate::check::{Verdict, ensure, refused, same};
use crate::end::End;
use crate::ground::{Ground, OPEN};
use crate::lab::{Lab, Options};
use crate::trial::{ALL_PATHS, Context, Trial};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("routing::prefers_the_first", prefers_the_first).on(ALL_PATHS),
    Trial::new("routing::takes_what_the_peer_has", takes_what_the_peer_has).on(ALL_PATHS),
    Trial::new("routing::preference_is_each_sides_own", preference_is_each_sides_own).on(ALL_PATHS),
    Trial::new("routing::takes_what_the_descriptor_has", takes_what_the_descriptor_has).on(ALL_PATHS),
    Trial::new("routing::nothing_in_common", nothing_in_common),
    Trial::new("routing::labels_are_checked", labels_are_checked),
];

fn open(lab: &Lab, labels: &[&str]) -> Verdict<End> {
    // Several transports of each: a rail group, in each run of many.
    let rails = lab.context.swept.then_some(4);
    lab.open(&Options { labels, rails, ..Options::default() })
}

/// Bytes that went out over a transport, however.
fn bytes_over(fabric: &Fabric, label: &str) -> u64 {
    let of_label = fabric.counters().into_iter().filter(|rail| rail.transport == label);
    of_label.map(|rail| rail.bytes + rail.direct_bytes).sum()
}

/// Writes each way over exactly that transport, small and large.
#[track_caller]
fn goes_over(lab: &Lab, from: &End, to: &End, label: &str) -> Verdict {
    let (peer, back) = from.connect_local(to)?;
    let src = Ground::new(from, 600_000, Access::LOCAL, 1)?;
    let mut dst = Ground::new(to, 600_000, OPEN, 2)?;
    let remote = dst.import(&peer)?;
    let before: Vec<_> =
        from.transports().iter().map(|info| (info.label.clone(), bytes_over(from, &info.label))).collect();
    for len in [8, 600_000] {
        lab.done(peer.write_with(&src.region, 0..len, &remote, 0, &WriteOptions::new().imm(1))?)?;
    }
    dst.expect_from(0, &src, 0..600_000);
    dst.check(label)?;
    lab.until("two imms", || back.imm(1).count() == 2)?;
    for (other, before) in before {
        let moved = bytes_over(from, &other) - before;
        same(&format!("bytes over {other}"), moved, if other == label { 600_008 } else { 0 })?;
    }
    for info in from.transports() {
        ensure(
            peer.explain().contains(&info.label),
            format!("{} is not explained:\n{}", info.label, peer.explain()),
        )?;
    }
    Ok(())
}

fn prefers_the_first(context: &Context) -> Verdict {
    let lab = Lab::new(context);
    let (a, b) = (open(&lab, &["one", "two"])?, open(&lab, &["one", "two"])?);
    let region = Ground::new(&b, 4096, OPEN, 1)?;
    let wire = Wire::of(&region)?;
    for label in ["one", "two"] {
        ensure(wire.entries.iter().any(|entry| entry.transport == label), format!("no entry for {label}"))?;
    }
    goes_over(&lab, &a, &b, "one")?;
    goes_over(&lab, &b, &a, "one")
}

fn takes_what_the_peer_has(context: &Context) -> Verdict {
    let lab = Lab::new(context);
    let a = open(&lab, &["one", "two", "three"])?;
    let (b, c) = (open(&lab, &["two"])?, open(&lab, &["three", "four"])?);
    goes_over(&lab, &a, &b, "two")?;
    goes_over(&lab, &b, &a, "two")?;
    goes_over(&lab, &a, &c, "three")?;
    goes_over(&lab, &c, &a, "three")
}

fn preference_is_each_sides_own(context: &Context) -> Verdict {
    let lab = Lab::new(context);
    let (a, b) = (open(&lab, &["one", "two"])?, open(&lab, &["two", "one"])?);
    goes_over(&lab, &a, &b, "one")?;
    goes_over(&lab, &b, &a, "two")
}

/// A descriptor without an entry for the preferred transport goes by another one.
fn takes_what_the_descriptor_has(context: &Context) -> Verdict {
    let lab = Lab::new(context);
    let (a, b) = (open(&lab, &["one", "two"])?, open(&lab, &["one", "two"])?);
    let (to_b, _) = a.connect_local(&b)?;
    let src = Ground::new(&a, 300_000, Access::LOCAL, 1)?;
    let mut dst = Ground::new(&b, 300_000, OPEN, 2)?;
    let mut wire = Wire::of(&dst)?;
    wire.entries.retain(|entry| entry.transport == "two");
    let remote = to_b.import(&wire.forge()?)?;
    lab.done(to_b.write(&src.region, 0..300_000, &remote, 0)?)?;
    dst.expect_from(0, &src, 0..300_000);
    dst.check("by the second transport")?;
    same("bytes over each", (bytes_over(&a, "one"), bytes_over(&a, "two")), (0, 300_000))
}

fn nothing_in_common(context: &Context) -> Verdict {
    let lab = Lab::new(context);
    let (a, b) = (open(&lab, &["one"])?, open(&lab, &["two"])?);
    let error = refused("no transport in common", a.connect_local(&b).map(drop), &[ErrorKind::Unreachable])?;
    ensure(error.context().contains("one"), format!("the transport is not named: {error}"))?;
    // Slots that were reserved for the attempt are free again.
    for _ in 0..context.amount(300, 3) {
        refused("still none", a.connect_local(&b).map(drop), &[ErrorKind::Unreachable])?;
        lab.turn();
    }
    let c = open(&lab, &["two", "one"])?;
    goes_over(&lab, &a, &c, "one")
}

fn labels_are_checked(context: &Context) -> Verdict {
    let lab = Lab::new(context);
    let long = "x".repeat(65);
    for labels in [&[][..], &[""], &["one", "one"], &[long.as_str()]] {
        let builder = crate::lab::builder(context, &Options { labels, ..Options::default() })?;
        refused(
            &format!("labels {labels:?}"),
            builder.caller_driven().open().map(drop),
            &[ErrorKind::InvalidRequest],
        )?;
    }
    drop(lab);
    Ok(())
}
