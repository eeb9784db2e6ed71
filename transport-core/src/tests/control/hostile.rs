//! Peers that send the wrong frame at every step, over real sockets: each gets a typed error, no other peer is
//! affected, and no slot stays reserved.

use std::io::Write;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::null::Null;
use super::raw::Raw;
use super::versions::recorded;
use super::{MS, gets_through, token, wait};
use crate::control::frame::{Cause, Frame};
use crate::control::handshake::hello::Hello;
use crate::{ErrorKind, Fabric, FabricBuilder, Listener, MAX_FRAME, TransportConfig};

/// A fabric whose reserved slots the test counts.
struct Watched {
    reserved: Arc<AtomicU32>,
    builder: FabricBuilder,
}

impl Watched {
    fn new(guarded: bool) -> Self {
        let null = Null::default();
        let reserved = Arc::clone(&null.reserved);
        let builder =
            FabricBuilder::new().transport(TransportConfig::new("null", Arc::new(null))).caller_driven();
        let builder = if guarded { builder.token(token("all")) } else { builder };
        Self { reserved, builder }
    }

    fn listen(&self) -> (Fabric, Listener, String) {
        super::served(self.builder.clone())
    }

    /// Returns once all slots but `kept` are given back.
    fn keeps(&self, kept: u32) {
        let mut limit = limit::Limit::of(limit::HANG);
        while self.reserved.load(Ordering::Relaxed) != kept {
            assert!(!limit.is_over(), "{} slots are reserved", self.reserved.load(Ordering::Relaxed));
            std::thread::sleep(MS);
        }
    }
}

/// A step of the handshake, by the frame that is due.
#[derive(Debug, Clone, Copy)]
struct Step {
    guarded: bool,
    said: usize,
    due: &'static str,
}

const fn step(guarded: bool, said: usize, due: &'static str) -> Step {
    Step { guarded, said, due }
}

const STEPS: [Step; 7] = [
    step(false, 1, "offers"),
    step(false, 2, "report"),
    step(false, 3, "ready"),
    step(true, 1, "proof"),
    step(true, 2, "offers"),
    step(true, 3, "report"),
    step(true, 4, "ready"),
];

impl Step {
    /// Sends all frames that come before this step, as the side that connected.
    fn reach(self, raw: &mut Raw) {
        if self.guarded && self.said >= 2 {
            raw.prove(&token("all"));
            assert!(matches!(raw.recv(), Some(Frame::Proof { .. })));
        } else {
            raw.greet(self.guarded);
        }
        let said = self.said - usize::from(self.guarded);
        if said >= 2 {
            raw.offers();
        }
        if said >= 3 {
            raw.report();
        }
    }
}

/// Checks that the connection ends, with a reason or at once. Frames that came before may be read.
fn assert_ends(raw: &mut Raw, what: &str) {
    loop {
        match raw.recv() {
            Some(Frame::Report { .. } | Frame::Ready) => {}
            Some(Frame::Refuse { reason, .. }) => {
                assert!(!reason.is_empty(), "{what}");
                assert_eq!(raw.rest(), b"", "{what}");
                return;
            }
            Some(Frame::Goodbye) | None => return,
            Some(other) => panic!("{other:?} after {what}"),
        }
    }
}

#[test]
fn every_frame_at_every_wrong_step_of_a_client() {
    for guarded in [false, true] {
        let watched = Watched::new(guarded);
        let (_server, listener, address) = watched.listen();
        for step in STEPS.into_iter().filter(|step| step.guarded == guarded) {
            let mut wrong: Vec<(String, Vec<u8>)> = Vec::new();
            for (name, frame) in recorded() {
                let mut bytes = frame.encode().unwrap();
                if name != step.due {
                    wrong.push((name.into(), bytes));
                    continue;
                }
                wrong.push((format!("{name}, cut"), bytes[..bytes.len() - 1].to_vec()));
                bytes.push(0);
                wrong.push((format!("{name} and a byte"), bytes));
            }
            wrong.push(("a hello".into(), Hello::new(guarded).unwrap().encode().unwrap()));
            wrong.push(("nothing in a frame".into(), Vec::new()));
            wrong.push(("garbage".into(), vec![0xff; 100]));
            for (name, bytes) in wrong {
                let mut raw = Raw::connect(&address);
                step.reach(&mut raw);
                raw.send_bytes(&bytes);
                assert_ends(&mut raw, &format!("{name} at {step:?}"));
            }
            // A peer that leaves without a frame, in the middle of a frame, and after a wrong length.
            for bytes in [&b""[..], &[40, 0, 0, 0, 1], &(MAX_FRAME as u32 + 1).to_le_bytes(), &[0xff; 4]] {
                let mut raw = Raw::connect(&address);
                step.reach(&mut raw);
                raw.0.write_all(bytes).unwrap();
                raw.0.shutdown(std::net::Shutdown::Write).unwrap();
                assert_ends(&mut raw, &format!("{bytes:?} at {step:?}"));
            }
        }
        watched.keeps(0);
        let client = watched.builder.clone().open().unwrap();
        let _pair = gets_through(&client, &listener);
        watched.keeps(2);
    }
}

#[test]
fn a_hello_that_is_none() {
    let watched = Watched::new(false);
    let (_server, listener, address) = watched.listen();
    let good = Hello::new(false).unwrap().encode().unwrap();
    let mut bad: Vec<Vec<u8>> = (0..good.len()).map(|len| good[..len].to_vec()).collect();
    bad.push([&good[..], b"\0"].concat());
    bad.push([&good[..44], b"\x02"].concat());
    bad.extend(recorded().into_iter().map(|(_, frame)| frame.encode().unwrap()));
    for hello in bad {
        let mut raw = Raw::connect(&address);
        raw.send_bytes(&hello);
        assert!(raw.recv_bytes().unwrap().starts_with(b"mrailctl"));
        assert_ends(&mut raw, &format!("{hello:?}"));
    }
    // An unauthenticated peer may not even announce the length that an admitted peer may send.
    for length in [2049_u32, 1 << 20, u32::MAX, u32::from_le_bytes(*b"GET ")] {
        let mut raw = Raw::connect(&address);
        raw.0.write_all(&length.to_le_bytes()).unwrap();
        assert!(raw.recv_bytes().unwrap().starts_with(b"mrailctl"));
        assert!(matches!(raw.recv(), Some(Frame::Refuse { cause: Cause::Protocol, .. })), "{length}");
    }
    watched.keeps(0);
    gets_through(&watched.builder.clone().open().unwrap(), &listener);
}

#[test]
fn silence_at_every_step_ends_within_the_limit() {
    for guarded in [false, true] {
        let watched = Watched::new(guarded);
        // Longer on a busy machine, where this side needs longer for the steps before.
        let span = limit::stretched(300 * MS).min(3000 * MS);
        let within = format!("within {:.1} s", span.as_secs_f64());
        let (_server, listener, address) = super::served(watched.builder.clone().handshake_limit(span));
        for step in STEPS.into_iter().filter(|step| step.guarded == guarded) {
            let mut raw = Raw::connect(&address);
            step.reach(&mut raw);
            loop {
                match raw.recv() {
                    Some(Frame::Report { .. } | Frame::Ready) => {}
                    Some(Frame::Refuse { cause: Cause::Failed, reason }) => {
                        break assert!(reason.contains(&within), "{reason}");
                    }
                    other => panic!("{other:?} at {step:?}"),
                }
            }
        }
        watched.keeps(0);
        gets_through(&watched.builder.clone().open().unwrap(), &listener);
    }
}

/// Serves one client of `watched`: sends `said` correct frames, then `bytes`.
fn serve(watched: &Watched, guarded: bool, said: usize, bytes: Vec<u8>) -> crate::Error {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let server = std::thread::spawn(move || {
        let mut raw = Raw::accept(&listener);
        if said > 0 {
            let (_, [accepting, connecting]) = raw.greet(guarded);
            if said >= 2 && guarded {
                assert!(matches!(raw.recv(), Some(Frame::Proof { .. })));
                let transcript = crate::control::handshake::proof::Transcript {
                    connecting,
                    accepting,
                    binding: Vec::new(),
                };
                let mac = transcript.prove(&token("all"), crate::control::handshake::proof::Role::Accepting);
                raw.send(&Frame::Proof { mac });
            }
            let said = said - usize::from(guarded);
            if said >= 2 {
                raw.offers();
            }
            if said >= 3 {
                raw.report();
            }
        }
        raw.send_bytes(&bytes);
        raw.rest()
    });
    let client = watched.builder.clone().open().unwrap();
    let error = wait(client.connect(&address)).err().unwrap();
    server.join().unwrap();
    error
}

#[test]
fn every_frame_at_every_wrong_step_of_a_server() {
    for guarded in [false, true] {
        let watched = Watched::new(guarded);
        for step in STEPS.into_iter().filter(|step| step.guarded == guarded) {
            for (name, frame) in recorded().into_iter().filter(|(name, _)| *name != step.due) {
                let error = serve(&watched, guarded, step.said, frame.encode().unwrap());
                let wanted = match frame {
                    Frame::Goodbye => ErrorKind::Closed,
                    Frame::Refuse { cause: Cause::Unreachable, .. } => ErrorKind::Unreachable,
                    Frame::Refuse { cause: Cause::Failed, .. } => ErrorKind::PeerDied,
                    Frame::Refuse { cause: Cause::Permission, .. } => ErrorKind::Permission,
                    _ => ErrorKind::Protocol,
                };
                assert_eq!(error.kind(), wanted, "{name} at {step:?}: {error}");
            }
        }
        for bytes in [Vec::new(), vec![0xff; 50], Frame::Ready.encode().unwrap()] {
            assert_eq!(serve(&watched, guarded, 0, bytes).kind(), ErrorKind::Protocol);
        }
        watched.keeps(0);
    }
}

#[test]
fn garbage_after_admission_ends_that_session_alone() {
    let watched = Watched::new(false);
    let (_server, listener, address) = watched.listen();
    let client = watched.builder.clone().open().unwrap();
    let (there, here) = gets_through(&client, &listener);
    let kept = watched.reserved.load(Ordering::Relaxed);
    let breaches = ["proof", "offers", "report", "ready", "found", "found_nothing", "grant"];
    let frames = recorded().into_iter().filter(|(name, _)| breaches.contains(name));
    let frames = frames.map(|(_, frame)| frame.encode().unwrap());
    for bytes in frames.chain([vec![], vec![0xff; 9], Hello::new(false).unwrap().encode().unwrap()]) {
        let mut raw = Raw::connect(&address);
        raw.shake_hands();
        let peer = wait(listener.accept()).unwrap();
        raw.send_bytes(&bytes);
        assert_eq!(wait(peer.closed()).kind(), ErrorKind::Protocol, "{bytes:?}");
        assert!(matches!(raw.recv(), Some(Frame::Refuse { cause: Cause::Protocol, .. })), "{bytes:?}");
    }
    watched.keeps(kept);
    assert!(there.is_alive() && here.is_alive());
}
