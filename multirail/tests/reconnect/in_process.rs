//! The peer's fabric is closed and opened again in this process.

use std::sync::mpsc::{RecvTimeoutError, TryRecvError, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use limit::{Limit, Woken, poll};
use multirail::{
    Access, Catalogue, Error, ErrorKind, Fabric, LocalList, PathPolicy, Paths, Peer, PeerHandle, ReadOptions,
    RebindableTransfer, ReconnectPolicy, Region, RemoteList, Token, WriteOptions, wait,
};

use crate::{LAYERS, LEN, LIMIT, PAGE, builder, connect, connected, content, gone, hooked, next, patient};

/// A fabric that accepts peers until it is closed.
struct Server {
    fabric: Fabric,
    /// The regions of its catalogue, which publishing does not keep alive.
    _layers: Vec<Region>,
    address: String,
    /// Dropped to let the thread end that accepts.
    accepts: Option<smol::channel::Sender<()>>,
    accepting: Option<JoinHandle<Vec<Peer>>>,
}

impl Server {
    /// Publishes a catalogue of `layers`, and listens.
    fn listen(fabric: Fabric, layers: Vec<Region>, address: &str) -> Self {
        Catalogue::new(layers.clone()).unwrap().publish(&fabric, LAYERS).unwrap();
        let listener = wait(fabric.listen(address), LIMIT).unwrap().unwrap();
        let address = listener.local_addr();
        let (accepts, ended) = smol::channel::bounded::<()>(1);
        let accept = move || {
            let mut peers: Vec<Peer> = Vec::new();
            let next = || {
                let end = async { ended.recv().await.ok().and(None) };
                smol::future::or(async { listener.accept().await.ok() }, end)
            };
            while let Some(peer) = pollster::block_on(next()) {
                peers.push(peer);
            }
            pollster::block_on(listener.close());
            peers
        };
        let accepting = Some(std::thread::spawn(accept));
        Self { fabric, _layers: layers, address, accepts: Some(accepts), accepting }
    }

    /// Publishes a page and a catalogue of regions of these lengths, and listens.
    fn with_layers(address: &str, layers: &[usize]) -> Self {
        let fabric = builder().open().unwrap();
        fabric.publish(PAGE, &fabric.alloc(LEN, Access::all()).unwrap()).unwrap();
        let layers: Vec<Region> =
            layers.iter().map(|len| fabric.alloc(*len, Access::all()).unwrap()).collect();
        Self::listen(fabric, layers, address)
    }

    fn new() -> Self {
        Self::with_layers(&limit::own_address(), &[LEN, LEN])
    }

    /// Closes the fabric. Returns the address that it listened at.
    fn close(mut self) -> String {
        self.end();
        std::mem::take(&mut self.address)
    }

    /// The listener ends before the peers are told. So a peer that connects again at once is refused, even if this
    /// thread is held up.
    fn end(&mut self) {
        self.accepts = None;
        let peers = self.accepting.take().map(|accepting| accepting.join().unwrap());
        self.fabric.close();
        drop(peers);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

fn kind<T>(result: Result<T, Error>) -> ErrorKind {
    result.err().expect("an error").kind()
}

#[test]
fn gives_up_at_the_limit_of_attempts() {
    let (fabric, server) = (builder().open().unwrap(), Server::new());
    let policy = ReconnectPolicy::attempts(3).first_delay(Duration::from_millis(1));
    let handle = connect(&fabric, &server.address, policy);
    let calls = hooked(&handle);
    server.close();
    let error = connected(&handle).err().expect("nobody listens");
    assert_eq!(error.kind(), ErrorKind::PeerDied);
    assert!(error.context().contains("3 attempts"), "{error}");
    let last = std::error::Error::source(&error).expect("the last attempt's error");
    let last = last.downcast_ref::<Error>().expect("an error of the library");
    assert_eq!(last.kind(), ErrorKind::Unreachable);
    // It stays so.
    assert_eq!(handle.peer().err().unwrap().to_string(), error.to_string());
    assert_eq!((handle.reconnects(), calls.try_recv().is_err()), (0, true));
}

#[test]
fn gives_up_at_the_limit_of_time() {
    let (fabric, server) = (builder().open().unwrap(), Server::new());
    // The limit passes in the middle of a delay.
    let policy = ReconnectPolicy::within(Duration::from_millis(20)).first_delay(Duration::from_secs(3600));
    let handle = connect(&fabric, &server.address, policy);
    server.close();
    let error = connected(&handle).err().expect("nobody listens");
    assert_eq!(error.kind(), ErrorKind::PeerDied);
    assert!(error.context().contains("0 attempts"), "{error}");
}

#[test]
fn the_first_connection_fails_at_once() {
    let fabric = builder().open().unwrap();
    let address = Server::new().close();
    let connecting = PeerHandle::connect(&fabric, &address, patient());
    assert_eq!(kind(wait(connecting, LIMIT).unwrap()), ErrorKind::Unreachable);
}

#[test]
fn while_it_is_away_the_error_says_so() {
    let (fabric, server) = (builder().open().unwrap(), Server::new());
    let policy = ReconnectPolicy::attempts(1).first_delay(Duration::from_secs(3600));
    let policy = policy.longest_delay(Duration::from_secs(3600));
    let handle = connect(&fabric, &server.address, policy);
    let peer = handle.peer().unwrap();
    server.close();
    gone(&peer);
    let error = handle.peer().err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Closed);
    assert!(error.context().contains("PeerHandle::connected"), "{error}");
    let woken = Arc::<Woken>::default();
    assert!(poll(&mut Box::pin(handle.connected()), &woken).is_pending());
    assert_eq!(kind(wait(handle.region(PAGE), LIMIT).unwrap()), ErrorKind::Closed);
}

#[test]
fn a_dropped_handle_ends_its_delay_at_once() {
    let (fabric, server) = (builder().open().unwrap(), Server::new());
    let policy = ReconnectPolicy::within(Duration::MAX).first_delay(Duration::from_secs(24 * 3600));
    let handle = connect(&fabric, &server.address, policy.longest_delay(Duration::from_secs(24 * 3600)));
    let calls = hooked(&handle);
    let other = handle.clone();
    let waiting = handle.connected();
    let waiter = std::thread::spawn(move || wait(waiting, LIMIT).unwrap().err().map(|error| error.kind()));
    let peer = handle.peer().unwrap();
    server.close();
    gone(&peer);
    drop(handle);
    assert_eq!(other.reconnects(), 0);
    drop(other);
    // The task holds the function, so the channel is disconnected once the task has ended.
    let ended = Limit::of(LIMIT).receive(&calls);
    assert_eq!(ended.unwrap_err(), RecvTimeoutError::Disconnected, "the task has ended");
    // Whoever waits is answered. The peer may have been connected still when the wait began.
    assert!(matches!(waiter.join().unwrap(), None | Some(ErrorKind::Closed)));
}

#[test]
fn a_waiter_is_answered_when_the_handle_is_dropped() {
    let (fabric, server) = (builder().open().unwrap(), Server::new());
    let policy = ReconnectPolicy::within(Duration::MAX).first_delay(Duration::from_secs(24 * 3600));
    let handle = connect(&fabric, &server.address, policy.longest_delay(Duration::from_secs(24 * 3600)));
    let peer = handle.peer().unwrap();
    server.close();
    gone(&peer);
    let mut waiting = Box::pin(handle.connected());
    assert!(poll(&mut waiting, &Arc::<Woken>::default()).is_pending());
    drop(handle);
    assert_eq!(kind(wait(waiting, LIMIT).unwrap()), ErrorKind::Closed);
}

#[test]
fn a_closed_fabric_ends_the_delay() {
    let (fabric, server) = (builder().open().unwrap(), Server::new());
    let policy = ReconnectPolicy::within(Duration::MAX).first_delay(Duration::from_secs(24 * 3600));
    let handle = connect(&fabric, &server.address, policy.longest_delay(Duration::from_secs(24 * 3600)));
    let peer = handle.peer().unwrap();
    server.close();
    gone(&peer);
    fabric.close();
    let error = connected(&handle).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Closed);
    assert!(error.context().contains("this fabric was closed"), "{error}");
}

#[test]
fn a_handle_keeps_no_fabric_open() {
    let (fabric, server) = (builder().open().unwrap(), Server::new());
    let handle = connect(&fabric, &server.address, patient());
    let weak = fabric.downgrade();
    drop(fabric);
    assert!(weak.upgrade().is_none());
    assert_eq!(kind(connected(&handle)), ErrorKind::Closed);
}

#[test]
fn a_disconnect_of_this_side_is_no_loss() {
    let (fabric, server) = (builder().open().unwrap(), Server::new());
    let handle = connect(&fabric, &server.address, patient());
    let calls = hooked(&handle);
    handle.peer().unwrap().disconnect();
    assert_eq!(kind(connected(&handle)), ErrorKind::Closed);
    assert_eq!(handle.reconnects(), 0);
    drop(handle);
    assert_eq!(Limit::of(LIMIT).receive(&calls).unwrap_err(), RecvTimeoutError::Disconnected);
}

/// A program that finds its peer dead may disconnect it all the same.
#[test]
fn a_disconnect_of_a_lost_peer_changes_nothing() {
    let (fabric, server) = (builder().open().unwrap(), Server::new());
    let handle = connect(&fabric, &server.address, patient());
    let peer = handle.peer().unwrap();
    let address = server.close();
    gone(&peer);
    peer.disconnect();
    let _server = Server::with_layers(&address, &[LEN]);
    assert!(connected(&handle).is_ok());
}

#[test]
fn a_refusal_that_would_come_again_ends_the_attempts() {
    let token = |byte: u8| Token::new([byte; 32]).unwrap();
    let secret = |byte| builder().token(token(byte)).open().unwrap();
    let (fabric, server) = (secret(1), Server::listen(secret(1), Vec::new(), &limit::own_address()));
    let handle = connect(&fabric, &server.address, patient());
    let address = server.close();
    let _other = Server::listen(secret(2), Vec::new(), &address);
    assert_eq!(kind(connected(&handle)), ErrorKind::Permission);
}

#[test]
fn a_panic_of_the_function_is_contained() {
    let (fabric, mut server) = (builder().open().unwrap(), Server::new());
    let handle = connect(&fabric, &server.address, patient());
    let (sender, calls) = channel();
    handle.on_reconnect(move |peer| {
        sender.send(peer.id()).unwrap();
        panic!("a panic of the test's function");
    });
    for round in 1..=2 {
        let peer = handle.peer().unwrap();
        let address = server.close();
        gone(&peer);
        server = Server::with_layers(&address, &[LEN]);
        let back = connected(&handle).unwrap();
        assert_eq!((next(&calls), handle.reconnects()), (back.id(), round));
    }
}

/// The function may use the handle, and even drop it.
#[test]
fn the_function_may_use_and_drop_the_handle() {
    let (fabric, server) = (builder().open().unwrap(), Server::new());
    let handle = connect(&fabric, &server.address, patient());
    wait(handle.region(PAGE), LIMIT).unwrap().unwrap();
    let (give, take) = channel::<PeerHandle>();
    let (sender, calls) = channel();
    let take = Mutex::new(take);
    handle.on_reconnect(move |peer| {
        let handle = take.lock().unwrap().recv().unwrap();
        let region = wait(handle.region(PAGE), LIMIT).unwrap().unwrap();
        sender.send((handle.peer().unwrap().id() == peer.id(), region.peer() == peer.id())).unwrap();
    });
    let peer = handle.peer().unwrap();
    let address = server.close();
    gone(&peer);
    give.send(handle).unwrap();
    let _server = Server::with_layers(&address, &[LEN]);
    assert_eq!(Limit::of(LIMIT).receive(&calls).unwrap(), (true, true));
    assert_eq!(Limit::of(LIMIT).receive(&calls).unwrap_err(), RecvTimeoutError::Disconnected);
}

/// What cannot be prepared for the new connection says why, and works once the reason is gone.
#[test]
fn transfers_that_cannot_be_rebound_say_why() {
    let (fabric, server) = (builder().open().unwrap(), Server::new());
    let handle = connect(&fabric, &server.address, patient());
    let peer = handle.peer().unwrap();
    let local = fabric.alloc(LEN, Access::LOCAL).unwrap();
    let options = WriteOptions::new();
    let page = wait(handle.region(PAGE), LIMIT).unwrap().unwrap();
    let layers = wait(handle.catalogue(LAYERS), LIMIT).unwrap().unwrap();
    let by_name = handle.prepare_write_pages(&local, [0], &page, [0], 4096, &options).unwrap();
    let prepare_layer = |number: usize, page: u32| {
        let layer = layers.region(number).unwrap();
        handle.prepare_read_pages(&local, [0], layer, [page], 4096, &ReadOptions::new()).unwrap()
    };
    let (first, end_of_first, second) = (prepare_layer(0, 0), prepare_layer(0, 15), prepare_layer(1, 0));
    let (mut to, mut from) = (LocalList::new(), RemoteList::new());
    to.push(&local, 0, LEN).unwrap();
    from.push_strided(layers.region(0).unwrap(), 0, 4096, 16, 4096).unwrap();
    to.push_strided(&local, 0, 4096, 16, 4096).unwrap();
    let list = handle.prepare_read_list(&to, 1..17, &from, 0..16, &ReadOptions::new()).unwrap();
    // Imported by its descriptor: the handle has no name for it.
    let unnamed = server.fabric.alloc(LEN, Access::all()).unwrap();
    let unnamed = peer.import(&unnamed.descriptor()).unwrap();
    let by_descriptor = handle.prepare_write_pages(&local, [0], &unnamed, [0], 4096, &options).unwrap();
    for transfer in [&by_name, &first, &end_of_first, &second, &list, &by_descriptor] {
        transfer.current().unwrap().post().unwrap().wait(LIMIT).unwrap();
    }

    let address = server.close();
    gone(&peer);
    // The page is not published yet, the catalogue has one region, and that is shorter.
    let restarted = builder().open().unwrap();
    let layer = restarted.alloc(LEN / 2, Access::all()).unwrap();
    layer.copy_in(0, &content(3, LEN / 2)).unwrap();
    let server = Server::listen(restarted, vec![layer], &address);
    let back = connected(&handle).unwrap();
    let why = |transfer: &RebindableTransfer| {
        let error = transfer.current().expect_err("it cannot be rebound");
        (error.kind(), error.to_string())
    };
    let (kind_of, text) = why(&by_name);
    assert!(kind_of == ErrorKind::NotFound && text.contains("region \"page\""), "{text}");
    let (kind_of, text) = why(&second);
    assert!(kind_of == ErrorKind::NotFound && text.contains("region 1 of catalogue \"layers\""), "{text}");
    assert_eq!(why(&end_of_first).0, ErrorKind::OutOfBounds);
    assert_eq!(why(&list).0, ErrorKind::OutOfBounds);
    let (kind_of, text) = why(&by_descriptor);
    assert!(kind_of == ErrorKind::Revoked && text.contains("PeerHandle::region"), "{text}");
    first.current().unwrap().post().unwrap().wait(LIMIT).unwrap();
    let mut bytes = vec![0; 4096];
    local.copy_out(0, &mut bytes).unwrap();
    assert_eq!(bytes, content(3, 4096));

    // A region of the former connection is refused when a transfer is prepared, too.
    let refused = handle.prepare_write_pages(&local, [0], &unnamed, [0], 4096, &options);
    assert_eq!(refused.err().unwrap().kind(), ErrorKind::Revoked);

    // The name is published late, and looked up again.
    assert_eq!(kind(wait(handle.region(PAGE), LIMIT).unwrap()), ErrorKind::NotFound);
    server.fabric.publish(PAGE, &server.fabric.alloc(LEN, Access::all()).unwrap()).unwrap();
    assert_eq!(wait(handle.region(PAGE), LIMIT).unwrap().unwrap().peer(), back.id());
    by_name.current().unwrap().post().unwrap().wait(LIMIT).unwrap();
}

/// A peer that comes and goes, also while it is imported again. In the end the last one is there, and each new
/// connection was told once.
#[test]
fn a_peer_that_comes_and_goes() {
    let (fabric, mut server) = (builder().open().unwrap(), Server::new());
    let handle = connect(&fabric, &server.address, patient().first_delay(Duration::from_millis(1)));
    let calls = hooked(&handle);
    wait(handle.region(PAGE), LIMIT).unwrap().unwrap();
    let layers = wait(handle.catalogue(LAYERS), LIMIT).unwrap().unwrap();
    layers.region(1).unwrap();
    for round in 0..20 {
        let address = server.close();
        server = Server::with_layers(&address, &[LEN, LEN]);
        if round % 4 == 0 {
            connected(&handle).unwrap();
        }
    }
    let last = server.fabric.incarnation();
    let is_there = || {
        // A peer whose end is not known here yet may still be given out.
        let peer = connected(&handle).unwrap();
        let page = wait(handle.region(PAGE), LIMIT).unwrap().ok()?;
        (peer.incarnation() == last && page.peer() == peer.id()).then_some(peer)
    };
    let peer = Limit::of(LIMIT).ask(is_there).expect("the last one");
    let layers = wait(handle.catalogue(LAYERS), LIMIT).unwrap().unwrap();
    assert_eq!((layers.peer().id(), layers.len()), (peer.id(), 2));
    let reconnects = handle.reconnects();
    drop(handle);
    // A call that is under way when the handle is dropped goes on.
    let mut called = Vec::new();
    while let Ok(peer) = Limit::of(LIMIT).receive(&calls) {
        called.push(peer);
    }
    assert_eq!(calls.try_recv(), Err(TryRecvError::Disconnected));
    assert_eq!(called.len() as u64, reconnects);
    assert!(called.is_sorted_by(|one, next| one < next), "{called:?}");
    assert_eq!(called.last(), Some(&peer.id()));
}

/// What the program has refused stays refused.
#[test]
fn the_path_policy_stays() {
    let (fabric, server) = (builder().open().unwrap(), Server::new());
    let handle = connect(&fabric, &server.address, patient());
    let peer = handle.peer().unwrap();
    let policy = PathPolicy::without(Paths::STAGED);
    peer.set_path_policy(policy);
    let address = server.close();
    gone(&peer);
    let _server = Server::with_layers(&address, &[LEN]);
    assert_eq!(connected(&handle).unwrap().path_policy(), policy);
}

/// A caller-driven fabric connects again while its caller waits: the catalogue is read by the caller's steps.
#[test]
fn a_caller_driven_fabric_connects_again() {
    let (fabric, server) = (builder().caller_driven().open().unwrap(), Server::new());
    let handle = connect(&fabric, &server.address, patient());
    let layers = wait(handle.catalogue(LAYERS), LIMIT).unwrap().unwrap();
    let local = fabric.alloc(LEN, Access::LOCAL).unwrap();
    let layer = layers.region(1).unwrap();
    let write = handle.prepare_write_pages(&local, [0], layer, [3], 4096, &WriteOptions::new()).unwrap();
    let peer = handle.peer().unwrap();
    let address = server.close();
    gone(&peer);
    let _server = Server::with_layers(&address, &[LEN, LEN]);
    connected(&handle).unwrap();
    write.current().unwrap().post().unwrap().wait(LIMIT).unwrap();
    assert_eq!(handle.reconnects(), 1);
}

/// On a runtime of one thread with a caller-driven fabric, also the user's function runs on that thread.
#[test]
fn a_fabric_without_threads_connects_again() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let server = Server::new();
    let fabric = builder().caller_driven().control_on(runtime.handle().clone()).open().unwrap();
    runtime.block_on(async {
        let handle = PeerHandle::connect(&fabric, &server.address, patient()).await.unwrap();
        let (sender, calls) = channel();
        handle.on_reconnect(move |_| sender.send(std::thread::current().id()).unwrap());
        let drive = async {
            loop {
                fabric.step();
                tokio::task::yield_now().await;
            }
        };
        let work = async {
            handle.catalogue(LAYERS).await.unwrap();
            let peer = handle.peer().unwrap();
            let address = tokio::task::spawn_blocking(move || server.close()).await.unwrap();
            peer.closed().await;
            let server = Server::with_layers(&address, &[LEN]);
            let back = handle.connected().await.unwrap();
            assert_eq!(calls.try_recv(), Ok(std::thread::current().id()));
            let layers = handle.catalogue(LAYERS).await.unwrap();
            assert_eq!((layers.peer().id(), layers.len()), (back.id(), 1));
            drop(handle);
            server
        };
        let server =
            tokio::select! { server = work => server, () = drive => unreachable!("it drives for ever") };
        fabric.close_and_wait().await;
        tokio::task::spawn_blocking(move || drop(server)).await.unwrap();
    });
}
