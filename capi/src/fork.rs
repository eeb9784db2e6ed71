//! Objects of a process that has forked: the child has their memory, and none of their threads.
//!
//! A lock of the library may be held for ever by a thread that the child does not have. So the child never touches an
//! object from before the fork, and never drops one.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// The number of forks that lie between this process and the one that has loaded the library.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// The number of forks that lie behind this process.
#[inline]
pub fn forks() -> u32 {
    FORKS.load(Relaxed)
}

/// Begins to count forks. Called before the first object is made.
pub fn watch() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // SAFETY: the function only adds to a number, which any thread may do in a child too.
        let failed = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        assert_eq!(failed, 0, "pthread_atfork has no memory");
    });
}

extern "C" fn in_child() {
    FORKS.fetch_add(1, Relaxed);
}
