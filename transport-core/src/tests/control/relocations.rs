//! Peers that announce relocated endpoints as often as they can: other peers are not affected.

use std::io::Write;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use super::null::Null;
use super::raw::{Raw, framed};
use super::{MS, gets_through, served, wait};
use crate::control::frame::{Cause, Frame};
use crate::{ErrorKind, Fabric, FabricBuilder, Listener, TransportConfig};

const LIMIT: Duration = Duration::from_secs(20);

/// Renewals wait here until the test opens the gate, or ends.
struct HeldRenewals {
    open: Arc<(Mutex<bool>, Condvar)>,
    begun: mpsc::Receiver<()>,
    reserved: Arc<AtomicU32>,
}

impl HeldRenewals {
    fn open(&self) {
        *self.open.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.open.1.notify_all();
    }

    /// The number of renewals that have begun since the last call.
    fn begun(&self) -> usize {
        self.begun.try_iter().count()
    }

    /// Returns once `kept` slots are reserved.
    fn keeps(&self, kept: u32) {
        let until = Instant::now() + LIMIT;
        while self.reserved.load(Ordering::Relaxed) != kept {
            assert!(Instant::now() < until, "{} slots are reserved", self.reserved.load(Ordering::Relaxed));
            std::thread::sleep(MS);
        }
    }
}

impl Drop for HeldRenewals {
    fn drop(&mut self) {
        self.open();
    }
}

fn builder(null: Null) -> FabricBuilder {
    let transport = TransportConfig::new("null", Arc::new(null));
    FabricBuilder::new().transport(transport).peer_timeout(Duration::from_secs(60))
}

/// A side whose renewals wait for the gate.
fn gated() -> (HeldRenewals, Fabric, Listener, String) {
    let open = Arc::new((Mutex::new(false), Condvar::new()));
    let (begins, begun) = mpsc::channel();
    let passes = Arc::clone(&open);
    let renew = move || {
        let _ = begins.send(());
        let (is_open, told) = &*passes;
        let closed = is_open.lock().unwrap();
        let (open, _) = told.wait_timeout_while(closed, LIMIT, |open| !*open).unwrap();
        assert!(*open, "nobody has opened the gate");
    };
    let null = Null { renew: Some(Arc::new(renew)), ..Null::default() };
    let reserved = Arc::clone(&null.reserved);
    let (server, listener, address) = served(builder(null).caller_driven());
    (HeldRenewals { open, begun, reserved }, server, listener, address)
}

fn moved(offer: u32) -> Frame {
    Frame::Moved { transport: "null".into(), pair: 0, offer: offer.to_le_bytes().to_vec() }
}

fn followed(offer: u32) -> Frame {
    Frame::Followed { transport: "null".into(), pair: 0, answer: offer.to_le_bytes().to_vec() }
}

#[test]
fn a_peer_that_moves_all_the_time_holds_up_nobody() {
    let (gate, _server, listener, address) = gated();
    let client = builder(Null::default()).caller_driven().open().unwrap();
    let (there, here) = gets_through(&client, &listener);
    let mut raw = Raw::connect(&address);
    raw.shake_hands();
    let peer = wait(listener.accept()).unwrap();
    (0..100).for_each(|offer| raw.send(&moved(offer)));
    gate.begun.recv_timeout(LIMIT).expect("a renewal begins");

    // The renewal takes its time. Meanwhile other peers are answered, and new ones connect.
    let answered = wait(there.region("none")).err().unwrap();
    assert_eq!(answered.kind(), ErrorKind::NotFound, "{answered}");
    let _another = gets_through(&client, &listener);
    assert_eq!(gate.begun(), 0, "one at a time");

    gate.open();
    for offer in 0..100 {
        assert_eq!(raw.recv(), Some(followed(offer)));
    }
    assert!(there.is_alive() && here.is_alive() && peer.is_alive());
}

#[test]
fn more_moves_than_anyone_can_follow_end_the_peer() {
    let (gate, _server, listener, address) = gated();
    let mut raw = Raw::connect(&address);
    raw.shake_hands();
    let peer = wait(listener.accept()).unwrap();
    raw.send(&moved(0));
    // The violation could be reported before the first renewal has begun, so the other frames follow after that.
    gate.begun.recv_timeout(LIMIT).expect("a renewal begins");
    let more: Vec<u8> = (1..2000).flat_map(|offer| framed(&moved(offer).encode().unwrap())).collect();
    // The other side may close the connection before it has read all of them.
    let _ = raw.0.write_all(&more);
    assert_eq!(wait(peer.closed()).kind(), ErrorKind::Protocol);
    match raw.recv() {
        Some(Frame::Refuse { cause: Cause::Protocol, reason }) => {
            assert!(reason.contains("move faster"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    // The renewal under way keeps the slot, so no other peer gets it in the meantime.
    assert_eq!((gate.begun(), gate.reserved.load(Ordering::Relaxed)), (0, 1));
    gate.open();
    gate.keeps(0);
    assert_eq!(gate.begun(), 0, "the rest is dropped");
}

#[test]
fn who_follows_a_move_that_was_none_is_ended() {
    let (gate, _server, listener, address) = gated();
    let mut raw = Raw::connect(&address);
    raw.shake_hands();
    let peer = wait(listener.accept()).unwrap();
    raw.send(&followed(1));
    assert_eq!(wait(peer.closed()).kind(), ErrorKind::Protocol);
    assert!(matches!(raw.recv(), Some(Frame::Refuse { cause: Cause::Protocol, .. })));
    gate.keeps(0);
}

/// An engine may hold requests for the next connection, and nothing else wakes an endpoint that sleeps.
#[test]
fn an_endpoint_that_sleeps_is_polled_after_a_renewal() {
    let polls = Arc::new(AtomicU32::new(0));
    let null = Null { renew: Some(Arc::new(|| ())), polls: Some(Arc::clone(&polls)), ..Null::default() };
    let (_server, listener, address) = served(builder(null));
    let mut raw = Raw::connect(&address);
    raw.shake_hands();
    let _peer = wait(listener.accept()).unwrap();
    let count = || polls.load(Ordering::Relaxed);
    let asleep = loop {
        let before = count();
        std::thread::sleep(100 * MS);
        if count() == before {
            break before;
        }
    };
    raw.send(&moved(1));
    assert_eq!(raw.recv(), Some(followed(1)));
    let until = Instant::now() + LIMIT;
    while count() == asleep {
        assert!(Instant::now() < until, "nobody has polled the endpoint");
        std::thread::sleep(MS);
    }
}
