//! Sockets between processes as every Unix has them: streams, with names in the file system.
//!
//! A domain's socket is in the directory for temporary files, while an offer of the domain waits for its initiator. The
//! name has the pid of the process. If the process is killed at that moment, the name stays until another process of
//! that user opens its first socket, and removes the names of processes that are gone.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::Instant;

use multirail_spi::{Error, ErrorKind, Result};
use rustix::io::{Errno, FdFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use rustix::process::Pid;

use super::packet_socket::PacketSocket;
use super::{connect_error, listen_error, within};
use crate::host::{namespace, random};
use crate::offer::MAX_SOCKET_NAME;

/// How the names begin. The pid namespace (0 on macOS), the pid and a random number follow, with hyphens between them.
const PREFIX: &str = "multirail-lo-";

/// Entries of the directory for temporary files that are looked at for names of processes that are gone. Around 1 s.
const MAX_ENTRIES: usize = 1 << 20;

/// A listening socket, and its path.
pub(super) fn listen() -> Result<(OwnedFd, String)> {
    static SAID: Once = Once::new();
    let directory = std::env::temp_dir();
    SAID.call_once(|| {
        tracing::info!(directory = %directory.display(),
            "loopback: processes reach each other by the portable path: POSIX shared memory and Unix sockets");
        remove_stale(&directory);
    });
    let path = directory.join(format!(
        "{PREFIX}{:x}-{}-{:016x}",
        namespace("pid"),
        std::process::id(),
        u64::from_ne_bytes(random()?)
    ));
    let Some(name) = path.to_str().filter(|name| is_name(name) && name.len() <= MAX_SOCKET_NAME) else {
        let context = format!(
            "the path of the server's socket, {}, must be absolute UTF-8 of at most {MAX_SOCKET_NAME} bytes: set \
             TMPDIR to another directory",
            path.display()
        );
        return Err(Error::new(ErrorKind::InvalidRequest, "prepare", context));
    };
    let listener = bind(name).map_err(listen_error)?;
    Ok((listener, name.into()))
}

fn bind(name: &str) -> rustix::io::Result<OwnedFd> {
    let listener = socket()?;
    rustix::io::ioctl_fionbio(&listener, true)?;
    rustix::net::bind(&listener, &SocketAddrUnix::new(name)?)?;
    let listening = rustix::net::listen(&listener, super::BACKLOG);
    if listening.is_err() {
        remove(name);
    }
    listening.map(|()| listener)
}

/// A socket that programs which this process starts do not inherit. Only Linux makes it so in one call: elsewhere, a
/// program that another thread starts meanwhile does inherit it.
fn socket() -> rustix::io::Result<OwnedFd> {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None)?;
    rustix::io::fcntl_setfd(&socket, FdFlags::CLOEXEC)?;
    Ok(socket)
}

/// The next connection, which does not block. The error is `CONNABORTED` for an initiator that is gone again.
pub(super) fn accept(listener: &OwnedFd) -> rustix::io::Result<PacketSocket> {
    let socket = rustix::net::accept(listener)?;
    let prepare = || {
        rustix::io::fcntl_setfd(&socket, FdFlags::CLOEXEC)?;
        rustix::io::ioctl_fionbio(&socket, true)
    };
    // macOS refuses to set options of a socket whose other end is closed already (`sosetoptlock` in XNU's
    // bsd/kern/uipc_socket.c).
    prepare().and_then(|()| PacketSocket::of_stream(socket)).map_err(|_| Errno::CONNABORTED)
}

/// Connects to the socket with that path, until `deadline`.
pub(super) fn connect(name: &str, deadline: Instant) -> Result<PacketSocket> {
    let fail = |context: &'static str| move |why: Errno| -> Error { connect_error(context, why) };
    let address = SocketAddrUnix::new(name).map_err(fail("the socket's name"))?;
    let socket = socket().map_err(fail("opening a socket"))?;
    within(&socket, deadline, || rustix::net::connect(&socket, &address)).map_err(|why| match why {
        // The target's name is gone with its last offer.
        Errno::NOENT | Errno::CONNREFUSED => offer_gone(),
        why => connect_error("connecting to the peer's process", why),
    })?;
    PacketSocket::of_stream(socket).map_err(fail("preparing a socket"))
}

/// The error for a target that does not listen any more.
pub(super) fn offer_gone() -> Error {
    let context =
        "the peer's offer was used already or withdrawn, or its process is gone: exchange new offers";
    Error::new(ErrorKind::Unreachable, "connect", context)
}

/// Returns true for the name of a socket of this module, a path.
pub(super) fn is_name(name: &str) -> bool {
    name.starts_with('/')
}

/// Removes a socket's name.
pub(super) fn remove(name: &str) {
    if let Err(error) = std::fs::remove_file(name)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(%error, name, "loopback: the name of a socket stays");
    }
}

/// Removes the names of this user's processes that are gone.
fn remove_stale(directory: &Path) {
    let entries = std::fs::read_dir(directory).into_iter().flatten().take(MAX_ENTRIES).flatten();
    for entry in entries {
        if entry.file_name().to_str().is_some_and(is_stale) {
            // The names of other users stay: the directory is sticky, or theirs.
            let _ = std::fs::remove_file::<PathBuf>(entry.path());
        }
    }
}

/// Returns true for a name of a process that is gone. A process of another pid namespace is not known here.
fn is_stale(name: &str) -> bool {
    let mut parts = name.strip_prefix(PREFIX).into_iter().flat_map(|rest| rest.split('-'));
    let here = parts.next().and_then(|part| u64::from_str_radix(part, 16).ok()) == Some(namespace("pid"));
    let pid = parts.next().and_then(|part| part.parse().ok()).filter(|pid| *pid > 0).and_then(Pid::from_raw);
    let is_whole = parts.next().is_some_and(|part| part.len() == 16) && parts.next().is_none();
    here && is_whole && pid.is_some_and(|pid| rustix::process::test_kill_process(pid) == Err(Errno::SRCH))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_dead_processes_are_stale() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let name = |namespace: u64, pid: u32| format!("{PREFIX}{namespace:x}-{pid}-{:016x}", 7);
        let here = namespace("pid");
        assert!(is_stale(&name(here, child.id())));
        assert!(!is_stale(&name(here, std::process::id())));
        assert!(!is_stale(&name(here ^ 1, child.id())), "a pid of another namespace");
        for other in ["multirail-lo-", "multirail-lo-0-0-0", "multirail-lo-0--1-0000000000000007", "else"] {
            assert!(!is_stale(other), "{other}");
        }
        assert!(!is_stale(&format!("{}-more", name(here, child.id()))));
    }

    #[test]
    fn a_dropped_socket_has_no_name() {
        let socket = super::super::ServerSocket::open(multirail_spi::HostSharing::Portable).unwrap();
        let name = socket.name().to_owned();
        assert!(Path::new(&name).exists() && is_name(&name));
        drop(socket);
        assert!(!Path::new(&name).exists());
    }
}
