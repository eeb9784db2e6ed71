//! Staged writes while the connection of their device breaks: it breaks whenever a peer refuses a work request.

use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use backend_verbs::Verbs;
use multirail_spi::ErrorKind;
use multirail_staging::StagingPolicy;
use transport_core::{Fabric, Peer, Region, RemoteRegion, WriteOptions};

use crate::{OPEN, register_refused};

const LEN: usize = 1 << 20;
const PARTS: usize = 16;
const ROUNDS: usize = 20;
const IMM: u32 = 5;
const LIMIT: Duration = limit::HANG;

fn open() -> Option<Fabric> {
    crate::open(Verbs::new(), StagingPolicy::WhereRefused)
}

/// Writes all of a region in parts with an imm each. Each part has to succeed, and its end is sent to `ended`.
fn write(peer: &Peer, from: &Region, to: &RemoteRegion, ended: &Sender<()>) {
    let options = WriteOptions::new().imm(IMM);
    let part = |at| peer.write_with(from, at..at + LEN / PARTS, to, at, &options).expect("a staged write");
    let under_way: Vec<_> = (0..PARTS).map(|at| part(at * LEN / PARTS)).collect();
    for mut write in under_way {
        write.wait(LIMIT).expect("a staged write");
        let _ = ended.send(());
    }
}

#[test]
fn writes_continue_after_each_break() {
    let Some((here, there)) = open().zip(open()) else { return };
    let (peer, origin) = here.connect_local(&there).expect("connected");
    let (from, to) = (register_refused(&here, LEN).unwrap(), register_refused(&there, LEN).unwrap());
    let remote = peer.import(&to.descriptor()).unwrap();
    assert_eq!(remote.path(), "staged through the host's memory");
    let plain = there.alloc(4096, OPEN).unwrap();
    let (sender, ended) = channel();
    std::thread::scope(|scope| {
        scope.spawn({
            let (from, to, remote, peer) = (&from, &to, &remote, &peer);
            move || {
                for round in 0..ROUNDS {
                    let bytes: Vec<u8> = (0..LEN).map(|at| (at / 9) as u8 ^ round as u8).collect();
                    from.copy_in(0, &bytes).unwrap();
                    write(peer, from, remote, &sender);
                    let mut came = vec![0; LEN];
                    to.copy_out(0, &mut came).unwrap();
                    assert!(came == bytes, "all bytes, in round {round}");
                }
            }
        });
        let mut broken = 0;
        // Each break follows the end of a write, while others are under way. A connection that broke without a pause
        // would move no bytes at all.
        while ended.recv().is_ok() {
            ended.try_iter().for_each(drop);
            let gone = here.alloc(4096, OPEN).unwrap();
            let stale = origin.import(&gone.descriptor()).unwrap();
            drop(gone);
            // The other process breaks the connection, so this process's device does not learn which of its work
            // requests were executed.
            let refused = origin.write(&plain, 0..4096, &stale, 0).and_then(|mut write| write.wait(LIMIT));
            let why = refused.expect_err("the region is gone");
            assert!(matches!(why.kind(), ErrorKind::RemoteAccess | ErrorKind::Revoked), "{why}");
            broken += usize::from(why.kind() == ErrorKind::RemoteAccess);
        }
        assert!(broken > 0, "the device refused no work request");
    });
    assert_eq!(origin.imm(IMM).count(), (ROUNDS * PARTS) as u64, "each imm arrives once");
}
