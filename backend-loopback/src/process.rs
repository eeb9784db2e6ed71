//! Who is at the other end of a socket, and whether it still lives.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;

use multirail_spi::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{PTracer, Pid, PidfdFlags};

use crate::wire::Hints;

/// Another process, held by a pidfd so that its number cannot come to mean another.
#[derive(Debug)]
pub(crate) struct Process {
    pid: Pid,
    pidfd: OwnedFd,
}

impl Process {
    /// The process at the other end of `socket`, if it runs as our user.
    pub(crate) fn behind(socket: impl AsFd) -> Result<Self> {
        let fail =
            |e: std::io::Error| Error::os("connect", "asking who is at the other end of the socket", e);
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
        // The number may have changed hands before we got the pidfd; the socket
        // still being open says that its owner had not died by then.
        if !process.is_alive() || is_hung_up(socket.as_fd()) {
            return Err(Error::new(
                ErrorKind::PeerDied,
                "connect",
                "the peer ended while connecting: try again",
            ));
        }
        Ok(process)
    }

    /// Its number.
    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// Readable once it ended.
    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Whether it has not ended. A system call.
    pub(crate) fn is_alive(&self) -> bool {
        !is_ready(self.pidfd.as_fd(), PollFlags::IN)
    }
}

/// Permits `process` to reach into this one's memory, where Yama guards it.
///
/// The kernel remembers one tracer: with several peers, any process of this user
/// is let in, as it is on systems without Yama. Returns the errno of a refusal, or 0.
pub(crate) fn permit(process: &Process) -> i32 {
    static PERMITTED: Mutex<Permitted> = Mutex::new(Permitted::Nobody);
    let mut permitted = PERMITTED.lock().expect("permitted tracer");
    *permitted = permitted.and(process.pid());
    // Without Yama the call is refused and nothing needs permitting.
    let permitted = rustix::process::set_ptracer(permitted.tracer());
    permitted.map_or_else(|error| error.raw_os_error(), |()| 0)
}

/// What this process knows of itself that decides who may reach into its memory.
pub(crate) fn hints(permitted: i32) -> Hints {
    let dumpable = rustix::process::dumpable_behavior();
    Hints {
        permitted,
        dumpable: dumpable.is_ok_and(|it| it == rustix::process::DumpableBehavior::Dumpable),
        users: crate::host::namespace("user"),
    }
}

/// Who may reach in. It only grows: whoever was let in may be at work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Permitted {
    Nobody,
    One(Pid),
    Any,
}

impl Permitted {
    /// With `pid` let in as well.
    fn and(self, pid: Pid) -> Self {
        match self {
            Self::Nobody => Self::One(pid),
            Self::One(known) if known == pid => self,
            Self::One(_) | Self::Any => Self::Any,
        }
    }

    fn tracer(self) -> PTracer {
        match self {
            Self::Nobody => PTracer::None,
            Self::One(pid) => PTracer::ProcessID(pid),
            Self::Any => PTracer::Any,
        }
    }
}

/// Whether the other end of `socket` is closed.
pub(crate) fn is_hung_up(socket: BorrowedFd<'_>) -> bool {
    is_ready(socket, PollFlags::empty())
}

/// Whether `fd` shows one of `wanted`, an error or a hang-up.
pub(crate) fn is_ready(fd: BorrowedFd<'_>, wanted: PollFlags) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, wanted)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(rustix::event::poll(&mut fds, Some(&at_once)), Ok(1..))
}

// Not rustix's: its `UCred` cannot hold the pid 0 that the kernel reports for a
// process of another namespace.
fn credentials(socket: BorrowedFd<'_>) -> std::io::Result<libc::ucred> {
    let mut credentials = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the option writes at most `len` bytes of a `ucred` that is ours.
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
    fn who_was_let_in_stays_in() {
        let [a, b] = [1, 2].map(|pid| Pid::from_raw(pid).unwrap());
        let one = Permitted::Nobody.and(a);
        assert_eq!((one, one.and(a)), (Permitted::One(a), Permitted::One(a)));
        assert_eq!((one.and(b), one.and(b).and(b)), (Permitted::Any, Permitted::Any));
    }

    #[test]
    fn knows_its_own_kind() {
        let (near, far) = UnixStream::pair().unwrap();
        let process = Process::behind(&near).unwrap();
        assert_eq!(process.pid().as_raw_nonzero().get() as u32, std::process::id());
        assert!(process.is_alive() && !is_hung_up(near.as_fd()));
        drop(far);
        assert!(is_hung_up(near.as_fd()));
        assert_eq!(Process::behind(&near).unwrap_err().kind(), ErrorKind::PeerDied);
    }
}
