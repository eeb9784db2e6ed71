//! Fences over the control connection.

use crate::control::frame::{Cause, Frame};
use crate::spi::{FenceKind, FenceReport};
use crate::tests::control::raw::Raw;
use crate::tests::control::{listening, pair, wait};
use crate::{ErrorKind, Fabric, Peer};

fn fence(id: u64, pair: u16) -> Frame {
    Frame::Fence { id, transport: "null".into(), pair, kind: FenceKind::PathLost }
}

/// A connected raw peer.
fn raw() -> (Raw, Fabric, Peer) {
    let (fabric, listener, address) = listening();
    let mut raw = Raw::connect(&address);
    raw.shake_hands();
    let peer = wait(listener.accept()).unwrap();
    (raw, fabric, peer)
}

#[test]
fn each_fence_is_answered_with_its_number() {
    let (mut raw, fabric, peer) = raw();
    for id in [7, u64::MAX] {
        raw.send(&fence(id, 0));
        // The fabric is caller-driven: its engine answers in a step.
        let answered = std::thread::scope(|scope| {
            // This side stops sending over the pair, too, and asks for a fence on its part.
            let answer = scope.spawn(|| {
                loop {
                    match raw.recv() {
                        Some(Frame::Fence { .. }) => {}
                        answer => break answer,
                    }
                }
            });
            while !answer.is_finished() {
                fabric.step();
            }
            answer.join().unwrap()
        });
        // The backend of this test cannot fence.
        match answered {
            Some(Frame::Fenced { id: answered, report: None, reason }) => {
                assert_eq!(answered, id);
                assert!(reason.contains("cannot keep out"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(peer.is_alive());
}

/// This side has broken its path over the pair, too, because the peer wanted a fence. Until it has settled that path, it
/// answers no peer that wants to send there again.
#[test]
fn a_fence_is_lifted_once_both_sides_are_settled() {
    let (mut raw, fabric, peer) = raw();
    raw.send(&fence(1, 0));
    raw.send(&Frame::Fence { id: 2, transport: "null".into(), pair: 0, kind: FenceKind::Lift });
    let (ours, mut answered) = std::thread::scope(|scope| {
        let answers = scope.spawn(|| {
            let (mut ours, mut answered) = (None, Vec::new());
            while answered.len() < 2 {
                match raw.recv() {
                    Some(Frame::Fence { id, kind, .. }) => {
                        assert!(answered.iter().all(|id| *id != 2), "lifted before this side was settled");
                        assert_eq!(kind, FenceKind::PathLost);
                        ours = Some(id);
                        raw.send(&Frame::Fenced {
                            id,
                            report: Some(FenceReport { imms: u64::MAX, messages: u64::MAX }),
                            reason: String::new(),
                        });
                    }
                    // The backend of this test can do neither.
                    Some(Frame::Fenced { id, report: None, .. }) => answered.push(id),
                    other => panic!("{other:?}"),
                }
            }
            (ours, answered)
        });
        while !answers.is_finished() {
            fabric.step();
        }
        answers.join().unwrap()
    });
    assert!(ours.is_some());
    // The backend refuses both in one step, and nothing orders the two refusals.
    answered.sort_unstable();
    assert_eq!(answered, [1, 2]);
    assert!(peer.is_alive());
}

#[test]
fn a_fence_of_an_unknown_pair_ends_the_peer() {
    let (mut raw, _fabric, peer) = raw();
    raw.send(&fence(0, 1));
    assert_eq!(wait(peer.closed()).kind(), ErrorKind::Protocol);
    assert!(matches!(raw.recv(), Some(Frame::Refuse { cause: Cause::Protocol, .. })));
}

#[test]
fn who_asks_twice_for_a_fence_is_ended() {
    let (mut raw, _fabric, peer) = raw();
    // The fabric answers in a step, and the test makes none: the first fence stays under way.
    (0..2).for_each(|id| raw.send(&fence(id, 0)));
    let error = wait(peer.closed());
    assert_eq!(error.kind(), ErrorKind::Protocol);
    assert!(error.to_string().contains("asks twice"), "{error}");
}

#[test]
fn who_answers_a_fence_that_was_none_is_ended() {
    let (mut raw, _fabric, peer) = raw();
    raw.send(&Frame::Fenced {
        id: 0,
        report: Some(FenceReport { imms: 1, messages: 0 }),
        reason: String::new(),
    });
    assert_eq!(wait(peer.closed()).kind(), ErrorKind::Protocol);
}

#[test]
fn the_answer_reaches_who_has_asked_and_an_end_drops_the_question() {
    let ((client, there), (server, here)) = pair();
    let (answers, answered) = std::sync::mpsc::channel();
    let ask = |peer: &Peer| {
        let answers = answers.clone();
        peer.0.context.session.request_fence(
            "null",
            0,
            FenceKind::DeviceLost,
            Box::new(move |answer| answers.send(answer).unwrap()),
        );
    };
    ask(&there);
    let answer = loop {
        server.step();
        if let Ok(answer) = answered.try_recv() {
            break answer;
        }
    };
    assert_eq!(answer.unwrap_err().kind(), ErrorKind::Unsupported);
    // The peer is gone before it answers.
    ask(&here);
    there.disconnect();
    wait(here.closed());
    drop(answers);
    assert!(answered.recv_timeout(limit::HANG).is_err(), "the question has an answer");
    client.step();
}
