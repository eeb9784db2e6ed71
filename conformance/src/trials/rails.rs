//! Rails: all are used, and sides with unequal numbers meet on what they share.

use transport_core::spi::Operations;
use transport_core::{Access, Fabric, Pages, WriteOptions};

use crate::check::{Verdict, ensure, same};
use crate::ground::{Ground, OPEN};
use crate::lab::{Lab, Options, Pair};
use crate::subject::Variant;
use crate::trial::{ALL_PATHS, Context, Trial};

const PATHS: &[Variant] = &[Variant::Queued, Variant::SmallQueue, Variant::Partial, Variant::Reorder];

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("rails::all_share_large_work", all_share_large_work).on(PATHS).rails(4),
    Trial::new("rails::unequal_numbers", unequal_numbers).on(ALL_PATHS).rails(4).needs(Operations::WRITE_IMM),
    Trial::new("rails::single_writes_take_turns", single_writes_take_turns).on(&[Variant::Queued]).rails(4),
];

fn unequal(context: &Context, ours: u32, theirs: u32) -> Verdict<Pair> {
    let options = |rails| Options { rails: Some(rails), ..Options::default() };
    Lab::new(context).pair_of(&options(ours), &options(theirs))
}

fn posts(fabric: &Fabric) -> Vec<u64> {
    fabric.counters().iter().map(|rail| rail.posts).collect()
}

fn all_share_large_work(context: &Context) -> Verdict {
    let pair = unequal(context, 4, 4)?;
    let src = Ground::new(&pair.a, 400 * 4096, Access::LOCAL, context.seed)?;
    let mut dst = Ground::new(&pair.b, 400 * 4096, OPEN, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let pages = Pages::new((0..400).rev().collect::<Vec<_>>());
    pair.lab.done(pair.to_b.write_pages(&src.region, &pages, &remote, &pages, 4096)?)?;
    dst.expect_from(0, &src, 0..400 * 4096);
    dst.check("400 pages over four rails")?;
    same("pages per rail", posts(&pair.a), vec![100; 4])
}

fn unequal_numbers(context: &Context) -> Verdict {
    for (ours, theirs) in context.some([(4, 2), (2, 4), (1, 4), (4, 1), (3, 2)]) {
        let pair = unequal(context, ours, theirs)?;
        let mut src = Ground::new(&pair.a, 2 << 20, OPEN, context.seed)?;
        let mut dst = Ground::new(&pair.b, 2 << 20, OPEN, context.seed + 1)?;
        let (remote, back) = (dst.import(&pair.to_b)?, src.import(&pair.to_a)?);
        let options = WriteOptions::new().imm(9);
        pair.lab.done(pair.to_b.write_with(&src.region, 0..1 << 20, &remote, 0, &options)?)?;
        dst.expect_from(0, &src, 0..1 << 20);
        let pages = Pages::new((0..100).collect::<Vec<_>>()).offset(1 << 20);
        pair.lab.done(pair.to_a.write_pages_with(&dst.region, &pages, &back, &pages, 4096, &options)?)?;
        src.expect_from(1 << 20, &dst, 1 << 20..(1 << 20) + 100 * 4096);
        dst.check(&format!("{ours} rails to {theirs}"))?;
        src.check(&format!("{theirs} rails to {ours}"))?;
        pair.lab.settle()?;
        same("imms", (pair.to_a.imm(9).count(), pair.to_b.imm(9).count()), (1, 1))?;
        for fabric in [&pair.a, &pair.b] {
            let unpaired = posts(fabric).into_iter().skip(ours.min(theirs) as usize).sum::<u64>();
            same("posts on rails without a partner", unpaired, 0)?;
        }
    }
    Ok(())
}

/// Many writes of one request each must not all go over the first rail.
fn single_writes_take_turns(context: &Context) -> Verdict {
    let pair = unequal(context, 4, 4)?;
    let src = Ground::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    let dst = Ground::new(&pair.b, 4096, OPEN, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let ops: Result<Vec<_>, _> = (0..80).map(|_| pair.to_b.write(&src.region, 0..4096, &remote, 0)).collect();
    pair.lab.all_done(ops?)?;
    let posts = posts(&pair.a);
    ensure(
        posts.iter().all(|posts| *posts == 20),
        format!("80 single writes went over four rails as {posts:?}"),
    )
}
