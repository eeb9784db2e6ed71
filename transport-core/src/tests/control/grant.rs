//! Grants between peers: they are there as soon as the peer is, they rise, and invalid ones end the peer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::raw::Raw;
use super::session::with_raw;
use super::{builder, fabric, listening, pair, served, wait};
use crate::control::frame::{Cause, Frame, MAX_OFFERS};
use crate::engine::index::GroupIndex;
use crate::spi::WireGrant;
use crate::spi::WorkKind;
use crate::{ErrorKind, Grant, GrantPolicy, GrantRequest, Peer};

/// The number of imms and messages that this side knows it may still send to a peer; up to a small limit.
fn send_credit(peer: &Peer) -> [u32; 2] {
    let credit = &peer.0.links[GroupIndex::FIRST].credit;
    [(WorkKind::Write, Some(1)), (WorkKind::Send, None)].map(|(kind, imm)| {
        let counter = credit.counter(kind, imm).unwrap();
        let taken = counter.take(1 << 20);
        counter.give_back(taken);
        taken
    })
}

#[test]
fn the_first_grant_is_there_with_the_peer() {
    let ((_client, there), (_server, here)) = pair();
    // The queue of a null device has 1024 entries; one half is for 64 new peers.
    assert_eq!([send_credit(&there), send_credit(&here)], [[6, 2]; 2]);
    let (one, other) = (fabric(), fabric());
    let (there, here) = one.connect_local(&other).unwrap();
    assert_eq!([send_credit(&there), send_credit(&here)], [[6, 2]; 2]);
}

/// A policy that grants the number of imms that is set at the moment.
#[derive(Default)]
struct AdjustablePolicy(AtomicU64);

impl GrantPolicy for AdjustablePolicy {
    fn grant(&self, request: &GrantRequest<'_>) -> Grant {
        assert_eq!((request.transport, request.tenant, request.capacity), ("null", "", 1024));
        assert_eq!((request.peers, request.taken), (1, 0));
        Grant { bytes: 9, imms: self.0.load(Ordering::SeqCst), messages: u64::MAX }
    }
}

#[test]
fn a_policy_that_changed_is_asked_again() {
    let dial = Arc::new(AdjustablePolicy::default());
    let (server, listener, address) = served(builder("null").grant_policy(dial.clone()));
    let client = fabric();
    let there = wait(client.connect(&address)).unwrap();
    let here = wait(listener.accept()).unwrap();
    assert_eq!(send_credit(&there), [0, 1 << 20]);
    assert_eq!(there.0.links[GroupIndex::FIRST].credit.bytes(), 9);
    // A smaller grant than before takes nothing back.
    for (imms, room_then) in [(5, 5), (7, 7), (3, 7)] {
        dial.0.store(imms, Ordering::SeqCst);
        here.regrant();
        server.step();
        // A lookup follows the grant in the same queue: a peer that answers it has received the grant.
        assert!(wait(here.0.context.session.lookup("x")).is_err());
        assert_eq!(send_credit(&there), [room_then, 1 << 20]);
    }
}

fn grant(transport: &str, imms: u64) -> Frame {
    Frame::Grant { transport: transport.into(), grant: WireGrant { bytes: 1, imms, messages: 0 } }
}

#[test]
fn grants_that_fall_or_fit_nothing_end_the_session() {
    for (lies, says) in [
        (&[grant("null", 5), grant("null", 4)][..], "may only grow"),
        (&[grant("null", u64::MAX), grant("null", 0)], "may only grow"),
        (&[grant("efa", 5)], "no transport between us"),
    ] {
        let (_server, peer, mut raw) = with_raw();
        lies.iter().for_each(|frame| raw.send(frame));
        let error = wait(peer.closed());
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        assert!(error.context().contains(says), "{error}");
        assert!(matches!(raw.recv(), Some(Frame::Refuse { cause: Cause::Protocol, .. })));
    }
}

#[test]
fn who_grants_nothing_is_sent_nothing() {
    let (_server, peer, _raw) = with_raw();
    assert_eq!((send_credit(&peer), peer.0.links[GroupIndex::FIRST].credit.bytes()), ([0, 0], 0));
}

#[test]
fn grants_without_end_are_no_handshake() {
    let (_server, _listener, address) = listening();
    let mut raw = Raw::connect(&address);
    raw.hello();
    raw.offers();
    raw.report();
    (0..=MAX_OFFERS).for_each(|_| raw.send(&grant("null", 5)));
    loop {
        match raw.recv() {
            Some(Frame::Ready) => {}
            Some(Frame::Refuse { cause: Cause::Protocol, reason }) => {
                break assert!(reason.contains("more grants"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_flood_of_grants_is_one_piece_of_news() {
    let ((server, _listener), peer, mut raw) = with_raw();
    server.step();
    (0..1000).for_each(|imms| raw.send(&grant("null", imms)));
    raw.send(&Frame::Goodbye);
    assert_eq!(wait(peer.closed()).kind(), ErrorKind::Closed);
    // The notices of grants and of the end.
    assert_eq!(peer.0.links[GroupIndex::FIRST].engine.controls.len(), 2);
}
