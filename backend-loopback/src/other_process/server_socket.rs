//! The socket of a domain's server, at which initiators of other processes connect, and how long it listens.
//!
//! On the portable path the socket has a name in the file system, which a killed process leaves. So such a socket
//! listens only while an offer waits for its initiator ([`OfferedSocket`]): a process whose peers are all connected has
//! no name.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use multirail_spi::{HostSharing, Result, WakeupPipe};

#[cfg(target_os = "linux")]
use super::linux;
use super::packet_socket::PacketSocket;
use super::portable;

/// A listening Unix socket. Dropping it removes its name.
pub(crate) struct ServerSocket {
    listener: OwnedFd,
    name: String,
    sharing: HostSharing,
    /// The process that made the socket. A forked child must not remove its parent's name.
    process: u32,
}

impl ServerSocket {
    /// Opens the socket of a domain. Its name is not used twice.
    pub(crate) fn open(sharing: HostSharing) -> Result<Self> {
        let (listener, name) = match sharing {
            #[cfg(target_os = "linux")]
            HostSharing::Linux => linux::listen()?,
            HostSharing::Portable => portable::listen()?,
        };
        Ok(Self { listener, name, sharing, process: std::process::id() })
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
        if self.sharing.is_portable() && self.process == std::process::id() {
            portable::remove(&self.name);
        }
    }
}

/// The socket at which a server listens now.
pub(crate) struct ListeningSocket {
    sharing: HostSharing,
    wakeup: Arc<WakeupPipe>,
    current: Mutex<Weak<ServerSocket>>,
    /// Keeps a socket that has no name in the file system.
    _kept: Option<Arc<ServerSocket>>,
}

/// Keeps a server's socket open while an offer with its name waits for an initiator.
pub(crate) struct OfferedSocket {
    /// `None` only while this is dropped.
    socket: Option<Arc<ServerSocket>>,
    wakeup: Arc<WakeupPipe>,
}

impl ListeningSocket {
    /// The socket of a server whose thread sleeps on `wakeup`.
    pub(crate) fn new(sharing: HostSharing, wakeup: Arc<WakeupPipe>) -> Result<Self> {
        let kept = if sharing.is_portable() { None } else { Some(Arc::new(ServerSocket::open(sharing)?)) };
        let current = Mutex::new(kept.as_ref().map(Arc::downgrade).unwrap_or_default());
        Ok(Self { sharing, wakeup, current, _kept: kept })
    }

    /// Opens the socket, unless it is open, for one offer more.
    pub(crate) fn offer(&self) -> Result<OfferedSocket> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let socket = match current.upgrade() {
            Some(socket) => socket,
            None => {
                let socket = Arc::new(ServerSocket::open(self.sharing)?);
                *current = Arc::downgrade(&socket);
                self.wakeup.handle().wake();
                socket
            }
        };
        Ok(OfferedSocket { socket: Some(socket), wakeup: self.wakeup.clone() })
    }

    /// The socket, if it is open. The thread must not keep it while it does not listen.
    pub(crate) fn current(&self) -> Option<Arc<ServerSocket>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).upgrade()
    }
}

impl OfferedSocket {
    /// The name by which initiators find the socket.
    pub(crate) fn name(&self) -> &str {
        self.socket.as_ref().map_or("", |socket| socket.name())
    }
}

impl Drop for OfferedSocket {
    fn drop(&mut self) {
        // The thread may sleep on the socket, and keeps it until it wakes.
        self.socket = None;
        self.wakeup.handle().wake();
    }
}
