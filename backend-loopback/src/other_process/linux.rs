//! Sockets between processes as only Linux has them: of type SEQPACKET, with abstract names, which no process has to
//! remove.

use std::os::fd::OwnedFd;
use std::time::Instant;

use multirail_spi::{Error, Result};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::packet_socket::PacketSocket;
use super::{connect_error, listen_error, within};
use crate::host::random;

/// A listening socket, and its abstract name.
pub(super) fn listen() -> Result<(OwnedFd, String)> {
    let name = format!("multirail-lo-{:032x}", u128::from_ne_bytes(random()?));
    let listener = bind(&name).map_err(listen_error)?;
    Ok((listener, name))
}

fn bind(name: &str) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::bind(&listener, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    rustix::net::listen(&listener, super::BACKLOG)?;
    Ok(listener)
}

/// The next connection, which does not block.
pub(super) fn accept(listener: &OwnedFd) -> rustix::io::Result<PacketSocket> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::accept_with(listener, flags).map(PacketSocket::of_packets)
}

/// Connects to the socket with that name, until `deadline`.
pub(super) fn connect(name: &str, deadline: Instant) -> Result<PacketSocket> {
    let fail = |context: &'static str| move |why: Errno| -> Error { connect_error(context, why) };
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(fail("the socket's name"))?;
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(fail("opening a socket"))?;
    within(&socket, deadline, || rustix::net::connect(&socket, &address))
        .map_err(fail("connecting to the peer's process"))?;
    Ok(PacketSocket::of_packets(socket))
}
