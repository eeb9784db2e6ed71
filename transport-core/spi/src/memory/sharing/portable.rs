//! Shared files by POSIX shared memory.
//!
//! A shared memory object needs a name, but only until it is open: the creator unlinks the name in its next call, and
//! hands the descriptor to peers. If a process is killed between the two calls, one name is left. All processes of a
//! user use the same few names, and unlink a name that they find: so the next creation removes it. Unlinking the name
//! of another living process does no harm, because that process has its descriptor already.
//!
//! Resizing: macOS allows one `ftruncate` in the life of an object, and every later one fails with `EINVAL`
//! (`pshm_truncate` in XNU's bsd/kern/posix_shm.c). So nobody can shrink an object under those who map it. Linux has no
//! such rule for the files of /dev/shm, which cannot be sealed either: there, a peer that shrinks an object ends this
//! process by `SIGBUS`. That is one reason why the portable path is for tests there.

use std::os::fd::OwnedFd;

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::shm::{self, OFlags};

/// Attempts to create an object. Each failed one means that another thread or process has created one meanwhile.
const TRIES: usize = 10_000;

/// A shared memory object of `len` bytes that has no name any more.
pub(super) fn create_file(len: usize) -> std::io::Result<OwnedFd> {
    let file = create_nameless()?;
    rustix::fs::ftruncate(&file, len as u64)?;
    Ok(file)
}

fn create_nameless() -> rustix::io::Result<OwnedFd> {
    let mut number = 0;
    for _ in 0..TRIES {
        let name = name(number);
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR;
        match shm::open(&name, flags, Mode::RUSR | Mode::WUSR) {
            Ok(file) => return unlink(&name).map(|()| file),
            // A killed process has left the name, or another one is about to unlink it.
            Err(Errno::EXIST) if unlink(&name).is_ok() => {}
            // Another user has taken the name.
            Err(Errno::EXIST) => number += 1,
            Err(why) => return Err(why),
        }
    }
    Err(Errno::EXIST)
}

/// A name of this user. macOS allows 31 bytes (PSHMNAMLEN in XNU's bsd/sys/posix_shm.h).
fn name(number: usize) -> String {
    format!("/multirail-{}-{number}", rustix::process::geteuid().as_raw())
}

/// Removes a name, which another process may have removed first.
fn unlink(name: &str) -> rustix::io::Result<()> {
    match shm::unlink(name) {
        Err(Errno::NOENT) => Ok(()),
        other => other,
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::Mapping;

    #[test]
    fn names_are_short_enough_for_macos() {
        assert!(name(TRIES).len() <= 31, "{}", name(TRIES));
    }

    /// Waits until `name` is gone. Another process of this user may have it for a moment.
    fn assert_gone(name: &str) {
        let mut limit = limit::Limit::of(limit::HANG);
        while shm::open(name, OFlags::RDWR, Mode::empty()).map(drop) != Err(Errno::NOENT) {
            assert!(!limit.is_over(), "{name} is left");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_name_that_a_killed_process_left_is_removed() {
        let left = shm::open(name(0), OFlags::CREATE | OFlags::RDWR, Mode::RUSR | Mode::WUSR).unwrap();
        drop(left);
        drop(create_file(1).unwrap());
        assert_gone(&name(0));
    }

    #[test]
    fn ten_thousand_files_made_by_many_threads_leave_no_name() {
        std::thread::scope(|scope| {
            for thread in 0..4_u8 {
                scope.spawn(move || {
                    for round in 0..2500_usize {
                        let (len, byte) = (1 + round % 5000, thread + 1);
                        let file = create_file(len).unwrap();
                        let maps = [(); 2].map(|()| Mapping::of_file(file.as_fd(), len, true).unwrap());
                        let [a, b] = maps.each_ref().map(|map| map.start().as_ptr().wrapping_add(len - 1));
                        // SAFETY: in bounds of two mappings of a file that nothing else uses.
                        unsafe {
                            assert_eq!(a.read(), 0);
                            a.write(byte);
                            assert_eq!(b.read(), byte, "a file is one thread's own");
                        }
                    }
                });
            }
        });
        (0..3).for_each(|number| assert_gone(&name(number)));
    }
}
