//! Barriers over real sockets: any order of arrivals, peers that leave at once, die, or break the protocol.

use std::time::Duration;

use limit::Limit;

use super::raw::Raw;
use super::session::with_raw;
use super::{MS, fabric, gets_through, hasty, listening, pair, served, wait};
use crate::control::frame::{Cause, Frame};
use crate::peer::MAX_AHEAD;
use crate::{Error, ErrorKind, Fabric, Peer, PeerGroup, Result};

const LIMIT: Duration = limit::HANG;

fn alone(peer: &Peer) -> PeerGroup {
    PeerGroup::new([peer.clone()]).unwrap()
}

/// As [`wait`](super::wait). The waiting thread drives the fabric.
fn reach(group: &PeerGroup, name: impl std::fmt::Display, limit: Duration) -> Result<()> {
    group.barrier(name, limit)?.wait()
}

fn kind(result: Result<(), Error>) -> ErrorKind {
    result.unwrap_err().kind()
}

#[test]
fn whoever_comes_first_and_again_and_again() {
    let ((_client, there), (_server, here)) = pair();
    let (ours, theirs) = (alone(&there), alone(&here));
    let other = std::thread::spawn(move || {
        for round in 0..200 {
            reach(&theirs, "round", LIMIT).unwrap();
            reach(&theirs, round, LIMIT).unwrap();
        }
    });
    for round in 0..200 {
        reach(&ours, "round", LIMIT).unwrap();
        reach(&ours, round, LIMIT).unwrap();
    }
    other.join().unwrap();
    assert_eq!(kind(reach(&ours, "round", 5 * MS)), ErrorKind::DeadlineExceeded);
}

#[test]
fn names_do_not_cross() {
    let ((_client, there), (_server, here)) = pair();
    let (ours, theirs) = (alone(&there), alone(&here));
    let (a, b) = (ours.barrier("a", LIMIT).unwrap(), ours.barrier("b", LIMIT).unwrap());
    assert_eq!(kind(ours.barrier("a", LIMIT).map(drop)), ErrorKind::Busy);
    reach(&theirs, "b", LIMIT).unwrap();
    wait(b).unwrap();
    assert_eq!(kind(reach(&theirs, "c", 5 * MS)), ErrorKind::DeadlineExceeded);
    reach(&theirs, "a", LIMIT).unwrap();
    wait(a).unwrap();
    for name in ["", &"x".repeat(256)] {
        assert_eq!(kind(ours.barrier(name, LIMIT).map(drop)), ErrorKind::InvalidRequest);
    }
}

#[test]
fn a_wait_that_was_given_up_is_taken_up_and_arrives_once() {
    let ((_client, there), (_server, here)) = pair();
    let (ours, theirs) = (alone(&there), alone(&here));
    for _ in 0..3 {
        assert_eq!(kind(reach(&ours, "a", MS)), ErrorKind::DeadlineExceeded);
        drop(ours.barrier("a", LIMIT).unwrap());
        reach(&theirs, "a", LIMIT).unwrap();
        // The peer has passed once, because this side has arrived once.
        assert_eq!(kind(reach(&theirs, "a", 20 * MS)), ErrorKind::DeadlineExceeded);
        reach(&ours, "a", LIMIT).unwrap();
        reach(&ours, "a", LIMIT).unwrap();
        reach(&theirs, "a", LIMIT).unwrap();
    }
}

#[test]
fn who_passes_may_leave_at_once() {
    for round in 0..20 {
        let (server, listener, address) = listening();
        let (one, two) = (fabric(), fabric());
        let to_one = |fabric: &Fabric| {
            let there = wait(fabric.connect(&address)).unwrap();
            (there, wait(listener.accept()).unwrap())
        };
        let ((one_there, one_here), (two_there, two_here)) = (to_one(&one), to_one(&two));
        let early = alone(&one_there).barrier("end", LIMIT).unwrap();
        let late = alone(&two_there).barrier("end", LIMIT).unwrap();
        let all = PeerGroup::new([one_here, two_here]).unwrap();
        reach(&all, "end", LIMIT).unwrap();
        // All others pass, although the server may be gone or has closed its connections.
        if round % 2 == 0 {
            server.close();
        } else {
            all.peers().iter().for_each(Peer::disconnect);
        }
        wait(early).unwrap();
        wait(late).unwrap();
        assert_eq!(wait(one_there.closed()).kind(), ErrorKind::Closed);
        assert_eq!(kind(alone(&one_there).barrier("end", LIMIT).map(drop)), ErrorKind::Closed);
    }
}

#[test]
fn a_peer_that_dies_before_it_ends_the_wait() {
    let ((client, there), (_server, here)) = pair();
    let barrier = alone(&there).barrier("a", LIMIT).unwrap();
    here.disconnect();
    assert_eq!(kind(wait(barrier)), ErrorKind::Closed);
    client.close();
    // One peer lives and has arrived; another one falls silent.
    let ((_fabric, listener, address), other) = (served(hasty("null")), fabric());
    let (to_us, lives) = gets_through(&other, &listener);
    let came = alone(&to_us).barrier("a", LIMIT).unwrap();
    // On a busy machine, a peer may count as dead before the wait begins: then the next one.
    let begun = || {
        let mut raw = Raw::connect(&address);
        raw.shake_hands();
        let silent = wait(listener.accept()).unwrap();
        let both = PeerGroup::new([lives.clone(), silent.clone()]).unwrap();
        Some((both.barrier("a", LIMIT).ok()?, silent, raw))
    };
    let (barrier, silent, _raw) = Limit::of(LIMIT).ask(begun).expect("a wait for a peer that lives");
    assert_eq!(kind(wait(barrier)), ErrorKind::PeerDied);
    wait(came).unwrap();
    assert_eq!(kind(alone(&silent).barrier("b", LIMIT).map(drop)), ErrorKind::PeerDied);
}

#[test]
fn an_arrival_is_said_once() {
    let ((_fabric, _listener), peer, mut raw) = with_raw();
    let group = alone(&peer);
    for _ in 0..3 {
        assert_eq!(kind(reach(&group, "a", MS)), ErrorKind::DeadlineExceeded);
    }
    assert_eq!(raw.recv(), Some(Frame::Barrier { name: "a".into() }));
    raw.send(&Frame::Barrier { name: "a".into() });
    reach(&group, "a", LIMIT).unwrap();
    drop(group.barrier("b", LIMIT).unwrap());
    assert_eq!(raw.recv(), Some(Frame::Barrier { name: "b".into() }));
}

#[test]
fn a_peer_that_reaches_more_than_it_can_is_cut_off() {
    let lies: [fn(&mut Raw); 3] = [
        // The peer arrives again, although this side has not arrived.
        |raw| (0..2).for_each(|_| raw.send(&Frame::Barrier { name: "a".into() })),
        // The peer arrives three times, this side once.
        |raw| {
            assert_eq!(raw.recv(), Some(Frame::Barrier { name: "ours".into() }));
            (0..3).for_each(|_| raw.send(&Frame::Barrier { name: "ours".into() }));
        },
        |raw| (0..=MAX_AHEAD).for_each(|at| raw.send(&Frame::Barrier { name: at.to_string() })),
    ];
    for lie in lies {
        let ((_fabric, _listener), peer, mut raw) = with_raw();
        drop(alone(&peer).barrier("ours", LIMIT).unwrap());
        lie(&mut raw);
        assert_eq!(wait(peer.closed()).kind(), ErrorKind::Protocol);
        let refusal = std::iter::from_fn(|| raw.recv()).find(|frame| !matches!(frame, Frame::Barrier { .. }));
        assert!(matches!(refusal, Some(Frame::Refuse { cause: Cause::Protocol, .. })), "{refusal:?}");
    }
    // The agreed number of arrivals is accepted, and all these barriers pass.
    let ((_fabric, _listener), peer, mut raw) = with_raw();
    (0..MAX_AHEAD).for_each(|at| raw.send(&Frame::Barrier { name: at.to_string() }));
    let group = alone(&peer);
    (0..MAX_AHEAD).for_each(|at| reach(&group, at, LIMIT).unwrap());
    let pending: Vec<_> = (0..MAX_AHEAD).map(|at| group.barrier(at, LIMIT).unwrap()).collect();
    assert_eq!(kind(group.barrier("more", LIMIT).map(drop)), ErrorKind::Exhausted);
    drop(pending);
    assert_eq!(kind(group.barrier("more", LIMIT).map(drop)), ErrorKind::Exhausted);
}
