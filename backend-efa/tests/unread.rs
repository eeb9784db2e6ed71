//! What a peer sent and nobody had received when it parted is nobody's.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

mod side;

use std::time::Instant;

use multirail_spi::{Batch, Completions, ErrorKind, Event, Memory, ReceiveRequest, WorkKind, WorkRequest};
use side::{LIMIT, Side};

impl Side {
    /// Polls, both sides, until this one tells such an event.
    fn hears(&mut self, other: &mut Self, what: &str, is_it: impl Fn(&Event) -> bool) -> Event {
        let begun = Instant::now();
        while begun.elapsed() < LIMIT {
            other.endpoint.poll(&mut Completions::with_room(16));
            let mut told = Completions::with_room(16);
            self.endpoint.poll(&mut told);
            if let Some(event) = told.as_slice().iter().find(|event| is_it(event)) {
                return *event;
            }
        }
        panic!("{what}: nothing")
    }

    /// Posts a request, once there is room: the other side gets on meanwhile.
    fn posts(&mut self, other: &mut Self, request: WorkRequest) {
        let (batch, begun): (Batch, _) = ([request].into_iter().collect(), Instant::now());
        // SAFETY: memory and imports outlive the endpoint, in this file.
        while unsafe { self.endpoint.post(&batch) }.accepted == 0 {
            assert!(begun.elapsed() < LIMIT, "no room");
            self.endpoint.poll(&mut Completions::with_room(16));
            other.endpoint.poll(&mut Completions::with_room(16));
        }
    }

    fn receives(&mut self, id: u64) {
        let (local, lkey) = (self.memory.as_ptr(), self.region.lkey());
        // SAFETY: the memory outlives the endpoint.
        let posted = unsafe { self.endpoint.post_recv(&[ReceiveRequest { id, local, lkey, len: 64 }]) };
        assert_eq!(posted.accepted, 1);
    }
}

#[test]
fn it_takes_no_receive_from_who_comes_next() {
    let (Some(mut here), Some(mut there)) = (Side::open(), Side::open()) else { return };
    let (peer, slot) = here.meet(&there);
    let far = there.import_for(&here, peer);
    let write = WorkRequest { imm: Some(1), len: 64, ..here.request(peer, &*far, 0) };
    let send = WorkRequest { kind: WorkKind::Send, imm: None, ..write };
    // They are there when the imm behind them is.
    for request in [send, WorkRequest { id: 1, ..send }, WorkRequest { id: 2, ..write }] {
        here.posts(&mut there, request);
    }
    there.hears(&mut here, "imm", |event| matches!(event, Event::Imm { imm: 1, .. }));
    there.domain.connector().disconnect(slot);
    there.hears(&mut here, "end", |event| *event == Event::PeerGone { peer: slot });

    // The first one takes it at once, before it is asked back.
    there.receives(1);
    there.endpoint.cancel_recv(1);
    let back = there.hears(&mut here, "receive", |event| !matches!(event, Event::Imm { .. }));
    assert!(
        matches!(back, Event::ReceiveFailed { id: 1, status } if status.kind == ErrorKind::Cancelled),
        "{back:?}"
    );

    // The second one takes this, for which another peer's message comes.
    there.receives(2);
    let mut next = Side::open().expect("as before");
    let (peer, next_slot) = next.meet(&there);
    assert_eq!(next_slot, slot);
    let far = there.import_for(&next, peer);
    let send = WorkRequest { kind: WorkKind::Send, len: 32, ..next.request(peer, &*far, 0) };
    next.posts(&mut there, send);
    let got = there.hears(&mut next, "message", |event| !matches!(event, Event::Imm { .. }));
    assert_eq!(got, Event::Received { id: 2, peer: slot, len: 32, imm: None });
}
