//! Notifications: they arrive in order, after the bytes of their operation, and take nothing from imms and receives.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use transport_core::spi::Operations;
use transport_core::{
    Access, Error, ErrorKind, Fabric, LocalList, Notification, Op, Outcome, Pages, ReadOptions, RemoteList,
    SendOptions, TraceContext, WriteOptions,
};

use crate::check::{TestResult, TrialFailure, ensure, ensure_eq, ensure_err, within};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::process::{HelperProcess, LIMIT, NOTIFICATION_MEMORY, notification, notifying_fabric};
use crate::sim_harness::{LABEL, Options, SimHarness, SimPair, builder};
use crate::trial::{ALL_PATHS, Trial, TrialContext};

const SEND: Operations = Operations::SEND;
const ALL: Operations = Operations::all();

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("notifications::of_any_length", any_length).on(ALL_PATHS).needs(SEND),
    Trial::new("notifications::with_trace_contexts", with_trace_contexts).on(ALL_PATHS).needs(ALL),
    Trial::new("notifications::after_their_bytes", after_their_bytes).on(ALL_PATHS).needs(ALL),
    Trial::new("notifications::beside_imms_and_messages", beside_imms_and_messages).on(ALL_PATHS).needs(ALL),
    Trial::new("notifications::that_nobody_takes", nobody_takes).on(ALL_PATHS).needs(SEND),
    Trial::new("notifications::of_what_has_failed", of_failed).on(ALL_PATHS).needs(ALL),
    Trial::new("notifications::after_some_that_failed", after_failed).on(ALL_PATHS).needs(SEND),
    Trial::new("notifications::of_a_peer_that_ends", of_a_peer_that_ends).on(ALL_PATHS).needs(SEND),
    Trial::new("notifications::where_not_opened", not_opened).needs(ALL),
    Trial::new("notifications::between_processes", between_processes).needs(ALL).process(),
];

/// Two connected fabrics with notifications.
fn pair(context: &TrialContext) -> TestResult<SimPair> {
    let options = Options { notifications: Some(NOTIFICATION_MEMORY), ..Options::default() };
    SimHarness::new(context).pair_of(&options, &options)
}

/// Ticks until a notification has arrived.
fn next(pair: &SimPair, fabric: &Fabric) -> TestResult<Notification> {
    Ok(pair.sim.output("a notification", fabric.notifications()?.next())??)
}

/// Fails unless no notification is there, and none comes.
fn none_is_left(pair: &SimPair, fabric: &Fabric) -> TestResult {
    pair.sim.settle()?;
    ensure_eq("what is left", fabric.notifications()?.try_next().map(Result::ok), None)
}

fn any_length(context: &TrialContext) -> TestResult {
    let pair = pair(context)?;
    // 4,072 bytes fit in one message.
    const LENS: [usize; 9] = [0, 1, 4071, 4072, 4073, 8145, 300_000, 5, (1 << 20)];
    for (peer, target, sender) in
        [(&pair.to_b, &pair.b, pair.to_a.id()), (&pair.to_a, &pair.a, pair.to_b.id())]
    {
        let mut ops = Vec::new();
        for (seed, len) in LENS.into_iter().enumerate() {
            ops.push((len, peer.notify(&notification(len, seed as u64))?));
        }
        for (seed, len) in LENS.into_iter().enumerate() {
            let taken = next(&pair, target)?;
            ensure(
                taken.bytes == notification(len, seed as u64),
                format!("{} of {len} bytes", taken.bytes.len()),
            )?;
            ensure_eq("the sender", taken.peer, sender)?;
            ensure_eq("its handle", target.peer(taken.peer).map(|found| found.id()), Some(sender))?;
        }
        ensure_eq("a peer of the other fabric", target.peer(peer.id()).map(|found| found.id()), None)?;
        for (len, op) in ops {
            ensure_eq("the outcome", pair.sim.done(op)?.bytes, len as u64)?;
        }
        none_is_left(&pair, target)?;
        let error =
            ensure_err("1 MiB and 1 byte", peer.notify(&vec![0; (1 << 20) + 1]), &[ErrorKind::TooLarge])?;
        ensure(error.context().contains("1048576"), error.to_string())?;
    }
    Ok(())
}

/// A notification takes the trace context of its operation along, whatever its length, and no other does. A trace context
/// alone changes nothing that the peer sees.
fn with_trace_contexts(context: &TrialContext) -> TestResult {
    const LEN: usize = 5000;
    let pair = pair(context)?;
    let trace = |number: u8| TraceContext::new([number; 16], [number + 100; 8], number);
    // With their context, 207 bytes fit into what the calling thread sends from its stack, 4,047 into one message.
    const LENS: [usize; 9] = [0, 207, 208, 4047, 4048, 4072, 300_000, (1 << 20) - 1, 1 << 20];
    for (number, len) in (1..).zip(LENS) {
        let options = SendOptions::new().trace(trace(number)?);
        let traced = pair.to_b.notify_with(&notification(len, 0), &options)?;
        let plain = pair.to_b.notify(&notification(len, 1))?;
        for (seed, expected) in [(0, Some(trace(number)?)), (1, None)] {
            let taken = next(&pair, &pair.b)?;
            ensure(taken.bytes == notification(len, seed), format!("{} of {len} bytes", taken.bytes.len()))?;
            ensure_eq("its trace", taken.trace, expected)?;
        }
        for op in [traced, plain] {
            ensure_eq("the outcome", pair.sim.done(op)?.bytes, len as u64)?;
        }
    }

    let src = CheckedRegion::new(&pair.a, LEN, FULL_ACCESS, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, LEN, FULL_ACCESS, context.seed + 1)?;
    let (remote, peer) = (dst.import(&pair.to_b)?, &pair.to_b);
    for (number, notifies) in [(20, true), (21, false)] {
        let (mut write, mut read) = (WriteOptions::new(), ReadOptions::new());
        if notifies {
            (write, read) = (write.notify(*b"moved"), read.notify(*b"moved"));
        }
        let (write, read) = (write.trace(trace(number)?), read.trace(trace(number)?));
        let prepared = peer.prepare_write_pages(&src.region, [0, 1], &remote, [0, 1], 2500, &write)?;
        for op in [
            peer.write_with(&src.region, 0..LEN, &remote, 0, &write)?,
            peer.write_pages_with(&src.region, [1], &remote, [1], 2500, &write)?,
            prepared.post()?,
        ] {
            pair.sim.done(op)?;
        }
        dst.expect_from(0, &src, 0..LEN);
        dst.check("written")?;
        for op in [
            peer.read_with(&src.region, 0..LEN, &remote, 0, &read)?,
            peer.read_pages_with(&src.region, [1], &remote, [1], 2500, &read)?,
        ] {
            pair.sim.done(op)?;
        }
        src.check("read")?;
        for _ in 0..if notifies { 5 } else { 0 } {
            let taken = next(&pair, &pair.b)?;
            ensure_eq(
                "a notification",
                (&taken.bytes[..], taken.trace),
                (&b"moved"[..], Some(trace(number)?)),
            )?;
        }
        none_is_left(&pair, &pair.b)?;
    }
    Ok(())
}

/// At the moment at which the notification of an operation is there, so are all its bytes.
fn after_their_bytes(context: &TrialContext) -> TestResult {
    const LEN: usize = 300_000;
    const PAGE: usize = 1000;
    let pair = pair(context)?;
    let src = CheckedRegion::new(&pair.a, LEN, FULL_ACCESS, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, LEN, FULL_ACCESS, context.seed + 1)?;
    let (remote, peer) = (dst.import(&pair.to_b)?, &pair.to_b);
    let write = WriteOptions::new().notify(*b"written");
    let (mut mine, mut theirs) = (LocalList::new(), RemoteList::new());
    mine.push_strided(&src.region, 0, PAGE, (LEN / PAGE) as u32, PAGE)?;
    theirs.push_strided(&remote, 0, PAGE, (LEN / PAGE) as u32, PAGE)?;
    let with_imm = write.clone().imm(9);
    let pages = Pages::new((0..LEN as u32 / PAGE as u32).step_by(2).collect::<Vec<_>>());
    let prepared = peer.prepare_write_list(&mine, .., &theirs, .., &WriteOptions::new().imm(3))?;
    type Submit<'a> = Box<dyn Fn() -> Result<Op, Error> + 'a>;
    let writes: [(&str, bool, Submit<'_>); 5] = [
        ("write", true, Box::new(|| peer.write_with(&src.region, 0..LEN, &remote, 0, &write))),
        (
            "a write and its imm",
            true,
            Box::new(|| peer.write_with(&src.region, 0..LEN, &remote, 0, &with_imm)),
        ),
        (
            "write_pages",
            false,
            Box::new(|| peer.write_pages_with(&src.region, &pages, &remote, &pages, PAGE, &write)),
        ),
        ("write_list", true, Box::new(|| peer.write_list(&mine, .., &theirs, .., &write))),
        ("prepared", true, Box::new(|| prepared.post_and_notify(*b"written"))),
    ];
    for (name, whole, submit) in &writes {
        dst.fill(context.seed + 10)?;
        let op = submit()?;
        for page in (0..LEN / PAGE).filter(|page| *whole || page % 2 == 0) {
            dst.expect_from(page * PAGE, &src, page * PAGE..(page + 1) * PAGE);
        }
        ensure_eq(name, next(&pair, &pair.b)?.bytes, b"written".to_vec())?;
        dst.check(name)?;
        let moved = if *whole { LEN } else { LEN / 2 } as u64;
        ensure_eq(name, pair.sim.done(op)?.bytes, moved)?;
    }
    // Small operations may run at once.
    ensure_eq(
        "a small write",
        pair.sim.done(peer.write_with(&src.region, 0..64, &remote, 0, &write)?)?.bytes,
        64,
    )?;
    ensure_eq("a small write", next(&pair, &pair.b)?.bytes, b"written".to_vec())?;
    let read = ReadOptions::new().notify(*b"read");
    for len in [64, LEN] {
        let op = peer.read_with(&src.region, 0..len, &remote, 0, &read)?;
        ensure_eq("read", next(&pair, &pair.b)?.bytes, b"read".to_vec())?;
        // Its bytes have been read, so the owner may write over them.
        let want = dst.bytes(0..len).to_vec();
        dst.fill(context.seed + 20 + len as u64)?;
        ensure_eq("read", pair.sim.done(op)?.bytes, len as u64)?;
        let mut got = vec![0; len];
        src.region.copy_out(0, &mut got)?;
        ensure(got == want, "a read has seen bytes from after its notification")?;
    }
    let read_list = peer.read_list(&mine, .., &theirs, .., &read)?;
    ensure_eq("read_list", next(&pair, &pair.b)?.bytes, b"read".to_vec())?;
    pair.sim.done(read_list)?;
    none_is_left(&pair, &pair.b)
}

fn beside_imms_and_messages(context: &TrialContext) -> TestResult {
    let pair = pair(context)?;
    let (src, mut dst) = (
        CheckedRegion::new(&pair.a, 4096, Access::LOCAL, context.seed)?,
        CheckedRegion::new(&pair.b, 4096, FULL_ACCESS, context.seed + 1)?,
    );
    let mut receive = pair.b.recv(&dst.region, 0..64)?;
    let mut ops = Vec::new();
    for round in 0..7_u8 {
        ops.push(pair.to_b.notify(&[round])?);
        ops.push(pair.to_b.write_imm(5)?);
    }
    pair.sim.all_done(ops)?;
    pair.sim.settle()?;
    ensure_eq("imms", pair.to_a.imm(5).count(), 7)?;
    ensure(receive.try_result().is_none(), "a notification has taken the user's receive")?;
    pair.sim.done(pair.to_b.send(&src.region, 0..64)?)?;
    ensure_eq("the message", pair.sim.done(receive)?.bytes, 64)?;
    dst.expect_from(0, &src, 0..64);
    dst.check("the message")?;
    for round in 0..7 {
        ensure_eq("a notification", next(&pair, &pair.b)?.bytes, vec![round])?;
    }
    none_is_left(&pair, &pair.b)
}

/// While nobody takes notifications, the sender's memory fills up, and then it is told so. Nothing is lost.
fn nobody_takes(context: &TrialContext) -> TestResult {
    let options = Options {
        notifications: Some(NOTIFICATION_MEMORY),
        max_operations: 4096,
        deadline: Duration::MAX,
        ..Options::default()
    };
    let pair = SimHarness::new(context).pair_of(&options, &options)?;
    let most = if context.seed_sweep { 3000 } else { 20_000 };
    let (mut sent, mut refusals, mut taken) = (0_u32, 0, 0_u32);
    while sent < most {
        match pair.to_b.notify(&sent.to_le_bytes()) {
            Ok(op) => {
                op.detach();
                sent += 1;
            }
            Err(error) => {
                ensure_err::<()>("too many", Err(error), &[ErrorKind::Busy])?;
                // Both sides' memory, in blocks of 4 KiB, and what has overtaken others.
                ensure(
                    sent - taken <= 4 * (NOTIFICATION_MEMORY as u32 / 4096),
                    format!("{sent} are sent, {taken} taken"),
                )?;
                refusals += 1;
                let until = taken + 100;
                while taken < until {
                    ensure_eq("in order", next(&pair, &pair.b)?.bytes, taken.to_le_bytes().to_vec())?;
                    taken += 1;
                }
            }
        }
        pair.sim.step();
    }
    ensure(refusals > 0, "the sender was never refused")?;
    for number in taken..sent {
        ensure_eq("the rest", next(&pair, &pair.b)?.bytes, number.to_le_bytes().to_vec())?;
    }
    none_is_left(&pair, &pair.b)
}

/// An operation that fails sends no notification, and is in the way of no other.
fn of_failed(context: &TrialContext) -> TestResult {
    let pair = pair(context)?;
    let src = CheckedRegion::new(&pair.a, 8192, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, 8192, FULL_ACCESS, context.seed + 1)?;
    let (remote, never) = (dst.import(&pair.to_b)?, Arc::new(AtomicU32::new(0)));
    let waiting = WriteOptions::new().when(never.clone(), 1).notify(*b"lost");
    let write = |options: &WriteOptions| pair.to_b.write_with(&src.region, 0..8192, &remote, 0, options);
    let cancelled = write(&waiting)?.cancel();
    let result = pair.sim.output("a cancel", cancelled)?;
    ensure_err("the cancelled write", result, &[ErrorKind::Cancelled])?;
    drop(write(&waiting)?);
    let short = waiting.clone().deadline(Duration::from_millis(5));
    pair.sim.fails("the late write", write(&short), &[ErrorKind::DeadlineExceeded])?;
    never.store(1, Ordering::Release);
    ensure_eq("one that is due", pair.sim.done(write(&waiting.clone().notify(*b"third"))?)?.bytes, 8192)?;
    pair.sim.done(pair.to_b.notify(b"fourth")?)?;
    for want in ["third", "fourth"] {
        ensure_eq("after failures", next(&pair, &pair.b)?.bytes, want.as_bytes().to_vec())?;
    }
    // One that waits for the receiver is cancelled, and says so.
    let mut waiting = Vec::new();
    for _ in 0..NOTIFICATION_MEMORY / 4096 / 8 {
        waiting.push(pair.to_b.notify(b"many")?);
    }
    let last = pair.to_b.notify(b"none")?;
    let result = pair.sim.output("a cancel", last.cancel())?;
    ensure_err("the cancelled notification", result, &[ErrorKind::Cancelled])?;
    for op in waiting {
        ensure_eq("one of many", next(&pair, &pair.b)?.bytes, b"many".to_vec())?;
        pair.sim.done(op)?;
    }
    // One that is refused at submission holds nothing.
    let far = WriteOptions::new().notify(vec![0; (1 << 20) + 1]);
    ensure_err("too long", write(&far), &[ErrorKind::TooLarge])?;
    none_is_left(&pair, &pair.b)
}

/// Notifications that have failed leave no gap: those that are sent later arrive.
fn after_failed(context: &TrialContext) -> TestResult {
    const SHORT: Duration = Duration::from_secs(1);
    let options = Options { notifications: Some(NOTIFICATION_MEMORY), deadline: SHORT, ..Options::default() };
    let pair = SimHarness::new(context).pair_of(&options, &options)?;
    // More than the receiver grants: the last ones wait, and run out of time.
    let (mut sent, mut ops) = (0_u32, Vec::new());
    while let Ok(op) = pair.to_b.notify(&notification(9000, u64::from(sent))) {
        ops.push(op);
        sent += 1;
    }
    let mut arrived = Vec::new();
    for (number, mut op) in ops.into_iter().enumerate() {
        match pair.sim.result(&mut op)? {
            Ok(Outcome { bytes, .. }) => {
                ensure_eq("bytes", bytes, 9000)?;
                arrived.push(number as u64);
            }
            Err(error) => {
                ensure_err::<()>("a late one", Err(error), &[ErrorKind::DeadlineExceeded])?;
            }
        }
    }
    ensure(arrived.len() < sent as usize, "none has failed")?;
    let mut notifications = pair.b.notifications()?;
    let mut late = 0;
    for number in arrived {
        // A notification that has failed may have arrived all the same, if its last fragment was on its way.
        let taken = pair.sim.output("one that has arrived", notifications.next())??;
        if taken.bytes != notification(9000, number) {
            let is_whole = (0..u64::from(sent)).any(|of| taken.bytes == notification(9000, of));
            ensure(is_whole, "bytes of several notifications")?;
            late += 1;
        }
    }
    let last = pair.to_b.notify(b"last")?;
    loop {
        let taken = pair.sim.output("the last", notifications.next())??;
        match taken.bytes.len() {
            4 => break ensure_eq("the last", taken.bytes, b"last".to_vec())?,
            9000 => late += 1,
            other => return Err(TrialFailure::new(format!("a notification of {other} bytes"))),
        }
    }
    ensure(late < 64, format!("{late} have arrived that were said to have failed"))?;
    pair.sim.done(last)?;
    // What tells of failures has arrived, too, and is not shown.
    pair.sim.until("the end", || notifications.try_next().is_none() && pair.sim.outstanding() == 0)
}

/// A notification whose operation has succeeded arrives, also if its sender ends before the receiver has looked.
fn of_a_peer_that_ends(context: &TrialContext) -> TestResult {
    let pair = pair(context)?;
    let short = pair.to_b.notify(&notification(40, 1))?;
    let long = pair.to_b.notify(&notification(5000, 2))?;
    // Without a step where the calling thread can send, so that nobody has looked.
    for (op, name) in [(short, "the short one"), (long, "the long one")] {
        pair.sim.output(name, op)??;
    }
    let mut last = pair.to_b.notify(&notification(40, 3))?;
    let at_once = last.try_result().transpose()?.is_some();
    if !at_once {
        pair.sim.output("the last one", last)??;
    }
    pair.a.close();
    for (len, seed) in [(40, 1), (5000, 2), (40, 3)] {
        ensure(next(&pair, &pair.b)?.bytes == notification(len, seed), format!("notification {seed}"))?;
    }
    none_is_left(&pair, &pair.b)
}

fn not_opened(context: &TrialContext) -> TestResult {
    let with = Options { notifications: Some(NOTIFICATION_MEMORY), ..Options::default() };
    let pair = SimHarness::new(context).pair_of(&with, &Options::default())?;
    let src = CheckedRegion::new(&pair.a, 64, Access::LOCAL, context.seed)?;
    let dst = CheckedRegion::new(&pair.b, 64, FULL_ACCESS, context.seed)?;
    let remote = dst.import(&pair.to_b)?;
    let options = WriteOptions::new().notify(*b"no");
    let kinds = [ErrorKind::Unsupported];
    for (what, result, whose) in [
        ("to a peer without", pair.to_b.notify(b"no"), "both fabrics"),
        ("by a fabric without", pair.to_a.notify(b"no"), "this fabric"),
        ("a write", pair.to_b.write_with(&src.region, 0..64, &remote, 0, &options), "both fabrics"),
    ] {
        let error = ensure_err(what, result, &kinds)?;
        ensure(
            error.context().contains(whose) && error.context().contains("FabricBuilder"),
            error.to_string(),
        )?;
    }
    ensure_err("the stream", pair.b.notifications().map(drop), &kinds)?;
    dst.check("a refused write")?;
    // The companion is no part of what the fabric shows.
    let labels: Vec<_> = pair.a.transports().into_iter().map(|transport| transport.label).collect();
    ensure(labels.last().is_some_and(|label| label == LABEL), format!("{labels:?}"))?;
    ensure_eq("the rails", pair.a.counters().len(), pair.b.counters().len())?;
    let little = builder(context, &Options { notifications: Some(1), ..with })?.open();
    let error = ensure_err("little memory", little.map(drop), &[ErrorKind::InvalidRequest])?;
    ensure(error.context().contains("4194304"), error.to_string())
}

fn between_processes(context: &TrialContext) -> TestResult {
    const LEN: usize = 1 << 20;
    let fabric = notifying_fabric(context)?;
    let mut helper = HelperProcess::spawn_idle(context)?;
    helper.command("open-notifying")?;
    let address = helper.command("listen")?;
    let peer = helper.connect(&fabric, &address)?;
    for (seed, len) in [0, 1, 5000, 1 << 20].into_iter().enumerate() {
        // The longest takes more buffers than a peer is granted, so it arrives while it is taken.
        let mut op = peer.notify(&notification(len, seed as u64))?;
        helper.command(&format!("take-notification {len} {seed}"))?;
        op.wait(LIMIT)?;
        let command = format!("notify {len} {seed}");
        helper.start(&command)?;
        let taken = fabric.notifications()?.next().wait(LIMIT)?;
        helper.finish(&command)?;
        ensure(taken.bytes == notification(len, seed as u64), "a notification of the helper")?;
    }
    // The helper's region has the bytes when it takes the notification.
    let near = CheckedRegion::new(&fabric, LEN, FULL_ACCESS, 1)?;
    helper.command(&format!("alloc far {LEN} 2"))?;
    let remote = within(LIMIT, "a lookup", peer.region("far"))??;
    let options = WriteOptions::new().notify(notification(100, 9));
    let op = peer.write_with(&near.region, 0..LEN, &remote, 0, &options)?;
    helper.command("take-notification 100 9")?;
    helper.command(&format!("check far 0 {LEN} 1"))?;
    let mut op = op;
    ensure_eq("bytes", op.wait(LIMIT)?.bytes, LEN as u64)?;
    // A notification waits until somebody takes it, also while there is no stream.
    helper.command("notify 5000 7")?;
    let taken = fabric.notifications()?.next().wait(LIMIT)?;
    ensure(taken.bytes == notification(5000, 7), "the last notification of a peer")
}
