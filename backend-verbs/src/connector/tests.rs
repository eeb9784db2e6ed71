//! Connections between two soft-RoCE devices: offers that cross, and joins that are stopped between the last step of
//! the card and the slot's.

use multirail_spi::{Armed, Completions, Domain, Event, Memory, ReceiveRequest, Status, WorkKind};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;
use crate::domain::VerbsDomain;
use crate::soft_roce::{LEN, TestEndpoint};

/// Connects the offered queue pairs of `slot` with the peer's `offer`, but does not raise the slot yet.
fn join<'a>(domain: &'a VerbsDomain, slot: PeerSlot, was_up: bool, offer: &[u8]) -> Joining<'a> {
    let shared = &domain.0;
    let offer = shared.read(offer).unwrap();
    let answered = was_up.then_some(offer.connection);
    let mut joining = shared.peers.take_offered(slot, answered, offer.accesses.len()).unwrap().unwrap();
    shared.join(&mut joining.pairs, &offer).unwrap();
    joining
}

/// Two endpoints, and the domain of the first.
fn sides() -> (VerbsDomain, TestEndpoint, TestEndpoint) {
    let (near, far) = (TestEndpoint::open("rxe0"), TestEndpoint::open("rxe1"));
    (VerbsDomain(Arc::clone(&near.domain.0)), near, far)
}

/// Sends imms and a message from `far`, until its card has the acknowledgements.
fn send_unpolled(near: &mut TestEndpoint, far: &mut TestEndpoint, imm: u32) {
    let receive = ReceiveRequest { id: imm.into(), local: near.memory.as_ptr(), lkey: 0, len: LEN as u64 };
    // SAFETY: the memory belongs to the endpoint, and the message arrives before the test ends.
    assert_eq!(unsafe { near.endpoint.post_recv(&[receive]) }.accepted, 1);
    for (kind, imm) in [(WorkKind::Write, imm), (WorkKind::Write, imm + 1), (WorkKind::Send, imm + 2)] {
        let end = far.post(kind, imm as u8, Some(imm), near);
        assert!(matches!(end, Event::Done { .. }), "{end:?}");
    }
}

/// Checks that `near` reports the arrivals in order.
fn check_arrivals(near: &mut TestEndpoint, imm: u32) {
    let peer = near.slot;
    let news = |event: &Event| !matches!(event, Event::EndpointChanged);
    let events = [(); 3].map(|()| near.until(news));
    let (id, len) = (imm.into(), LEN as u64);
    let received = Event::Received { id, peer, len, imm: Some(imm + 2) };
    assert_eq!(events, [Event::Imm { peer, imm }, Event::Imm { peer, imm: imm + 1 }, received]);
    assert!(near.bytes() == [imm as u8 + 2; LEN]);
}

fn exchange(near: &mut TestEndpoint, far: &mut TestEndpoint, imm: u32) {
    send_unpolled(near, far, imm);
    check_arrivals(near, imm);
}

/// Breaks the connection of a side. Returns its offer of the next connection.
fn break_connection(side: &mut TestEndpoint) -> Vec<u8> {
    side.endpoint.abort(side.slot);
    side.domain.connector().next_offer(side.slot).unwrap().expect("an offer")
}

/// The answer of a side to an offer.
fn answer_offer(side: &TestEndpoint, offer: &[u8]) -> Vec<u8> {
    side.domain.connector().renew(side.slot, offer).unwrap()
}

/// Gives the answer to the side that has made the offer.
fn accept_answer(side: &TestEndpoint, answer: &[u8]) {
    side.domain.connector().finish_renewal(side.slot, answer).unwrap();
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn arrivals_during_a_join_are_reported() {
    let (domain, mut near, mut far) = sides();
    far.complete(&near);
    let joining = join(&domain, near.slot, false, &far.offer);
    exchange(&mut near, &mut far, 10);
    assert!(domain.0.peers.raise(near.slot, joining).unwrap());
    exchange(&mut near, &mut far, 20);

    // The next connection.
    let offer = break_connection(&mut near);
    let joining = join(&domain, near.slot, true, &answer_offer(&far, &offer));
    exchange(&mut near, &mut far, 30);
    assert!(domain.0.peers.raise(near.slot, joining).unwrap());
    exchange(&mut near, &mut far, 40);

    // A failed join leaves no number in the table: the card gives the number to another queue pair.
    let offer = break_connection(&mut near);
    let number = domain.0.read(&offer).unwrap().messages.number;
    let answer = domain.0.read(&answer_offer(&far, &offer)).unwrap();
    let answer = VerbsOffer { address: PortAddress { is_ethernet: false, ..answer.address }, ..answer };
    let joining = domain.0.peers.take_offered(near.slot, Some(answer.connection), 1).unwrap().unwrap();
    assert_eq!(domain.0.peers.owner(number), Some(near.slot));
    let refused = domain.0.join_offered(near.slot, joining, &answer).unwrap_err();
    assert_eq!((refused.kind(), domain.0.peers.owner(number)), (ErrorKind::Unreachable, None));

    // The failed join does not end the peer: this side offers the next connection.
    let offer = domain.connector().next_offer(near.slot).unwrap().expect("an offer");
    accept_answer(&near, &answer_offer(&far, &offer));
    exchange(&mut near, &mut far, 50);
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn an_offer_that_comes_late_does_not_break_the_connection() {
    let (_, mut near, mut far) = sides();
    near.complete(&far);
    far.complete(&near);
    for round in 0..4 {
        // Both sides offer. One offer is accepted and answered before the other one is read.
        let (mut offer, mut late) = (break_connection(&mut near), break_connection(&mut far));
        let (mut winner, mut loser) = (&near, &far);
        let mut answer = answer_offer(loser, &offer);
        if answer.is_empty() {
            (winner, loser, offer, late) = (loser, winner, late, offer);
            answer = answer_offer(loser, &offer);
        }
        accept_answer(winner, &answer);
        accept_answer(loser, &answer_offer(winner, &late));
        exchange(&mut near, &mut far, 10 + 10 * round);
        exchange(&mut far, &mut near, 50 + 10 * round);
    }
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn an_answer_belongs_to_its_offer() {
    let (_, mut near, mut far) = sides();
    near.complete(&far);
    far.complete(&near);
    let offer = break_connection(&mut near);
    let late = answer_offer(&far, &offer);
    // The peer breaks the connection before its answer arrives.
    let offer = break_connection(&mut far);
    accept_answer(&far, &answer_offer(&near, &offer));
    let offer = break_connection(&mut near);
    accept_answer(&near, &late);
    accept_answer(&near, &answer_offer(&far, &offer));
    exchange(&mut near, &mut far, 10);
    exchange(&mut far, &mut near, 20);
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn arrivals_of_a_replaced_connection_are_reported() {
    let (domain, mut near, mut far) = sides();
    near.complete(&far);
    far.complete(&near);
    // The endpoint has never polled the connection.
    send_unpolled(&mut near, &mut far, 10);
    let offer = break_connection(&mut far);
    accept_answer(&far, &answer_offer(&near, &offer));
    check_arrivals(&mut near, 10);
    exchange(&mut near, &mut far, 20);

    // A connection that is replaced while it is being made.
    let offer = break_connection(&mut near);
    let joining = join(&domain, near.slot, true, &answer_offer(&far, &offer));
    send_unpolled(&mut near, &mut far, 30);
    let offer = break_connection(&mut far);
    accept_answer(&far, &answer_offer(&near, &offer));
    assert!(!domain.0.peers.raise(near.slot, joining).unwrap());
    check_arrivals(&mut near, 30);
    exchange(&mut near, &mut far, 40);
    exchange(&mut far, &mut near, 50);
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn the_loss_of_a_device_is_reported_once_no_join_is_under_way() {
    let (domain, mut near, mut far) = sides();
    far.complete(&near);
    let joining = join(&domain, near.slot, false, &far.offer);
    near.lose();
    let mut events = Completions::with_room(16);
    for byte in [1, 2] {
        near.endpoint.poll(&mut events);
        assert_eq!(events.as_slice(), [], "the queue pairs of the join still accept bytes");
        assert!(matches!(far.write(byte, &near), Event::Done { .. }));
        assert!(near.bytes() == [byte; LEN]);
    }

    let refused = domain.0.peers.raise(near.slot, joining).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::DeviceLost);
    near.endpoint.poll(&mut events);
    let status = Status { kind: ErrorKind::DeviceLost, code: -1 };
    assert_eq!(events.as_slice(), [Event::DeviceLost { status }]);
    let late = far.write(3, &near);
    assert!(near.bytes() == [2; LEN], "a late byte has landed; its write ended as {late:?}");
    assert!(!matches!(late, Event::Done { .. }), "{late:?}");
    events.clear();
    near.endpoint.poll(&mut events);
    assert_eq!(events.as_slice(), [], "the loss is reported once");
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn flushed_requests_of_an_ended_connection_do_not_break_the_next() {
    let (domain, mut near, mut far) = sides();
    near.complete(&far);
    far.complete(&near);
    assert!(matches!(far.write(1, &near), Event::Done { .. }));
    near.endpoint.abort(near.slot);
    near.endpoint.poll(&mut Completions::with_room(16));
    // The aborted side does not acknowledge this write.
    far.begin(WorkKind::Write, 2, None, &near);
    let offer = domain.connector().next_offer(near.slot).unwrap().unwrap();
    let answer = far.domain.connector().renew(far.slot, &offer).unwrap();
    domain.connector().finish_renewal(near.slot, &answer).unwrap();
    let end = far.end();
    assert!(matches!(end, Event::Done { .. }), "{end:?}");
    assert!(near.bytes() == [2; LEN]);
    assert!(!far.events.contains(&Event::EndpointChanged), "{:?}", far.events);
    let number = domain.0.read(&answer).unwrap().messages.number;
    assert_eq!(far.domain.0.peers.owner(number), Some(far.slot));
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn a_sleeping_endpoint_is_woken_when_its_connection_is_replaced() {
    let (mut near, mut far) = (TestEndpoint::with_retries("rxe0", 7), TestEndpoint::open("rxe1"));
    near.complete(&far);
    far.complete(&near);
    assert!(matches!(near.write(1, &far), Event::Done { .. }));
    // The peer's card acknowledges nothing over this connection any more.
    let offer = break_connection(&mut far);
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
    assert!(!wakes(300), "no card acknowledges the write");
    let answer = answer_offer(&near, &offer);
    assert!(wakes(900), "the write is flushed");
    accept_answer(&far, &answer);
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
    let offer = break_connection(&mut near);
    let mut events = Completions::with_room(16);
    // The second poll destroys the queue pairs of the broken connection.
    (0..2).for_each(|_| near.endpoint.poll(&mut events));
    assert!(
        matches!(near.endpoint.arm(), Armed::Ready),
        "nothing wakes the caller when the next connection is up"
    );
    accept_answer(&near, &answer_offer(&far, &offer));
    assert!(
        matches!(near.endpoint.arm(), Armed::Ready),
        "the caller can post the requests that it holds back"
    );
    near.endpoint.poll(&mut events);
    assert!(matches!(near.endpoint.arm(), Armed::Fd(_)));
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn nothing_lands_once_a_peer_is_fenced() {
    let (domain, mut near, mut far) = sides();
    near.complete(&far);
    far.complete(&near);
    send_unpolled(&mut near, &mut far, 10);
    assert!(matches!(domain.connector().fence(near.slot), Poll::Ready(Ok(()))));
    // As of a card that its owner has lost: it sends what was posted before.
    let late = far.write(2, &near);
    assert!(!matches!(late, Event::Done { .. }), "{late:?}");
    // What had arrived is reported, and no late byte has landed on the message.
    check_arrivals(&mut near, 10);
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn a_fence_waits_for_the_end_of_a_join() {
    let (domain, near, far) = sides();
    far.complete(&near);
    let joining = join(&domain, near.slot, false, &far.offer);
    assert!(domain.connector().fence(near.slot).is_pending());
    assert!(domain.0.peers.raise(near.slot, joining).unwrap());
    assert!(matches!(domain.connector().fence(near.slot), Poll::Ready(Ok(()))));
}
