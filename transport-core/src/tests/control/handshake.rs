//! A peer that breaks the handshake gets a typed error, and no other peer is affected.

use std::io::Write;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::raw::{Raw, offers};
use super::{MS, builder, fabric, listening, pair, served, wait};
use crate::control::frame::{Cause, Frame, LinkReport};
use crate::control::{Acceptor, Bootstrap, Channel};
use crate::{Error, ErrorKind, Result};

/// Checks that two fabrics are connected to each other, and that the connection works.
fn good_client_gets_through(listener: &crate::Listener) {
    let client = fabric();
    let peer = wait(client.connect(&listener.local_addr())).unwrap();
    let here = wait(listener.accept()).unwrap();
    assert_eq!(here.incarnation(), client.incarnation());
    assert!(peer.is_alive() && here.is_alive());
}

#[test]
fn garbage_at_each_step_stops_no_good_client() {
    let (_server, listener, address) = listening();
    let hello = |raw: &mut Raw| assert!(!raw.hello().token);
    let offered = move |raw: &mut Raw| {
        hello(raw);
        raw.offers();
    };
    let report = move |raw: &mut Raw| {
        offered(raw);
        raw.report();
        assert_eq!(raw.recv(), Some(Frame::Ready));
    };
    let nothing = |_: &mut Raw| ();
    let steps: [&dyn Fn(&mut Raw); 4] = [&nothing, &hello, &offered, &report];
    let mut heartbeat = Frame::Heartbeat { seq: 1 }.encode().unwrap();
    let early = heartbeat.clone();
    heartbeat.push(0);
    for (step, prologue) in steps.iter().enumerate() {
        for garbage in [&b""[..], b"\xff\xff\xff", b"mrailctl\x01\0\x01\0\xff\xff", &early, &heartbeat] {
            let mut raw = Raw::connect(&address);
            prologue(&mut raw);
            raw.send_bytes(garbage);
            if step == 0 {
                assert!(raw.recv_bytes().unwrap().starts_with(b"mrailctl"));
            }
            match raw.recv() {
                Some(Frame::Refuse { cause: Cause::Protocol, reason }) => assert!(!reason.is_empty()),
                other => panic!("{other:?} after {garbage:?} at step {step}"),
            }
            assert_eq!(raw.recv_bytes(), None);
        }
        // Bytes that are no frames, from clients that leave at once.
        let mut http = Raw::connect(&address);
        prologue(&mut http);
        http.0.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        while http.recv_bytes().is_some() {}
        prologue(&mut Raw::connect(&address));
    }
    good_client_gets_through(&listener);
}

/// The error of `connect` to a socket that `server` serves.
fn connect_to(server: impl FnOnce(Raw) + Send + 'static) -> Error {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let server = std::thread::spawn(move || server(Raw::accept(&listener)));
    let error = wait(fabric().connect(&address)).err().unwrap();
    server.join().unwrap();
    error
}

#[test]
fn connecting_to_strangers_ends_typed() {
    let error = connect_to(drop);
    assert_eq!(error.kind(), ErrorKind::PeerDied, "{error}");

    let error = connect_to(|mut raw| raw.0.write_all(b"220 mail.example.org ESMTP\r\n").unwrap());
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    assert!(error.context().contains("check that the other side is a multirail fabric"), "{error}");

    let error = connect_to(|mut raw| {
        raw.send_bytes(b"mrailctl\x03\0\x04\0and things we cannot know");
        raw.recv_bytes();
        raw.recv_bytes();
    });
    assert_eq!(error.kind(), ErrorKind::Version, "{error}");
    assert!(error.context().contains("peer speaks 3..=4, we speak 1..=1"), "{error}");

    let error = connect_to(|mut raw| {
        raw.hello();
        raw.send(&Frame::Refuse { cause: Cause::Failed, reason: "no room".into() });
        raw.recv();
    });
    assert_eq!(error.kind(), ErrorKind::PeerDied, "{error}");
    assert!(error.context().contains("no room"), "{error}");
}

/// A peer with more rails on either side has more time, by the fabric's setting.
#[test]
fn more_rails_have_more_time() {
    // Long enough to send offers on a busy machine.
    let limit = limit::stretched(1000 * MS);
    let limits = builder("null").handshake_limit(limit).handshake_limit_per_rail(limit::HANG);
    let (_server, _listener, address) = served(limits);
    let with_rails = |rails: usize| {
        let mut raw = Raw::connect(&address);
        raw.hello();
        let Frame::Offers { identity, peer_timeout_ms, mut transports } = offers(raw.1, b"raw rail") else {
            panic!("no offers")
        };
        transports[0].rates = vec![0; rails];
        transports[0].rails = vec![b"raw rail".to_vec(); rails];
        raw.send(&Frame::Offers { identity, peer_timeout_ms, transports });
        assert!(matches!(raw.recv(), Some(Frame::Offers { .. })));
        raw
    };
    let (mut two, mut one) = (with_rails(2), with_rails(1));
    // The later peer, which has one rail, is dropped.
    match one.recv() {
        Some(Frame::Refuse { cause: Cause::Failed, reason }) => {
            let expected = format!("report on its links within {:.1} s", limit.as_secs_f64());
            assert!(reason.contains(&expected), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    two.report();
    two.send(&Frame::Ready);
    assert_eq!(two.recv(), Some(Frame::Ready));
}

/// Limits that no clock reaches mean no limit.
#[test]
fn endless_limits_are_none() {
    let endless = || {
        let builder = builder("null").handshake_limit(Duration::MAX).handshake_limit_per_rail(Duration::MAX);
        builder.peer_timeout(Duration::MAX).deadline(Duration::MAX).stall_after(Duration::MAX)
    };
    let (server, listener, address) = served(endless());
    let client = endless().open().unwrap();
    let there = wait(client.connect(&address)).unwrap();
    let here = wait(listener.accept()).unwrap();
    let missing = wait(there.region("nothing")).err().unwrap();
    assert_eq!(missing.kind(), ErrorKind::NotFound, "{missing}");
    drop((here, server));
    assert_eq!(wait(there.closed()).kind(), ErrorKind::Closed);
}

#[test]
fn nobody_listens_there() {
    // No program that runs beside this one is given this port.
    let error = wait(fabric().connect("127.0.0.1:1")).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    assert!(error.context().contains("is the other side listening?"), "{error}");
}

#[test]
fn without_a_common_transport_both_sides_say_so() {
    let (_server, listener, address) = listening();
    let other = builder("other").open().unwrap();
    let error = wait(other.connect(&address)).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    assert!(error.context().contains("other"), "{error}");
    // A peer that this side refuses, a peer that refuses this side, and a peer whose backend fails.
    let mut raw = Raw::connect(&address);
    raw.hello();
    raw.offers();
    raw.send(&Frame::report(&[LinkReport {
        label: "null".into(),
        refused: Some("no cable".into()),
        more: Vec::new(),
    }]));
    assert!(matches!(raw.recv(), Some(Frame::Report { .. })));
    match raw.recv() {
        Some(Frame::Refuse { cause: Cause::Unreachable, reason }) => {
            assert!(reason.contains("no cable"), "{reason}")
        }
        other => panic!("{other:?}"),
    }
    let mut raw = Raw::connect(&address);
    raw.hello();
    raw.send(&offers(Duration::from_secs(60), b"panic"));
    assert!(matches!(raw.recv(), Some(Frame::Offers { .. })));
    assert!(matches!(raw.recv(), Some(Frame::Goodbye | Frame::Refuse { .. })));
    good_client_gets_through(&listener);
}

#[test]
fn a_silent_client_blocks_nobody_and_is_dropped() {
    // Longer than any wait here, so that all silent clients are still connected when the honest one arrives.
    let (_server, listener, address) = served(builder("null").handshake_limit(10 * limit::HANG));
    let mut silent: Vec<_> = (0..10).map(|_| Raw::connect(&address)).collect();
    silent[0].send_bytes(b"");
    good_client_gets_through(&listener);

    let (_server, _listener, address) = served(builder("null").handshake_limit(Duration::from_millis(300)));
    let mut silent = Raw::connect(&address);
    while silent.recv_bytes().is_some() {}
    assert!(silent.is_at_its_end());
}

#[test]
fn peers_nobody_claims_are_disconnected() {
    let client = fabric();
    let is_freed = || {
        let (_server, listener, address) = listening();
        let peer = wait(client.connect(&address)).unwrap();
        wait(listener.close());
        assert_eq!(wait(peer.closed()).kind(), ErrorKind::Closed);
        TcpListener::bind(&address).is_ok()
    };
    // Another program may get the port between the close and the test.
    assert!((0..5).any(|_| is_freed()), "closing frees the address");

    let (_server, listener, address) = listening();
    let mut connecting = Box::pin(client.connect(&address));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    // Held up for long enough, this thread finds a peer at once.
    if let std::task::Poll::Ready(connected) = connecting.as_mut().poll(&mut context) {
        connected.unwrap().disconnect();
    }
    drop(connecting);
    // The server may have seen a client, which has gone by itself.
    good_client_gets_through_after_ghosts(&listener);
}

fn good_client_gets_through_after_ghosts(listener: &crate::Listener) {
    let client = fabric();
    let peer = wait(client.connect(&listener.local_addr())).unwrap();
    loop {
        let here = wait(listener.accept()).unwrap();
        if here.incarnation() == client.incarnation() {
            break assert!(here.is_alive() && peer.is_alive());
        }
        wait(here.closed());
    }
}

#[test]
fn closed_fabrics_neither_listen_nor_connect() {
    let ((client, _), (server, _)) = pair();
    let listener = wait(server.listen("0")).unwrap();
    let address = listener.local_addr();
    server.close();
    assert_eq!(wait(listener.accept()).err().unwrap().kind(), ErrorKind::Closed);
    assert_eq!(wait(server.listen("0")).err().unwrap().kind(), ErrorKind::Closed);
    assert_eq!(wait(client.connect(&address)).err().unwrap().kind(), ErrorKind::Unreachable);
}

/// A bootstrap that never finds a peer.
struct Lost;

#[async_trait]
impl Bootstrap for Lost {
    async fn listen(&self, _: &str) -> Result<Box<dyn Acceptor>> {
        Err(Error::new(ErrorKind::Unsupported, "listen", "this bootstrap only connects"))
    }

    async fn connect(&self, _: &str) -> Result<Channel> {
        std::future::pending().await
    }
}

#[test]
fn a_bootstrap_of_ones_own_is_asked_and_bounded_by_close() {
    let fabric = builder("null").bootstrap(Arc::new(Lost)).open().unwrap();
    assert_eq!(wait(fabric.listen("anywhere")).err().unwrap().kind(), ErrorKind::Unsupported);
    let connecting = fabric.connect("anywhere");
    let waiting = std::thread::spawn(move || wait(connecting).err().unwrap());
    std::thread::sleep(Duration::from_millis(50));
    fabric.close();
    assert_eq!(waiting.join().unwrap().kind(), ErrorKind::Closed);
}
