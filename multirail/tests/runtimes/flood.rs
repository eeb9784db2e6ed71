//! A target revokes its page while an initiator writes to it and drops operations at random.

use multirail::{Access, ErrorKind, Op, Peer, Region, RemoteRegion, Result};

use crate::{LIMIT, PAGE, TestDevices, TestPage, limited, outlast};

/// The number of writes after which a flood reports its start with an imm.
const BEGUN: u32 = 1;
/// The number of refusals in a row after which a flood ends, because the region is revoked.
const REFUSALS: u32 = 200;

/// Writes random ranges and drops operations at random, until the page is revoked and for long after. On return no
/// operation is outstanding.
pub async fn flood(peer: &Peer, from: &Region, to: &RemoteRegion, seed: u64) -> Result<()> {
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut held, mut refused, mut written, mut silent) = (Vec::<Op>::new(), 0, 0_u64, true);
    while refused < REFUSALS {
        let start = random.usize(..PAGE);
        let range = start..random.usize(start + 1..=PAGE);
        match peer.write(from, range, to, start) {
            Ok(op) => {
                written += 1;
                held.push(op);
            }
            Err(error) if error.kind() == ErrorKind::Busy => held.clear(),
            Err(error) => {
                assert!(is_refusal(error.kind()), "{error}");
                refused += 1;
            }
        }
        if silent && written >= 20 {
            match peer.write_imm(BEGUN) {
                Ok(op) => op.detach(),
                Err(error) if error.kind() == ErrorKind::Busy => continue,
                Err(error) => return Err(error),
            }
            silent = false;
        }
        match random.u8(..8) {
            0..4 => drop(held.pop()),
            4 if !held.is_empty() => drop(held.swap_remove(random.usize(..held.len()))),
            5 if !held.is_empty() => {
                // Awaits the operation for a while and drops it, as a `select!` does.
                let op = held.swap_remove(random.usize(..held.len()));
                smol::future::or(async { drop(op.await) }, smol::future::yield_now()).await;
            }
            6 => held.truncate(16),
            // The target may be another task on this thread.
            7 => smol::future::yield_now().await,
            _ => {}
        }
    }
    drop(held);
    peer.drain()?.await
}

/// The target's side: waits for the flood, revokes the page and reuses it. Returns the page, to be checked again after
/// the flood.
pub async fn reclaim(initiator: &Peer, mut page: TestPage, seed: u64) -> Result<TestPage> {
    initiator.imm(BEGUN).expect(1).await?;
    initiator.imm(BEGUN).try_take(1);
    for _ in 0..fastrand::Rng::with_seed(seed).u32(..200) {
        smol::future::yield_now().await;
    }
    page.region.revoke()?.await?;
    page.fill(seed + 1000)?;
    assert_eq!(page.wrong_bytes(), 0, "right after the revoke");
    Ok(page)
}

fn is_refusal(kind: ErrorKind) -> bool {
    [ErrorKind::Revoked, ErrorKind::RemoteAccess].contains(&kind)
}

async fn rounds(device: TestDevices, seed: u64) -> Result<()> {
    let (a, b) = (device.open(seed)?, device.open(seed + 1)?);
    let (to_b, to_a) = a.connect_local(&b)?;
    let src = TestPage::new(&a, Access::LOCAL, seed)?;
    let probed = b.alloc(64, Access::all())?;
    let probe = to_b.import(&probed.descriptor())?;
    for round in seed..seed + 6 {
        let page = TestPage::new(&b, Access::all(), round)?;
        let remote = to_b.import(&page.region.descriptor())?;
        let flooding = flood(&to_b, &src.region, &remote, round);
        let (page, ()) = futures::future::try_join(reclaim(&to_a, page, round), flooding).await?;
        outlast(&to_b, &src.region, &probe).await?;
        assert_eq!(page.wrong_bytes(), 0, "late bytes in round {round}");
    }
    Ok(())
}

#[test]
fn in_one_process() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let tasks: Vec<_> = TestDevices::ALL
        .into_iter()
        .flat_map(|device| [10, 20, 30].map(|seed| runtime.spawn(limited(rounds(device, seed)))))
        .collect();
    for task in tasks {
        runtime.block_on(task).unwrap().unwrap();
    }
    multirail::wait(rounds(TestDevices::Late, 40), LIMIT).unwrap().unwrap();
}
