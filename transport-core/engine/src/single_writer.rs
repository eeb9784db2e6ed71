//! Counters that one thread at a time writes and any thread reads.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Adds to a counter that no other thread writes at the same time: a plain load and store loses nothing.
#[inline]
pub(crate) fn add(counter: &AtomicU64, more: u64) {
    counter.store(counter.load(Relaxed) + more, Relaxed);
}
