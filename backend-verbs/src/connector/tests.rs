//! Connections between two soft-RoCE devices: offers that cross, joins that are stopped between the last step of the
//! card and the slot's, fences, and a link that goes down.

use std::process::Command;
use std::time::Duration;

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
    assert!(matches!(domain.connector().fence(near.slot, FenceKind::DeviceLost), Poll::Ready(Ok(()))));
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
    assert!(domain.connector().fence(near.slot, FenceKind::DeviceLost).is_pending());
    assert!(domain.0.peers.raise(near.slot, joining).unwrap());
    assert!(matches!(domain.connector().fence(near.slot, FenceKind::DeviceLost), Poll::Ready(Ok(()))));
}

/// Fences the slot of a side.
fn fence(side: &TestEndpoint) {
    assert!(matches!(side.domain.connector().fence(side.slot, FenceKind::DeviceLost), Poll::Ready(Ok(()))));
}

fn lift_fence(side: &TestEndpoint) {
    side.domain.connector().lift_fence(side.slot).unwrap();
}

fn next_offer(side: &TestEndpoint) -> Option<Vec<u8>> {
    side.domain.connector().next_offer(side.slot).unwrap()
}

/// For so long a card repeats a request several times.
const SOME_TIME: Duration = Duration::from_millis(400);

/// Two connected endpoints. The cards repeat a request until it is aborted.
fn patient_sides() -> (TestEndpoint, TestEndpoint) {
    let (near, far) = (TestEndpoint::with_retries("rxe0", 7), TestEndpoint::with_retries("rxe1", 7));
    near.complete(&far);
    far.complete(&near);
    (near, far)
}

/// Aborts the request of a side. It must end without success.
fn abort(side: &mut TestEndpoint) {
    side.endpoint.abort(side.slot);
    let end = side.end();
    assert!(!matches!(end, Event::Done { .. }), "{end:?}");
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn a_slot_carries_writes_again_after_a_fence_and_nothing_old_lands() {
    let (mut near, mut far) = patient_sides();
    assert!(matches!(far.write(1, &near), Event::Done { .. }));
    for round in [10, 20] {
        let before = near.bytes();
        fence(&near);
        assert_eq!(next_offer(&near), None, "a fenced slot makes no offer");
        far.begin(WorkKind::Write, round, None, &near);
        far.poll_for(SOME_TIME);
        assert!(near.bytes() == before, "a byte has landed behind the fence");
        lift_fence(&near);
        near.poll_for(Duration::ZERO);
        far.poll_for(SOME_TIME);
        assert!(near.bytes() == before, "a byte of the old connection has landed after the fence");
        abort(&mut far);
        let offer = next_offer(&near).expect("an offer");
        accept_answer(&near, &answer_offer(&far, &offer));
        near.poll_for(SOME_TIME);
        assert!(near.bytes() == before, "an aborted write has landed over the next connection");
        assert!(matches!(far.write(round + 1, &near), Event::Done { .. }));
        assert!(near.bytes() == [round + 1; LEN]);
        assert!(matches!(near.write(round + 2, &far), Event::Done { .. }));
        exchange(&mut near, &mut far, u32::from(round) + 3);
        exchange(&mut far, &mut near, u32::from(round) + 6);
    }
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn a_fence_withdraws_the_offer_of_the_next_connection() {
    let (mut near, mut far) = patient_sides();
    assert!(matches!(far.write(1, &near), Event::Done { .. }));
    let offer = break_connection(&mut near);
    let answer = answer_offer(&far, &offer);
    // The peer posts over the next connection, and asks for a fence before its answer is read.
    far.begin(WorkKind::Write, 2, None, &near);
    fence(&near);
    accept_answer(&near, &answer);
    near.poll_for(Duration::ZERO);
    far.poll_for(SOME_TIME);
    assert!(near.bytes() == [1; LEN], "a byte has landed behind the fence");
    abort(&mut far);
    lift_fence(&near);
    let offer = next_offer(&near).expect("an offer");
    accept_answer(&near, &answer_offer(&far, &offer));
    assert!(matches!(far.write(3, &near), Event::Done { .. }));
    assert!(near.bytes() == [3; LEN]);
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn a_second_fence_stops_the_connection_that_was_made_behind_the_first() {
    let (mut near, mut far) = patient_sides();
    fence(&near);
    let offer = break_connection(&mut far);
    accept_answer(&far, &answer_offer(&near, &offer));
    fence(&near);
    lift_fence(&near);
    let offer = next_offer(&near).expect("the connection is stopped, and the slot needs the next one");
    accept_answer(&near, &answer_offer(&far, &offer));
    exchange(&mut near, &mut far, 10);
}

/// The cable is out while this value lives.
struct CableOut;

impl CableOut {
    fn new() -> Self {
        Self::set("down");
        Self
    }

    fn set(state: &str) {
        assert!(Command::new("ip").args(["link", "set", "veth1", state]).status().unwrap().success());
    }
}

impl Drop for CableOut {
    fn drop(&mut self) {
        Self::set("up");
    }
}

/// Waits until a side offers its next connection.
fn await_offer(side: &mut TestEndpoint) -> Vec<u8> {
    loop {
        side.until(|event| matches!(event, Event::EndpointChanged));
        if let Some(offer) = next_offer(side) {
            return offer;
        }
    }
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn requests_fail_by_their_path_while_the_link_is_down() {
    let (_, mut near, mut far) = sides();
    near.complete(&far);
    far.complete(&near);
    let cable = CableOut::new();
    let unconfirmed = near.write(1, &far);
    let status = Status { kind: ErrorKind::Unreachable, code: rdma_sys::IBV_WC_RETRY_EXC_ERR as i32 };
    assert_eq!(unconfirmed, Event::FailedUnconfirmed { id: 1, peer: near.slot, status });
    // This side's interface is down.
    let status = Status { kind: ErrorKind::Unreachable, code: rdma_sys::IBV_WC_LOC_QP_OP_ERR as i32 };
    assert_eq!(far.write(2, &near), Event::Failed { id: 2, status });
    assert_eq!((next_offer(&near), next_offer(&far)), (None, None), "no port is active");
    near.poll_for(SOME_TIME);
    assert!(matches!(near.endpoint.arm(), Armed::FdOrTimeout(_)), "a worker sleeps while the link is down");
    drop(cable);
    let offer = await_offer(&mut far);
    accept_answer(&far, &answer_offer(&near, &offer));
    exchange(&mut near, &mut far, 10);
    exchange(&mut far, &mut near, 20);
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn a_connection_that_cannot_be_made_while_the_link_is_down_is_made_later() {
    let (_, mut near, mut far) = sides();
    near.complete(&far);
    far.complete(&near);
    // The side that is asked cannot connect.
    let offer = break_connection(&mut near);
    let cable = CableOut::new();
    assert_eq!(answer_offer(&far, &offer), [], "the peer stays, and gets an offer later");
    drop(cable);
    let offer = await_offer(&mut far);
    accept_answer(&far, &answer_offer(&near, &offer));
    exchange(&mut near, &mut far, 10);

    // The side that has asked cannot connect.
    let offer = break_connection(&mut far);
    let answer = answer_offer(&near, &offer);
    let cable = CableOut::new();
    accept_answer(&far, &answer);
    drop(cable);
    far.events.clear();
    let offer = await_offer(&mut far);
    accept_answer(&far, &answer_offer(&near, &offer));
    exchange(&mut near, &mut far, 20);
    exchange(&mut far, &mut near, 30);
}
