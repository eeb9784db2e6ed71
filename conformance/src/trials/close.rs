//! Closing a fabric: whatever was asked of it ends, before, meanwhile and after.

use transport_core::spi::Operations;
use transport_core::{Access, ErrorKind, Op, Pages};

use crate::check::{Failure, Verdict, ensure, refused, same, within};
use crate::ground::{Ground, OPEN};
use crate::lab::Pair;
use crate::process::{LIMIT, live};
use crate::subject::{Side, Variant};
use crate::trial::{Context, Trial};

const CLOSED: &[ErrorKind] = &[ErrorKind::Closed];

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("close::everything_queued_ends", everything_queued_ends).on(&[
        Variant::Plain,
        Variant::Queued,
        Variant::Slow,
    ]),
    Trial::new("close::a_pool_in_use_says_so", a_pool_in_use_says_so).needs(Operations::SEND),
    Trial::new("close::a_posted_receive_says_so", a_posted_receive_says_so).needs(Operations::SEND),
    Trial::new("close::late_revoke_ends", late_revoke_ends).process(),
    Trial::new("close::meanwhile_submitted_ends", meanwhile_submitted_ends).process(),
];

/// More operations than an engine takes in a turn, none of them begun.
fn everything_queued_ends(context: &Context) -> Verdict {
    let pair = Pair::new(context)?;
    let src = Ground::new(&pair.a, 8192, Access::LOCAL, context.seed)?;
    let dst = Ground::new(&pair.b, 8192, OPEN, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let pages = Pages::new([0, 1]);
    let mut ops = Vec::new();
    for _ in 0..1000 {
        ops.push(pair.to_b.write_pages(&src.region, &pages, &remote, &pages, 4096)?);
    }
    let cancelled = ops.pop().map(Op::cancel);
    pair.a.close();
    for mut op in ops {
        let result = op.try_result().ok_or_else(|| Failure::new("an operation outlives its fabric"))?;
        refused("a queued operation", result, CLOSED)?;
    }
    let mut cancelled = cancelled.ok_or_else(|| Failure::new("no operation"))?;
    refused("a cancel", cancelled.wait(LIMIT), &[ErrorKind::Closed, ErrorKind::Cancelled])?;
    dst.check("a target that nothing was written to")
}

/// Every buffer is in the user's hands, none is posted: the end is told all the same.
fn a_pool_in_use_says_so(context: &Context) -> Verdict {
    let pair = Pair::new(context)?;
    let pool = pair.b.recv_pool(2, 64)?;
    let src = Ground::new(&pair.a, 64, Access::LOCAL, context.seed)?;
    let sent = [pair.to_b.send(&src.region, 0..64)?, pair.to_b.send(&src.region, 0..64)?];
    let mut messages = Vec::new();
    pair.lab.until("both messages", || {
        messages.extend(pool.try_next());
        messages.len() == 2
    })?;
    pair.lab.all_done(sent.into())?;
    pair.b.close();
    let next = within(LIMIT, "the end of a pool", pool.next())?;
    refused("next", next.map(drop), CLOSED)?;
    for message in messages {
        ensure(message?.to_vec() == src.bytes(0..64), "a message changed as its fabric closed")?;
    }
    drop(pool);
    Ok(())
}

/// What closing takes back was closed, not cancelled.
fn a_posted_receive_says_so(context: &Context) -> Verdict {
    let pair = Pair::new(context)?;
    let landing = Ground::new(&pair.b, 64, Access::LOCAL, context.seed)?;
    let mut op = pair.b.recv(&landing.region, 0..64)?;
    pair.lab.settle()?;
    pair.b.close();
    let result = op.try_result().ok_or_else(|| Failure::new("a receive outlives its fabric"))?;
    refused("a posted receive", result, CLOSED)?;
    landing.check("a buffer that nothing came to")
}

fn late_revoke_ends(context: &Context) -> Verdict {
    let fabric = live(context)?;
    let ground = Ground::new(&fabric, 4096, OPEN, context.seed)?;
    fabric.close();
    match ground.region.revoke() {
        // Nobody is inside: there is nothing to wait for.
        Ok(mut op) => same("a late revoke", op.wait(LIMIT)?.bytes, 0),
        Err(error) => refused::<()>("a late revoke", Err(error), CLOSED).map(drop),
    }
}

/// Threads that submit while the fabric closes: each operation ends.
fn meanwhile_submitted_ends(context: &Context) -> Verdict {
    for round in 0..20 {
        let (a, b) = (live(context)?, live(context)?.at(Side::Target));
        let src = Ground::new(&a, 8192, Access::LOCAL, context.seed + round)?;
        let dst = Ground::new(&b, 8192, OPEN, context.seed)?;
        let (to_b, _) = a.connect_local(&b)?;
        let remote = dst.import(&to_b)?;
        let submitter = {
            let (src, to_b) = (src.region.clone(), to_b.clone());
            std::thread::spawn(move || {
                let pages = Pages::new([0, 1]);
                let submit = || to_b.write_pages(&src, &pages, &remote, &pages, 4096);
                let ops = std::iter::from_fn(|| submit().ok()).take(3000);
                ops.map(|mut op| op.wait(LIMIT)).filter_map(Result::err).collect::<Vec<_>>()
            })
        };
        a.close();
        let errors = submitter.join().map_err(|_| Failure::new("the submitter panicked"))?;
        for error in errors {
            refused::<()>("an operation", Err(error), CLOSED)?;
        }
    }
    Ok(())
}
