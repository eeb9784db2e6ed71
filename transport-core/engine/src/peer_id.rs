//! The numbers of peers.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};

/// A connected peer's number. It is unique among all fabrics of this process, and never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerId(NonZeroU64);

impl PeerId {
    /// A number that no peer of this process has had.
    #[doc(hidden)]
    pub fn next() -> Self {
        static PEERS: AtomicU64 = AtomicU64::new(1);
        Self(NonZeroU64::new(PEERS.fetch_add(1, Ordering::Relaxed)).unwrap_or(NonZeroU64::MAX))
    }

    /// The peer with this number; `None` for zero, which no peer has.
    #[doc(hidden)]
    pub fn from_number(number: u64) -> Option<Self> {
        NonZeroU64::new(number).map(Self)
    }

    /// The number by itself, for dumps and traces.
    #[doc(hidden)]
    #[inline]
    pub fn number(self) -> u64 {
        self.0.get()
    }
}

impl std::fmt::Display for PeerId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "peer {}", self.0)
    }
}
