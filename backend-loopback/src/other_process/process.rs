//! The process at the other end of a socket, and whether it is alive.
//!
//! Linux tells this by a pidfd. On the portable path the two processes have a *liveness socket*: a pair of sockets of
//! which each process has one end, and through which no byte ever goes. The kernel closes the ends of a process that
//! dies, and then the other end becomes readable. One weakness is left: a child that a process forks without `exec`
//! inherits the end, so that the death of the parent shows only once the child has ended too.

#[cfg(target_os = "linux")]
use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
#[cfg(target_os = "linux")]
use std::sync::{Mutex, PoisonError, Weak};

use multirail_spi::{Error, ErrorKind, HostSharing, Result};
use rustix::event::{PollFd, PollFlags, Timespec};
#[cfg(target_os = "linux")]
use rustix::process::{Pid, PidfdFlags};

/// Another process of this host.
#[derive(Debug)]
pub(crate) struct PeerProcess {
    /// `None` on the portable path.
    #[cfg(target_os = "linux")]
    pid: Option<Pid>,
    /// Readable once the process has ended: its pidfd, which identifies it even after the kernel gives its pid to a new
    /// process, or this side's end of the liveness socket. `None` before there is such a socket. The connections to one
    /// process share its pidfd.
    end: Option<Arc<OwnedFd>>,
}

impl PeerProcess {
    /// The process at the other end of `socket`, if it runs as this process's user.
    pub(crate) fn behind(socket: impl AsFd, sharing: HostSharing) -> Result<Self> {
        let credentials = PeerCredentials::of(socket.as_fd()).map_err(no_credentials)?;
        if credentials.user != rustix::process::geteuid().as_raw() {
            let context =
                format!("the peer runs as user {}: run both processes as one user", credentials.user);
            return Err(Error::new(ErrorKind::Unreachable, "connect", context));
        }
        match sharing {
            #[cfg(target_os = "linux")]
            HostSharing::Linux => Self::with_pidfd(socket.as_fd(), credentials.pid),
            HostSharing::Portable => Ok(Self {
                #[cfg(target_os = "linux")]
                pid: None,
                end: None,
            }),
        }
    }

    #[cfg(target_os = "linux")]
    fn with_pidfd(socket: BorrowedFd<'_>, pid: i32) -> Result<Self> {
        let pid = Pid::from_raw(pid).ok_or_else(|| {
            let context = "the peer is in another pid namespace: share it (docker: --pid=host)";
            Error::new(ErrorKind::Unreachable, "connect", context)
        })?;
        let pidfd = pidfd_of(pid).map_err(|e| no_credentials(e.into()))?;
        let process = Self { pid: Some(pid), end: Some(pidfd) };
        // The kernel may have given the pid to a new process before `pidfd_open`. If the socket is still open, its
        // owner was alive until then.
        if !process.is_alive() || is_hung_up(socket) {
            return Err(Error::new(
                ErrorKind::PeerDied,
                "connect",
                "the peer's process ended while this side connected: try again",
            ));
        }
        Ok(process)
    }

    /// Target, on the portable path: makes the liveness socket. Returns the end to hand to the peer. This process must
    /// close that end once it has arrived. With a pidfd, returns `None`.
    pub(crate) fn open_liveness_socket(&mut self) -> std::io::Result<Option<OwnedFd>> {
        if self.end.is_some() {
            return Ok(None);
        }
        let (ours, theirs) = UnixStream::pair()?;
        self.end = Some(Arc::new(ours.into()));
        Ok(Some(theirs.into()))
    }

    /// Initiator: takes the end of the liveness socket that the peer has handed over. Returns false if the peer should
    /// have handed one over and has not, or handed over something else.
    pub(crate) fn take_liveness_socket(&mut self, end: Option<OwnedFd>) -> bool {
        match (&self.end, end) {
            (Some(_), None) => true,
            (None, Some(end)) => {
                let is_socket = rustix::net::sockopt::socket_type(&end).is_ok();
                self.end = Some(Arc::new(end));
                is_socket
            }
            _ => false,
        }
    }

    /// The process id. `None` on the portable path.
    #[cfg(target_os = "linux")]
    pub(crate) fn pid(&self) -> Option<Pid> {
        self.pid
    }

    /// A descriptor that is readable once the process has ended.
    pub(crate) fn end(&self) -> Option<BorrowedFd<'_>> {
        self.end.as_ref().map(|end| end.as_fd())
    }

    /// Returns true if the process has not ended. Makes a system call.
    pub(crate) fn is_alive(&self) -> bool {
        self.end().is_none_or(|end| !is_ready(end, PollFlags::IN))
    }
}

/// The pidfd of a process.
#[cfg(target_os = "linux")]
fn pidfd_of(pid: Pid) -> rustix::io::Result<Arc<OwnedFd>> {
    /// The pidfds that are open, by pid.
    static OPEN: Mutex<BTreeMap<i32, Weak<OwnedFd>>> = Mutex::new(BTreeMap::new());
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let number = pid.as_raw_nonzero().get();
    // While a process lives, no other one has its pid.
    if let Some(pidfd) = open.get(&number).and_then(Weak::upgrade)
        && !is_ready(pidfd.as_fd(), PollFlags::IN)
    {
        return Ok(pidfd);
    }
    let pidfd = Arc::new(rustix::process::pidfd_open(pid, PidfdFlags::empty())?);
    open.retain(|_, pidfd| pidfd.strong_count() > 0);
    open.insert(number, Arc::downgrade(&pidfd));
    Ok(pidfd)
}

fn no_credentials(error: std::io::Error) -> Error {
    Error::os("connect", "reading the credentials of the process at the other end of the socket", error)
}

/// Returns true if the other end of `socket` is closed. macOS may answer false for a closed one, so this is no proof
/// that the peer is there.
pub(crate) fn is_hung_up(socket: BorrowedFd<'_>) -> bool {
    is_ready(socket, PollFlags::empty())
}

/// Returns true if `fd` is ready for one of `wanted`, or has an error or a hang-up.
pub(crate) fn is_ready(fd: BorrowedFd<'_>, wanted: PollFlags) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, wanted)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(rustix::event::poll(&mut fds, Some(&at_once)), Ok(1..))
}

/// What the kernel says about the process at the other end of a socket.
struct PeerCredentials {
    /// The effective user.
    user: u32,
    /// The process id, or 0 for a process of another pid namespace.
    #[cfg(target_os = "linux")]
    pid: i32,
}

impl PeerCredentials {
    // rustix has this call too, but its `UCred` cannot hold the pid 0 that the kernel reports for a process of another
    // namespace.
    #[cfg(target_os = "linux")]
    fn of(socket: BorrowedFd<'_>) -> std::io::Result<Self> {
        let mut credentials = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: the option writes at most `len` bytes of a `ucred` of this function.
        let result = unsafe {
            let into = (&raw mut credentials).cast();
            libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, into, &raw mut len)
        };
        if result != 0 {
            return Err(std::io::Error::last_os_error());
        }
        Ok(Self { user: credentials.uid, pid: credentials.pid })
    }

    #[cfg(not(target_os = "linux"))]
    fn of(socket: BorrowedFd<'_>) -> std::io::Result<Self> {
        let (mut user, mut group) = (libc::uid_t::MAX, libc::gid_t::MAX);
        // SAFETY: the call writes two numbers of this function.
        let result = unsafe { libc::getpeereid(socket.as_raw_fd(), &raw mut user, &raw mut group) };
        if result == 0 { Ok(Self { user }) } else { Err(std::io::Error::last_os_error()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn a_process_identifies_itself() {
        let (local, remote) = UnixStream::pair().unwrap();
        let process = PeerProcess::behind(&local, HostSharing::Linux).unwrap();
        assert_eq!(process.pid().unwrap().as_raw_nonzero().get() as u32, std::process::id());
        assert!(process.is_alive() && !is_hung_up(local.as_fd()));
        let again = PeerProcess::behind(&local, HostSharing::Linux).unwrap();
        let number = |process: &PeerProcess| process.end().unwrap().as_raw_fd();
        assert_eq!(number(&process), number(&again), "one pidfd for all connections to a process");
        drop(remote);
        assert!(is_hung_up(local.as_fd()));
        let error = PeerProcess::behind(&local, HostSharing::Linux).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerDied);
    }

    #[test]
    fn a_liveness_socket_shows_the_end_to_both_sides() {
        let pair = || {
            let (local, remote) = UnixStream::pair().unwrap();
            let [mut target, mut initiator] =
                [&local, &remote].map(|end| PeerProcess::behind(end, HostSharing::Portable).unwrap());
            let end = initiator.open_liveness_socket().unwrap();
            assert!(end.is_some() && target.take_liveness_socket(end));
            assert!(target.is_alive() && initiator.is_alive());
            (target, initiator)
        };
        let (target, initiator) = pair();
        drop(initiator);
        assert!(!target.is_alive());
        let (target, initiator) = pair();
        drop(target);
        assert!(!initiator.is_alive());
    }

    #[test]
    fn only_a_socket_is_a_liveness_socket() {
        let (local, _remote) = UnixStream::pair().unwrap();
        let mut process = PeerProcess::behind(&local, HostSharing::Portable).unwrap();
        assert!(!process.take_liveness_socket(None));
        assert!(!process.take_liveness_socket(Some(std::fs::File::open("/").unwrap().into())));
    }
}
