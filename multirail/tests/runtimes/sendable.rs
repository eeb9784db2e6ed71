//! Futures that can be spawned. The compiler checks them; they never run.

use multirail::{
    Arrivals, Barrier, Cancel, Drain, Expect, Fabric, ImmCounter, Listener, Message, NextArrivals,
    NextMessage, Op, Peer, PeerClosed, PeerGroup, PeerHandle, PreparedTransfer, RebindableTransfer, RecvPool,
    Region, RemoteRegion,
};

const fn spawns<T: Send + 'static>() {}
const fn shared<T: Send + Sync + Clone + 'static>() {}

const _: () = {
    spawns::<Op>();
    spawns::<Cancel>();
    spawns::<Drain>();
    spawns::<Expect>();
    spawns::<Arrivals>();
    spawns::<NextArrivals<'static>>();
    spawns::<Barrier>();
    spawns::<PreparedTransfer>();
    spawns::<RebindableTransfer>();
    spawns::<PeerClosed>();
    spawns::<NextMessage<'static>>();
    spawns::<Message>();
    spawns::<Listener>();
    spawns::<RecvPool>();
    shared::<Fabric>();
    shared::<Peer>();
    shared::<PeerHandle>();
    shared::<ImmCounter>();
    shared::<PeerGroup>();
    shared::<Region>();
    shared::<RemoteRegion>();
};

#[expect(dead_code, reason = "compiling it is the check")]
fn futures_of_calls(fabric: &Fabric, peer: &Peer, listener: &'static Listener, other: Listener) {
    const fn spawns<T: Send + 'static>(_: &T) {}
    spawns(&fabric.listen(""));
    spawns(&fabric.connect(""));
    spawns(&peer.region(""));
    spawns(&listener.accept());
    spawns(&other.close());
}

/// Futures borrow listeners and pools. Many tasks can share these.
#[test]
fn shared_among_tasks() {
    use std::sync::Arc;
    let (a, b) = (multirail::open().unwrap(), multirail::open().unwrap());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    runtime.block_on(crate::limited(async {
        let listener = Arc::new(b.listen("127.0.0.1:0").await.unwrap());
        let accept = |listener: Arc<Listener>| tokio::spawn(async move { listener.accept().await });
        let accepting = [accept(Arc::clone(&listener)), accept(Arc::clone(&listener))];
        let connect = || tokio::spawn(a.connect(&listener.local_addr()));
        let (first, second) = (connect(), connect());
        let peers = [first.await.unwrap().unwrap(), second.await.unwrap().unwrap()];
        for accepted in accepting {
            assert!(accepted.await.unwrap().unwrap().is_alive());
        }
        let pool = Arc::new(b.recv_pool(4, 64).unwrap());
        let next = |pool: Arc<RecvPool>| {
            tokio::spawn(async move { pool.next().await.map(|message| message.to_vec()) })
        };
        let taking = [next(Arc::clone(&pool)), next(Arc::clone(&pool))];
        let src = a.alloc(2, multirail::Access::LOCAL).unwrap();
        src.copy_in(0, &[1, 2]).unwrap();
        for (at, peer) in peers.iter().enumerate() {
            tokio::spawn(peer.send(&src, at..at + 1).unwrap()).await.unwrap().unwrap();
        }
        let mut messages = Vec::new();
        for taken in taking {
            messages.push(taken.await.unwrap().unwrap());
        }
        messages.sort();
        assert_eq!(messages, [[1], [2]]);
    }));
}
