//! A 32-bit word in memory that a GPU, a stream or a thread waits for or writes.

use std::sync::atomic::AtomicU32;

/// A 32-bit word that this library shares with others: a kernel that polls it, a stream that waits for it or writes it, or
/// another thread. `ImmCounter::mirror` writes one.
///
/// An `Arc<AtomicU32>` is a signal for the processor alone. Workers call [`atomic`](Self::atomic) and may drop the last
/// handle; neither may block or panic.
pub trait Signal: Send + Sync {
    /// The word.
    fn atomic(&self) -> &AtomicU32;
}

impl Signal for AtomicU32 {
    fn atomic(&self) -> &AtomicU32 {
        self
    }
}
