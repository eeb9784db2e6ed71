//! A peer made by hand: a plain socket that speaks as well, or as badly, as the test wants.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use crate::Token;
use crate::control::frame::{Frame, Identity, LinkReport, TransportOffer};
use crate::control::handshake::hello::Hello;
use crate::control::handshake::proof::{Role, Transcript};

/// Its socket, and the silence it bears.
pub(super) struct Raw(pub TcpStream, pub Duration);

/// Offers as good as any.
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

impl Raw {
    pub fn connect(address: &str) -> Self {
        Self::of(TcpStream::connect(address).unwrap())
    }

    pub fn of(stream: TcpStream) -> Self {
        stream.set_read_timeout(Some(limit::HANG)).unwrap();
        Self(stream, Duration::from_secs(60))
    }

    /// The next client of a listener that is not ours.
    pub fn accept(listener: &TcpListener) -> Self {
        Self::of(listener.accept().unwrap().0)
    }

    pub fn send_bytes(&mut self, frame: &[u8]) {
        let bytes = [&(frame.len() as u32).to_le_bytes()[..], frame].concat();
        self.0.write_all(&bytes).unwrap();
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

    /// Whether the other side closed the connection: a read that gave up says something else.
    pub fn is_at_its_end(&mut self) -> bool {
        matches!(self.0.read(&mut [0]), Ok(0))
    }

    /// The next frame that is no heartbeat and no grant.
    pub fn recv(&mut self) -> Option<Frame> {
        loop {
            match Frame::decode(&self.recv_bytes()?).unwrap() {
                Frame::Heartbeat { .. } | Frame::Grant { .. } => {}
                frame => return Some(frame),
            }
        }
    }

    /// Says hello without a token, and reads the other's.
    pub fn hello(&mut self) -> Hello {
        self.greet(false).0
    }

    /// Says hello, and reads the other's; both as they were on the wire too.
    pub fn greet(&mut self, token: bool) -> (Hello, [Vec<u8>; 2]) {
        let ours = Hello::new(token).unwrap().encode().unwrap();
        self.send_bytes(&ours);
        let theirs = self.recv_bytes().unwrap();
        (Hello::decode(&theirs).unwrap(), [ours, theirs])
    }

    /// Says hello and proves `token` as the side that connected; what was proved.
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

    /// All that comes until the end of the connection.
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

    /// The whole handshake, done well.
    pub fn shake_hands(&mut self) {
        self.hello();
        self.offers();
        self.report();
        self.send(&Frame::Ready);
        assert_eq!(self.recv(), Some(Frame::Ready));
    }
}
