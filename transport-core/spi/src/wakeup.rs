//! Waking a thread that sleeps on file descriptors.
//!
//! A socket pair from the standard library: portable to every Unix, and its
//! sending end can be handed to another process. Rung only at a sleeper, so its
//! cost (a system call) is paid once per sleep, never per operation.

use std::io::{ErrorKind as Os, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::{Error, Result};

/// The receiving end, with a bell to ring it.
#[derive(Debug)]
pub struct Doorbell {
    receiver: UnixStream,
    bell: Bell,
}

/// The ringing end.
#[derive(Debug)]
pub struct Bell(UnixStream);

impl Doorbell {
    /// A doorbell that has not been rung.
    pub fn new() -> Result<Self> {
        let wrap = |e| Error::os("open a doorbell", "raise the limit of open files (ulimit -n)", e);
        let (receiver, sender) = UnixStream::pair().map_err(wrap)?;
        receiver.set_nonblocking(true).map_err(wrap)?;
        sender.set_nonblocking(true).map_err(wrap)?;
        Ok(Self { receiver, bell: Bell(sender) })
    }

    /// The ringing end.
    pub fn bell(&self) -> &Bell {
        &self.bell
    }

    /// Readable once rung, until [`Doorbell::clear`].
    pub fn raw_fd(&self) -> RawFd {
        self.receiver.as_raw_fd()
    }

    /// Forgets all rings so far.
    pub fn clear(&self) {
        let mut sink = [0; 64];
        while matches!((&self.receiver).read(&mut sink), Ok(n) if n == sink.len()) {}
    }

    /// Sleeps until this doorbell or one of `others` is readable, or `limit` has passed;
    /// whether this doorbell was rung.
    pub fn sleep(&self, others: &[BorrowedFd<'_>], limit: Option<Duration>) -> bool {
        let mut fds = Vec::with_capacity(others.len() + 1);
        fds.push(PollFd::new(&self.receiver, PollFlags::IN));
        fds.extend(others.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)));
        let limit = limit.and_then(|span| Timespec::try_from(span).ok());
        // An interrupted or failed wait is an early wake-up: the caller looks again.
        let _ = rustix::event::poll(&mut fds, limit.as_ref());
        !fds[0].revents().is_empty()
    }
}

impl Bell {
    /// Rings. A full bell is rung already; a vanished listener needs no waking.
    pub fn ring(&self) {
        while matches!(self.ring_once(), Err(error) if error.kind() == Os::Interrupted) {}
    }

    /// Never blocks or signals, whatever it was made of: a bell may come from another
    /// process, which can change the flags it shares with us, or hand over no socket.
    #[cfg(target_os = "linux")]
    fn ring_once(&self) -> std::io::Result<usize> {
        let flags = rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL;
        Ok(rustix::net::send(&self.0, &[1], flags)?)
    }

    #[cfg(not(target_os = "linux"))]
    fn ring_once(&self) -> std::io::Result<usize> {
        std::io::Write::write(&mut &self.0, &[1])
    }

    /// A second bell for the same door.
    pub fn try_clone(&self) -> Result<Self> {
        self.0
            .try_clone()
            .map(Self)
            .map_err(|e| Error::os("clone a doorbell", "raise the limit of open files", e))
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<OwnedFd> for Bell {
    /// A bell that another process handed over.
    fn from(fd: OwnedFd) -> Self {
        Self(fd.into())
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn rings_through_threads_and_clears() {
        let door = Doorbell::new().unwrap();
        let bell = door.bell().try_clone().unwrap();
        let ringer = std::thread::spawn(move || (0..100_000).for_each(|_| bell.ring()));
        door.sleep(&[], None);
        ringer.join().unwrap();
        door.clear();
        let mut fd = [PollFd::new(&door.receiver, PollFlags::IN)];
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut fd, Some(&none)).unwrap(), 0);
    }
}
