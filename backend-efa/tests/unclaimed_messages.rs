//! Messages of a peer that has disconnected are dropped if the engine has not received them.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

mod side;

use std::time::Instant;

use multirail_spi::{Batch, Completions, ErrorKind, Event, Memory, ReceiveRequest, WorkKind, WorkRequest};
use side::{LIMIT, Side};

impl Side {
    /// Polls both sides until this one reports an event that matches. Returns the event.
    fn wait_for(&mut self, other: &mut Self, what: &str, is_it: impl Fn(&Event) -> bool) -> Event {
        let start = Instant::now();
        while start.elapsed() < LIMIT {
            other.endpoint.poll(&mut Completions::with_room(16));
            let mut completions = Completions::with_room(16);
            self.endpoint.poll(&mut completions);
            if let Some(event) = completions.as_slice().iter().find(|event| is_it(event)) {
                return *event;
            }
        }
        panic!("no event: {what}")
    }

    /// Posts a request once there is room. Polls both sides until then.
    fn post_request(&mut self, other: &mut Self, request: WorkRequest) {
        let (batch, start): (Batch, _) = ([request].into_iter().collect(), Instant::now());
        // SAFETY: memory and imports outlive the endpoint, in this file.
        while unsafe { self.endpoint.post(&batch) }.accepted == 0 {
            assert!(start.elapsed() < LIMIT, "no room");
            self.endpoint.poll(&mut Completions::with_room(16));
            other.endpoint.poll(&mut Completions::with_room(16));
        }
    }

    fn post_receive(&mut self, id: u64) {
        let (local, lkey) = (self.memory.as_ptr(), self.region.lkey());
        // SAFETY: the memory outlives the endpoint.
        let posted = unsafe { self.endpoint.post_recv(&[ReceiveRequest { id, local, lkey, len: 64 }]) };
        assert_eq!(posted.accepted, 1);
    }
}

#[test]
fn a_message_of_a_former_peer_takes_no_receive_from_the_next_one() {
    let (Some(mut here), Some(mut there)) = (Side::open(), Side::open()) else { return };
    let (peer, slot) = here.connect(&there);
    let import = there.import_for(&here, peer);
    let write = WorkRequest { imm: Some(1), len: 64, ..here.request(peer, &*import, 0) };
    let send = WorkRequest { kind: WorkKind::Send, imm: None, ..write };
    // When the imm arrives, the messages before it have arrived.
    for request in [send, WorkRequest { id: 1, ..send }, WorkRequest { id: 2, ..write }] {
        here.post_request(&mut there, request);
    }
    there.wait_for(&mut here, "imm", |event| matches!(event, Event::Imm { imm: 1, .. }));
    there.domain.connector().disconnect(slot);
    there.wait_for(&mut here, "end", |event| *event == Event::PeerGone { peer: slot });

    // The first message consumes this receive at once, before it is cancelled.
    there.post_receive(1);
    there.endpoint.cancel_recv(1);
    let back = there.wait_for(&mut here, "receive", |event| !matches!(event, Event::Imm { .. }));
    assert!(
        matches!(back, Event::ReceiveFailed { id: 1, status } if status.kind == ErrorKind::Cancelled),
        "{back:?}"
    );

    // The second message consumes this receive, which is then posted again for the message of the next peer.
    there.post_receive(2);
    let mut next = Side::open().expect("as before");
    let (peer, next_slot) = next.connect(&there);
    assert_eq!(next_slot, slot);
    let import = there.import_for(&next, peer);
    let send = WorkRequest { kind: WorkKind::Send, len: 32, ..next.request(peer, &*import, 0) };
    next.post_request(&mut there, send);
    let got = there.wait_for(&mut next, "message", |event| !matches!(event, Event::Imm { .. }));
    assert_eq!(got, Event::Received { id: 2, peer: slot, len: 32, imm: None });
}
