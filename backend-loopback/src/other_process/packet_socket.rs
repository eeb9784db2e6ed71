//! The socket between an initiator and a target's server: one packet per request and per reply, with files.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::protocol::parse;

/// Files in one packet, at most.
const MAX_FILES: usize = 4;
/// Bytes of a packet, at most.
const MAX_PACKET: usize = 192;
/// Bytes of the length before each packet of a stream, little endian.
const LENGTH: usize = 2;

/// A connected Unix socket.
pub(crate) struct PacketSocket {
    fd: OwnedFd,
    /// The packet that is arriving through a stream. `None` for a socket that keeps packets apart (SEQPACKET).
    arriving: Option<Mutex<ArrivingPacket>>,
}

/// A length, and the bytes and files of the packet after it, as far as they have arrived.
struct ArrivingPacket {
    bytes: [u8; LENGTH + MAX_PACKET],
    len: usize,
    files: Vec<OwnedFd>,
}

impl PacketSocket {
    /// A socket of type SEQPACKET.
    #[cfg(target_os = "linux")]
    pub(super) fn of_packets(fd: OwnedFd) -> Self {
        Self { fd, arriving: None }
    }

    /// A socket of type STREAM, which macOS has in place of SEQPACKET.
    pub(super) fn of_stream(fd: OwnedFd) -> rustix::io::Result<Self> {
        #[cfg(target_vendor = "apple")]
        rustix::net::sockopt::set_socket_nosigpipe(&fd, true)?;
        Ok(Self { fd, arriving: Some(Mutex::new(ArrivingPacket::new())) })
    }

    /// Sends `message` and `files` as one packet.
    pub(crate) fn send(
        &self,
        message: &impl Serialize,
        files: &[BorrowedFd<'_>],
        flags: SendFlags,
    ) -> rustix::io::Result<()> {
        let mut bytes = [0; LENGTH + MAX_PACKET];
        let body = postcard::to_slice(message, &mut bytes[LENGTH..]).map_err(|_| Errno::MSGSIZE)?.len();
        bytes[..LENGTH].copy_from_slice(&(body as u16).to_le_bytes());
        let start = if self.arriving.is_some() { 0 } else { LENGTH };
        let packet = &bytes[start..LENGTH + body];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
            return Err(Errno::MSGSIZE);
        }
        #[cfg(not(target_vendor = "apple"))]
        let flags = flags | SendFlags::NOSIGNAL;
        let sent = rustix::net::sendmsg(&self.fd, &[IoSlice::new(packet)], &mut control, flags)?;
        if sent == packet.len() {
            return Ok(());
        }
        // The other end would take the next packet for the rest of this one.
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Both);
        Err(Errno::IO)
    }

    /// Receives a packet, or a part of one: then it returns `None`, and the caller calls again. The error is `PIPE` if
    /// the other end has closed the socket, and `PROTO` for an invalid packet.
    pub(crate) fn receive<T: DeserializeOwned>(
        &self,
        flags: RecvFlags,
    ) -> rustix::io::Result<Option<(T, Vec<OwnedFd>)>> {
        let Some(arriving) = &self.arriving else {
            let mut packet = [0; MAX_PACKET];
            let (len, files) = self.receive_bytes(&mut packet, flags)?;
            return Ok(Some((parse(packet.get(..len).ok_or(Errno::PROTO)?)?, files)));
        };
        let mut arriving = arriving.lock().expect("arriving packet");
        let (from, to) = (arriving.len, arriving.wanted()?);
        let (len, files) = self.receive_bytes(&mut arriving.bytes[from..to], flags)?;
        arriving.len += len;
        arriving.files.extend(files);
        if arriving.files.len() > MAX_FILES {
            return Err(Errno::PROTO);
        }
        if arriving.len < arriving.wanted()? {
            return Ok(None);
        }
        let packet = std::mem::replace(&mut *arriving, ArrivingPacket::new());
        Ok(Some((parse(&packet.bytes[LENGTH..packet.len])?, packet.files)))
    }

    fn receive_bytes(&self, into: &mut [u8], flags: RecvFlags) -> rustix::io::Result<(usize, Vec<OwnedFd>)> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        #[cfg(target_os = "linux")]
        let flags = flags | RecvFlags::CMSG_CLOEXEC;
        let got = rustix::net::recvmsg(&self.fd, &mut [IoSliceMut::new(into)], &mut control, flags)?;
        let mut files = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                files.extend(fds);
            }
        }
        #[cfg(not(target_os = "linux"))]
        for file in &files {
            rustix::io::fcntl_setfd(file, rustix::io::FdFlags::CLOEXEC)?;
        }
        if got.bytes == 0 {
            return Err(Errno::PIPE);
        }
        if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            return Err(Errno::PROTO);
        }
        Ok((got.bytes, files))
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl ArrivingPacket {
    fn new() -> Self {
        Self { bytes: [0; LENGTH + MAX_PACKET], len: 0, files: Vec::new() }
    }

    /// The number of bytes up to the end of the length, or of the packet once its length has arrived. So one call never
    /// receives the bytes or the files of two packets.
    fn wanted(&self) -> rustix::io::Result<usize> {
        if self.len < LENGTH {
            return Ok(LENGTH);
        }
        match usize::from(u16::from_le_bytes([self.bytes[0], self.bytes[1]])) {
            body @ 1..=MAX_PACKET => Ok(LENGTH + body),
            _ => Err(Errno::PROTO),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::other_process::protocol::ServerRequest;

    fn number(request: ServerRequest) -> u64 {
        match request {
            ServerRequest::StagingBuffer { number } => number,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_stream_keeps_packets_and_their_files_apart() {
        let (a, b) = UnixStream::pair().unwrap();
        let [a, b] = [a, b].map(|end| PacketSocket::of_stream(end.into()).unwrap());
        for packet in 0..3 {
            let files = vec![a.as_fd(); packet as usize];
            a.send(&ServerRequest::StagingBuffer { number: packet << 40 }, &files, SendFlags::empty())
                .unwrap();
        }
        for packet in 0..3 {
            assert!(b.receive::<ServerRequest>(RecvFlags::DONTWAIT).unwrap().is_none(), "the length");
            let (request, files) = b.receive(RecvFlags::DONTWAIT).unwrap().unwrap();
            assert_eq!((number(request), files.len() as u64), (packet << 40, packet));
        }
        assert_eq!(b.receive::<ServerRequest>(RecvFlags::DONTWAIT).unwrap_err(), Errno::AGAIN);
        drop(a);
        assert_eq!(b.receive::<ServerRequest>(RecvFlags::DONTWAIT).unwrap_err(), Errno::PIPE);
    }

    #[test]
    fn a_packet_arrives_byte_by_byte() {
        let (mut a, b) = UnixStream::pair().unwrap();
        let b = PacketSocket::of_stream(b.into()).unwrap();
        for byte in [2, 0, 2] {
            a.write_all(&[byte]).unwrap();
            assert!(b.receive::<ServerRequest>(RecvFlags::DONTWAIT).unwrap().is_none());
            assert_eq!(b.receive::<ServerRequest>(RecvFlags::DONTWAIT).unwrap_err(), Errno::AGAIN);
        }
        a.write_all(&[9]).unwrap();
        assert_eq!(number(b.receive(RecvFlags::DONTWAIT).unwrap().unwrap().0), 9);
    }

    #[test]
    fn a_packet_of_an_impossible_length_is_refused() {
        for length in [0_u16, MAX_PACKET as u16 + 1, u16::MAX] {
            let (mut a, b) = UnixStream::pair().unwrap();
            let b = PacketSocket::of_stream(b.into()).unwrap();
            a.write_all(&length.to_le_bytes()).unwrap();
            for _ in 0..2 {
                assert_eq!(b.receive::<ServerRequest>(RecvFlags::DONTWAIT).unwrap_err(), Errno::PROTO);
            }
        }
    }

    #[test]
    fn more_files_than_a_packet_has_are_refused() {
        let (a, b) = UnixStream::pair().unwrap();
        let b = PacketSocket::of_stream(b.into()).unwrap();
        // Three for each byte of the length.
        for byte in [2_u8, 0] {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let files = [a.as_fd(); 3];
            assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
            rustix::net::sendmsg(&a, &[IoSlice::new(&[byte])], &mut control, SendFlags::empty()).unwrap();
        }
        assert!(b.receive::<ServerRequest>(RecvFlags::DONTWAIT).unwrap().is_none());
        assert_eq!(b.receive::<ServerRequest>(RecvFlags::DONTWAIT).unwrap_err(), Errno::PROTO);
    }
}
