//! Warming up: every rail answers, nothing is delivered, nothing hangs.

use std::sync::Arc;
use std::time::Duration;

use transport_core::{Access, ErrorKind, Workers};

use crate::check::{Failure, Verdict, refused, same};
use crate::ground::{Ground, OPEN};
use crate::lab::{Lab, Options, Pair, builder};
use crate::process::{LIMIT, Meeting};
use crate::subject::Variant;
use crate::trial::{ALL_PATHS, Context, Trial};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("warm_up::every_rail_answers", every_rail).on(ALL_PATHS),
    Trial::new("warm_up::ends_by_its_deadline", deadline).on(&[Variant::Slow]),
    Trial::new("warm_up::peer_goes", goes).on(&[Variant::Queued, Variant::Slow]),
    Trial::new("warm_up::between_processes", processes).process(),
    Trial::new("warm_up::of_eager_workers", eager).rails(2),
];

fn every_rail(context: &Context) -> Verdict {
    let pair = Pair::new(context)?;
    let src = Ground::new(&pair.a, 100_000, Access::LOCAL, context.seed)?;
    let mut dst = Ground::new(&pair.b, 100_000, OPEN, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let rails = pair.a.transports()[0].devices.len() as u64;
    for round in 1..4 {
        let outcome = pair.lab.done(pair.to_b.warm_up()?)?;
        same("bytes and requests", (outcome.bytes, outcome.work_requests), (0, rails))?;
        let posts: Vec<_> = pair.a.counters().iter().map(|rail| rail.posts).collect();
        same("posts of each rail", posts, vec![round; rails as usize])?;
        pair.lab.done(pair.to_a.warm_up()?)?;
    }
    pair.lab.settle()?;
    same("imms", (0..64).map(|imm| pair.to_a.imm(imm).count() + pair.to_b.imm(imm).count()).sum::<u64>(), 0)?;
    dst.check("warmed up")?;
    src.check("warmed up")?;
    pair.lab.done(pair.to_b.write(&src.region, 0..90_000, &remote, 5)?)?;
    dst.expect_from(5, &src, 0..90_000);
    dst.check("a write after it")
}

fn deadline(context: &Context) -> Verdict {
    let ours = Options { deadline: Duration::from_secs(1), ..Options::default() };
    let pair = Lab::new(context).pair_of(&ours, &Options::default())?;
    pair.lab.fails("a warm-up", pair.to_b.warm_up(), &[ErrorKind::DeadlineExceeded])?;
    pair.lab.settle()
}

fn goes(context: &Context) -> Verdict {
    let gone = &[ErrorKind::PeerDied, ErrorKind::Closed];
    let pair = Pair::new(context)?;
    let mut op = pair.to_b.warm_up()?;
    pair.to_a.disconnect();
    refused("a warm-up", pair.lab.result(&mut op)?, gone)?;
    refused("the next", pair.to_b.warm_up().map(drop), gone)?;
    pair.lab.settle()
}

/// Workers that write every request at once, over two rails.
fn eager(context: &Context) -> Verdict {
    let lab = Lab::new(context);
    let options = Options { rails: Some(2), ..Options::default() };
    let open = |number| {
        let builder = builder(context, &options)?.workers(Workers::per_group().eager()).caller_driven();
        let fabric = builder.clock(Arc::new(lab.clock.clone())).seed(number).incarnation(number).open()?;
        lab.drive(&fabric);
        Ok::<_, Failure>(fabric)
    };
    let (a, b) = (open(1)?, open(2)?);
    let (to_b, _to_a) = a.connect_local(&b)?;
    let outcome = lab.done(to_b.warm_up()?)?;
    same("bytes and requests", (outcome.bytes, outcome.work_requests), (0, 2))
}

fn processes(context: &Context) -> Verdict {
    let Meeting { fabric, peer, mut child } = Meeting::new(context)?;
    child.ask("alloc far 3000000 1")?;
    let src = Ground::new(&fabric, 3_000_000, Access::LOCAL, 2)?;
    let remote = crate::check::within(LIMIT, "a lookup", peer.region("far"))??;
    peer.warm_up()?.wait(LIMIT)?;
    child.ask("holds far")?;
    peer.write(&src.region, 0..3_000_000, &remote, 0)?.wait(LIMIT)?;
    child.ask("check far 0 3000000 2").map(drop)
}
