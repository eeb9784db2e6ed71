//! The same between two processes: no late byte, whichever side gives up.
#![cfg(target_os = "linux")]

use multirail::{Access, Peer, Result};

use crate::child::{self, Other};
use crate::device::{Device, limited, outlast};
use crate::flood::reclaim;
use crate::page::{PAGE, Page};

const SEEDS: [u64; 2] = [3, 4];
const ROUNDS: u64 = 6;

/// Writes are dropped here, half of them through a cancel; the page is reused there.
#[test]
fn a_dropped_write_is_over_there_too() {
    for seed in SEEDS {
        let mut other = Other::start(seed);
        let fabric = Device::Late.open(seed + 100).unwrap();
        smol::block_on(limited(async {
            let peer = fabric.connect(&other.address).await?;
            // Its answer comes behind the regions it publishes.
            other.ask("fill 2");
            let (to, probe) = (peer.region(child::PAGE).await?, peer.region(child::PROBE).await?);
            let mut src = Page::new(&fabric, Access::LOCAL, 1)?;
            let mut random = fastrand::Rng::with_seed(seed);
            let mut lost = 0;
            for round in 0..ROUNDS {
                let mut op = peer.write(&src.region, 0..PAGE, &to, 0)?;
                let turns = random.u32(1..500);
                let gives_up = async {
                    for _ in 0..turns {
                        smol::future::yield_now().await;
                    }
                    true
                };
                let written = async { (&mut op).await.map_or_else(|error| panic!("{error}"), |_| false) };
                if smol::future::or(written, gives_up).await {
                    lost += 1;
                    quiet(&peer, op, round % 2 == 0).await?;
                }
                src.fill(100 + round)?;
                other.ask(&format!("fill {}", 200 + round));
                outlast(&peer, &src.region, &probe).await?;
                assert_eq!((other.ask("strays").as_str(), src.strays()), ("0", 0), "round {round}");
            }
            assert!(lost > 0);
            Ok::<_, multirail::Error>(())
        }))
        .unwrap();
    }
}

async fn quiet(peer: &Peer, op: multirail::Op, cancel: bool) -> Result<()> {
    if cancel {
        let _ = op.cancel().await;
        return Ok(());
    }
    drop(op);
    peer.drain()?.await
}

/// The flood is there; the page is taken back here.
#[test]
fn a_revoke_stops_the_other_process() {
    for seed in SEEDS {
        let mut other = Other::start(seed);
        let fabric = Device::Late.open(seed + 100).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
        let peer = runtime.block_on(fabric.connect(&other.address)).unwrap();
        for round in 0..ROUNDS {
            let page = Page::new(&fabric, Access::all(), round).unwrap();
            let name = format!("page-{round}");
            fabric.publish(&name, &page.region).unwrap();
            other.tell(&format!("flood {name} {round}"));
            let page = runtime.block_on(limited(reclaim(&peer, page, seed + round))).unwrap();
            other.hear();
            assert_eq!(page.strays(), 0, "late bytes in round {round}");
        }
    }
}
