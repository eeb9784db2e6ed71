//! The socket of a domain's server, at which initiators of other processes connect.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use multirail_spi::{HostSharing, Result};

#[cfg(target_os = "linux")]
use super::linux;
use super::packet_socket::PacketSocket;
use super::portable;

/// A listening Unix socket. Dropping it removes its name.
pub(crate) struct ServerSocket {
    listener: OwnedFd,
    name: String,
    sharing: HostSharing,
}

impl ServerSocket {
    /// Opens the socket of a domain. Its name is not used twice.
    pub(crate) fn open(sharing: HostSharing) -> Result<Self> {
        let (listener, name) = match sharing {
            #[cfg(target_os = "linux")]
            HostSharing::Linux => linux::listen()?,
            HostSharing::Portable => portable::listen()?,
        };
        Ok(Self { listener, name, sharing })
    }

    /// The name by which initiators find the socket: an abstract name on Linux, a path on the portable path.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Takes an initiator that waits, without blocking.
    pub(crate) fn accept(&self) -> rustix::io::Result<PacketSocket> {
        match self.sharing {
            #[cfg(target_os = "linux")]
            HostSharing::Linux => linux::accept(&self.listener),
            HostSharing::Portable => portable::accept(&self.listener),
        }
    }

    /// Initiator: connects to the socket with that name, until `deadline`.
    pub(super) fn connect(sharing: HostSharing, name: &str, deadline: Instant) -> Result<PacketSocket> {
        match sharing {
            #[cfg(target_os = "linux")]
            HostSharing::Linux => linux::connect(name, deadline),
            HostSharing::Portable => portable::connect(name, deadline),
        }
    }

    /// The reason why this side cannot connect to a socket with that name, or `None` if it can: both sides must use the
    /// same path.
    pub(crate) fn obstacle(sharing: HostSharing, name: &str) -> Option<&'static str> {
        match (sharing.is_portable(), portable::is_name(name)) {
            (false, true) => Some(
                "the peer uses the portable path (MULTIRAIL_LOOPBACK_PORTABLE=1), and this process does not: set \
                 the variable in both or in neither",
            ),
            (true, false) => Some(
                "this process uses the portable path (MULTIRAIL_LOOPBACK_PORTABLE=1), and the peer does not: set \
                 the variable in both or in neither",
            ),
            _ => None,
        }
    }
}

impl AsFd for ServerSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for ServerSocket {
    fn drop(&mut self) {
        if self.sharing.is_portable() {
            portable::remove(&self.name);
        }
    }
}
