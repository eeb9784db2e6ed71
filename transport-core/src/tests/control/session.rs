//! What a session does for its peer, and every way in which it ends.

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;

use super::raw::Raw;
use super::{MS, builder, listening, pair, peer_timeout, served, wait};
use crate::control::frame::{Cause, Frame, MAX_NAME};
use crate::control::{Acceptor, Bootstrap, Channel, TcpBootstrap};
use crate::{Access, Error, ErrorKind, Fabric, Listener, Peer, Result};

/// A fabric and a raw peer that have completed the handshake.
pub(super) fn with_raw() -> ((Fabric, Listener), Peer, Raw) {
    let (fabric, listener, address) = listening();
    let mut raw = Raw::connect(&address);
    raw.shake_hands();
    let peer = wait(listener.accept()).unwrap();
    ((fabric, listener), peer, raw)
}

#[test]
fn names_are_looked_up() {
    let ((_client, there), (server, _)) = pair();
    let region = server.alloc(4096, Access::REMOTE_WRITE).unwrap();
    server.publish("kv", &region).unwrap();
    let lookup = |name: &str| wait(there.0.context.session.lookup(name));
    assert_eq!(lookup("kv").unwrap(), region.descriptor().to_bytes());
    let error = lookup("no\nsuch").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.context().contains("no such"), "{error}");
    assert_eq!(lookup(&"x".repeat(MAX_NAME + 1)).unwrap_err().kind(), ErrorKind::InvalidRequest);
    // More lookups at once than may be outstanding.
    let many: Vec<_> = (0..300).map(|_| there.0.context.session.lookup("kv")).collect();
    assert!(many.into_iter().all(|lookup| wait(lookup).is_ok()));
    server.unpublish("kv");
    assert_eq!(lookup("kv").unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn quiet_connections_live() {
    let ((_client, there), (_server, here)) = pair();
    std::thread::sleep(3 * peer_timeout());
    assert!(there.is_alive() && here.is_alive());
}

#[test]
fn closing_and_disconnecting_are_seen_as_closed() {
    let ends: [fn(&Fabric, Peer); 2] = [|fabric, _| fabric.close(), |_, peer| peer.disconnect()];
    for end in ends {
        let ((client, there), (_server, here)) = pair();
        let lookup = there.0.context.session.lookup("x");
        end(&client, there);
        // The goodbye ends it with `Closed`; silence would end it with `PeerDied`.
        let error = wait(here.closed());
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
        // The operation has ended, with any result.
        let _ = wait(lookup);
    }
}

#[test]
fn a_peer_handle_keeps_no_fabric_open() {
    let ((client, there), (_server, here)) = pair();
    drop(client);
    assert_eq!(wait(here.closed()).kind(), ErrorKind::Closed);
    assert_eq!(wait(there.closed()).kind(), ErrorKind::Closed);
    assert_eq!(wait(there.0.context.session.lookup("x")).unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn a_lost_connection_is_a_dead_peer() {
    let (_fabric, peer, raw) = with_raw();
    let lookup = peer.0.context.session.lookup("never answered");
    drop(raw);
    let error = wait(peer.closed());
    assert_eq!(error.kind(), ErrorKind::PeerDied);
    assert!(error.context().contains("control connection lost"), "{error}");
    assert_eq!(wait(lookup).unwrap_err().kind(), ErrorKind::PeerDied);
}

#[test]
fn silence_is_death_and_the_silent_one_is_told() {
    let (_fabric, listener, address) = served(builder("null").peer_timeout(400 * MS));
    let mut raw = Raw::connect(&address);
    raw.shake_hands();
    let peer = wait(listener.accept()).unwrap();
    let error = wait(peer.closed());
    assert_eq!(error.kind(), ErrorKind::PeerDied);
    assert!(error.context().contains("no heartbeat for 0.4 s"), "{error}");
    match raw.recv() {
        Some(Frame::Refuse { cause: Cause::Failed, reason }) => {
            assert!(reason.contains("no heartbeat"), "{reason}")
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn anything_received_is_life() {
    let (_fabric, peer, mut raw) = with_raw();
    for _ in 0..10 {
        std::thread::sleep(peer_timeout() / 4);
        raw.send(&Frame::Revoked { incarnation: 77, region: 1 });
    }
    assert!(peer.is_alive());
    raw.send(&Frame::Goodbye);
    let error = wait(peer.closed());
    assert_eq!((error.kind(), error.context()), (ErrorKind::Closed, "peer closed the connection"));
}

#[test]
fn breaking_the_protocol_ends_the_session_with_a_reason() {
    let report = Frame::report(&[]).encode().unwrap();
    let unasked = Frame::Found { id: 9, descriptor: None }.encode().unwrap();
    let mut trailing = Frame::Heartbeat { seq: 0 }.encode().unwrap();
    trailing.push(7);
    for garbage in [&b""[..], b"\x2a", b"mrailctl\x01\0\x01\0", &report, &unasked, &trailing] {
        let (_fabric, peer, mut raw) = with_raw();
        raw.send_bytes(garbage);
        let error = wait(peer.closed());
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        assert!(matches!(raw.recv(), Some(Frame::Refuse { cause: Cause::Protocol, .. })));
        assert_eq!(raw.recv_bytes(), None);
    }
}

#[test]
fn a_peer_that_asks_and_never_reads_is_dropped() {
    let ((fabric, _listener), peer, mut raw) = with_raw();
    let region = fabric.alloc(4096, Access::REMOTE_WRITE).unwrap();
    fabric.publish("kv", &region).unwrap();
    let question = Frame::Lookup { id: 1, name: "kv".into() }.encode().unwrap();
    let framed = [&(question.len() as u32).to_le_bytes()[..], &question].concat();
    let burst = framed.repeat(10_000);
    // The peer sends lookups, so it counts as alive, but reads no answer. It ends with the connection.
    while raw.0.write_all(&burst).is_ok() {}
    let error = wait(peer.closed());
    assert!(matches!(error.kind(), ErrorKind::PeerDied | ErrorKind::Protocol), "{error}");
    assert!(error.context().contains("read"), "{error}");
}

#[test]
fn an_impatient_peer_hears_more_heartbeats() {
    // Patient with this side, which sends no heartbeats.
    let (_fabric, listener, address) = served(builder("null").peer_timeout(limit::HANG));
    let mut raw = Raw::connect(&address);
    raw.1 = 60 * MS;
    raw.hello();
    raw.offers();
    raw.report();
    raw.send(&Frame::Ready);
    assert_eq!(raw.recv(), Some(Frame::Ready));
    let _peer = wait(listener.accept()).unwrap();
    let mut five = || {
        let started = Instant::now();
        for _ in 0..5 {
            let frame = Frame::decode(&raw.recv_bytes().unwrap()).unwrap();
            assert!(matches!(frame, Frame::Heartbeat { .. }));
        }
        started.elapsed()
    };
    // Every 20 ms, not every 50 ms: a busy machine delays some heartbeats, but not all.
    assert!((0..50).any(|_| five() < 200 * MS));
}

#[test]
fn revocations_reach_the_peer() {
    let ((fabric, _listener), _peer, mut raw) = with_raw();
    let region = fabric.alloc(4096, Access::REMOTE_WRITE).unwrap();
    let _op = region.revoke().unwrap();
    assert!(
        matches!(raw.recv(), Some(Frame::Revoked { incarnation, .. }) if incarnation == fabric.incarnation())
    );
}

#[test]
fn failing_a_peer_elsewhere_ends_its_session() {
    let (_fabric, peer, mut raw) = with_raw();
    peer.fail(Error::new(ErrorKind::DeviceLost, "post", "the card fell out"));
    match raw.recv() {
        Some(Frame::Refuse { cause: Cause::Failed, reason }) => assert_eq!(reason, "the card fell out"),
        other => panic!("{other:?}"),
    }
}

/// TCP, with a way to block the control thread.
struct Blocking(TcpBootstrap);

#[async_trait]
impl Bootstrap for Blocking {
    async fn listen(&self, address: &str) -> Result<Box<dyn Acceptor>> {
        self.0.listen(address).await
    }

    async fn connect(&self, address: &str) -> Result<Channel> {
        if address == "block" {
            std::thread::sleep(3 * peer_timeout());
        }
        self.0.connect(address).await
    }
}

#[test]
fn a_starved_control_thread_does_not_take_its_peer_for_dead() {
    let starved = builder("null").bootstrap(Arc::new(Blocking(TcpBootstrap::default()))).open().unwrap();
    let patient = builder("null").peer_timeout(100 * peer_timeout()).open().unwrap();
    let listener = wait(patient.listen("0")).unwrap();
    let peer = wait(starved.connect(&listener.local_addr())).unwrap();
    let here = wait(listener.accept()).unwrap();
    for _ in 0..3 {
        assert_eq!(wait(starved.connect("block")).err().unwrap().kind(), ErrorKind::InvalidRequest);
    }
    std::thread::sleep(peer_timeout() / 2);
    assert!(peer.is_alive() && here.is_alive());
}
