//! The counts of the operations over one link.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crate::single_writer::add;

/// Counts of the operations of one link that the engine has ended. Only the thread that drives the engine adds to
/// them; any thread may read them.
#[derive(Debug, Default)]
pub struct LinkCounts {
    operations: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
}

impl LinkCounts {
    #[inline]
    pub fn succeeded(&self, bytes: u64) {
        add(&self.operations, 1);
        add(&self.bytes, bytes);
    }

    #[cold]
    pub fn failed(&self) {
        add(&self.errors, 1);
    }

    /// The operations that succeeded, their bytes, and the operations that failed.
    pub fn read(&self) -> [u64; 3] {
        [&self.operations, &self.bytes, &self.errors].map(|count| count.load(Relaxed))
    }
}
