//! Fabrics that disconnect and connect again while both stay open.

use std::time::Duration;

use transport_core::spi::Operations;
use transport_core::{ErrorKind, SendOptions, WriteOptions};

use crate::check::{TestResult, ensure_eq, ensure_err, within};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::process::{HelperProcess, LIMIT, worker_fabric};
use crate::trial::{Trial, TrialContext, TrialFabric};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("reconnect::at_once", at_once).needs(Operations::WRITE_IMM).process(),
    Trial::new("reconnect::left_unread", left_unread)
        .needs(Operations::WRITE_IMM.union(Operations::SEND))
        .process(),
];

const LEN: usize = 100_000;

/// Opens two fabrics that are not connected yet: one here with a region, and one in a helper that listens and has the
/// region `far`.
fn unconnected(context: &TrialContext) -> TestResult<(TrialFabric, HelperProcess, String, CheckedRegion)> {
    let fabric = worker_fabric(context)?;
    let mut helper = HelperProcess::spawn(context)?;
    let address = helper.command("listen")?;
    helper.command(&format!("alloc far {LEN} 1"))?;
    let near = CheckedRegion::new(&fabric, LEN, FULL_ACCESS, 2)?;
    Ok((fabric, helper, address, near))
}

/// Disconnects and connects many times, with outstanding writes at each disconnect. Neither side waits until the other
/// has noticed the disconnect.
fn at_once(context: &TrialContext) -> TestResult {
    let (fabric, mut helper, address, near) = unconnected(context)?;
    fabric.publish("near", &near.region)?;
    for round in 0..12 {
        let peer = helper.connect(&fabric, &address)?;
        // Without this, libfabric may hold writes back until a handshake, which never comes because the peer is gone.
        peer.warm_up()?.wait(LIMIT)?;
        let remote = within(LIMIT, "a lookup", peer.region("far"))??;
        // This side writes first, or the helper, or both, or neither.
        if round & 1 == 0 {
            let options = WriteOptions::new().imm(1);
            peer.write_with(&near.region, 0..LEN, &remote, 0, &options)?.wait(LIMIT)?;
            helper.command("expect 1 1")?;
        }
        if round & 2 == 0 {
            helper.command(&format!("write far 0 {LEN} near 0 2"))?;
            peer.imm(2).expect(1).wait(LIMIT)?;
        }
        let left: Result<Vec<_>, _> = (0..8).map(|_| peer.write(&near.region, 0..LEN, &remote, 0)).collect();
        peer.disconnect();
        for mut op in left? {
            if let Err(error) = op.wait(LIMIT) {
                ensure_err::<()>(
                    "what was under way",
                    Err(error),
                    &[ErrorKind::Closed, ErrorKind::PeerDied],
                )?;
            }
        }
    }
    Ok(())
}

/// A message that was not received before its sender disconnected is not delivered as one of the next connection.
fn left_unread(context: &TrialContext) -> TestResult {
    let (fabric, mut helper, address, near) = unconnected(context)?;
    for round in 1..4 {
        let peer = helper.connect(&fabric, &address)?;
        let remote = within(LIMIT, "a lookup", peer.region("far"))??;
        helper.command("receive far 0 64")?;
        peer.send_with(&near.region, 0..round, &SendOptions::new().imm(7))?.wait(LIMIT)?;
        let mut received = helper.command("wait-receive")?;
        if round > 1 && received == "64 Some(8) of another peer" {
            // A receive takes the message of any peer. This one was posted before the helper's worker knew that the
            // former peer had left, and so took its last message, as that peer's.
            helper.command("receive far 0 64")?;
            received = helper.command("wait-receive")?;
        }
        ensure_eq("the received message", received, format!("{round} Some(7)"))?;
        let unread = peer.send_with(&near.region, 0..64, &SendOptions::new().imm(8))?;
        // The imm takes the same path as the message. Once the imm has arrived, the message most likely has, too,
        // unless the imm waits behind the message (libfabric 2.1, tcp).
        let mut behind = peer.write(&near.region, 0..64, &remote, 0)?;
        if let Err(error) = behind.wait(Duration::from_millis(200)) {
            ensure_err::<()>("what is behind it", Err(error), &[ErrorKind::DeadlineExceeded])?;
        }
        peer.disconnect();
        drop(unread);
    }
    Ok(())
}
