//! A peer made by hand: a plain socket that speaks as well, or as badly, as the test wants.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use crate::control::frame::{Frame, Identity, LinkReport, TransportOffer};
use crate::control::hello::Hello;

pub(super) struct Raw(pub TcpStream);

impl Raw {
    pub fn connect(address: &str) -> Self {
        Self::of(TcpStream::connect(address).unwrap())
    }

    pub fn of(stream: TcpStream) -> Self {
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        Self(stream)
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

    /// The next frame that is no heartbeat.
    pub fn recv(&mut self) -> Option<Frame> {
        loop {
            match Frame::decode(&self.recv_bytes()?).unwrap() {
                Frame::Heartbeat { .. } => {}
                frame => return Some(frame),
            }
        }
    }

    pub fn hello(&mut self) -> Hello {
        self.send_hello(Duration::from_secs(60));
        Hello::decode(&self.recv_bytes().unwrap()).unwrap()
    }

    pub fn send_hello(&mut self, peer_timeout: Duration) {
        let identity = Identity { incarnation: 77, host: "raw".into() };
        self.send_bytes(&Hello::new(identity, peer_timeout).encode().unwrap());
    }

    pub fn offers(&mut self) -> Vec<TransportOffer> {
        let rails = vec![b"raw rail".to_vec()];
        self.send(&Frame::Offers {
            transports: vec![TransportOffer { label: "null".into(), backend: "null".into(), rails }],
        });
        match self.recv() {
            Some(Frame::Offers { transports }) => transports,
            other => panic!("{other:?} where offers were due"),
        }
    }

    pub fn report(&mut self) -> Vec<LinkReport> {
        self.send(&Frame::report(&[LinkReport { label: "null".into(), refused: None }]));
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
