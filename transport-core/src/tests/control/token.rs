//! Tokens: a peer with the same token is admitted; any other peer learns nothing.

use std::io::Write;
use std::net::TcpListener;

use super::raw::{Raw, framed, offers};
use super::{builder, fabric, gets_through, listening, served, token, wait};
use crate::control::frame::{Cause, Frame};
use crate::control::handshake::hello::Hello;
use crate::control::handshake::proof::{Role, Transcript};
use crate::{Access, Error, ErrorKind, Fabric, Listener};

fn guarded() -> (Fabric, Listener, String) {
    served(builder("null").token(token("all")))
}

/// Checks that the only remaining frame is a refusal for lack of a token.
fn assert_denied(raw: &mut Raw) {
    match raw.recv() {
        Some(Frame::Refuse { cause: Cause::Permission, reason }) => {
            assert!(reason.contains("token"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(raw.rest(), b"");
}

#[test]
fn the_same_token_on_both_sides_connects() {
    let (server, listener, _) = guarded();
    let client = builder("null").token(token("all")).open().unwrap();
    let (there, here) = gets_through(&client, &listener);
    assert_eq!(there.incarnation(), server.incarnation());
    assert_eq!((here.tenant(), there.tenant()), ("", ""));
}

#[test]
fn wrong_and_missing_tokens_end_typed_and_say_what_to_do() {
    let (_server, listener, address) = guarded();
    let (_open, _listener, open_address) = listening();
    let with = |name: &str| builder("null").token(token(name)).open().unwrap();
    let refused = |client: &Fabric, address: &str| -> Error {
        let error = wait(client.connect(address)).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Permission, "{error}");
        assert!(error.context().contains("FabricBuilder::token, or --token-file"), "{error}");
        error
    };
    let wrong = refused(&with("others"), &address);
    assert!(wrong.context().contains("another one: give both sides the same"), "{wrong}");
    let missing = refused(&fabric(), &address);
    assert!(missing.context().contains("the peer asks for a token"), "{missing}");
    let alone = refused(&with("all"), &open_address);
    assert!(alone.context().contains("this side has a token and the peer has none"), "{alone}");
    gets_through(&with("all"), &listener);
}

#[test]
fn strangers_see_a_hello_and_a_refusal_and_nothing_else() {
    let (server, _listener, address) = guarded();
    let region = server.alloc(4096, Access::REMOTE_WRITE).unwrap();
    server.publish("a name nobody may know", &region).unwrap();
    let good = Hello::new(true).unwrap().encode().unwrap();
    let other = Hello::new(false).unwrap().encode().unwrap();
    let proof = Frame::Proof { mac: [7; 32] }.encode().unwrap();
    let offers = offers(std::time::Duration::from_secs(1), b"raw rail").encode().unwrap();
    let lookup = Frame::Lookup { id: 1, name: "a name nobody may know".into() }.encode().unwrap();
    let talks: [&[&[u8]]; 8] = [
        &[&good, &proof],
        &[&good, &offers],
        &[&good, &lookup],
        &[&good, &good],
        &[&other],
        &[&other, &offers, &lookup],
        &[&proof],
        &[b"mrailctl\x09\0\x09\0"],
    ];
    for (at, talk) in talks.iter().enumerate() {
        let mut raw = Raw::connect(&address);
        // In one piece: the server may refuse the first frame, and close the connection, before the others are sent.
        let all: Vec<u8> = talk.iter().flat_map(|bytes| framed(bytes)).collect();
        raw.0.write_all(&all).unwrap();
        let hello = raw.recv_bytes().unwrap();
        assert_eq!((hello.len(), Hello::decode(&hello).unwrap().token), (12 + 32 + 1, true));
        let refusal = raw.recv_bytes().unwrap_or_else(|| panic!("no refusal after talk {at}"));
        assert!(matches!(Frame::decode(&refusal), Ok(Frame::Refuse { .. })), "{refusal:?}");
        let text = String::from_utf8_lossy(&refusal).into_owned();
        for secret in [rustix::system::uname().nodename().to_str().unwrap(), "null", "nobody may know"] {
            assert!(!text.contains(secret), "{text}");
        }
        assert_eq!(raw.rest(), b"", "after talk {at}");
    }
}

#[test]
fn proofs_are_good_once_and_for_one_side() {
    let (_server, listener, address) = guarded();
    // With the right token the handshake continues, up to the offers.
    let mut raw = Raw::connect(&address);
    let transcript = raw.prove(&token("all"));
    match raw.recv() {
        Some(Frame::Proof { mac }) => assert!(transcript.verify(&token("all"), Role::Accepting, &mac)),
        other => panic!("{other:?}"),
    }
    raw.offers();
    // The same proof again, after the hello that was recorded with it.
    let mut replay = Raw::connect(&address);
    replay.send_bytes(&transcript.connecting);
    replay.recv_bytes().unwrap();
    replay.send(&Frame::Proof { mac: transcript.prove(&token("all"), Role::Connecting) });
    assert_denied(&mut replay);
    // A proof of another hello, of the other role, with a flipped bit, and of another channel.
    let bad: [fn(Transcript) -> [u8; 32]; 4] = [
        |mut good| {
            good.connecting = Hello::new(true).unwrap().encode().unwrap();
            good.prove(&token("all"), Role::Connecting)
        },
        |good| good.prove(&token("all"), Role::Accepting),
        |good| {
            let mut mac = good.prove(&token("all"), Role::Connecting);
            mac[0] ^= 1;
            mac
        },
        |mut good| {
            good.binding = b"another channel".to_vec();
            good.prove(&token("all"), Role::Connecting)
        },
    ];
    for bad in bad {
        let mut raw = Raw::connect(&address);
        let (_, [connecting, accepting]) = raw.greet(true);
        raw.send(&Frame::Proof { mac: bad(Transcript { connecting, accepting, binding: Vec::new() }) });
        assert_denied(&mut raw);
    }
    // A proof before the hello is no hello.
    let mut early = Raw::connect(&address);
    early.send(&Frame::Proof { mac: [0; 32] });
    early.recv_bytes().unwrap();
    assert!(matches!(early.recv(), Some(Frame::Refuse { cause: Cause::Protocol, .. })));
    gets_through(&builder("null").token(token("all")).open().unwrap(), &listener);
}

/// A foreign server that does not have the token.
fn impostor(server: impl FnOnce(&mut Raw) + Send + 'static) -> Error {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let server = std::thread::spawn(move || {
        let mut raw = Raw::accept(&listener);
        server(&mut raw);
        raw.rest()
    });
    let client = builder("null").token(token("all")).open().unwrap();
    let error = wait(client.connect(&address)).err().unwrap();
    let seen = server.join().unwrap();
    // The client offered nothing to the impostor.
    let text = String::from_utf8_lossy(&seen).into_owned();
    assert!(!text.contains("null"), "{text}");
    error
}

#[test]
fn impostors_are_offered_nothing() {
    let echo = |raw: &mut Raw| {
        for _ in 0..2 {
            let frame = raw.recv_bytes().unwrap();
            raw.send_bytes(&frame);
        }
    };
    let reflected = |raw: &mut Raw| {
        raw.greet(true);
        let proof = raw.recv_bytes().unwrap();
        raw.send_bytes(&proof);
    };
    let guessed = |raw: &mut Raw| {
        raw.greet(true);
        raw.send(&Frame::Proof { mac: [3; 32] });
    };
    let none = |raw: &mut Raw| drop(raw.greet(false));
    for error in [impostor(echo), impostor(reflected), impostor(guessed), impostor(none)] {
        assert_eq!(error.kind(), ErrorKind::Permission, "{error}");
        assert!(error.context().contains("token"), "{error}");
    }
    let error = impostor(|raw| {
        raw.greet(true);
        raw.send(&offers(std::time::Duration::from_secs(1), b"raw rail"));
    });
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
}
