//! Workers in real time: requests that cannot be posted do not delay requests that can.

use std::sync::Arc;
use std::time::Duration;

use multirail_loopback::{LinkModel, Loopback, LoopbackConfig};
use multirail_spi::{Access, VirtualClock};
use transport_core::{Fabric, FabricBuilder, TransportConfig};

/// Far more than any of these tests takes. An operation that is not served ends by its deadline.
const LIMIT: Duration = limit::HANG;

fn open() -> Fabric {
    let transport = TransportConfig::new("loopback", Arc::new(Loopback::new()));
    FabricBuilder::new().transport(transport).deadline(3 * LIMIT).open().unwrap()
}

#[test]
fn a_write_is_not_delayed_by_a_thousand_sends_without_receives() {
    let (here, there) = (open(), open());
    let (peer, _) = here.connect_local(&there).unwrap();
    let source = here.alloc(1 << 20, Access::LOCAL).unwrap();
    let target = there.alloc(1 << 20, Access::REMOTE_WRITE).unwrap();
    let remote = peer.import(&target.descriptor()).unwrap();
    source.copy_in(0, &vec![7; 1 << 20]).unwrap();
    // The peer has posted no receive: its message ring fills up, and the other sends wait here.
    let sends: Vec<_> = (0..1000).map(|_| peer.send(&source, 0..64).unwrap()).collect();
    let mut write = peer.write(&source, 0..1 << 20, &remote, 0).unwrap();
    assert_eq!(write.wait(LIMIT).unwrap().bytes, 1 << 20);
    let mut last = [0];
    target.copy_out((1 << 20) - 1, &mut last).unwrap();
    assert_eq!(last, [7]);

    // The sends still complete once there are receives.
    let pool = there.recv_pool(16, 64).unwrap();
    let took = transport_core::wait(
        async {
            for _ in 0..sends.len() {
                pool_next(&pool).await;
            }
        },
        LIMIT,
    );
    took.unwrap();
    sends.into_iter().for_each(|mut send| assert_eq!(send.wait(LIMIT).unwrap().bytes, 64));
}

async fn pool_next(pool: &transport_core::RecvPool) {
    let message = pool.next().await.unwrap();
    assert_eq!(message.to_vec(), [7; 64]);
}

#[test]
fn a_lost_device_leaves_its_worker_no_work() {
    for seed in 0..16 {
        let clock = VirtualClock::default();
        let open = |link: LinkModel| {
            let loopback = Loopback::with(LoopbackConfig::default().link(link));
            let transport = TransportConfig::new("loopback", Arc::new(loopback));
            let builder = FabricBuilder::new().transport(transport).clock(Arc::new(clock.clone()));
            builder.seed(seed).caller_driven().open().unwrap()
        };
        // Requests run some steps after they were posted, so a step that posts nothing may be the one in which
        // the device is lost.
        let doomed = LinkModel {
            accept_at_most: Some(3),
            latency: Duration::from_micros(5),
            lose_device_after: Some(20),
            ..LinkModel::default()
        };
        let (here, there) = (open(doomed), open(LinkModel::default()));
        let (peer, _) = here.connect_local(&there).unwrap();
        let source = here.alloc(4096, Access::LOCAL).unwrap();
        let target = there.alloc(4096, Access::REMOTE_WRITE).unwrap();
        let remote = peer.import(&target.descriptor()).unwrap();
        let mut writes: Vec<_> = (0..40).map(|_| peer.write(&source, 0..4096, &remote, 0).unwrap()).collect();
        for _ in 0..1000 {
            here.step();
            clock.advance(Duration::from_micros(1));
        }
        let lost = |write: &mut transport_core::Op| write.try_result().is_some_and(|result| result.is_err());
        assert!(writes.iter_mut().any(lost), "seed {seed}: nothing was lost");
        assert_eq!(here.step().events, 0, "seed {seed}: something to do on a lost device");
    }
}
