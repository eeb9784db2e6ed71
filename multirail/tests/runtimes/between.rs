//! Two processes: no late byte lands, on whichever side the operation ends, and a blocked runtime loses no peer.
#![cfg(target_os = "linux")]

use std::time::Duration;

use multirail::{Access, Peer, Result, WriteOptions};

use crate::child::{self, PeerProcess};
use crate::flood::reclaim;
use crate::{PAGE, TestDevices, TestPage, limited, outlast};

const SEEDS: [u64; 2] = [3, 4];
const ROUNDS: u64 = 6;

/// This process drops writes, half of them with a cancel. The other process reuses the page.
#[test]
fn a_dropped_write_is_over_in_the_other_process() {
    for seed in SEEDS {
        let mut other = PeerProcess::start(seed);
        let fabric = TestDevices::Late.open(seed + 100).unwrap();
        smol::block_on(limited(async {
            let peer = fabric.connect(&other.address).await?;
            // The response comes after the regions are published.
            other.request("fill 2");
            let (to, probe) = (peer.region(child::PAGE).await?, peer.region(child::PROBE).await?);
            let mut src = TestPage::new(&fabric, Access::LOCAL, 1)?;
            let mut random = fastrand::Rng::with_seed(seed);
            let mut lost = 0;
            for round in 0..ROUNDS {
                let mut op = peer.write(&src.region, 0..PAGE, &to, 0)?;
                // A race that the write sometimes loses, on any machine.
                let turns = if round % 3 == 0 { 0 } else { random.u32(1..500) };
                let gives_up = async {
                    for _ in 0..turns {
                        smol::future::yield_now().await;
                    }
                    true
                };
                let written = async { (&mut op).await.map_or_else(|error| panic!("{error}"), |_| false) };
                if smol::future::or(gives_up, written).await {
                    lost += 1;
                    wait_until_over(&peer, op, round % 2 == 0).await?;
                }
                src.fill(100 + round)?;
                other.request(&format!("fill {}", 200 + round));
                outlast(&peer, &src.region, &probe).await?;
                assert_eq!(
                    (other.request("wrong-bytes").as_str(), src.wrong_bytes()),
                    ("0", 0),
                    "round {round}"
                );
            }
            assert!(lost > 0);
            Ok::<_, multirail::Error>(())
        }))
        .unwrap();
    }
}

async fn wait_until_over(peer: &Peer, op: multirail::Op, cancel: bool) -> Result<()> {
    if cancel {
        let _ = op.cancel().await;
        return Ok(());
    }
    drop(op);
    peer.drain()?.await
}

/// The other process floods a page, and this process revokes it.
#[test]
fn a_revoke_stops_the_other_process() {
    for seed in SEEDS {
        let mut other = PeerProcess::start(seed);
        let fabric = TestDevices::Late.open(seed + 100).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
        let peer = runtime.block_on(fabric.connect(&other.address)).unwrap();
        for round in 0..ROUNDS {
            let page = TestPage::new(&fabric, Access::all(), round).unwrap();
            let name = format!("page-{round}");
            fabric.publish(&name, &page.region).unwrap();
            other.send(&format!("flood {name} {round}"));
            let page = runtime.block_on(limited(reclaim(&peer, page, seed + round))).unwrap();
            other.receive();
            assert_eq!(page.wrong_bytes(), 0, "late bytes in round {round}");
        }
    }
}

/// Ten times the default peer timeout.
const BLOCKED: Duration = Duration::from_secs(30);

#[test]
fn a_runtime_that_is_blocked_for_thirty_seconds_loses_no_peer() {
    let mut other = PeerProcess::start(1);
    let fabric = TestDevices::Late.open(2).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let peer = fabric.connect(&other.address).await.unwrap();
        let mut end = tokio::spawn(peer.closed());
        other.request("fill 5");
        let remote = peer.region(child::PAGE).await.unwrap();
        let src = TestPage::new(&fabric, Access::LOCAL, 7).unwrap();
        other.send("expect 1 7");

        // The test blocks the runtime, so that none of its tasks is polled.
        std::thread::sleep(BLOCKED);

        assert!(peer.is_alive());
        let options = WriteOptions::new().imm(1);
        let written = peer.write_with(&src.region, 0..PAGE, &remote, 0, &options).unwrap().await.unwrap();
        assert_eq!(written.bytes as usize, PAGE);
        assert_eq!(other.receive(), "done");
        // The task that watches the peer was polled since, and still waits.
        assert!(tokio::time::timeout(Duration::ZERO, &mut end).await.is_err());
        peer.disconnect();
        assert_eq!(end.await.unwrap().kind(), multirail::ErrorKind::Closed);
    });
}
