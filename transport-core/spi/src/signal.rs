//! A word of memory that a GPU, or any other thread, watches or writes.

use std::sync::atomic::AtomicU32;

/// A 32-bit word that something beyond this library shares: a kernel that polls it, a stream that waits
/// for it or writes it, another thread. `ImmCounter::mirror` writes one.
///
/// For the processor alone an `Arc<AtomicU32>` is one. Workers call [`atomic`](Self::atomic), and
/// may drop the last handle: neither may block or panic.
pub trait Signal: Send + Sync {
    /// The word.
    fn atomic(&self) -> &AtomicU32;
}

impl Signal for AtomicU32 {
    fn atomic(&self) -> &AtomicU32 {
        self
    }
}
