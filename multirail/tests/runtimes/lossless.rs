//! A dropped wait loses nothing: the next wait gets what the dropped one waited for.

use std::future::Future;

use futures::future::{join, try_join};
use multirail::{Access, PeerGroup, Result};
use smol::future::{poll_once, yield_now};

use crate::{LIMIT, PAGE, TestDevices, TestPage, strict};

/// Polls the future of `wait` a few times and drops it.
async fn poll_and_drop<F: Future>(mut wait: impl FnMut() -> F) {
    for _ in 0..3 {
        drop(poll_once(wait()).await);
    }
}

async fn dropped_waits(device: TestDevices) -> Result<()> {
    let (a, b) = (device.open(1)?, device.open(2)?);
    let listener = b.listen("127.0.0.1:0").await?;
    let address = listener.local_addr();
    poll_and_drop(|| listener.accept()).await;
    // Accepts connections, but sends no bytes.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let nobody = silent.local_addr().expect("bound").to_string();
    poll_and_drop(|| a.connect(&nobody)).await;
    let (to_a, to_b) = try_join(listener.accept(), a.connect(&address)).await?;

    let (src, dst) = (TestPage::new(&a, Access::LOCAL, 1)?, TestPage::new(&b, Access::all(), 2)?);
    b.publish("dst", &dst.region)?;
    poll_and_drop(|| to_b.region("dst")).await;
    let remote = to_b.region("dst").await?;
    to_b.write(&src.region, 0..PAGE, &remote, 0)?.await?;

    let pool = b.recv_pool(4, 16)?;
    poll_and_drop(|| pool.next()).await;
    // Both wait. The dropped one must not have the only wakeup.
    let mut first = Box::pin(pool.next());
    assert!(poll_once(&mut first).await.is_none());
    let sends = async {
        to_b.send(&src.region, 0..3)?.await?;
        drop(first);
        Ok(())
    };
    let (message, ()) = try_join(pool.next(), sends).await?;
    assert_eq!(message.len(), 3);

    let counter = to_a.imm(5);
    poll_and_drop(|| counter.expect(1)).await;
    to_b.write_imm(5)?.await?;
    counter.expect(1).await?;
    assert_eq!(counter.count(), 1);

    let (ours, theirs) = (PeerGroup::new([to_b.clone()])?, PeerGroup::new([to_a.clone()])?);
    poll_and_drop(|| ours.barrier("x", LIMIT).expect("no other barrier waits")).await;
    let mut arrivals = to_a.imm(6).arrivals();
    drop(poll_once(arrivals.next()).await);
    to_b.write_imm(6)?.await?;
    assert_eq!(arrivals.next().await?, 1);
    theirs.barrier("x", LIMIT)?.await?;
    ours.barrier("x", LIMIT)?.await?;

    // The second accept waits behind the first, which is dropped.
    let mut turn = Box::pin(listener.accept());
    assert!(poll_once(&mut turn).await.is_none());
    let connects = async {
        yield_now().await;
        drop(turn);
        a.connect(&address).await
    };
    try_join(listener.accept(), connects).await?;

    poll_and_drop(|| to_a.closed()).await;
    let (end, ()) = join(to_a.closed(), async { to_b.disconnect() }).await;
    assert_eq!(end.kind(), multirail::ErrorKind::Closed);
    Ok(())
}

#[test]
fn the_next_wait_gets_what_a_dropped_wait_waited_for() {
    TestDevices::ALL.into_iter().for_each(|device| strict::run(dropped_waits(device)).unwrap());
}
