//! A peer that stands still with requests posted to it, which have to be cut off in the end:
//! nobody else may lose by it.

use std::time::Duration;

use limit::Limit;
use rustix::process::Signal;
use transport_core::spi::Operations;
use transport_core::{Fabric, Op, Peer, WriteOptions};

use crate::check::{Verdict, ensure, same, within};
use crate::ground::{Ground, OPEN, content};
use crate::process::{Child, LIMIT, impatient};
use crate::trial::{Context, Trial};

pub(super) const TRIALS: &[Trial] = &[Trial::new("frozen::others_go_on", others_go_on)
    .needs(Operations::WRITE_IMM.union(Operations::SEND))
    .process()];

const LEN: usize = 1 << 20;
/// A write of the helper's to us.
const PIECE: usize = 64 << 10;
const MESSAGE: usize = 1000;
/// Writes to the frozen peer: more than sockets take in.
const STUCK: usize = 32;
/// Writes to the other one at a time.
const AT_ONCE: usize = 4;
const IMM: u32 = 7;
/// More than a backend takes on an idle machine that can cut off what does not end.
const PATIENCE: Duration = Duration::from_secs(5);

fn meet(context: &Context, fabric: &Fabric, seed: u64) -> Verdict<(Child, Peer)> {
    let (mut child, peer) = Child::met(context, fabric)?;
    child.ask(&format!("alloc far {LEN} {seed}"))?;
    Ok((child, peer))
}

/// Whether nothing is posted; no rail may be lost.
fn is_quiet(fabric: &Fabric) -> Verdict<bool> {
    let dump = fabric.dump();
    let rails = dump.transports.iter().flat_map(|transport| &transport.rails);
    ensure(rails.clone().all(|rail| !rail.lost), "a rail is lost")?;
    Ok(rails.map(|rail| rail.outstanding).sum::<u64>() == 0)
}

fn others_go_on(context: &Context) -> Verdict {
    let fabric = impatient(context)?;
    let (frozen, to_frozen) = meet(context, &fabric, 1)?;
    let (mut well, to_well) = meet(context, &fabric, 2)?;
    let src = Ground::new(&fabric, LEN, OPEN, 3)?;
    let mut near = Ground::new(&fabric, PIECE, OPEN, 4)?;
    fabric.publish("near", &near.region)?;
    well.ask(&format!("alloc own {PIECE} 6"))?;
    near.expect(0, &content(6, PIECE));
    let mut inbox = Ground::new(&fabric, MESSAGE, OPEN, 5)?;
    let mut message = fabric.recv(&inbox.region, 0..MESSAGE)?;
    let stuck_at = within(LIMIT, "a lookup", to_frozen.region("far"))??;
    let far = within(LIMIT, "a lookup", to_well.region("far"))??;
    let write = || to_frozen.write(&src.region, 0..LEN, &stuck_at, 0);
    // The ways are open before it freezes.
    to_frozen.warm_up()?.wait(LIMIT)?;
    frozen.signal(Signal::STOP)?;
    let stuck: Vec<Op> = (0..STUCK).map(|_| write()).collect::<Result<_, _>>()?;
    let (mut patience, mut limit) = (Limit::of(PATIENCE), Limit::of(LIMIT));
    let (mut written, mut was_quiet) = (0, false);
    // Once more after it is over.
    while !was_quiet {
        was_quiet = !to_frozen.is_alive() && is_quiet(&fabric)?;
        if patience.is_over() {
            // A device that cuts nothing off gives up on who is not there any more.
            frozen.signal(Signal::KILL)?;
        }
        well.tell(&format!("write own 0 {PIECE} near 0 -"))?;
        let options = WriteOptions::new().imm(IMM);
        let write = |_| to_well.write_with(&src.region, 0..LEN, &far, 0, &options);
        for mut op in (0..AT_ONCE).map(write).collect::<Result<Vec<_>, _>>()? {
            op.wait(LIMIT)?;
            written += 1;
        }
        well.answer("a write of the other peer's")?;
        near.check("what the other peer wrote")?;
        ensure(!limit.is_over(), "what was posted to the frozen peer is never over")?;
    }
    same("imms", well.ask(&format!("expect {IMM} {written}"))?, written.to_string())?;
    well.ask(&format!("check far 0 {LEN} 3"))?;
    // It holds what we wrote by now.
    well.ask(&format!("send far 0 {MESSAGE} -"))?;
    same("bytes", message.wait(LIMIT)?.bytes, MESSAGE as u64)?;
    inbox.expect_from(0, &src, 0..MESSAGE);
    inbox.check("a message of the other peer's")?;
    for mut op in stuck {
        op.wait(LIMIT).err();
    }
    src.check("the source")
}
