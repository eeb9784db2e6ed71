//! A lock between processes that outlives its holder.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;

/// A robust, process-shared pthread mutex. Zeroed memory is none yet: [`init`](Lock::init) first.
#[repr(C)]
pub(crate) struct Lock(UnsafeCell<libc::pthread_mutex_t>);

// SAFETY: that is what it is for.
unsafe impl Sync for Lock {}

impl Lock {
    /// Makes the lock, which nobody uses yet.
    pub(crate) fn init(&self) {
        let mut attributes = MaybeUninit::<libc::pthread_mutexattr_t>::uninit();
        // SAFETY: the attributes are initialised by the first call, and destroyed last; the mutex is
        // in memory that all its users share.
        unsafe {
            libc::pthread_mutexattr_init(attributes.as_mut_ptr());
            libc::pthread_mutexattr_setpshared(attributes.as_mut_ptr(), libc::PTHREAD_PROCESS_SHARED);
            libc::pthread_mutexattr_setrobust(attributes.as_mut_ptr(), libc::PTHREAD_MUTEX_ROBUST);
            libc::pthread_mutex_init(self.0.get(), attributes.as_ptr());
            libc::pthread_mutexattr_destroy(attributes.as_mut_ptr());
        }
    }

    /// Waits for who holds it now, but no longer than a second: one that is stopped is not waited for.
    pub(crate) fn pass(&self) {
        // SAFETY: plain data; as in `with`.
        unsafe {
            let mut until: libc::timespec = std::mem::zeroed();
            libc::clock_gettime(libc::CLOCK_REALTIME, &raw mut until);
            until.tv_sec += 1;
            match libc::pthread_mutex_timedlock(self.0.get(), &raw const until) {
                libc::ETIMEDOUT => return,
                libc::EOWNERDEAD => drop(libc::pthread_mutex_consistent(self.0.get())),
                _ => {}
            }
            libc::pthread_mutex_unlock(self.0.get());
        }
    }

    /// Runs `act` while no other process or thread does. A holder that died left rings whose
    /// indices are moved last: at worst what it was about to add is not there.
    pub(crate) fn with<T>(&self, act: impl FnOnce() -> T) -> T {
        // SAFETY: initialised when the page was made; unlocked by the thread that locked.
        unsafe {
            if libc::pthread_mutex_lock(self.0.get()) == libc::EOWNERDEAD {
                libc::pthread_mutex_consistent(self.0.get());
            }
            let result = act();
            libc::pthread_mutex_unlock(self.0.get());
            result
        }
    }
}
