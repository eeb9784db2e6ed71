//! A stopped peer with outstanding requests. The backend has to tear these requests down in the end, and other peers
//! must not lose requests.

use std::time::{Duration, Instant};

use limit::Limit;
use rustix::process::Signal;
use transport_core::spi::Operations;
use transport_core::{Fabric, Op, Peer, WriteOptions};

use crate::check::{TestResult, ensure, ensure_eq, within};
use crate::checked_region::{CheckedRegion, FULL_ACCESS, content};
use crate::process::{HelperProcess, LIMIT, short_timeout_fabric};
use crate::trial::{Trial, TrialContext};

pub(super) const TRIALS: &[Trial] = &[Trial::new("frozen::others_go_on", others_go_on)
    .needs(Operations::WRITE_IMM.union(Operations::SEND))
    .process()];

const LEN: usize = 1 << 20;
/// The size of a write from the helper to this process.
const PIECE: usize = 64 << 10;
const MESSAGE: usize = 1000;
/// The number of writes to the stopped peer: more bytes than socket buffers hold.
const WRITES_TO_FROZEN: usize = 32;
/// The number of outstanding writes to the other peer.
const AT_ONCE: usize = 4;
const IMM: u32 = 7;
/// A backend that can tear down requests does so within this time, on an idle machine. The trial does not wait longer
/// on a busy one: a backend that cannot do so closes its endpoint after a time of its own, and loses the device.
const TEARDOWN_LIMIT: Duration = Duration::from_secs(5);

fn meet(context: &TrialContext, fabric: &Fabric, seed: u64) -> TestResult<(HelperProcess, Peer)> {
    let (mut helper, peer) = HelperProcess::spawn_connected(context, fabric)?;
    helper.command(&format!("alloc far {LEN} {seed}"))?;
    Ok((helper, peer))
}

/// Returns true if no request is outstanding. Fails if a rail is lost.
fn is_idle(fabric: &Fabric) -> TestResult<bool> {
    let dump = fabric.dump();
    let rails = dump.transports.iter().flat_map(|transport| &transport.rails);
    ensure(rails.clone().all(|rail| !rail.lost), "a rail is lost")?;
    Ok(rails.map(|rail| rail.outstanding).sum::<u64>() == 0)
}

fn others_go_on(context: &TrialContext) -> TestResult {
    let fabric = short_timeout_fabric(context)?;
    let (frozen, to_frozen) = meet(context, &fabric, 1)?;
    let (mut healthy, to_healthy) = meet(context, &fabric, 2)?;
    let src = CheckedRegion::new(&fabric, LEN, FULL_ACCESS, 3)?;
    let mut near = CheckedRegion::new(&fabric, PIECE, FULL_ACCESS, 4)?;
    fabric.publish("near", &near.region)?;
    healthy.command(&format!("alloc own {PIECE} 6"))?;
    near.expect(0, &content(6, PIECE));
    let mut landing = CheckedRegion::new(&fabric, MESSAGE, FULL_ACCESS, 5)?;
    let mut message = fabric.recv(&landing.region, 0..MESSAGE)?;
    let frozen_region = within(LIMIT, "a lookup", to_frozen.region("far"))??;
    let far = within(LIMIT, "a lookup", to_healthy.region("far"))??;
    let write = || to_frozen.write(&src.region, 0..LEN, &frozen_region, 0);
    // All rails are connected before the peer stops.
    to_frozen.warm_up()?.wait(LIMIT)?;
    frozen.signal(Signal::STOP)?;
    let frozen_writes: Vec<Op> = (0..WRITES_TO_FROZEN).map(|_| write()).collect::<Result<_, _>>()?;
    let (stopped_at, mut limit) = (Instant::now(), Limit::of(LIMIT));
    let (mut written, mut was_idle) = (0, false);
    // One more round runs after the teardown.
    while !was_idle {
        was_idle = !to_frozen.is_alive() && is_idle(&fabric)?;
        if stopped_at.elapsed() > TEARDOWN_LIMIT {
            // A device that cannot tear down requests gives up on a peer that no longer exists.
            frozen.signal(Signal::KILL)?;
        }
        healthy.start(&format!("write own 0 {PIECE} near 0 -"))?;
        let options = WriteOptions::new().imm(IMM);
        let write = |_| to_healthy.write_with(&src.region, 0..LEN, &far, 0, &options);
        for mut op in (0..AT_ONCE).map(write).collect::<Result<Vec<_>, _>>()? {
            op.wait(LIMIT)?;
            written += 1;
        }
        healthy.finish("the write of the other peer")?;
        near.check("the bytes that the other peer wrote")?;
        ensure(!limit.is_over(), "the requests to the stopped peer do not end")?;
    }
    ensure_eq("imms", healthy.command(&format!("expect {IMM} {written}"))?, written.to_string())?;
    healthy.command(&format!("check far 0 {LEN} 3"))?;
    // The other peer's region has the bytes of this process now.
    healthy.command(&format!("send far 0 {MESSAGE} -"))?;
    ensure_eq("bytes", message.wait(LIMIT)?.bytes, MESSAGE as u64)?;
    landing.expect_from(0, &src, 0..MESSAGE);
    landing.check("a message of the other peer's")?;
    for mut op in frozen_writes {
        op.wait(LIMIT).err();
    }
    src.check("the source")
}
