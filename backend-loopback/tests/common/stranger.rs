//! A local process that knows the name of a domain's socket.
#![allow(dead_code, reason = "every test binary uses its own part")]

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType};

/// A connection to a domain's server, made without multirail.
pub struct Stranger {
    socket: OwnedFd,
    /// On the portable path, packets go through a stream: each follows its length, in two bytes.
    is_stream: bool,
}

impl Stranger {
    /// Connects to the socket with that name. A path is the name of a stream.
    pub fn connect(name: &str) -> rustix::io::Result<Self> {
        let is_stream = name.starts_with('/');
        let (kind, address) = match is_stream {
            true => (SocketType::STREAM, SocketAddrUnix::new(name)?),
            false => (SocketType::SEQPACKET, SocketAddrUnix::new_abstract_name(name.as_bytes())?),
        };
        let socket = rustix::net::socket(AddressFamily::UNIX, kind, None)?;
        rustix::net::connect(&socket, &address)?;
        set_socket_timeout(&socket, Timeout::Recv, Some(limit::HANG))?;
        Ok(Self { socket, is_stream })
    }

    /// Sends a packet of any length.
    pub fn send(&self, packet: &[u8]) -> rustix::io::Result<()> {
        let length = (packet.len() as u16).to_le_bytes();
        let start = if self.is_stream { &length[..] } else { &[] };
        self.send_raw(&[start, packet].concat())
    }

    /// Sends bytes, which in a stream need not be a packet.
    pub fn send_raw(&self, bytes: &[u8]) -> rustix::io::Result<()> {
        rustix::net::send(&self.socket, bytes, SendFlags::NOSIGNAL).map(drop)
    }

    /// The next packet. `None` once the server has closed the connection.
    pub fn receive(&self) -> Option<Vec<u8>> {
        if !self.is_stream {
            return self.receive_up_to(256);
        }
        let mut length = self.receive_up_to(2)?;
        if length.len() == 1 {
            length.extend(self.receive_up_to(1)?);
        }
        let length = usize::from(u16::from_le_bytes([length[0], length[1]]));
        let mut packet = Vec::new();
        while packet.len() < length {
            packet.extend(self.receive_up_to(length - packet.len())?);
        }
        Some(packet)
    }

    /// All packets until the server closes the connection.
    pub fn receive_all(&self) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| self.receive()).collect()
    }

    fn receive_up_to(&self, len: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; len];
        match rustix::net::recv(&self.socket, &mut bytes[..], RecvFlags::empty()) {
            Ok((1.., len)) => bytes.truncate(len),
            // It is a reset if the server had not read every packet.
            Ok((0, _)) | Err(Errno::CONNRESET | Errno::PIPE) => return None,
            Err(error) => panic!("neither an answer nor an end: {error}"),
        }
        Some(bytes)
    }
}

/// Where the name of the socket begins in an offer. It is at the end, after its length. The bytes before are random, so a
/// slash alone does not tell.
fn start_of_name(offer: &[u8]) -> usize {
    let directory = std::env::temp_dir();
    let directory = directory.as_os_str().as_encoded_bytes();
    let is_start = |at: &usize| {
        let (length, name) = (offer[at - 1], &offer[*at..]);
        usize::from(length) == name.len()
            && (name.starts_with(b"multirail-lo") || name.starts_with(directory))
    };
    (1..offer.len()).find(is_start).unwrap()
}

/// The name of the socket. Any process can read it in /proc/net/unix or in the directory for temporary files.
pub fn socket_of(offer: &[u8]) -> String {
    String::from_utf8(offer[start_of_name(offer)..].to_vec()).unwrap()
}

/// The secret, which is before the name and its length.
pub fn secret_of(offer: &[u8]) -> [u8; 16] {
    let start = start_of_name(offer);
    offer[start - 17..start - 1].try_into().unwrap()
}
