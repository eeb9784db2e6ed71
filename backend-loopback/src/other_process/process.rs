//! The process at the other end of a socket, and whether it is alive.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;

use multirail_spi::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{PTracer, Pid, PidfdFlags};
use serde::{Deserialize, Serialize};

/// Another process. The pidfd identifies it even after the kernel gives its pid to a new process.
#[derive(Debug)]
pub(crate) struct PeerProcess {
    pid: Pid,
    pidfd: OwnedFd,
}

impl PeerProcess {
    /// The process at the other end of `socket`, if it runs as this process's user.
    pub(crate) fn behind(socket: impl AsFd) -> Result<Self> {
        let fail = |e: std::io::Error| {
            Error::os("connect", "reading the credentials of the process at the other end of the socket", e)
        };
        let credentials = credentials(socket.as_fd()).map_err(fail)?;
        if credentials.uid != rustix::process::geteuid().as_raw() {
            let context =
                format!("the peer runs as user {}: run both processes as one user", credentials.uid);
            return Err(Error::new(ErrorKind::Unreachable, "connect", context));
        }
        let pid = Pid::from_raw(credentials.pid).ok_or_else(|| {
            let context = "the peer is in another pid namespace: share it (docker: --pid=host)";
            Error::new(ErrorKind::Unreachable, "connect", context)
        })?;
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).map_err(|e| fail(e.into()))?;
        let process = Self { pid, pidfd };
        // The kernel may have given the pid to a new process before `pidfd_open`. If the socket is still open, its
        // owner was alive until then.
        if !process.is_alive() || is_hung_up(socket.as_fd()) {
            return Err(Error::new(
                ErrorKind::PeerDied,
                "connect",
                "the peer's process ended while this side connected: try again",
            ));
        }
        Ok(process)
    }

    /// The process id.
    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// A descriptor that is readable once the process has ended.
    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Returns true if the process has not ended. Makes a system call.
    pub(crate) fn is_alive(&self) -> bool {
        !is_ready(self.pidfd.as_fd(), PollFlags::IN)
    }
}

/// Facts that a target reports about itself, and that decide which processes may use its memory. Peers use them for
/// error messages alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PtraceHints {
    /// The errno of its own PR_SET_PTRACER. 0 if that succeeded.
    pub(crate) permit_errno: i32,
    /// True if PR_GET_DUMPABLE returns 1.
    pub(crate) dumpable: bool,
    /// The inode of its user namespace.
    pub(crate) user_namespace: u64,
}

/// Asks Yama, where the kernel has it, to let `process` use this process's memory.
///
/// The kernel keeps one tracer. With several peers, any process of this user is permitted, as on systems without
/// Yama. Returns the errno of a refusal, or 0.
pub(crate) fn permit(process: &PeerProcess) -> i32 {
    static PERMITTED: Mutex<PermittedTracers> = Mutex::new(PermittedTracers::None);
    let mut permitted = PERMITTED.lock().expect("permitted tracer");
    *permitted = permitted.with(process.pid());
    // Without Yama the kernel refuses this call, and no permission is needed.
    let permitted = rustix::process::set_ptracer(permitted.tracer());
    permitted.map_or_else(|error| error.raw_os_error(), |()| 0)
}

/// The hints about this process. `permit_errno` is the result of [`permit`].
pub(crate) fn hints(permit_errno: i32) -> PtraceHints {
    let dumpable = rustix::process::dumpable_behavior();
    PtraceHints {
        permit_errno,
        dumpable: dumpable.is_ok_and(|it| it == rustix::process::DumpableBehavior::Dumpable),
        user_namespace: crate::host::namespace("user"),
    }
}

/// The processes that may use this process's memory. The set only grows, since a permitted process may be copying.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PermittedTracers {
    None,
    One(Pid),
    Any,
}

impl PermittedTracers {
    /// The same set with `pid`.
    fn with(self, pid: Pid) -> Self {
        match self {
            Self::None => Self::One(pid),
            Self::One(known) if known == pid => self,
            Self::One(_) | Self::Any => Self::Any,
        }
    }

    fn tracer(self) -> PTracer {
        match self {
            Self::None => PTracer::None,
            Self::One(pid) => PTracer::ProcessID(pid),
            Self::Any => PTracer::Any,
        }
    }
}

/// Returns true if the other end of `socket` is closed.
pub(crate) fn is_hung_up(socket: BorrowedFd<'_>) -> bool {
    is_ready(socket, PollFlags::empty())
}

/// Returns true if `fd` is ready for one of `wanted`, or has an error or a hang-up.
pub(crate) fn is_ready(fd: BorrowedFd<'_>, wanted: PollFlags) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, wanted)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(rustix::event::poll(&mut fds, Some(&at_once)), Ok(1..))
}

// rustix has this call too, but its `UCred` cannot hold the pid 0 that the kernel reports for a process of another
// namespace.
fn credentials(socket: BorrowedFd<'_>) -> std::io::Result<libc::ucred> {
    let mut credentials = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the option writes at most `len` bytes of a `ucred` of this function.
    let result = unsafe {
        let into = (&raw mut credentials).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, into, &raw mut len)
    };
    if result == 0 { Ok(credentials) } else { Err(std::io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_permitted_process_stays_permitted() {
        let [a, b] = [1, 2].map(|pid| Pid::from_raw(pid).unwrap());
        let one = PermittedTracers::None.with(a);
        assert_eq!((one, one.with(a)), (PermittedTracers::One(a), PermittedTracers::One(a)));
        assert_eq!((one.with(b), one.with(b).with(b)), (PermittedTracers::Any, PermittedTracers::Any));
    }

    #[test]
    fn a_process_identifies_itself() {
        let (local, remote) = UnixStream::pair().unwrap();
        let process = PeerProcess::behind(&local).unwrap();
        assert_eq!(process.pid().as_raw_nonzero().get() as u32, std::process::id());
        assert!(process.is_alive() && !is_hung_up(local.as_fd()));
        drop(remote);
        assert!(is_hung_up(local.as_fd()));
        assert_eq!(PeerProcess::behind(&local).unwrap_err().kind(), ErrorKind::PeerDied);
    }
}
