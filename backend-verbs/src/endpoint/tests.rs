//! A card that is lost, played by a soft-RoCE device whose completions cannot be read any more.

use std::ptr::null_mut;

use multirail_spi::{Armed, Completions, Domain, ReceiveRequest};

use super::*;
use crate::soft_roce::{LEN, TestEndpoint};

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn nothing_lands_once_the_loss_of_the_device_is_told() {
    let (mut near, mut far) = (TestEndpoint::open("rxe0"), TestEndpoint::open("rxe1"));
    near.complete(&far);
    far.complete(&near);
    assert!(matches!(far.write(1, &near), Event::Done { .. }));
    assert!(near.bytes() == [1; LEN]);
    let receive = |id| ReceiveRequest { id, local: null_mut(), lkey: 0, len: 0 };
    // SAFETY: no message comes for it.
    assert_eq!(unsafe { near.endpoint.post_recv(&[receive(7)]) }.accepted, 1);

    near.lose();
    let mut told = Completions::with_room(16);
    near.endpoint.poll(&mut told);
    let status = Status { kind: ErrorKind::DeviceLost, code: -1 };
    assert_eq!(told.as_slice(), [Event::ReceiveFailed { id: 7, status }, Event::DeviceLost { status }]);

    // The user may use the memory for something else from now on.
    let late = far.write(2, &near);
    assert!(near.bytes() == [1; LEN], "a late byte has landed; its write ended as {late:?}");
    assert!(!matches!(late, Event::Done { .. }), "{late:?}");

    // Nothing is posted or connected any more, and the peer's end is told.
    // SAFETY: it is refused.
    let refused = unsafe { near.endpoint.post_recv(&[receive(8)]) };
    assert_eq!((refused.accepted, refused.error.map(|why| why.kind)), (0, Some(ErrorKind::DeviceLost)));
    let refused = near.domain.connector().prepare().err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::DeviceLost);
    assert!(matches!(near.endpoint.arm(), Armed::Unsupported));
    near.domain.connector().disconnect(near.slot);
    let gone = Event::PeerGone { peer: near.slot };
    assert_eq!(near.until(|event| *event == gone), gone);
}
