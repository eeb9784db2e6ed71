//! Connections that a runtime of the caller serves.

use tokio::runtime::{Builder, Runtime};
use tokio::time::{sleep, timeout};

use super::*;

/// A runtime of one thread, which runs inside `block_on`.
fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// A fabric whose connections the runtime serves.
fn on(runtime: &Runtime) -> Fabric {
    builder("null").control_on(runtime.handle().clone()).open().unwrap()
}

/// Two such fabrics, connected: the listener, the connecting side's handle of the other side, and the other side's.
async fn connected(client: &Fabric, server: &Fabric) -> (Listener, Peer, Peer) {
    let listener = server.listen("0").await.unwrap();
    let address = listener.local_addr();
    let (there, here) = tokio::join!(client.connect(&address), listener.accept());
    (listener, there.unwrap(), here.unwrap())
}

#[test]
fn goodbye_is_said_from_inside_as_well() {
    let runtime = runtime();
    let on = || hasty("null").control_on(runtime.handle().clone()).open().unwrap();
    let (client, server) = (on(), on());
    runtime.block_on(async {
        let (_listener, there, here) = connected(&client, &server).await;
        // Both peers stay connected, and neither counts as dead.
        sleep(2 * peer_timeout()).await;
        assert!(there.is_alive() && here.is_alive());
        client.close_and_wait().await;
        assert_eq!(timeout(limit::HANG, here.closed()).await.unwrap().kind(), ErrorKind::Closed);
        assert_eq!(there.closed().await.kind(), ErrorKind::Closed);
        let late = client.connect("127.0.0.1:1").await.err().unwrap();
        assert_eq!(late.kind(), ErrorKind::Closed);
    });
    runtime.block_on(server.close_and_wait());
    assert_eq!(runtime.metrics().num_alive_tasks(), 0);
}

#[test]
fn from_outside_it_is_bounded_and_said_later() {
    let runtime = runtime();
    // The other side's peer timeout is longer than `close` waits.
    let (client, server) = (on(&runtime), fabric());
    let (_listener, there, here) = runtime.block_on(connected(&client, &server));
    client.close();
    assert_eq!(wait(there.closed()).kind(), ErrorKind::Closed);
    runtime.block_on(client.close_and_wait());
    assert_eq!(wait(here.closed()).kind(), ErrorKind::Closed);
}

#[test]
fn close_waits_for_a_runtime_with_threads_of_its_own() {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (client, server) = (on(&runtime), on(&runtime));
    let (_listener, _there, here) = wait(connected(&client, &server));
    client.close();
    let end = wait(here.closed());
    assert!(end.kind() == ErrorKind::Closed && end.to_string().contains("peer closed"), "{end}");
}

#[test]
fn a_tenants_end_is_awaited_as_well() {
    let runtime = runtime();
    let parent = builder("null").token(token("all")).control_on(runtime.handle().clone()).open().unwrap();
    let tenant = parent.tenant("one", token("one")).unwrap();
    let client = builder("null").token(token("one")).open().unwrap();
    runtime.block_on(async {
        let listener = parent.listen("0").await.unwrap();
        let address = listener.local_addr();
        let (there, here) = tokio::join!(client.connect(&address), listener.accept());
        let (there, here) = (there.unwrap(), here.unwrap());
        assert_eq!(here.tenant(), "one");
        tenant.close_and_wait().await;
        assert_eq!(timeout(limit::HANG, there.closed()).await.unwrap().kind(), ErrorKind::Closed);
        parent.close_and_wait().await;
    });
}

#[test]
fn a_runtime_that_is_shut_down_ends_all_and_says_so() {
    let (runtime, other) = (runtime(), fabric());
    let fabric = on(&runtime);
    let (listener, peer, _here) = runtime.block_on(connected(&fabric, &other));
    let own = runtime.block_on(fabric.listen("0")).unwrap();
    let waits = std::thread::spawn(move || wait(own.accept()).err().unwrap());
    let asks = peer.region("nothing");
    drop(runtime);
    let gone = wait(peer.closed());
    assert_eq!(gone.kind(), ErrorKind::Closed);
    assert!(gone.to_string().contains("shut down"), "{gone}");
    assert_eq!(waits.join().unwrap().kind(), ErrorKind::Closed);
    assert_eq!(wait(asks).err().unwrap().kind(), ErrorKind::Closed);
    let late = wait(fabric.connect(&listener.local_addr())).err().unwrap();
    assert!(late.kind() == ErrorKind::Closed && late.to_string().contains("shut down"), "{late}");
    // There is nothing to wait for.
    fabric.close();
}

#[test]
fn a_runtime_without_sockets_is_refused_in_words() {
    let runtime = Builder::new_current_thread().build().unwrap();
    let fabric = on(&runtime);
    let refused = runtime.block_on(fabric.listen("0")).err().unwrap();
    assert!(refused.to_string().contains("enable_all"), "{refused}");
}
