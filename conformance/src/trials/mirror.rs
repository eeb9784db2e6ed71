//! Mirrored imm counters: the word follows the arrivals, after their bytes, and tells of the end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use limit::Limit;
use rustix::process::Signal;
use transport_core::spi::Operations;
use transport_core::{Access, AtEnd, ErrorKind, Mirror, WriteOptions};

use crate::check::{Verdict, ensure, refused, same, within};
use crate::ground::{Ground, OPEN};
use crate::lab::Pair;
use crate::process::{LIMIT, Meeting};
use crate::trial::{ALL_PATHS, Context, Trial};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("mirror::follows_every_arrival", follows).on(ALL_PATHS).needs(Operations::WRITE_IMM),
    Trial::new("mirror::says_when_bytes_are_there", after_its_bytes)
        .on(ALL_PATHS)
        .needs(Operations::WRITE_IMM),
    Trial::new("mirror::passes_when_the_peer_ends", passes_at_the_end).needs(Operations::WRITE_IMM),
    Trial::new("mirror::passes_when_the_peer_is_killed", killed).needs(Operations::WRITE_IMM).process(),
];

fn word() -> Arc<AtomicU32> {
    Arc::new(AtomicU32::new(0))
}

fn now(word: &AtomicU32) -> u32 {
    word.load(Ordering::Acquire)
}

fn follows(context: &Context) -> Verdict {
    const EACH: u32 = 150;
    let pair = Pair::new(context)?;
    let send = |imm: u32| -> Verdict {
        let ops: Result<Vec<_>, _> = (0..EACH).map(|_| pair.to_b.write_imm(imm)).collect();
        pair.lab.all_done(ops?)?;
        pair.lab.settle()
    };
    // What came before counts, what was taken before does not.
    send(5)?;
    ensure(pair.to_a.imm(5).try_take(10), "could not take")?;
    let (five, six) = (word(), word());
    let mirrors = [
        pair.to_a.imm(5).mirror(five.clone(), AtEnd::Keep),
        pair.to_a.imm(6).mirror(six.clone(), AtEnd::Keep),
    ];
    same("at first", (now(&five), now(&six)), (EACH - 10, 0))?;
    send(6)?;
    send(5)?;
    send(7)?;
    ensure(pair.to_a.imm(5).try_take(u64::from(EACH)), "could not take")?;
    same("after more", (now(&five), now(&six)), (2 * EACH - 10, EACH))?;
    same("totals", mirrors.map(|mirror| mirror.total()), [2 * u64::from(EACH) - 10, EACH.into()])?;
    send(5)?;
    same("after the mirror was dropped", now(&five), 2 * EACH - 10)
}

fn after_its_bytes(context: &Context) -> Verdict {
    const LEN: usize = 300_000;
    let pair = Pair::new(context)?;
    let src = Ground::new(&pair.a, LEN, Access::LOCAL, context.seed)?;
    let mut dst = Ground::new(&pair.b, LEN, OPEN, context.seed + 1)?;
    let (remote, word) = (dst.import(&pair.to_b)?, word());
    let _mirror = pair.to_a.imm(1).mirror(word.clone(), AtEnd::Keep);
    for round in 1..=5 {
        dst.fill(context.seed + 10 + u64::from(round))?;
        let op = pair.to_b.write_with(&src.region, 0..LEN, &remote, 0, &WriteOptions::new().imm(1))?;
        dst.expect_from(0, &src, 0..LEN);
        // At that very moment all bytes must be there.
        pair.lab.until("the word", || now(&word) == round)?;
        dst.check("the bytes that the word announced")?;
        pair.lab.done(op)?;
    }
    Ok(())
}

fn passes_at_the_end(context: &Context) -> Verdict {
    let pair = Pair::new(context)?;
    let (passing, keeping) = (word(), word());
    let mirrors = [
        pair.to_a.imm(1).mirror(passing.clone(), AtEnd::Pass),
        pair.to_a.imm(1).mirror(keeping.clone(), AtEnd::Keep),
    ];
    pair.lab.done(pair.to_b.write_imm(1)?)?;
    pair.lab.settle()?;
    ensure(mirrors.iter().all(|mirror| mirror.end().is_none()), "an end before it")?;
    // The fabric at the other end is closed.
    pair.a.close();
    pair.lab.settle()?;
    same("words at the end", (now(&passing), now(&keeping)), (1 + Mirror::PASS, 1))?;
    let gone = [ErrorKind::Closed, ErrorKind::PeerDied];
    mirrors.iter().try_for_each(|mirror| {
        same("total", mirror.total(), 1)?;
        refused("the end", mirror.end().map_or(Ok(()), Err), &gone).map(drop)
    })
}

/// A stream that waits has nobody else to tell it.
fn killed(context: &Context) -> Verdict {
    let Meeting { peer, mut child, fabric: _fabric } = Meeting::new(context)?;
    let word = word();
    let mirror = peer.imm(4).mirror(word.clone(), AtEnd::Pass);
    child.ask("imms 4 100")?;
    peer.imm(4).expect(100).wait(LIMIT)?;
    same("the word", (now(&word), mirror.total()), (100, 100))?;
    child.signal(Signal::KILL)?;
    within(LIMIT, "the end of the peer", peer.closed())?;
    // The end is known before all who wait for it are told.
    let mut limit = Limit::of(LIMIT);
    while now(&word) == 100 && !limit.is_over() {
        std::thread::yield_now();
    }
    same("the word at the end", now(&word), 100 + Mirror::PASS)?;
    refused::<()>("the end", mirror.end().map_or(Ok(()), Err), &[ErrorKind::PeerDied]).map(drop)
}
