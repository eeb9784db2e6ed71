//! A process that a card talks to.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use crate::host::SimHost;
use crate::name::ProcessId;
use crate::page::{ProcessPage, ReceiveBuffer, SharedCard, unmap};
use crate::queue_pair::lock;

/// One card of a process.
#[derive(Clone)]
pub(crate) struct RemoteCard {
    reach: Arc<RemoteProcess>,
    card: usize,
}

struct RemoteProcess {
    process: ProcessId,
    pidfd: i32,
    page: *mut ProcessPage,
    is_gone: AtomicBool,
    /// Whether it was stopped when somebody looked last.
    stopped: Mutex<Option<(Instant, bool)>>,
}

/// How long such a look is good for.
const LOOK: Duration = Duration::from_millis(1);

// SAFETY: the page is shared memory made of atomics and locked rings.
unsafe impl Send for RemoteProcess {}
// SAFETY: as above.
unsafe impl Sync for RemoteProcess {}

/// Which way bytes go.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    There,
    Here,
}

/// Why bytes did not go.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum TransferError {
    /// Nobody is there any more.
    Gone,
    /// There is no such memory.
    Address,
}

impl RemoteCard {
    /// Who has this GID, unless that is nobody.
    pub(crate) fn find(host: &SimHost, gid: &[u8; 16]) -> Option<Self> {
        static KNOWN: OnceLock<Mutex<HashMap<ProcessId, Weak<RemoteProcess>>>> = OnceLock::new();
        let (process, card) = ProcessId::of_gid(gid)?;
        let mut known = lock(KNOWN.get_or_init(Mutex::default));
        known.retain(|_, reach| reach.strong_count() > 0);
        if let Some(reach) = known.get(&process).and_then(Weak::upgrade) {
            return Some(Self { reach, card });
        }
        // SAFETY: a system call with plain arguments.
        let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, process.pid, 0) } as i32;
        // A process that is gone; where the call itself is missing (valgrind), kill tells instead.
        if pidfd < 0 && last_error() != libc::ENOSYS {
            return None;
        }
        let page = process.is_alive().then(|| host.page_of(process).ok()).flatten();
        let Some(page) = page else {
            // SAFETY: opened above.
            unsafe { libc::close(pidfd) };
            return None;
        };
        let reach = Arc::new(RemoteProcess {
            process,
            pidfd,
            page,
            is_gone: AtomicBool::new(false),
            stopped: Mutex::default(),
        });
        known.insert(process, Arc::downgrade(&reach));
        Some(Self { reach, card })
    }

    pub(crate) fn card(&self) -> &SharedCard {
        // SAFETY: mapped as long as `reach` lives.
        unsafe { &(*self.reach.page).cards[self.card] }
    }

    /// Whether its process runs and the card answers.
    pub(crate) fn is_alive(&self) -> bool {
        if self.reach.is_gone.load(Ordering::Relaxed) || self.card().is_dead.load(Ordering::Relaxed) != 0 {
            return false;
        }
        if self.reach.pidfd < 0 {
            // SAFETY: no signal is sent.
            return unsafe { libc::kill(self.reach.process.pid as libc::pid_t, 0) } == 0;
        }
        let mut ended = libc::pollfd { fd: self.reach.pidfd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry.
        let is_gone = unsafe { libc::poll(&raw mut ended, 1, 0) } > 0;
        self.reach.is_gone.store(is_gone, Ordering::Relaxed);
        !is_gone
    }

    /// Whether its process is stopped, by a signal or a debugger.
    pub(crate) fn is_stopped(&self) -> bool {
        let mut stopped = lock(&self.reach.stopped);
        let now = Instant::now();
        if let Some((_, is_stopped)) = stopped.filter(|(looked, _)| now.duration_since(*looked) < LOOK) {
            return is_stopped;
        }
        let is_stopped = self.reach.process.is_stopped();
        *stopped = Some((now, is_stopped));
        is_stopped
    }

    /// Copies between `here`, this process's memory, and `there`, its.
    pub(crate) fn copy(
        &self,
        here: &[ReceiveBuffer],
        there: &[ReceiveBuffer],
        way: Way,
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
        let pid = self.reach.process.pid as libc::pid_t;
        let (locals, remotes) = (here.len() as libc::c_ulong, there.len() as libc::c_ulong);
        // SAFETY: the kernel checks every address, of this process and of that.
        let copied = unsafe {
            match way {
                Way::There => {
                    libc::process_vm_writev(pid, local.as_ptr(), locals, remote.as_ptr(), remotes, 0)
                }
                Way::Here => libc::process_vm_readv(pid, local.as_ptr(), locals, remote.as_ptr(), remotes, 0),
            }
        };
        match copied {
            copied if copied == len as isize => Ok(()),
            // It is ending: its memory, and who it was, go before its number does.
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
        // SAFETY: opened and mapped for this value, whose last user is gone.
        unsafe {
            libc::close(self.pidfd);
            unmap(self.page);
        }
    }
}
