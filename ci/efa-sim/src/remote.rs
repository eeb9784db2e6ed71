//! Remote processes, and access to their memory.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use crate::host::SimHost;
use crate::name::ProcessId;
use crate::page::{ProcessPage, ReceiveBuffer, SharedCard, unmap};
use crate::queue_pair::lock;

/// A card of a remote process.
#[derive(Clone)]
pub(crate) struct RemoteCard {
    process: Arc<RemoteProcess>,
    card: usize,
}

/// A remote process. All its cards share the value.
struct RemoteProcess {
    id: ProcessId,
    pidfd: i32,
    page: *mut ProcessPage,
    is_gone: AtomicBool,
    /// The time of the last check whether the process is stopped, and its result.
    stopped: Mutex<Option<(Instant, bool)>>,
}

/// How long the result of a check is valid.
const CHECK_VALID: Duration = Duration::from_millis(1);

// SAFETY: the page is shared memory made of atomics and locked rings.
unsafe impl Send for RemoteProcess {}
// SAFETY: as above.
unsafe impl Sync for RemoteProcess {}

/// The direction of a copy.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    ToPeer,
    FromPeer,
}

/// The reason why bytes were not copied.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum TransferError {
    /// The process has ended.
    Gone,
    /// The memory does not exist.
    Address,
}

impl RemoteCard {
    /// The card with this GID. `None` if its process does not exist.
    pub(crate) fn find(host: &SimHost, gid: &[u8; 16]) -> Option<Self> {
        static KNOWN: OnceLock<Mutex<HashMap<ProcessId, Weak<RemoteProcess>>>> = OnceLock::new();
        let (id, card) = ProcessId::of_gid(gid)?;
        let mut known = lock(KNOWN.get_or_init(Mutex::default));
        known.retain(|_, process| process.strong_count() > 0);
        if let Some(process) = known.get(&id).and_then(Weak::upgrade) {
            return Some(Self { process, card });
        }
        // SAFETY: a system call with plain arguments.
        let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, id.pid, 0) } as i32;
        // The process has ended. If the call itself is missing (valgrind), `kill` tells later.
        if pidfd < 0 && last_error() != libc::ENOSYS {
            return None;
        }
        let page = id.is_alive().then(|| host.page_of(id).ok()).flatten();
        let Some(page) = page else {
            // SAFETY: the descriptor was opened above.
            unsafe { libc::close(pidfd) };
            return None;
        };
        let process = Arc::new(RemoteProcess {
            id,
            pidfd,
            page,
            is_gone: AtomicBool::new(false),
            stopped: Mutex::default(),
        });
        known.insert(id, Arc::downgrade(&process));
        Some(Self { process, card })
    }

    pub(crate) fn card(&self) -> &SharedCard {
        // SAFETY: the page is mapped as long as `process` lives.
        unsafe { &(*self.process.page).cards[self.card] }
    }

    /// The process of the card.
    pub(crate) fn process(&self) -> ProcessId {
        self.process.id
    }

    /// Whether the process exists and the card is not dead.
    pub(crate) fn is_alive(&self) -> bool {
        if self.process.is_gone.load(Ordering::Relaxed) || self.card().is_dead.load(Ordering::Relaxed) != 0 {
            return false;
        }
        if self.process.pidfd < 0 {
            // SAFETY: signal 0 is not sent.
            return unsafe { libc::kill(self.process.id.pid as libc::pid_t, 0) } == 0;
        }
        let mut ended = libc::pollfd { fd: self.process.pidfd, events: libc::POLLIN, revents: 0 };
        // SAFETY: the list has one entry.
        let is_gone = unsafe { libc::poll(&raw mut ended, 1, 0) } > 0;
        self.process.is_gone.store(is_gone, Ordering::Relaxed);
        !is_gone
    }

    /// Whether the process is stopped, by a signal or a debugger.
    pub(crate) fn is_stopped(&self) -> bool {
        let mut stopped = lock(&self.process.stopped);
        let now = Instant::now();
        if let Some((_, is_stopped)) =
            stopped.filter(|(checked, _)| now.duration_since(*checked) < CHECK_VALID)
        {
            return is_stopped;
        }
        let is_stopped = self.process.id.is_stopped();
        *stopped = Some((now, is_stopped));
        is_stopped
    }

    /// Copies between `here`, memory of this process, and `there`, memory of the remote process.
    pub(crate) fn copy(
        &self,
        here: &[ReceiveBuffer],
        there: &[ReceiveBuffer],
        direction: Direction,
    ) -> Result<(), TransferError> {
        let iovecs = |buffers: &[ReceiveBuffer]| {
            let mut iovecs = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 8];
            for (iovec, buffer) in iovecs.iter_mut().zip(buffers) {
                (iovec.iov_base, iovec.iov_len) = (buffer.addr as *mut _, buffer.len as usize);
            }
            iovecs
        };
        let (local, remote) = (iovecs(here), iovecs(there));
        let len: u64 = here.iter().map(|buffer| buffer.len).sum();
        if len == 0 {
            return if self.is_alive() { Ok(()) } else { Err(TransferError::Gone) };
        }
        let pid = self.process.id.pid as libc::pid_t;
        let (locals, remotes) = (here.len() as libc::c_ulong, there.len() as libc::c_ulong);
        // SAFETY: the kernel checks every address of both processes.
        let copied = unsafe {
            match direction {
                Direction::ToPeer => {
                    libc::process_vm_writev(pid, local.as_ptr(), locals, remote.as_ptr(), remotes, 0)
                }
                Direction::FromPeer => {
                    libc::process_vm_readv(pid, local.as_ptr(), locals, remote.as_ptr(), remotes, 0)
                }
            }
        };
        match copied {
            copied if copied == len as isize => Ok(()),
            // The process is ending: its memory and its user are gone before its number is.
            -1 if matches!(last_error(), libc::ESRCH | libc::EPERM) => Err(TransferError::Gone),
            _ if self.is_alive() => Err(TransferError::Address),
            _ => Err(TransferError::Gone),
        }
    }
}

fn last_error() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

impl Drop for RemoteProcess {
    fn drop(&mut self) {
        // SAFETY: the descriptor and the mapping belong to this value, which has no other user.
        unsafe {
            libc::close(self.pidfd);
            unmap(self.page);
        }
    }
}
