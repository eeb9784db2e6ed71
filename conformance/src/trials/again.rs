//! Fabrics that part and meet again, while both stay open.

use std::time::Duration;

use transport_core::spi::Operations;
use transport_core::{ErrorKind, SendOptions, WriteOptions};

use crate::check::{Verdict, refused, same, within};
use crate::end::End;
use crate::ground::{Ground, OPEN};
use crate::process::{Child, LIMIT, live};
use crate::trial::{Context, Trial};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("again::at_once", at_once).needs(Operations::WRITE_IMM).process(),
    Trial::new("again::left_unread", left_unread)
        .needs(Operations::WRITE_IMM.union(Operations::SEND))
        .process(),
];

const LEN: usize = 100_000;

/// Two that are to meet: a fabric here with a region, and one in a helper with another, `far`, which listens there.
fn apart(context: &Context) -> Verdict<(End, Child, String, Ground)> {
    let fabric = live(context)?;
    let mut child = Child::spawn(context)?;
    let address = child.ask("listen")?;
    child.ask(&format!("alloc far {LEN} 1"))?;
    let near = Ground::new(&fabric, LEN, OPEN, 2)?;
    Ok((fabric, child, address, near))
}

/// Over and over, with writes under way when they part, and neither waits until the other has noticed.
fn at_once(context: &Context) -> Verdict {
    let (fabric, mut child, address, near) = apart(context)?;
    fabric.publish("near", &near.region)?;
    for round in 0..12 {
        let peer = child.meets(&fabric, &address)?;
        // Else libfabric may hold writes back until a handshake that never comes, as the peer is gone.
        peer.warm_up()?.wait(LIMIT)?;
        let remote = within(LIMIT, "a lookup", peer.region("far"))??;
        // Either side is the first to write, both are, or nobody.
        if round & 1 == 0 {
            let options = WriteOptions::new().imm(1);
            peer.write_with(&near.region, 0..LEN, &remote, 0, &options)?.wait(LIMIT)?;
            child.ask("expect 1 1")?;
        }
        if round & 2 == 0 {
            child.ask(&format!("write far 0 {LEN} near 0 2"))?;
            peer.imm(2).expect(1).wait(LIMIT)?;
        }
        let left: Result<Vec<_>, _> = (0..8).map(|_| peer.write(&near.region, 0..LEN, &remote, 0)).collect();
        peer.disconnect();
        for mut op in left? {
            if let Err(error) = op.wait(LIMIT) {
                refused::<()>("what was under way", Err(error), &[ErrorKind::Closed, ErrorKind::PeerDied])?;
            }
        }
    }
    Ok(())
}

/// A message that nobody had received when its sender parted is not taken for the next one's.
fn left_unread(context: &Context) -> Verdict {
    let (fabric, mut child, address, near) = apart(context)?;
    for round in 1..4 {
        let peer = child.meets(&fabric, &address)?;
        let remote = within(LIMIT, "a lookup", peer.region("far"))??;
        child.ask("receive far 0 64")?;
        peer.send_with(&near.region, 0..round, &SendOptions::new().imm(7))?.wait(LIMIT)?;
        same("what was received", child.ask("received")?, format!("{round} Some(7)"))?;
        let unread = peer.send_with(&near.region, 0..64, &SendOptions::new().imm(8))?;
        // It takes the same way, and the message has most likely come when this has; unless it stands behind it
        // (libfabric 2.1, tcp).
        let mut behind = peer.write(&near.region, 0..64, &remote, 0)?;
        if let Err(error) = behind.wait(Duration::from_millis(200)) {
            refused::<()>("what is behind it", Err(error), &[ErrorKind::DeadlineExceeded])?;
        }
        peer.disconnect();
        drop(unread);
    }
    Ok(())
}
