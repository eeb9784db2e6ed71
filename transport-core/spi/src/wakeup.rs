//! Waking a thread that sleeps on file descriptors, and words in memory that GPUs and threads wait for.
//!
//! A pipe is a socket pair: every Unix has those, and the sending end can be handed to another process. A caller wakes
//! only a thread that sleeps, so that it pays the system call once per sleep and never per operation.

use std::io::{ErrorKind as Os, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::{Error, Result};

/// The receiving end of a pipe, with a handle that wakes the thread that sleeps on it.
#[derive(Debug)]
pub struct WakeupPipe {
    receiver: UnixStream,
    handle: WakeupHandle,
}

/// The sending end of a [`WakeupPipe`].
#[derive(Debug)]
pub struct WakeupHandle(UnixStream);

impl WakeupPipe {
    /// A pipe that nobody has woken.
    pub fn new() -> Result<Self> {
        let wrap = |e| Error::os("open a wakeup pipe", "raise the limit of open files (ulimit -n)", e);
        let (receiver, sender) = UnixStream::pair().map_err(wrap)?;
        receiver.set_nonblocking(true).map_err(wrap)?;
        sender.set_nonblocking(true).map_err(wrap)?;
        Ok(Self { receiver, handle: OwnedFd::from(sender).into() })
    }

    /// The sending end.
    pub fn handle(&self) -> &WakeupHandle {
        &self.handle
    }

    /// A descriptor that is readable from [`WakeupHandle::wake`] until [`WakeupPipe::clear`].
    pub fn raw_fd(&self) -> RawFd {
        self.receiver.as_raw_fd()
    }

    /// Forgets all wakeups so far.
    pub fn clear(&self) {
        let mut sink = [0; 64];
        while matches!((&self.receiver).read(&mut sink), Ok(n) if n == sink.len()) {}
    }

    /// Sleeps until this pipe or one of `others` is readable, or until `limit` has passed. Returns true if this pipe is
    /// readable.
    pub fn sleep(&self, others: &[BorrowedFd<'_>], limit: Option<Duration>) -> bool {
        let mut fds = Vec::with_capacity(others.len() + 1);
        fds.push(PollFd::new(&self.receiver, PollFlags::IN));
        fds.extend(others.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)));
        let limit = limit.and_then(|span| Timespec::try_from(span).ok());
        // An interrupted or failed poll is an early wakeup: the caller looks again.
        let _ = rustix::event::poll(&mut fds, limit.as_ref());
        !fds[0].revents().is_empty()
    }
}

/// The receiving end, to wait for it beside others.
impl AsFd for WakeupPipe {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.receiver.as_fd()
    }
}

impl WakeupHandle {
    /// Wakes the thread that sleeps on the pipe. Does nothing if the pipe is full: then it is readable already. Also
    /// does nothing if its receiving end is closed.
    pub fn wake(&self) {
        while matches!(self.wake_once(), Err(error) if error.kind() == Os::Interrupted) {}
    }

    /// Never blocks and raises no signal. The descriptor may come from another process, which can change the flags that
    /// both share, or hand over something that is no socket.
    fn wake_once(&self) -> std::io::Result<usize> {
        let flags = rustix::net::SendFlags::DONTWAIT;
        #[cfg(not(target_vendor = "apple"))]
        let flags = flags | rustix::net::SendFlags::NOSIGNAL;
        Ok(rustix::net::send(&self.0, &[1], flags)?)
    }

    /// A second handle of the same pipe.
    pub fn try_clone(&self) -> Result<Self> {
        self.0
            .try_clone()
            .map(Self)
            .map_err(|e| Error::os("clone a wakeup handle", "raise the limit of open files", e))
    }
}

impl AsFd for WakeupHandle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<OwnedFd> for WakeupHandle {
    /// A handle that another process handed over.
    fn from(fd: OwnedFd) -> Self {
        // Apple's sockets have this option in place of a flag of `send`. Where the descriptor is no socket, `send`
        // fails without a signal.
        #[cfg(target_vendor = "apple")]
        let _ = rustix::net::sockopt::set_socket_nosigpipe(&fd, true);
        Self(fd.into())
    }
}

/// A 32-bit word that this library shares with others: with a GPU kernel that polls it, a CUDA stream that waits for it
/// or writes it, or another thread. `ImmCounter::mirror` writes one.
///
/// If only threads of the processor use it, an `Arc<AtomicU32>` is enough; a GPU cannot reach that word. Neither
/// [`atomic`](Self::atomic) nor `drop` may block or panic, because workers call both.
pub trait Signal: Send + Sync {
    /// The word.
    fn atomic(&self) -> &AtomicU32;
}

impl Signal for AtomicU32 {
    fn atomic(&self) -> &AtomicU32 {
        self
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn wakes_across_threads_and_clears() {
        let pipe = WakeupPipe::new().unwrap();
        let handle = pipe.handle().try_clone().unwrap();
        let waker = std::thread::spawn(move || (0..100_000).for_each(|_| handle.wake()));
        pipe.sleep(&[], None);
        waker.join().unwrap();
        pipe.clear();
        let mut fd = [PollFd::new(&pipe.receiver, PollFlags::IN)];
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut fd, Some(&none)).unwrap(), 0);
    }
}
