//! Version 1 stays as it was recorded, and the errors for other versions name the versions.

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::path::PathBuf;

use super::raw::Raw;
use super::{fabric, gets_through, listening, wait};
use crate::ErrorKind;
use crate::control::frame::{Cause, Frame, Identity, LinkReport, TransportOffer};
use crate::control::handshake::hello::Hello;
use crate::spi::{FenceKind, FenceReport, WireGrant};

/// One frame of every kind, as recorded.
pub(super) fn recorded() -> Vec<(&'static str, Frame)> {
    let mac = std::array::from_fn(|at| at as u8);
    let identity = Identity { incarnation: 0x0123_4567_89ab_cdef, host: "node-7.example".into() };
    let offer = |label: &str, rails: &[&[u8]]| TransportOffer {
        label: label.into(),
        backend: "efa".into(),
        rates: vec![100_000; rails.len()],
        rails: rails.iter().map(|rail| rail.to_vec()).collect(),
    };
    let transports = vec![offer("efa", &[b"rail zero", b"\x00\xff"]), offer("empty", &[])];
    let links = vec![
        LinkReport { label: "efa".into(), refused: None, more: vec![b"one more".to_vec()] },
        LinkReport {
            label: "empty".into(), refused: Some("no rail — none at all".into()), more: Vec::new()
        },
    ];
    let refuse = |cause| Frame::Refuse { cause, reason: "in words".into() };
    vec![
        ("proof", Frame::Proof { mac }),
        ("offers", Frame::Offers { identity, peer_timeout_ms: 3000, transports }),
        ("report", Frame::Report { links }),
        ("ready", Frame::Ready),
        ("refuse_protocol", refuse(Cause::Protocol)),
        ("refuse_unreachable", refuse(Cause::Unreachable)),
        ("refuse_failed", refuse(Cause::Failed)),
        ("refuse_permission", refuse(Cause::Permission)),
        ("heartbeat", Frame::Heartbeat { seq: 300 }),
        ("lookup", Frame::Lookup { id: 70_000, name: "kv cache 0".into() }),
        ("found", Frame::Found { id: 70_000, descriptor: Some(b"mrD\x01 and so on".to_vec()) }),
        ("found_nothing", Frame::Found { id: u64::MAX, descriptor: None }),
        ("revoked", Frame::Revoked { incarnation: u64::MAX, region: 128 }),
        ("goodbye", Frame::Goodbye),
        (
            "grant",
            Frame::Grant {
                transport: "efa".into(),
                grant: WireGrant { bytes: u64::MAX, imms: 300, messages: 2 },
            },
        ),
        ("barrier", Frame::Barrier { name: "step 7".into() }),
        ("moved", Frame::Moved { transport: "efa".into(), pair: 300, offer: b"somewhere else".to_vec() }),
        (
            "followed",
            Frame::Followed { transport: "efa".into(), pair: 7, answer: b"as it was told".to_vec() },
        ),
        ("fence", Frame::Fence { id: 9, transport: "efa".into(), pair: 300, kind: FenceKind::DeviceLost }),
        ("fence_path", Frame::Fence { id: 9, transport: "efa".into(), pair: 300, kind: FenceKind::PathLost }),
        ("messages_posted", Frame::MessagesPosted { transport: "efa".into(), pair: 300, count: 9 }),
        ("lift", Frame::Fence { id: 9, transport: "efa".into(), pair: 300, kind: FenceKind::Lift }),
        (
            "fenced",
            Frame::Fenced {
                id: 9,
                report: Some(FenceReport { imms: 300, messages: 7 }),
                reason: String::new(),
            },
        ),
        ("fenced_not", Frame::Fenced { id: u64::MAX, report: None, reason: "in words".into() }),
    ]
}

fn hellos() -> [(&'static str, Hello); 2] {
    let nonce = std::array::from_fn(|at| 255 - at as u8);
    [("hello", Hello { nonce, token: false }), ("hello_token", Hello { nonce, token: true })]
}

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/tests/control/frames/v1").join(format!("{name}.bin"))
}

fn stored(name: &str) -> Vec<u8> {
    let why = "a frame without a recording: what was released is recorded once and never changes";
    std::fs::read(path(name)).unwrap_or_else(|e| panic!("{name}: {e}: {why}"))
}

#[test]
fn version_1_is_as_recorded() {
    for (name, hello) in hellos() {
        assert_eq!(Hello::decode(&stored(name)).unwrap(), hello, "{name}");
        assert_eq!(hello.encode().unwrap(), stored(name), "{name}");
    }
    for (name, frame) in recorded() {
        assert_eq!(Frame::decode(&stored(name)).unwrap(), frame, "{name}");
        assert_eq!(frame.encode().unwrap(), stored(name), "{name}");
    }
    // Every recording is used, and every kind of frame has one.
    let known: BTreeSet<_> = recorded().iter().map(|(name, _)| *name).collect();
    let known = known.into_iter().chain(hellos().map(|(name, _)| name)).map(path);
    let files = std::fs::read_dir(path("").parent().unwrap()).unwrap();
    let files: BTreeSet<_> = files.map(|file| file.unwrap().path()).collect();
    assert_eq!(files, known.collect());
    let tags: BTreeSet<_> = recorded().iter().map(|(name, _)| stored(name)[0]).collect();
    assert_eq!(tags, (0..17).collect(), "a kind of frame is not recorded");
    let mut next = stored("messages_posted");
    next[0] += 1;
    assert!(Frame::decode(&next).is_err(), "a kind of frame is not recorded");
}

/// Writes the recordings that do not exist yet. To be run once for a new kind of frame.
#[test]
#[ignore = "records"]
fn record() {
    std::fs::create_dir_all(path("").parent().unwrap()).unwrap();
    let hellos = hellos().map(|(name, hello)| (name, hello.encode().unwrap()));
    let frames = recorded().into_iter().map(|(name, frame)| (name, frame.encode().unwrap()));
    for (name, bytes) in hellos.into_iter().chain(frames) {
        if !path(name).exists() {
            std::fs::write(path(name), bytes).unwrap();
        }
    }
}

fn versions(low: u16, high: u16) -> Vec<u8> {
    let mut hello = Hello::new(false).unwrap().encode().unwrap();
    hello[8..10].copy_from_slice(&low.to_le_bytes());
    hello[10..12].copy_from_slice(&high.to_le_bytes());
    hello
}

const OTHERS: [(u16, u16, &str); 2] = [(0, 0, "upgrade the peer"), (2, 5, "upgrade this side")];

#[test]
fn clients_of_other_versions_are_refused_in_words() {
    let (_server, listener, address) = listening();
    for (low, high, advice) in OTHERS {
        let mut raw = Raw::connect(&address);
        raw.send_bytes(&[&versions(low, high)[..12], b"a body of another shape"].concat());
        raw.recv_bytes().unwrap();
        match raw.recv() {
            Some(Frame::Refuse { cause: Cause::Protocol, reason }) => {
                assert!(reason.contains(&format!("peer speaks {low}..={high}, we speak 1..=1")), "{reason}");
                assert!(reason.contains(advice), "{reason}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(raw.rest(), b"");
    }
    gets_through(&fabric(), &listener);
}

#[test]
fn servers_of_other_versions_are_told_and_named() {
    for (low, high, advice) in OTHERS {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = std::thread::spawn(move || {
            let mut raw = Raw::accept(&listener);
            raw.send_bytes(&versions(low, high));
            raw.recv_bytes().unwrap();
            raw.recv()
        });
        let error = wait(fabric().connect(&address)).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Version, "{error}");
        assert!(error.context().contains(advice), "{error}");
        let told = server.join().unwrap();
        assert!(matches!(&told, Some(Frame::Refuse { reason, .. }) if reason.contains(advice)), "{told:?}");
    }
}

#[test]
fn a_later_release_that_still_speaks_1_is_served() {
    let (_server, listener, address) = listening();
    let mut raw = Raw::connect(&address);
    raw.send_bytes(&versions(1, 7));
    raw.recv_bytes().unwrap();
    raw.offers();
    raw.report();
    raw.send(&Frame::Ready);
    assert_eq!(raw.recv(), Some(Frame::Ready));
    assert_eq!(wait(listener.accept()).unwrap().incarnation(), 77);
}
