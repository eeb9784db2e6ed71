//! A raw peer: a plain socket that keeps or breaks the protocol, as the test wants.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use crate::Token;
use crate::control::frame::{Frame, Identity, LinkReport, TransportOffer};
use crate::control::handshake::hello::Hello;
use crate::control::handshake::proof::{Role, Transcript};

/// A raw peer: its socket, and the peer timeout that it announces.
pub(super) struct Raw(pub TcpStream, pub Duration);

/// Valid offers.
pub(super) fn offers(peer_timeout: Duration, rail: &[u8]) -> Frame {
    let transport = TransportOffer {
        label: "null".into(),
        backend: "null".into(),
        rates: vec![0],
        rails: vec![rail.to_vec()],
    };
    Frame::Offers {
        identity: Identity { incarnation: 77, host: "raw".into() },
        peer_timeout_ms: peer_timeout.as_millis() as u32,
        transports: vec![transport],
    }
}

/// A frame with its length, as it is sent.
pub(super) fn framed(frame: &[u8]) -> Vec<u8> {
    [&(frame.len() as u32).to_le_bytes()[..], frame].concat()
}

impl Raw {
    pub fn connect(address: &str) -> Self {
        Self::of(TcpStream::connect(address).unwrap())
    }

    pub fn of(stream: TcpStream) -> Self {
        stream.set_read_timeout(Some(limit::HANG)).unwrap();
        Self(stream, Duration::from_secs(60))
    }

    /// The next client of a plain TCP listener.
    pub fn accept(listener: &TcpListener) -> Self {
        Self::of(listener.accept().unwrap().0)
    }

    pub fn send_bytes(&mut self, frame: &[u8]) {
        self.0.write_all(&framed(frame)).unwrap();
    }

    pub fn send(&mut self, frame: &Frame) {
        self.send_bytes(&frame.encode().unwrap());
    }

    /// The next frame's bytes; `None` at the end of the connection.
    pub fn recv_bytes(&mut self) -> Option<Vec<u8>> {
        let mut length = [0; 4];
        self.0.read_exact(&mut length).ok()?;
        let mut frame = vec![0; u32::from_le_bytes(length) as usize];
        self.0.read_exact(&mut frame).ok()?;
        Some(frame)
    }

    /// Whether the other side closed the connection. False if a read timed out.
    pub fn is_at_its_end(&mut self) -> bool {
        matches!(self.0.read(&mut [0]), Ok(0))
    }

    /// The next frame that is neither a heartbeat nor a grant.
    pub fn recv(&mut self) -> Option<Frame> {
        loop {
            match Frame::decode(&self.recv_bytes()?).unwrap() {
                Frame::Heartbeat { .. } | Frame::Grant { .. } => {}
                frame => return Some(frame),
            }
        }
    }

    /// Sends a hello without a token, and reads the other side's hello.
    pub fn hello(&mut self) -> Hello {
        self.greet(false).0
    }

    /// Sends a hello, and reads the other side's hello. Returns the bytes of both too.
    pub fn greet(&mut self, token: bool) -> (Hello, [Vec<u8>; 2]) {
        let ours = Hello::new(token).unwrap().encode().unwrap();
        self.send_bytes(&ours);
        let theirs = self.recv_bytes().unwrap();
        (Hello::decode(&theirs).unwrap(), [ours, theirs])
    }

    /// Sends a hello and proves `token` as the side that connected. Returns the transcript.
    pub fn prove(&mut self, token: &Token) -> Transcript {
        let (_, [connecting, accepting]) = self.greet(true);
        let transcript = Transcript { connecting, accepting, binding: Vec::new() };
        self.send(&Frame::Proof { mac: transcript.prove(token, Role::Connecting) });
        transcript
    }

    pub fn offers(&mut self) -> Vec<TransportOffer> {
        self.send(&offers(self.1, b"raw rail"));
        match self.recv() {
            Some(Frame::Offers { transports, .. }) => transports,
            other => panic!("{other:?} where offers were due"),
        }
    }

    /// All bytes until the end of the connection.
    pub fn rest(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let _ = self.0.read_to_end(&mut bytes);
        bytes
    }

    pub fn report(&mut self) -> Vec<LinkReport> {
        self.send(&Frame::report(&[LinkReport { label: "null".into(), refused: None, more: Vec::new() }]));
        match self.recv() {
            Some(Frame::Report { links }) => links,
            other => panic!("{other:?} where a report was due"),
        }
    }

    /// Completes the handshake.
    pub fn shake_hands(&mut self) {
        self.hello();
        self.offers();
        self.report();
        self.send(&Frame::Ready);
        assert_eq!(self.recv(), Some(Frame::Ready));
    }
}
