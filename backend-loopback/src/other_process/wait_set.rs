//! Waiting for many descriptors, at a cost that depends on those that are ready: by epoll(7) on Linux. Elsewhere by
//! poll(2), whose cost depends on all of them.

#[cfg(target_os = "linux")]
pub(crate) use linux::WaitSet;
#[cfg(not(target_os = "linux"))]
pub(crate) use other::WaitSet;

#[cfg(target_os = "linux")]
mod linux {
    use std::io;
    use std::mem::MaybeUninit;
    use std::os::fd::{BorrowedFd, OwnedFd};

    use rustix::event::epoll;

    /// Descriptors that are ready, at most, in one wait.
    const READY: usize = 64;

    /// The descriptors that a thread waits for, each with a number.
    pub(crate) struct WaitSet(OwnedFd);

    impl WaitSet {
        /// An empty set.
        pub(crate) fn new() -> io::Result<Self> {
            Ok(Self(epoll::create(epoll::CreateFlags::CLOEXEC)?))
        }

        /// Adds a descriptor, which is ready when it is readable or closed.
        pub(crate) fn add(&mut self, fd: BorrowedFd<'_>, number: u64) -> io::Result<()> {
            Ok(epoll::add(&self.0, fd, epoll::EventData::new_u64(number), epoll::EventFlags::IN)?)
        }

        /// Forgets a number whose descriptor is closed: the kernel has forgotten it.
        pub(crate) fn remove_closed(&mut self, _: u64) {}

        /// Removes a descriptor, which is still open.
        pub(crate) fn remove(&mut self, fd: BorrowedFd<'_>) {
            let _ = epoll::delete(&self.0, fd);
        }

        /// Sleeps until a descriptor is ready. Adds the numbers of those that are to `ready`. May return early.
        pub(crate) fn wait(&mut self, ready: &mut Vec<u64>) {
            let mut events = [MaybeUninit::<epoll::Event>::uninit(); READY];
            // An interrupted wait is an early return: the caller waits again.
            if let Ok((events, _)) = epoll::wait(&self.0, &mut events, None) {
                ready.extend(events.iter().map(|event| event.data.u64()));
            }
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod other {
    use std::io;
    use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

    use rustix::event::{PollFd, PollFlags};

    /// The descriptors that a thread waits for, each with a number.
    pub(crate) struct WaitSet(Vec<(RawFd, u64)>);

    impl WaitSet {
        /// An empty set.
        pub(crate) fn new() -> io::Result<Self> {
            Ok(Self(Vec::new()))
        }

        /// Adds a descriptor, which is ready when it is readable or closed.
        pub(crate) fn add(&mut self, fd: BorrowedFd<'_>, number: u64) -> io::Result<()> {
            // The earlier descriptor of this number, and another one that had this descriptor, are closed.
            self.0.retain(|(raw, other)| *raw != fd.as_raw_fd() && *other != number);
            self.0.push((fd.as_raw_fd(), number));
            Ok(())
        }

        /// Forgets a number whose descriptor is closed.
        pub(crate) fn remove_closed(&mut self, number: u64) {
            self.0.retain(|(_, other)| *other != number);
        }

        /// Removes a descriptor, which is still open.
        pub(crate) fn remove(&mut self, fd: BorrowedFd<'_>) {
            self.0.retain(|(raw, _)| *raw != fd.as_raw_fd());
        }

        /// Sleeps until a descriptor is ready. Adds the numbers of those that are to `ready`. May return early.
        pub(crate) fn wait(&mut self, ready: &mut Vec<u64>) {
            // SAFETY: the caller removes a descriptor before it closes it.
            let borrow = |(raw, _): &(RawFd, u64)| unsafe { BorrowedFd::borrow_raw(*raw) };
            let fds: Vec<_> = self.0.iter().map(borrow).collect();
            let mut polled: Vec<_> =
                fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
            // An interrupted poll is an early return: the caller waits again.
            if rustix::event::poll(&mut polled, None).is_ok() {
                let numbered = self.0.iter().zip(&polled);
                ready.extend(
                    numbered.filter(|(_, fd)| !fd.revents().is_empty()).map(|((_, number), _)| *number),
                );
            }
        }
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn the_ready_descriptors_are_found() {
        let (near, far): (Vec<_>, Vec<_>) = (0..100).map(|_| UnixStream::pair().unwrap()).unzip();
        let (mut set, mut ready) = (WaitSet::new().unwrap(), Vec::new());
        near.iter().enumerate().for_each(|(at, fd)| set.add(fd.as_fd(), at as u64).unwrap());
        let mut far: Vec<_> = far.into_iter().map(Some).collect();
        (far[3], far[70]) = (None, None);
        set.wait(&mut ready);
        ready.sort_unstable();
        assert_eq!(ready, [3, 70]);
        set.remove(near[3].as_fd());
        ready.clear();
        set.wait(&mut ready);
        assert_eq!(ready, [70]);
    }
}
