//! Joins between two soft-RoCE devices that are stopped between the last step of the card and the slot's.

use transport_core::Memory;
use transport_core::spi::{Completions, Domain, Event, ReceiveRequest, Status, WorkKind};

use super::*;
use crate::domain::VerbsDomain;
use crate::soft_roce::{LEN, Side};

/// Connects what `slot` has offered with the peer's `offer`; the slot is not told yet.
fn join<'a>(domain: &'a VerbsDomain, slot: PeerSlot, was_up: bool, offer: &[u8]) -> Joining<'a> {
    let shared = &domain.0;
    let offer = shared.read(offer).unwrap();
    let mut joining = shared.peers.take_offered(slot, was_up, offer.accesses.len()).unwrap().unwrap();
    shared.join(&mut joining.pairs, &offer).unwrap();
    joining
}

/// Both sides, `near` with another hold of its domain.
fn sides() -> (VerbsDomain, Side, Side) {
    let (near, far) = (Side::open("rxe0"), Side::open("rxe1"));
    (VerbsDomain(Arc::clone(&near.domain.0)), near, far)
}

/// The peer sends imms and a message, which its card says to be received, and `near` tells them in order.
fn sends(near: &mut Side, far: &mut Side, imm: u32) {
    let receive = ReceiveRequest { id: imm.into(), local: near.memory.as_ptr(), lkey: 0, len: LEN as u64 };
    // SAFETY: the memory is the side's own, and the message comes into it before this returns.
    assert_eq!(unsafe { near.endpoint.post_recv(&[receive]) }.accepted, 1);
    for (kind, imm) in [(WorkKind::Write, imm), (WorkKind::Write, imm + 1), (WorkKind::Send, imm + 2)] {
        let end = far.post(kind, imm as u8, Some(imm), near);
        assert!(matches!(end, Event::Done { .. }), "{end:?}");
    }
    let peer = near.slot;
    let news = |event: &Event| !matches!(event, Event::Moved);
    let told = [(); 3].map(|()| near.until(news));
    let (id, len) = (imm.into(), LEN as u64);
    let received = Event::Received { id, peer, len, imm: Some(imm + 2) };
    assert_eq!(told, [Event::Imm { peer, imm }, Event::Imm { peer, imm: imm + 1 }, received]);
    assert!(near.bytes() == [imm as u8 + 2; LEN]);
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
    near.endpoint.abort(near.slot);
    let offer = domain.connector().offer_again(near.slot).unwrap().unwrap();
    let answer = far.domain.connector().renew(far.slot, &offer).unwrap();
    let joining = join(&domain, near.slot, true, &answer);
    sends(&mut near, &mut far, 30);
    assert!(domain.0.peers.raise(near.slot, joining).unwrap());
    sends(&mut near, &mut far, 40);

    // A join that fails leaves no number behind: the card gives it to others.
    near.endpoint.abort(near.slot);
    let offer = domain.connector().offer_again(near.slot).unwrap().unwrap();
    let number = domain.0.read(&offer).unwrap().messages.number;
    let answer = far.domain.connector().renew(far.slot, &offer).unwrap();
    let answer = domain.0.read(&answer).unwrap();
    let answer = Offer { place: Place { is_ethernet: false, ..answer.place }, ..answer };
    let joining = domain.0.peers.take_offered(near.slot, true, 1).unwrap().unwrap();
    assert_eq!(domain.0.peers.owner(number), Some(near.slot));
    let refused = domain.0.join_offered(near.slot, joining, &answer).unwrap_err();
    assert_eq!((refused.kind(), domain.0.peers.owner(number)), (ErrorKind::Unreachable, None));
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
    // Nobody answers it.
    far.begin(WorkKind::Write, 2, None, &near);
    let offer = domain.connector().offer_again(near.slot).unwrap().unwrap();
    let answer = far.domain.connector().renew(far.slot, &offer).unwrap();
    domain.connector().renewed(near.slot, &answer).unwrap();
    let end = far.end();
    assert!(matches!(end, Event::Done { .. }), "{end:?}");
    assert!(near.bytes() == [2; LEN]);
    assert!(!far.told.contains(&Event::Moved), "{:?}", far.told);
    let number = domain.0.read(&answer).unwrap().messages.number;
    assert_eq!(far.domain.0.peers.owner(number), Some(far.slot));
}
