//! The kernel's calls on memory of another process.
//!
//! The kernel lets a process use another one's memory by the rules of ptrace. This backend is stricter in one point:
//! both processes must have one effective user id. Beyond that, the kernel demands that the caller's real user and
//! group id are the target's real, effective and saved ones, that the target is dumpable, that it is in the caller's
//! user namespace or below, and that it has no capabilities that the caller lacks. Yama and seccomp may refuse as
//! well. [`probe`] finds out at every import whether the kernel allows the calls, and
//! [`ptrace_diagnosis`](super::ptrace_diagnosis) says why not.

use libc::iovec;
use multirail_spi::{Access, ErrorKind, Status};
use rustix::process::Pid;

/// The calls that move bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VmCall {
    Read,
    Write,
}

impl VmCall {
    /// The kernel's name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Read => "process_vm_readv",
            Self::Write => "process_vm_writev",
        }
    }

    /// Tries the call on `pid` without touching a byte of its memory. A refusal is its errno.
    ///
    /// The remote address is none that user memory has: a call that is allowed ends with `EFAULT`, which comes after
    /// every check of permissions.
    pub(crate) fn try_on(self, pid: Pid) -> Result<(), i32> {
        let mut byte = 0_u8;
        let local = iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        let remote = iovec { iov_base: std::ptr::without_provenance_mut(usize::MAX - 4095), iov_len: 1 };
        let call = match self {
            Self::Read => libc::process_vm_readv,
            Self::Write => libc::process_vm_writev,
        };
        // SAFETY: the local byte is this function's; the kernel checks the remote address.
        let moved = unsafe { call(pid.as_raw_nonzero().get(), &raw const local, 1, &raw const remote, 1, 0) };
        match std::io::Error::last_os_error().raw_os_error() {
            Some(code) if moved < 0 && errno_status(code).kind == ErrorKind::Permission => Err(code),
            _ => Ok(()),
        }
    }
}

/// Asks the kernel whether this process may use `pid`'s memory as `access` says. A refusal is the call and its errno.
pub(crate) fn probe(pid: Pid, access: Access) -> Result<(), (VmCall, i32)> {
    for (right, call) in [(Access::REMOTE_WRITE, VmCall::Write), (Access::REMOTE_READ, VmCall::Read)] {
        if access.contains(right) {
            call.try_on(pid).map_err(|errno| (call, errno))?;
        }
    }
    Ok(())
}

/// The status of a call that failed with that errno.
pub(crate) fn errno_status(code: i32) -> Status {
    let kind = match code {
        libc::EPERM | libc::EACCES | libc::ENOSYS => ErrorKind::Permission,
        libc::ESRCH => ErrorKind::PeerDied,
        libc::EFAULT => ErrorKind::RemoteAccess,
        libc::ENOMEM => ErrorKind::Exhausted,
        _ => ErrorKind::Io,
    };
    Status { kind, code }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errno_becomes_a_kind() {
        assert_eq!(errno_status(libc::ESRCH).kind, ErrorKind::PeerDied);
        assert_eq!(errno_status(libc::EPERM).kind, ErrorKind::Permission);
        assert_eq!(errno_status(12345), Status { kind: ErrorKind::Io, code: 12345 });
    }
}
