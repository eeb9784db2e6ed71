//! Whether an `await` first waits for a moment, before its task gives the loop back.
//!
//! A loop that sleeps is told through a pipe, and takes 40 µs to go on; a small transfer takes 10. Waiting for it with
//! the GIL released costs less, but only if it ends soon. So the last awaits decide.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// How long an `await` may keep the loop: about what telling a sleeping loop costs (`benches/python/compare.py`).
pub const LIMIT: Duration = Duration::from_micros(30);

/// The most awaits in a row that do not spin, after awaits that have spun for nothing. Then one of 1,024 awaits spins,
/// which costs 30 ns an await.
const MAX_SKIPS: u32 = 1023;

/// Decides by what the last awaits of transfers have shown. All loops of the process share it; threads may race, which
/// changes only how often an await spins.
pub struct Spins {
    /// How many awaits follow that do not spin.
    left: AtomicU32,
    /// How many were left after the last that has spun for nothing.
    after_failure: AtomicU32,
}

impl Spins {
    pub const fn new() -> Self {
        Self { left: AtomicU32::new(0), after_failure: AtomicU32::new(0) }
    }

    /// Whether this await may spin.
    pub fn may(&self) -> bool {
        let left = self.left.load(Ordering::Relaxed);
        if left > 0 {
            self.left.store(left - 1, Ordering::Relaxed);
        }
        left == 0
    }

    /// An await has spun. `ended` is whether the transfer ended meanwhile.
    pub fn learn(&self, ended: bool) {
        let skips = match ended {
            true => 0,
            false => (2 * self.after_failure.load(Ordering::Relaxed) + 1).min(MAX_SKIPS),
        };
        self.after_failure.store(skips, Ordering::Relaxed);
        self.left.store(skips, Ordering::Relaxed);
    }
}
