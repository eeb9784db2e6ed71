//! One scenario that awaits every future of the library.

use std::time::Duration;

use futures::future::{join, try_join};
use multirail::{
    Access, ErrorKind, Fabric, FabricBuilder, Listener, Pages, Peer, PeerGroup, RecvPool, RemoteRegion,
    Result, WriteOptions,
};

use crate::LIMIT;

use crate::{PAGE, TestPage, differing};

/// Two connected fabrics: `a` is the initiator, `b` is the target.
struct ConnectedFabrics {
    a: Fabric,
    b: Fabric,
    to_b: Peer,
    to_a: Peer,
    listener: Listener,
    src: TestPage,
    dst: TestPage,
    remote: RemoteRegion,
}

/// Awaits every future of the library, between two fabrics with these settings.
pub async fn scenario(ours: FabricBuilder, theirs: FabricBuilder) -> Result<()> {
    let scene = ConnectedFabrics::set(ours.open()?, theirs.open()?).await?;
    scene.write().await?;
    scene.count().await?;
    scene.gather().await?;
    scene.read_and_send().await?;
    scene.stop().await?;
    scene.end().await
}

impl ConnectedFabrics {
    async fn set(a: Fabric, b: Fabric) -> Result<Self> {
        let listener = b.listen("127.0.0.1:0").await?;
        let address = listener.local_addr();
        // Accepting is polled first, so it must be woken.
        let (to_a, to_b) = try_join(listener.accept(), a.connect(&address)).await?;
        let src = TestPage::new(&a, Access::all(), 1)?;
        let dst = TestPage::new(&b, Access::all(), 2)?;
        b.publish("dst", &dst.region)?;
        let remote = to_b.region("dst").await?;
        assert_eq!(to_b.region("nothing").await.err().map(|e| e.kind()), Some(ErrorKind::NotFound));
        Ok(Self { a, b, to_b, to_a, listener, src, dst, remote })
    }

    async fn write(&self) -> Result<()> {
        let Self { to_b, src, dst, remote, .. } = self;
        let first = to_b.write(&src.region, 0..8, remote, 0)?.await?;
        assert_eq!(first.bytes, 8);
        to_b.write(&src.region, 8..PAGE / 2, remote, 8)?.await?;
        let rest = Pages::new([3, 2]);
        let whole = to_b.write_pages(&src.region, &rest, remote, &rest, PAGE / 4)?.await?;
        assert_eq!(whole.bytes as usize, PAGE / 2);
        assert_eq!(differing(&dst.region, 1), 0);
        Ok(())
    }

    async fn count(&self) -> Result<()> {
        let Self { to_b, to_a, src, remote, .. } = self;
        let (imms, last) = (to_a.imm(7), to_a.imm(8).expect(1));
        let all = Pages::new([0, 1, 2, 3]);
        let options = WriteOptions::new().imm(7).per_wr();
        let pages = to_b.write_pages_with(&src.region, &all, remote, &all, PAGE / 4, &options)?;
        try_join(imms.expect(4), pages).await?;
        assert!(imms.try_take(4) && !imms.try_take(1));
        let (announced, alone) = (WriteOptions::new().imm(8), to_b.write_imm(7)?);
        let write = to_b.write_with(&src.region, 0..PAGE, remote, 0, &announced)?;
        try_join(try_join(last, imms.expect(1)), try_join(write, alone)).await?;
        Ok(())
    }

    /// Operations to many peers, here to one peer twice, and arrivals from them.
    async fn gather(&self) -> Result<()> {
        let Self { a, b, to_b, to_a, src, dst, remote, .. } = self;
        to_b.warm_up()?.await?;
        let (again, back) = a.connect_local(b)?;
        let (ours, theirs) = (PeerGroup::new([to_b.clone(), again])?, PeerGroup::new([to_a.clone(), back])?);
        let second = ours.peers()[1].import(&dst.region.descriptor())?;
        let called = theirs.peers().iter().map(|peer| {
            let (told, called) = futures::channel::oneshot::channel();
            peer.imm(20).on_reached(1, |result| drop(told.send(result)));
            called
        });
        let (called, mut arrivals) = (futures::future::join_all(called), to_a.imm(21).arrivals());
        let halves = [remote.clone(), second];
        let imm = WriteOptions::new().imm(20);
        let scatter = ours.scatter_evenly(&src.region, 0..PAGE, &halves, 0, &imm)?;
        let (outcome, called) = join(scatter, called).await;
        assert_eq!(outcome?.bytes as usize, PAGE);
        called.into_iter().for_each(|result| assert!(matches!(result, Ok(Ok(())))));

        let (first, all) = try_join(arrivals.next(), ours.write_imm(21)?).await?;
        assert_eq!((first, all.bytes), (1, 0));
        ours.peers()[0].write_imm(21)?.await?;
        let taken = futures::StreamExt::next(&mut arrivals).await.expect("the peer is alive")?;
        assert_eq!((taken, to_a.imm(21).count()), (1, 0));

        // Two barriers: the last side to arrive waits least.
        for round in 0..3 {
            let there = async { theirs.barrier(round, LIMIT)?.await };
            try_join(ours.barrier(round, LIMIT)?, there).await?;
        }
        let short = ours.barrier("nobody", Duration::from_millis(5))?.await;
        assert_eq!(short.map_err(|error| error.kind()), Err(ErrorKind::DeadlineExceeded));
        ours.peers()[1].disconnect();
        let gone = ours.barrier("nobody", LIMIT)?.await;
        assert_eq!(gone.map_err(|error| error.kind()), Err(ErrorKind::Closed));
        assert_eq!(ours.barrier(99, LIMIT).err().map(|error| error.kind()), Some(ErrorKind::Closed));
        to_b.write(&src.region, 0..PAGE, remote, 0)?.await?;
        Ok(())
    }

    async fn read_and_send(&self) -> Result<()> {
        let Self { a, b, to_b, to_a, src, remote, .. } = self;
        let copy = TestPage::new(a, Access::LOCAL, 3)?;
        to_b.read(&copy.region, 0..PAGE, remote, 0)?.await?;
        assert_eq!(differing(&copy.region, 1), 0);

        let inbox = b.alloc(64, Access::LOCAL)?;
        let receive = b.recv(&inbox, 0..64)?;
        let (received, sent) = try_join(receive, to_b.send(&src.region, 0..50)?).await?;
        assert_eq!((received.bytes, received.peer, sent.bytes), (50, Some(to_a.id()), 50));

        let pool = b.recv_pool(2, 64)?;
        for len in [1, 2, 3, 64] {
            let (message, _) = try_join(pool.next(), to_b.send(&src.region, 0..len)?).await?;
            assert_eq!((message.len(), message.peer()), (len, to_a.id()));
        }
        Ok(())
    }

    async fn stop(&self) -> Result<()> {
        let Self { to_b, src, dst, remote, .. } = self;
        let write = || to_b.write(&src.region, 0..PAGE, remote, 0);
        match write()?.cancel().await {
            Ok(outcome) => assert_eq!(outcome.bytes as usize, PAGE),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Cancelled),
        }
        drop(write()?);
        write()?.detach();
        to_b.drain()?.await?;
        dst.region.revoke()?.await?;
        let late = match write() {
            Ok(op) => op.await,
            Err(error) => Err(error),
        };
        let kind = late.expect_err("the region is revoked").kind();
        assert!([ErrorKind::Revoked, ErrorKind::RemoteAccess].contains(&kind), "{kind:?}");
        Ok(())
    }

    async fn end(self) -> Result<()> {
        let Self { a, b, to_b, to_a, listener, .. } = self;
        let pool: RecvPool = b.recv_pool(1, 64)?;
        let (expected, leaves) = (to_a.imm(99).expect(1), async { to_b.disconnect() });
        let (waits, ()) = join(join(to_a.closed(), expected), leaves).await;
        assert_eq!(waits.0.kind(), ErrorKind::Closed);
        assert_eq!(waits.1.map_err(|error| error.kind()), Err(ErrorKind::Closed));
        assert_eq!(to_b.closed().await.kind(), ErrorKind::Closed);

        let closes = async { b.close() };
        let (ends, ()) = join(join(pool.next(), listener.accept()), closes).await;
        assert_eq!(ends.0.err().map(|error| error.kind()), Some(ErrorKind::Closed));
        assert_eq!(ends.1.err().map(|error| error.kind()), Some(ErrorKind::Closed));
        listener.close().await;
        let refused = try_join(a.connect("127.0.0.1:1"), a.listen("256.0.0.1:0")).await;
        assert!(refused.is_err());
        Ok(())
    }
}
