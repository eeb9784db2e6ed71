//! Connections between two soft-RoCE devices: offers that cross, and joins that are stopped between the last step of
//! the card and the slot's.

use multirail_spi::{Armed, Completions, Domain, Event, Memory, ReceiveRequest, Status, WorkKind};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;
use crate::domain::VerbsDomain;
use crate::soft_roce::{LEN, Side};

/// Connects what `slot` has offered with the peer's `offer`; the slot is not told yet.
fn join<'a>(domain: &'a VerbsDomain, slot: PeerSlot, was_up: bool, offer: &[u8]) -> Joining<'a> {
    let shared = &domain.0;
    let offer = shared.read(offer).unwrap();
    let answered = was_up.then_some(offer.turn);
    let mut joining = shared.peers.take_offered(slot, answered, offer.accesses.len()).unwrap().unwrap();
    shared.join(&mut joining.pairs, &offer).unwrap();
    joining
}

/// Both sides, `near` with another hold of its domain.
fn sides() -> (VerbsDomain, Side, Side) {
    let (near, far) = (Side::open("rxe0"), Side::open("rxe1"));
    (VerbsDomain(Arc::clone(&near.domain.0)), near, far)
}

/// The peer sends imms and a message, which its card says to be received.
fn begins(near: &mut Side, far: &mut Side, imm: u32) {
    let receive = ReceiveRequest { id: imm.into(), local: near.memory.as_ptr(), lkey: 0, len: LEN as u64 };
    // SAFETY: the memory is the side's own, and the message comes into it before the test ends.
    assert_eq!(unsafe { near.endpoint.post_recv(&[receive]) }.accepted, 1);
    for (kind, imm) in [(WorkKind::Write, imm), (WorkKind::Write, imm + 1), (WorkKind::Send, imm + 2)] {
        let end = far.post(kind, imm as u8, Some(imm), near);
        assert!(matches!(end, Event::Done { .. }), "{end:?}");
    }
}

/// `near` tells in order what the peer has sent.
fn tells(near: &mut Side, imm: u32) {
    let peer = near.slot;
    let news = |event: &Event| !matches!(event, Event::EndpointChanged);
    let told = [(); 3].map(|()| near.until(news));
    let (id, len) = (imm.into(), LEN as u64);
    let received = Event::Received { id, peer, len, imm: Some(imm + 2) };
    assert_eq!(told, [Event::Imm { peer, imm }, Event::Imm { peer, imm: imm + 1 }, received]);
    assert!(near.bytes() == [imm as u8 + 2; LEN]);
}

fn sends(near: &mut Side, far: &mut Side, imm: u32) {
    begins(near, far, imm);
    tells(near, imm);
}

/// The side gives its connection up: its offer of the next one.
fn breaks(side: &mut Side) -> Vec<u8> {
    side.endpoint.abort(side.slot);
    side.domain.connector().next_offer(side.slot).unwrap().expect("an offer")
}

/// What the side answers to the offer.
fn renews(side: &Side, offer: &[u8]) -> Vec<u8> {
    side.domain.connector().renew(side.slot, offer).unwrap()
}

/// The side that has offered hears the answer.
fn hears(side: &Side, answer: &[u8]) {
    side.domain.connector().finish_renewal(side.slot, answer).unwrap();
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn what_comes_while_a_connection_is_made_is_told() {
    let (domain, mut near, mut far) = sides();
    far.complete(&near);
    let joining = join(&domain, near.slot, false, &far.offer);
    sends(&mut near, &mut far, 10);
    assert!(domain.0.peers.raise(near.slot, joining).unwrap());
    sends(&mut near, &mut far, 20);

    // The next connection.
    let offer = breaks(&mut near);
    let joining = join(&domain, near.slot, true, &renews(&far, &offer));
    sends(&mut near, &mut far, 30);
    assert!(domain.0.peers.raise(near.slot, joining).unwrap());
    sends(&mut near, &mut far, 40);

    // A join that fails leaves no number behind: the card gives it to others.
    let offer = breaks(&mut near);
    let number = domain.0.read(&offer).unwrap().messages.number;
    let answer = domain.0.read(&renews(&far, &offer)).unwrap();
    let answer = Offer { place: Place { is_ethernet: false, ..answer.place }, ..answer };
    let joining = domain.0.peers.take_offered(near.slot, Some(answer.turn), 1).unwrap().unwrap();
    assert_eq!(domain.0.peers.owner(number), Some(near.slot));
    let refused = domain.0.join_offered(near.slot, joining, &answer).unwrap_err();
    assert_eq!((refused.kind(), domain.0.peers.owner(number)), (ErrorKind::Unreachable, None));

    // It is no end: the next one is offered.
    let offer = domain.connector().next_offer(near.slot).unwrap().expect("an offer");
    hears(&near, &renews(&far, &offer));
    sends(&mut near, &mut far, 50);
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn an_offer_that_comes_late_does_not_break_the_connection() {
    let (_, mut near, mut far) = sides();
    near.complete(&far);
    far.complete(&near);
    for round in 0..4 {
        // Both offer. One of the offers stands, and is renewed before the other one is looked at.
        let (mut offer, mut late) = (breaks(&mut near), breaks(&mut far));
        let (mut winner, mut loser) = (&near, &far);
        let mut answer = renews(loser, &offer);
        if answer.is_empty() {
            (winner, loser, offer, late) = (loser, winner, late, offer);
            answer = renews(loser, &offer);
        }
        hears(winner, &answer);
        hears(loser, &renews(winner, &late));
        sends(&mut near, &mut far, 10 + 10 * round);
        sends(&mut far, &mut near, 50 + 10 * round);
    }
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn an_answer_is_to_its_own_offer() {
    let (_, mut near, mut far) = sides();
    near.complete(&far);
    far.complete(&near);
    let offer = breaks(&mut near);
    let late = renews(&far, &offer);
    // The peer has broken it before its answer is heard.
    let offer = breaks(&mut far);
    hears(&far, &renews(&near, &offer));
    let offer = breaks(&mut near);
    hears(&near, &late);
    hears(&near, &renews(&far, &offer));
    sends(&mut near, &mut far, 10);
    sends(&mut far, &mut near, 20);
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn what_came_over_a_connection_that_was_replaced_unseen_is_told() {
    let (domain, mut near, mut far) = sides();
    near.complete(&far);
    far.complete(&near);
    // The endpoint has never looked at the connection.
    begins(&mut near, &mut far, 10);
    let offer = breaks(&mut far);
    hears(&far, &renews(&near, &offer));
    tells(&mut near, 10);
    sends(&mut near, &mut far, 20);

    // A connection that is replaced while it is made.
    let offer = breaks(&mut near);
    let joining = join(&domain, near.slot, true, &renews(&far, &offer));
    begins(&mut near, &mut far, 30);
    let offer = breaks(&mut far);
    hears(&far, &renews(&near, &offer));
    assert!(!domain.0.peers.raise(near.slot, joining).unwrap());
    tells(&mut near, 30);
    sends(&mut near, &mut far, 40);
    sends(&mut far, &mut near, 50);
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn the_loss_of_a_device_is_told_once_no_join_is_under_way() {
    let (domain, mut near, mut far) = sides();
    far.complete(&near);
    let joining = join(&domain, near.slot, false, &far.offer);
    near.lose();
    let mut told = Completions::with_room(16);
    for byte in [1, 2] {
        near.endpoint.poll(&mut told);
        assert_eq!(told.as_slice(), [], "the queue pairs of the join take bytes");
        assert!(matches!(far.write(byte, &near), Event::Done { .. }));
        assert!(near.bytes() == [byte; LEN]);
    }

    let refused = domain.0.peers.raise(near.slot, joining).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::DeviceLost);
    near.endpoint.poll(&mut told);
    let status = Status { kind: ErrorKind::DeviceLost, code: -1 };
    assert_eq!(told.as_slice(), [Event::DeviceLost { status }]);
    let late = far.write(3, &near);
    assert!(near.bytes() == [2; LEN], "a late byte has landed; its write ended as {late:?}");
    assert!(!matches!(late, Event::Done { .. }), "{late:?}");
    told.clear();
    near.endpoint.poll(&mut told);
    assert_eq!(told.as_slice(), [], "it is told once");
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn what_an_ended_connection_flushes_does_not_break_the_next() {
    let (domain, mut near, mut far) = sides();
    near.complete(&far);
    far.complete(&near);
    assert!(matches!(far.write(1, &near), Event::Done { .. }));
    near.endpoint.abort(near.slot);
    near.endpoint.poll(&mut Completions::with_room(16));
    // The side that was aborted does not answer this write.
    far.begin(WorkKind::Write, 2, None, &near);
    let offer = domain.connector().next_offer(near.slot).unwrap().unwrap();
    let answer = far.domain.connector().renew(far.slot, &offer).unwrap();
    domain.connector().finish_renewal(near.slot, &answer).unwrap();
    let end = far.end();
    assert!(matches!(end, Event::Done { .. }), "{end:?}");
    assert!(near.bytes() == [2; LEN]);
    assert!(!far.told.contains(&Event::EndpointChanged), "{:?}", far.told);
    let number = domain.0.read(&answer).unwrap().messages.number;
    assert_eq!(far.domain.0.peers.owner(number), Some(far.slot));
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn a_sleeping_endpoint_is_woken_when_its_connection_is_replaced() {
    let (mut near, mut far) = (Side::with_retries("rxe0", 7), Side::open("rxe1"));
    near.complete(&far);
    far.complete(&near);
    assert!(matches!(near.write(1, &far), Event::Done { .. }));
    // The peer's card does not answer over this connection any more.
    let offer = breaks(&mut far);
    near.begin(WorkKind::Write, 2, None, &far);
    let fd = loop {
        match near.endpoint.arm() {
            Armed::Fd(fd) => break fd,
            _ => near.endpoint.poll(&mut Completions::with_room(16)),
        }
    };
    // SAFETY: the endpoint keeps its descriptor open.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    let wakes = |limit: i64| {
        let limit = Timespec { tv_sec: 0, tv_nsec: limit * 1_000_000 };
        poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&limit)).unwrap() == 1
    };
    assert!(!wakes(300), "nobody acknowledges the write");
    let answer = renews(&near, &offer);
    assert!(wakes(900), "the write is flushed");
    hears(&far, &answer);
    let end = near.end();
    assert!(matches!(end, Event::Done { .. }), "{end:?}");
    assert!(far.bytes() == [2; LEN]);
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn an_endpoint_does_not_sleep_before_its_caller_has_posted_over_the_next_connection() {
    let (_, mut near, far) = sides();
    near.complete(&far);
    far.complete(&near);
    let offer = breaks(&mut near);
    let mut told = Completions::with_room(16);
    // The queue pairs of the connection that broke go at the second one.
    (0..2).for_each(|_| near.endpoint.poll(&mut told));
    assert!(
        matches!(near.endpoint.arm(), Armed::Ready),
        "nothing wakes the caller when the next connection is there"
    );
    hears(&near, &renews(&far, &offer));
    assert!(matches!(near.endpoint.arm(), Armed::Ready), "what the caller holds back can be posted");
    near.endpoint.poll(&mut told);
    assert!(matches!(near.endpoint.arm(), Armed::Fd(_)));
}
